"""Ends the process on SIGTERM while a model loads. As process 1 of a container it would not end by default."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


@contextmanager
def ends_on_sigterm() -> Iterator[None]:
    """Makes SIGTERM raise SystemExit, so that what was begun is ended too. Does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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


def _end(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
