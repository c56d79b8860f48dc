"""Takes SIGHUP from the start on: while the model loads it would end the process, and systemd would not restart it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class HangUps:
    """What SIGHUP does. A signal that comes before `act_by` is remembered."""

    def __init__(self) -> None:
        self._act: Callable[[], None] | None = None
        self._is_missed = False

    def act_by(self, act: Callable[[], None]) -> None:
        """Calls `act` for each signal from now on, and at once where one has come. On the main thread."""
        self._act = act
        if self._is_missed:
            act()

    def __call__(self, *_: object) -> None:
        """The signal's handler."""
        if self._act is None:
            self._is_missed = True
        else:
            self._act()


@contextmanager
def takes_hangups() -> Iterator[HangUps]:
    """Takes SIGHUP while it is entered. Does nothing outside the main thread, and where there is no such signal."""
    hangups = HangUps()
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGHUP"):
        yield hangups
        return
    before = signal.signal(signal.SIGHUP, hangups)
    try:
        yield hangups
    finally:
        signal.signal(signal.SIGHUP, before)
