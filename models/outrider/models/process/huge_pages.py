"""Moves large memory of this process into huge pages: a step that reads all weights looks up fewer pages.

Done once the weights are where they stay. Unlike glibc's own huge pages, which must be asked for before a process
starts, it takes no memory that was not in use.
"""

from __future__ import annotations

import ctypes
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

LEAST: Final = 16 << 20
"""Bytes of a mapping that is worth it."""
_DENSE: Final = 0.9
"""Of a mapping that must be in use: the rest would be taken from the system, and zeroed."""
_COLLAPSE: Final = 25
"""MADV_COLLAPSE of madvise(2), Linux 6.1 and newer."""
_PAGE_SIZE: Final = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_MAPPING: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p [0-9a-f]+ [0-9a-f:]+ 0\s*$")


def begin_huge_pages() -> None:
    """Begins to move this process's memory, in a thread: a GB takes some seconds, in which the model may run."""
    if sys.platform == "linux":
        threading.Thread(target=use_huge_pages, name="outrider-huge-pages", daemon=True).start()


def use_huge_pages() -> int:
    """Moves it; returns the bytes that are in huge pages now, 0 where the system has none, or cannot move memory."""
    try:
        page = int(_PAGE_SIZE.read_text("ascii"))
        smaps = Path("/proc/self/smaps").read_text("utf-8", "replace")
    except (OSError, ValueError):
        return 0
    advise, moved = ctypes.CDLL(None).madvise, 0
    for start, end in dense_mappings(smaps.splitlines()):
        start, size = -(-start // page) * page, end // page * page - -(-start // page) * page
        moved += size if advise(ctypes.c_void_p(start), ctypes.c_size_t(size), _COLLAPSE) == 0 else 0
    return moved


def dense_mappings(smaps: Iterable[str]) -> Iterator[tuple[int, int]]:
    """First and last address of each large private mapping of no file that is in use as a whole, by the lines of
    /proc/PID/smaps.
    """
    start = end = 0
    for line in smaps:
        if found := _MAPPING.match(line):
            start, end = (int(each, 16) for each in found.groups())
        elif line[:1] in "0123456789abcdef":
            start = end = 0
        elif line.startswith("Rss:") and end - start >= LEAST and int(line.split()[1]) << 10 >= _DENSE * (end - start):
            yield start, end
