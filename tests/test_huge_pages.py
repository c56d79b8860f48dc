"""Memory in huge pages: what is moved, and that it is."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest

from outrider.models.process.huge_pages import LEAST, dense_mappings, use_huge_pages


def smaps(mapping: str, size: int, used: int) -> str:
    return f"{mapping}\nSize: {size >> 10} kB\nRss: {used >> 10} kB\nVmFlags: rd wr mr\n"


@pytest.mark.parametrize(
    ("rights", "file", "used", "is_moved"),
    [
        ("rw-p", "00:00 0", LEAST, True),
        ("rw-p", "00:00 0 ", LEAST * 15 // 16, True),
        ("rw-p", "00:00 0", LEAST * 14 // 16, False),  # the rest would be taken from the system
        ("rw-p", "00:00 0 [heap]", LEAST, False),
        ("rw-p", "fe:00 4711 /a/model.bin", LEAST, False),
        ("rw-s", "00:00 0", LEAST, False),
        ("r--p", "00:00 0", LEAST, False),
    ],
)
def test_large_private_memory_in_use_is_moved(rights: str, file: str, used: int, is_moved: bool) -> None:
    start, end = 0x7F0000000000, 0x7F0000000000 + LEAST
    small = smaps(f"{end:x}-{end + 4096:x} rw-p 00000000 00:00 0", 4096, 4096)
    text = small + smaps(f"{start:x}-{end:x} {rights} 00000000 {file}", LEAST, used) + small
    assert list(dense_mappings(text.splitlines())) == ([(start, end)] if is_moved else [])


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages of Linux")
def test_memory_keeps_its_bytes_in_huge_pages() -> None:
    def num_huge() -> int:
        lines = Path("/proc/self/smaps").read_text("utf-8", "replace").splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages:"))

    with mmap.mmap(-1, 2 * LEAST, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:] = bytes(range(256)) * (2 * LEAST // 256)
        before = num_huge()
        if not use_huge_pages():
            pytest.skip("this system moves no memory: Linux before 6.1, or no huge pages")
        assert num_huge() > before or before >= 2 * LEAST
        assert memory[:] == bytes(range(256)) * (2 * LEAST // 256)
