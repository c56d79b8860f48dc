"""Handles signals while a model loads.

On SIGTERM the process ends; as process 1 of a container it would not by default. On SIGHUP it would end, and systemd
would not restart it: that signal is taken from the start on.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn


@contextmanager
def _handled(name: str, handler: Callable[..., Any]) -> Iterator[None]:
    """Handles a signal inside. Does nothing outside the main thread, and where there is no such signal."""
    number = getattr(signal, name, None)
    if number is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def ends_on_sigterm() -> AbstractContextManager[None]:
    """Makes SIGTERM raise SystemExit, so that what was begun is ended too. Does nothing outside the main thread."""
    return _handled("SIGTERM", _end)


@contextmanager
def ends_at_once() -> Iterator[None]:
    """Inside `ends_on_sigterm`: SIGTERM ends the process also while native code runs, which may take a minute.

    Python's handlers wait until that code returns; a thread does not. Nothing is cleaned up.
    """
    if os.name != "posix" or threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        while numbers := os.read(reader, 16):
            if signal.SIGTERM in numbers:
                os._exit(128 + signal.SIGTERM)

    thread = threading.Thread(target=watch, name="outrider-sigterm", daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
        thread.join()
        os.close(reader)


def _end(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


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
    with _handled("SIGHUP", hangups):
        yield hangups
