"""Runs Prometheus' promtool, Debian's or another."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def find_promtool() -> str:
    """The program; skips the test where there is none."""
    if (found := shutil.which("promtool")) is not None:
        return found
    pytest.skip("there is no promtool here: apt-get install prometheus")


def promtool(*arguments: str | Path, stdin: str | None = None) -> None:
    """Fails the test with promtool's words if it finds anything wrong."""
    command = [find_promtool(), *map(str, arguments)]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "FAILED" not in done.stdout, done.stdout + done.stderr
