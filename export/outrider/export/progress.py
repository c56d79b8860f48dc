"""Defines the progress events of an export and of a training, and how a caller stops the latter.

The work calls a function with them; showing them is the caller's.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

STAGES: Final = ("read", "widen", "load", "convert", "quantize", "calibrate", "compile", "check", "measure", "write")
"""Every stage of an export, in order; an export skips what it does not need."""

_WORDS: Final = {
    "read": "reading and hashing the source",
    "widen": "widening, function unchanged",
    "load": "loading the source model in FP32",
    "convert": "converting",
    "quantize": "quantizing the weights",
    "calibrate": "calibrating and quantizing weights and activations",
    "compile": "compiling for the NPU ahead of time",
    "check": "checking against the source, in its own runtime",
    "measure": "measuring the acceptance rate",
    "write": "hashing and writing the bundle",
}


@dataclass(frozen=True, slots=True)
class StageEvent:
    """A stage begins. bundle: what is being made, such as "draft"; stage: one of STAGES."""

    bundle: str
    stage: str

    def __str__(self) -> str:
        return f"{self.bundle}: {_WORDS[self.stage]}"


Progress = Callable[[StageEvent], None]


@dataclass(frozen=True, slots=True)
class Event:
    """How far a stage of a training is. share: of its budget, in [0, 1]. is_news: worth a line that stays."""

    stage: str
    share: float
    text: str
    is_news: bool = False


Report = Callable[[Event], None]
Stop = Callable[[], bool]
"""Called between steps; when it returns True, the work is saved and ended."""


def silent(event: object) -> None:
    """A progress function that shows nothing."""


def never() -> bool:
    """A `Stop` that never stops."""
    return False


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """A `Stop`: whether Ctrl-C or SIGTERM has come. `tell` is called once, with a line on what happens next.

    The first signal is remembered: the work saves its state at its next step. The second ends it at once. Use it as a
    context manager in the main thread; elsewhere signals cannot be caught, and the answer is always no.
    """

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

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise SystemExit(128 + number)
        self.signal = number
        self._tell("stopping at the next step; press again to stop at once and lose the work since the last save")
