"""Keeps results of expensive stages until an export that needs them succeeds, so that a killed export can continue.

A result is a directory that appears whole, by renaming, or not at all. Its key is a hash of everything that decides it,
so nothing is ever stale. Knows nothing of models.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from filelock import FileLock, Timeout

from outrider.models.bundle.bundle_writer import flush_tree

_FORGOTTEN_AFTER_S: Final = 14 * 24 * 3600.0
"""A result that was not used for this long belongs to an abandoned export."""


def discard(place: Path) -> None:
    """Removes a directory, renaming it first: a process killed here must not leave half of one that looks whole."""
    aside = place.with_name(f".{place.name.strip('.')}.partial-{secrets.token_hex(8)}")
    with contextlib.suppress(FileNotFoundError):
        place.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


class StageStore:
    """A directory of results; several processes may share it, and none removes what another uses."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._tag = secrets.token_hex(8)
        # By key. A lock on a small file beside a result marks it as used; the system drops the lock of a process that
        # ends, however it ends.
        self._used: dict[str, FileLock] = {}

    def get(self, what: Mapping[str, Any], build: Callable[[Path], None]) -> Path:
        """The directory of the result that `what` (JSON-able) describes; `build` fills a new one if there is none.

        Blocks while another process builds the same. Raises what `build` raises, and leaves nothing then.
        """
        key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:20]
        place = self._root / key
        self._root.mkdir(parents=True, exist_ok=True)
        with FileLock(self._lock_file(key)):
            os.utime(self._lock_file(key))
            if not place.is_dir():
                self._build(key, place, build)
            os.utime(place)
            if key not in self._used:
                self._used[key] = FileLock(self._root / f"{key}.user-{self._tag}", thread_local=False)
                self._used[key].acquire()
        return place

    def release(self) -> None:
        """Removes the results that this store returned, unless another export uses them, and abandoned results."""
        for key, mark in self._used.items():
            with FileLock(self._lock_file(key)):
                mark.release()
                Path(mark.lock_file).unlink(missing_ok=True)
                if not self._is_used(key):
                    discard(self._root / key)
        self._used.clear()
        oldest = time.time() - _FORGOTTEN_AFTER_S
        for path in self._root.iterdir() if self._root.is_dir() else ():
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                if path.stat().st_mtime < oldest:
                    discard(path) if path.is_dir() else path.unlink()

    def _build(self, key: str, place: Path, build: Callable[[Path], None]) -> None:
        for abandoned in self._root.glob(f".{key}.partial-*"):  # nobody else builds it: this process has the lock
            shutil.rmtree(abandoned, ignore_errors=True)
        partial = self._partial(key)
        partial.mkdir()
        try:
            build(partial)
            flush_tree(partial)
            partial.rename(place)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _is_used(self, key: str) -> bool:
        """Whether any process uses a result; removes the marks of killed ones."""
        for path in self._root.glob(f"{key}.user-*"):
            try:
                with FileLock(path, timeout=0):
                    pass
            except Timeout:
                return True
            path.unlink(missing_ok=True)
        return False

    def _partial(self, key: str) -> Path:
        return self._root / f".{key}.partial-{secrets.token_hex(8)}"

    def _lock_file(self, key: str) -> Path:
        return self._root / f"{key}.lock"
