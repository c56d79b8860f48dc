"""Marks a pulled draft as in use, so that no other process removes it.

The mark is a shared lock on the bundle's manifest, which the system drops when a process ends. On Windows the open file
is the mark: its directory cannot be renamed.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from outrider.models.bundle.manifest import MANIFEST_NAME

if sys.platform != "win32":
    import fcntl


class InUse(OSError):
    """Another process uses the draft."""


@contextlib.contextmanager
def in_use(place: Path) -> Iterator[None]:
    """Marks the bundle at `place` as in use. One that is missing is not marked: whoever opens it reports that."""
    try:
        descriptor = os.open(place / MANIFEST_NAME, os.O_RDONLY)
    except OSError:
        yield
        return
    try:
        if sys.platform != "win32":
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def unused(place: Path) -> Iterator[None]:
    """Keeps other processes from marking the bundle. Raises InUse where one has, OSError where that is unknown."""
    if sys.platform == "win32":
        yield
        return
    descriptor = os.open(place / MANIFEST_NAME, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InUse(error.errno, "a running process uses it") from None
        yield
    finally:
        os.close(descriptor)
