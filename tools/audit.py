"""Asks an advisory service about installed packages, through pip-audit, and says what the answer is worth.

pip-audit reports "no known vulnerabilities" also where the service knows none of the packages (a mirror of an index
without its advisories answers 404), and ends with 1 both for a vulnerable package and for a service that it cannot
reach. Here these are three verdicts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any


class Verdict(StrEnum):
    """What is known of the packages."""

    CLEAN = "clean"
    VULNERABLE = "vulnerable"
    NOT_ASKED = "not asked"


@dataclass(frozen=True, slots=True)
class Audit:
    """A verdict, the words for it, and pip-audit's report where there is one."""

    verdict: Verdict
    words: str
    report: dict[str, Any] | None = None

    def to_json(self) -> str:
        """For the release's directory."""
        return json.dumps({"verdict": self.verdict, "words": self.words, "report": self.report}, indent=1) + "\n"


def audit(site_packages: Path, own: Collection[str], options: Sequence[str] = ()) -> Audit:
    """Audits what is installed in `site_packages`. own: our distributions, which no service knows.

    options: further arguments of pip-audit, such as another service.
    """
    command = [sys.executable, "-m", "pip_audit", "--path", str(site_packages), "--format", "json"]
    done = subprocess.run([*command, "--progress-spinner", "off", *options], capture_output=True, text=True)
    return judge(done.stdout, done.stderr, own)


def judge(output: str, errors: str, own: Collection[str]) -> Audit:
    """The verdict on what pip-audit printed to standard output and error."""
    try:
        report = json.loads(output)
        packages = report["dependencies"]
    except (ValueError, KeyError, TypeError):
        reason = next(
            (line.strip() for line in reversed(errors.splitlines()) if line.strip()), "pip-audit said nothing"
        )
        return Audit(Verdict.NOT_ASKED, f"the advisory service gave no answer: {reason}")
    found = [f"{each['name']} {each['version']}: {fault['id']}" for each in packages for fault in each.get("vulns", ())]
    if found:
        return Audit(Verdict.VULNERABLE, f"{len(found)} known vulnerabilities: {'; '.join(found)}", report)
    foreign = [each for each in packages if each["name"] not in own]
    unknown = [each["name"] for each in foreign if "vulns" not in each]
    if unknown or not foreign:
        words = (
            f"the advisory service does not know {len(unknown)} of {len(foreign)} packages: {', '.join(unknown[:5])}"
        )
        return Audit(Verdict.NOT_ASKED, words + (", ..." if len(unknown) > 5 else ""), report)
    return Audit(Verdict.CLEAN, f"no known vulnerabilities in {len(foreign)} packages", report)
