"""Holds what an attack measured, and its limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. is_met: None where nothing could be measured; `measured` then says why.

    raw: the numbers behind `measured`, for --json.
    """

    number: str
    what: str
    measured: str
    limit: str
    is_met: bool | None
    raw: dict[str, Any] = field(default_factory=dict)


def seconds(value: float | None, cap_s: float = 0.0) -> str:
    """A time for people; None is one that did not end within `cap_s`."""
    if value is None:
        return f"over {cap_s:g} s"
    return f"{value:.1f} s" if value >= 1.0 else f"{value * 1e3:.0f} ms"


def middle(values: Sequence[float | None], cap_s: float) -> float:
    """The median, where None counts as `cap_s`."""
    return median(cap_s if value is None else value for value in values)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie; the largest where there are few."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def listed(names: Sequence[str], word: str) -> str:
    """How many, and which: all of a few, the first of many."""
    if len(names) > 5:
        return f"{len(names)} {word}: {', '.join(names[:3])}, ..."
    return f"{len(names)} {word}" + (f": {', '.join(names)}" if names else "")
