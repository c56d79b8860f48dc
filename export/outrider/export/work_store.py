"""Results of expensive stages, kept until an export that needs them has succeeded: a killed export is not begun anew.

A result is a directory that appears whole, by renaming, or not at all. Its key is a hash of all that decides it, so
nothing is ever stale. Knows nothing of models.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from filelock import FileLock

from outrider.models.errors import ExportError

_FORGOTTEN_AFTER_S: Final = 14 * 24 * 3600.0
"""A result that nobody has asked for in this long belongs to an export that was given up."""

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)


class WorkStore:
    """A directory of results; several processes may share it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._used: set[Path] = set()

    def get(self, what: Mapping[str, Any], build: Callable[[Path], None]) -> Path:
        """The directory of the result that `what` (JSON-able) describes; `build` fills a new one if there is none.

        Blocks while another process builds the same. Raises what `build` raises, and leaves nothing then.
        """
        key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:20]
        place = self._root / key
        self._root.mkdir(parents=True, exist_ok=True)
        with FileLock(self._root / f"{key}.lock"):
            self._used.add(place)
            if place.is_dir():
                os.utime(place)
                return place
            for abandoned in self._root.glob(f".{key}.partial-*"):  # nobody else builds it: the lock is ours
                shutil.rmtree(abandoned, ignore_errors=True)
            partial = self._root / f".{key}.partial-{os.getpid()}-{secrets.token_hex(4)}"
            partial.mkdir()
            try:
                build(partial)
                partial.rename(place)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        return place

    def release(self) -> None:
        """Removes what was got here: the export that needed it is in place. Also what was given up long ago."""
        for place in self._used:
            shutil.rmtree(place, ignore_errors=True)
        self._used.clear()
        oldest = time.time() - _FORGOTTEN_AFTER_S
        for path in self._root.iterdir() if self._root.is_dir() else ():
            with contextlib.suppress(FileNotFoundError):  # another process was quicker
                if path.is_dir() and path.stat().st_mtime < oldest:
                    shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def telling_of_full_disks(*places: Path) -> Iterator[None]:
    """Turns "no space left" into an ExportError that says where, how much there is, and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise full_disk(places) from error


def full_disk(places: tuple[Path, ...]) -> ExportError:
    """What to raise when one of `places` has no room left."""
    rooms = ", ".join(f"{free_bytes(place) / 1e6:,.0f} MB free for {place}" for place in places)
    return ExportError(
        f"the disk is full ({rooms}); nothing was written. Free some space, choose another --out, or set "
        "OUTRIDER_CACHE to where there is room for what is made on the way"
    )


def require_room(place: Path, needed_bytes: int) -> None:
    """Raises ExportError if the disk of `place` has less than `needed_bytes` free: before the work, not after it."""
    free = free_bytes(place)
    if free < needed_bytes:
        raise ExportError(
            f"the export needs about {needed_bytes / 1e6:,.0f} MB at {place}, and {free / 1e6:,.0f} MB are free; "
            "free some space, choose another --out, or set OUTRIDER_CACHE to where there is room"
        )


def free_bytes(place: Path) -> int:
    """Bytes free for `place`, which need not exist yet."""
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free
