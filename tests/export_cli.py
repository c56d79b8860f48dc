"""`outrider-export` in this process, for tests."""

from __future__ import annotations

import signal
import sys

import pytest

from outrider.export.cli import main as cli


def run_export(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit status of `outrider-export` with these arguments; the handler of SIGTERM is as before."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "argv", ["outrider-export", *arguments])
    try:
        cli.main()
    except SystemExit as exit:
        return int(exit.code or 0)
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0
