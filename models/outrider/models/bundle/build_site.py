"""Names what a process builds beside its destination, so that what a killed process leaves is recognised and removed.

Each builder holds a lock on a small file of its own. The system drops the lock of a process that ends, however it ends
and on every operating system, so a file whose lock can be taken belongs to a dead process. Knows nothing of what is
built.
"""

from __future__ import annotations

import contextlib
import errno
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

Kind = Literal["partial", "old"]


class BuildSite:
    """Paths beside one destination, for one builder: `partial` is being built, `old` was set aside to be replaced."""

    def __init__(self, destination: Path) -> None:
        self._destination = destination
        self._tag = secrets.token_hex(8)
        self._lock: FileLock | None = None

    def path(self, kind: Kind) -> Path:
        """The path of that kind; whatever is built there is hidden, and on the destination's file system."""
        return self._named(kind, self._tag)

    def open(self) -> bool:
        """Takes the lock, then clears what killed builders of the same destination left; the parent must exist.

        Returns whether something that they had set aside was put back. Raises OSError.
        """
        path = self._named("lock", self._tag)
        try:
            path.touch(exist_ok=False)  # filelock would make a parent that is missing
        except FileNotFoundError:
            if not path.parent.is_dir():
                raise
            # So /proc answers, where nothing can be made, and filelock would try again for ever.
            raise PermissionError(errno.EACCES, "no file can be made there", str(path.parent)) from None
        self._lock = FileLock(path, thread_local=False)
        self._lock.acquire()
        restored = [self._clear(tag) for tag in self._tags() if tag != self._tag]
        return any(restored)

    def swap(self) -> None:
        """Renames the directory that was built to the destination.

        A directory cannot replace another in one rename: an old one is set aside first, and put back on failure.
        """
        built, aside = self.path("partial"), self.path("old")
        if not self._destination.exists():
            built.rename(self._destination)
            return
        self._destination.rename(aside)
        try:
            built.rename(self._destination)
        except BaseException:
            aside.rename(self._destination)
            raise
        shutil.rmtree(aside, ignore_errors=True)

    def close(self) -> None:
        """Gives the lock back and removes its file. What was built is not touched."""
        if self._lock is not None:
            self._lock.release()
            self._named("lock", self._tag).unlink(missing_ok=True)
            self._lock = None

    def _clear(self, tag: str) -> bool:
        """Clears what the builder `tag` left, unless it is alive; returns whether its old destination was put back."""
        lock = self._named("lock", tag)
        is_restored = False
        # A live builder's stays, and so does what this user may not open.
        with contextlib.suppress(Timeout, PermissionError):
            with FileLock(lock, timeout=0):
                old = self._named("old", tag)
                if old.exists() and not self._destination.exists():
                    old.rename(self._destination)  # its builder died between two renames
                    is_restored = True
                for path in (self._named("partial", tag), old):
                    if path.is_dir():
                        shutil.rmtree(path, ignore_errors=True)
                    else:
                        path.unlink(missing_ok=True)
            lock.unlink(missing_ok=True)
        return is_restored

    def _tags(self) -> Iterator[str]:
        pattern = re.compile(rf"\.{re.escape(self._destination.name)}\.(?:partial|old|lock)-([0-9a-f]{{16}})")
        found = (pattern.fullmatch(path.name) for path in self._destination.parent.iterdir())
        yield from sorted({match[1] for match in found if match})

    def _named(self, kind: Kind | Literal["lock"], tag: str) -> Path:
        return self._destination.parent / f".{self._destination.name}.{kind}-{tag}"  # "/" has no name
