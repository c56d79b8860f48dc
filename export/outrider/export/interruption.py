"""Catches Ctrl-C and SIGTERM, so that long work can ask whether to stop.

The first signal is remembered: the work saves its state at its next step. The second ends it at once. Use it as a
context manager in the main thread; elsewhere signals cannot be caught, and the answer is always no.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Callable: whether a signal has come. `tell` is called once, with a line on what happens next."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.signal: int | None = None
        self._tell = tell
        self._before: dict[int, Any] = {}

    def __call__(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise SystemExit(128 + number)
        self.signal = number
        self._tell("stopping at the next step; press again to stop at once and lose the work since the last save")
