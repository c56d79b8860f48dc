"""Ends a console script on Ctrl-C without a traceback, also while its modules are being imported.

Imports next to nothing itself, because what is imported before it is not guarded.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # `typing` takes longer to import than the rest of this module
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

EXIT_CODE = 130
"""What shells report of a program that Ctrl-C ended."""


class QuietInterrupt:
    """A context in which Ctrl-C ends the process at once: for imports and shutdown, where nothing is to be cleaned up.

    An exception would not do: an import that is interrupted can turn it into another one, or print and drop it. Leaves
    a handler that somebody else installed, and an ignored signal, as they are.
    """

    def __init__(self) -> None:
        self._is_installed = False

    def __enter__(self) -> None:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            try:
                signal.signal(signal.SIGINT, _end)
            except ValueError:
                return  # only the main thread is interrupted, and this is another
            self._is_installed = True

    def __exit__(self, *_: object) -> None:
        if self._is_installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(EXIT_CODE)


def run_guarded(load: Callable[[], Callable[[], None]]) -> None:
    """Runs what `load` imports. Ctrl-C ends the process with code 130: during the import, the run and the shutdown."""
    try:
        with QuietInterrupt():
            run = load()
        run()
    except KeyboardInterrupt:
        sys.exit(EXIT_CODE)
    finally:
        QuietInterrupt().__enter__()  # for good: the interpreter's shutdown comes next
