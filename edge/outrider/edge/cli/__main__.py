"""Runs `outrider`. Ctrl-C ends it without a traceback, also while its modules are being imported."""

from __future__ import annotations

from outrider.models.process.interrupts import run_guarded

TYPE_CHECKING = False  # `typing` is not imported before Ctrl-C is guarded
if TYPE_CHECKING:
    from collections.abc import Callable


def main() -> None:
    """The console script."""
    run_guarded(_load)


def _load() -> Callable[[], None]:
    from outrider.edge.cli.main import main

    return main


if __name__ == "__main__":
    main()
