"""Moves large memory of this process into huge pages: a step that reads all weights looks up fewer pages.

Done once the weights are where they stay. Unlike glibc's own huge pages, which must be asked for before a process
starts, it takes hardly any memory that was not in use.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

LEAST: Final = 16 << 20
"""Bytes of a mapping that is worth it."""
SLICE: Final = 64 << 20
"""Bytes that are moved at a time: the system can end the process only between two moves."""
_DENSE: Final = 0.9
"""Of a slice that must be in use: the rest is taken from the system."""
_COLLAPSE: Final = 25
"""MADV_COLLAPSE of madvise(2), Linux 6.1 and newer."""
PAGE_SIZE: Final = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_MAPPING: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p [0-9a-f]+ [0-9a-f:]+ 0\s*$")


def begin_huge_pages() -> None:
    """Begins to move this process's memory, in a thread: a GB takes some seconds, in which the model may run."""
    if sys.platform == "linux":
        threading.Thread(target=use_huge_pages, name="outrider-huge-pages", daemon=True).start()


def use_huge_pages() -> int:
    """Moves it; returns the bytes that were moved, 0 where the system has no huge pages, or cannot move memory."""
    try:
        page = int(PAGE_SIZE.read_text("ascii"))
        maps = Path("/proc/self/maps").read_text("utf-8", "replace").splitlines()
    except (OSError, ValueError):
        return 0
    libc, moved = ctypes.CDLL(None), 0
    for start, end in large_mappings(maps):
        for at in range(-(-start // page) * page, end - page + 1, SLICE):
            size = min(SLICE, (end - at) // page * page)
            place = ctypes.c_void_p(at), ctypes.c_size_t(size)
            in_use = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
            # It may be gone by now: then both calls fail, and nothing has changed.
            if libc.mincore(*place, in_use) == 0 and sum(in_use) >= _DENSE * len(in_use):
                moved += size if libc.madvise(*place, _COLLAPSE) == 0 else 0
    if moved:
        logger.info("%d MB of this process were moved into huge pages", moved >> 20)
    return moved


def large_mappings(maps: Iterable[str]) -> Iterator[tuple[int, int]]:
    """First and last address of each large private mapping of no file, by the lines of /proc/PID/maps."""
    for line in maps:
        if found := _MAPPING.match(line):
            start, end = (int(each, 16) for each in found.groups())
            if end - start >= LEAST:
                yield start, end
