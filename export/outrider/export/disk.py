"""Reports disks that are full or not writable: before the work where possible, otherwise in one message.

Python's own writers raise OSError with a number; errors of safetensors, numpy and OpenVINO are known by their words.
Knows nothing of models.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from outrider.models.errors import DiskFull, ExportError

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
# Of writers that raise no OSError with a number: safetensors (Rust's words for the system's error, on Linux and macOS,
# and on Windows), numpy's `tofile`, through which onnx_ir writes ("32768 requested and 4096 written"), and OpenVINO,
# which says no more than this and removes what it had written: how full the disk was cannot be measured afterwards.
_NO_ROOM_WORDS: Final = re.compile(
    r"no space left on device|quota exceeded|not enough space on the disk|\d+ requested and \d+ written|iostream error",
    re.IGNORECASE,
)
_NOT_WRITABLE: Final = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG)


@contextlib.contextmanager
def telling_of_full_disks(*places: Path, kept: str = "") -> Iterator[None]:
    """Turns what a writer raises on a full or forbidden disk into an ExportError: where, how much is free, what to do.

    kept: says in a clause what is kept of the work. Everything else goes through.
    """
    try:
        yield
    except DiskFull:
        raise
    except Exception as error:
        causes = list(_causes(error))
        if any(_says_no_room(cause) for cause in causes):
            fullest_first = sorted(places, key=free_bytes)
            rooms = ", ".join(f"{free_bytes(place) / 1e6:,.1f} MB for {place}" for place in fullest_first)
            raise DiskFull(
                f"the disk is full; {kept}the destination is unchanged. Free after the partial files were removed: "
                f"{rooms}. Free some space there, or write elsewhere: --out, OUTRIDER_CACHE, for downloads HF_HOME"
            ) from error
        refused = next((cause for cause in causes if isinstance(cause, OSError) and _is_refusal(cause, places)), None)
        if refused is not None:
            raise ExportError(
                f"{refused.filename} cannot be written: {refused.strerror}; the destination is unchanged. Choose a "
                "writable place with --out (for the cache: OUTRIDER_CACHE)"
            ) from error
        raise


def require_room(*needs: tuple[Path, float]) -> None:
    """Raises DiskFull, before the work, if a disk has less free than `needs` (place, bytes) take on it together."""
    by_disk: defaultdict[int, list[tuple[Path, float]]] = defaultdict(list)
    for place, needed_bytes in needs:
        by_disk[_nearest(place).stat().st_dev].append((place, needed_bytes))
    for shares in by_disk.values():
        place, needed = shares[0][0], sum(needed_bytes for _, needed_bytes in shares)
        if (free := free_bytes(place)) < needed:
            raise DiskFull(
                f"the export needs about {needed / 1e6:,.1f} MB at {place}, and {free / 1e6:,.1f} MB are free; "
                "free some space, or write elsewhere (--out, OUTRIDER_CACHE)"
            )


def link_or_copy(path: str | Path, target: str | Path) -> None:
    """Gives a file another name; copies it to another disk, or to one that has no links."""
    try:
        os.link(path, target)
    except OSError:
        shutil.copyfile(path, target)


def is_one_disk(place: Path, other: Path) -> bool:
    """Whether two places, which need not exist yet, are on one disk, so that files can have a name in both."""
    return _nearest(place).stat().st_dev == _nearest(other).stat().st_dev


def free_bytes(place: Path) -> int:
    """Bytes free for `place`, which need not exist yet."""
    return shutil.disk_usage(_nearest(place)).free


def _nearest(place: Path) -> Path:
    """`place`, or the nearest directory above it that exists."""
    place = place.absolute()
    while not place.exists():
        place = place.parent
    return place


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it was raised from: what upstream raises is wrapped."""
    while error is not None:
        yield error
        error = error.__cause__


def _says_no_room(error: BaseException) -> bool:
    number = error.errno if isinstance(error, OSError) else None
    return number in _NO_ROOM if number is not None else _NO_ROOM_WORDS.search(str(error)) is not None


def _is_refusal(error: OSError, places: tuple[Path, ...]) -> bool:
    """Whether it is the system's refusal to write one of `places`, in it, or beside it where a bundle is built."""
    if error.errno not in _NOT_WRITABLE or error.filename is None:
        return False
    path = Path(error.filename).absolute()
    return any(
        path.is_relative_to(place)
        or place.is_relative_to(path)
        or (path.parent == place.parent and path.name.startswith(f".{place.name}."))
        for place in map(Path.absolute, places)
    )
