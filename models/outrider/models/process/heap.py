"""Gives freed memory back to the system."""

from __future__ import annotations

import ctypes
import sys
import time
from functools import cache
from typing import Final

TRIM_EVERY_S: Final = 1.0


def trim_heap() -> None:
    """Has glibc return what is free in its heaps; elsewhere nothing. Takes some ms: not for an engine's thread.

    A library that frees many small blocks beside a few that stay leaves heaps that never shrink on their own.
    """
    if (trim := _malloc_trim()) is not None:
        trim(0)


class HeapTrimmer:
    """Trims the heap at most once in `TRIM_EVERY_S`. For one thread."""

    def __init__(self) -> None:
        self._trimmed_s = time.monotonic()

    def trim(self) -> None:
        """Trims it, or does nothing."""
        if (now := time.monotonic()) - self._trimmed_s >= TRIM_EVERY_S:
            self._trimmed_s = now
            trim_heap()


@cache
def _malloc_trim() -> ctypes._NamedFuncPointer | None:
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
