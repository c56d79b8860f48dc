"""Defines what a check reports, and keeps one broken check from ending the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Status = Literal["ok", "warning", "fault"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. found: what is so. advice: what to do, one piece; empty where nothing is to be done."""

    status: Status
    name: str
    found: str
    advice: str = ""

    def as_json(self) -> dict[str, str]:
        """As plain data."""
        return asdict(self)


def ok(name: str, found: str, advice: str = "") -> Finding:
    """Nothing to do; advice says what could be gained."""
    return Finding("ok", name, found, advice)


def warning(name: str, found: str, advice: str) -> Finding:
    """Works, but not as well as it could, or not for long."""
    return Finding("warning", name, found, advice)


def fault(name: str, found: str, advice: str) -> Finding:
    """Does not work."""
    return Finding("fault", name, found, advice)


def from_error(name: str, error: Exception, status: Status = "fault", advice: str = "correct it") -> Finding:
    """The finding of an error of ours, which ends with "; " and its advice. advice: where it has none."""
    problem, _, last = str(error).rpartition("; ")
    return Finding(status, name, problem or last, last if problem else advice)


@dataclass(eq=False)
class Failed(Exception):
    """Raised by a check that found a fault, where what comes after it in the check needs what is broken."""

    finding: Finding


def guarded(name: str, check: Callable[..., Iterable[Finding]], *arguments: Any) -> Iterator[Finding]:
    """A check's findings. If it raises, that is a fault of its own: whatever is broken, the other checks run."""
    try:
        yield from check(*arguments)
    except Failed as failed:
        yield failed.finding
    except Exception as error:
        yield fault(name, f"the check failed ({in_one_line(error)})", "report it with the output of `outrider doctor`")


def in_one_line(error: Exception) -> str:
    """An unexpected error: its type, and the first line of what it says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:1]])[:300]


def without_secrets(finding: Finding, secrets: Iterable[str]) -> Finding:
    """The finding on one line, and with `***` wherever one of these keys stands in it."""
    found, advice = " ".join(finding.found.split()), " ".join(finding.advice.split())
    for secret in filter(None, secrets):
        found, advice = found.replace(secret, "***"), advice.replace(secret, "***")
    return replace(finding, found=found, advice=advice)
