"""Runs `outrider`. Ctrl-C ends it without a traceback, also while its modules are being imported."""

from __future__ import annotations

import importlib

from outrider.models.process.interrupts import run_guarded


def main() -> None:
    """The console script."""
    run_guarded(lambda: importlib.import_module("outrider.edge.cli.main").main)


if __name__ == "__main__":
    main()
