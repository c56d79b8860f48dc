"""Keeps what glibc holds of freed memory small, and gives it back to the system."""

from __future__ import annotations

import ctypes
import sys
import time
from functools import cache
from typing import Final

TRIM_EVERY_S: Final = 1.0
# Of mallopt(3): parameter -> value. By itself glibc raises both thresholds with the largest block that was freed, up to
# 64 MB, so one large request leaves that much in a thread's heap for good.
_BOUNDS: Final = {
    -3: 1 << 20,  # M_MMAP_THRESHOLD, bytes: larger blocks come from the system and return to it
    -1: 4 << 20,  # M_TRIM_THRESHOLD, bytes: more than this at a heap's end returns
    -8: 2,  # M_ARENA_MAX: heaps for all threads. Python's small objects are in none
}


def bound_heaps() -> None:
    """Has glibc keep little of what a serving process frees; elsewhere nothing. Call it before threads start."""
    if (mallopt := getattr(_linux_libc(), "mallopt", None)) is not None:
        for parameter, value in _BOUNDS.items():
            mallopt(parameter, value)


def trim_heap() -> None:
    """Has glibc return what is free in its heaps; elsewhere nothing. Takes some ms: not for an engine's thread.

    A library that frees many small blocks beside a few that stay leaves heaps that never shrink on their own.
    """
    if (trim := getattr(_linux_libc(), "malloc_trim", None)) is not None:  # musl has none
        trim(0)


@cache
def _linux_libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if sys.platform == "linux" else None


class HeapTrimmer:
    """Trims the heap at most once in `TRIM_EVERY_S`. For one thread."""

    def __init__(self) -> None:
        self._trimmed_s = time.monotonic()

    def trim(self) -> None:
        """Trims it, or does nothing."""
        if (now := time.monotonic()) - self._trimmed_s >= TRIM_EVERY_S:
            self._trimmed_s = now
            trim_heap()
