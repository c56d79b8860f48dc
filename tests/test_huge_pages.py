"""Memory in huge pages: what is moved, and that it is."""

from __future__ import annotations

import ctypes
import logging
import mmap
import re
from pathlib import Path

import pytest

from outrider.models.process import huge_pages
from outrider.models.process.huge_pages import LEAST, PAGE_SIZE, SLICE, large_mappings, use_huge_pages

START, END = 0x7F0000000000, 0x7F0000000000 + LEAST


@pytest.mark.parametrize(
    ("mapping", "is_large"),
    [
        (f"{START:x}-{END:x} rw-p 00000000 00:00 0", True),
        (f"{START:x}-{END:x} rw-p 00000000 00:00 0 ", True),
        (f"{START:x}-{END - 4096:x} rw-p 00000000 00:00 0", False),
        (f"{START:x}-{END:x} rw-p 00000000 00:00 0 [heap]", False),
        (f"{START:x}-{END:x} rw-p 00000000 fe:00 4711 /a/model.bin", False),
        (f"{START:x}-{END:x} rw-s 00000000 00:00 0", False),
        (f"{START:x}-{END:x} r--p 00000000 00:00 0", False),
    ],
)
def test_large_private_mappings_of_no_file_are_found(mapping: str, is_large: bool) -> None:
    assert list(large_mappings([mapping])) == ([(START, END)] if is_large else [])


def in_huge_pages(start: int, end: int) -> int:
    """Bytes of the mappings that lie there."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text("utf-8", "replace").splitlines():
        if place := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(place[1], 16) < end and start < int(place[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            found += int(line.split()[1]) << 10
    return found


@pytest.mark.skipif(not PAGE_SIZE.exists(), reason="this system has no huge pages")
def test_memory_in_use_keeps_its_bytes_in_huge_pages_and_the_rest_is_left() -> None:
    """Also where the system takes both for one mapping."""
    content = bytes(range(256)) * (SLICE // 256)
    with mmap.mmap(-1, 4 * SLICE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if (missing := in_huge_pages(start, start + 4 * SLICE)) or not hasattr(mmap, "MADV_NOHUGEPAGE"):
            pytest.skip(f"{missing} bytes are in huge pages from the start")
        memory[: 2 * SLICE] = 2 * content
        if not use_huge_pages():
            pytest.skip("this system moves no memory: Linux before 6.1")
        assert SLICE <= in_huge_pages(start, start + 4 * SLICE) <= 3 * SLICE
        assert memory[: 2 * SLICE] == 2 * content


@pytest.mark.skipif(not PAGE_SIZE.exists(), reason="this system has no huge pages")
def test_nothing_moved_is_not_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(huge_pages, "large_mappings", lambda maps: [])
    assert use_huge_pages() == 0 and not caplog.messages
