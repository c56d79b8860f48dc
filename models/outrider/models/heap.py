"""Gives freed memory back to the system."""

from __future__ import annotations

import ctypes
import sys
from functools import cache


def trim_heap() -> None:
    """Has glibc return what is free in its heaps; elsewhere nothing. Takes some ms: not for an engine's thread.

    A library that frees many small blocks beside a few that stay leaves heaps that never shrink on their own.
    """
    if (trim := _malloc_trim()) is not None:
        trim(0)


@cache
def _malloc_trim() -> ctypes._NamedFuncPointer | None:
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
