"""Reads files again when they change, without a restart: keys, certificates.

A thread looks once a second, so no request pays for it. A change counts once the files have kept still from one look
to the next, so that a file which an editor still writes is not read; `check_soon` (SIGHUP) reads them once they keep
still, changed or not.
What cannot be read leaves the server as it is: the log says so once for each change, and a metric counts it.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Self

from outrider.models.errors import ConfigError
from outrider.models.faults import log_fault

_log = logging.getLogger("outrider.files")

LOOK_S: Final = 1.0
"""Seconds between two looks."""

State = tuple[tuple[int, int, int] | None, ...]


class WatchedFiles:
    """Files that are read together. reload: reads them; raises ConfigError where they cannot be used.

    Make it before they are read for the first time: what changes from then on is noticed. name: in the log and in
    metrics.
    """

    def __init__(self, name: str, paths: Sequence[Path], reload: Callable[[], object]) -> None:
        self.name = name
        self._paths = tuple(paths)
        self.reload = reload
        self._read = self._seen = self._state()
        self._is_forced = False

    def check(self, counts: Counter[tuple[str, str]], *, is_forced: bool = False) -> None:
        """Reads the files again if they keep still and have changed, or were to be read whether or not: `is_forced`.

        counts: how often, by name and result, "ok" or "failed".
        """
        state, before = self._state(), self._seen
        self._seen = state
        self._is_forced = self._is_forced or is_forced
        if state != before or (state == self._read and not self._is_forced):
            return
        self._read, self._is_forced = state, False
        try:
            self.reload()
        except ConfigError as error:
            counts[self.name, "failed"] += 1
            _log.warning("%s: %s; the server keeps what it had", self.name, error)
        else:
            counts[self.name, "ok"] += 1
            _log.info("%s: read again", self.name)

    def _state(self) -> State:
        return tuple(map(_state_of, self._paths))


def _state_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


class FileWatch:
    """Checks files on a thread of its own while it is entered. counts: what was read again, by name and result."""

    def __init__(self, files: Sequence[WatchedFiles], counts: Counter[tuple[str, str]] | None = None) -> None:
        self._files = tuple(files)
        self.counts = Counter[tuple[str, str]]() if counts is None else counts
        self.counts.update({(each.name, result): 0 for each in files for result in ("ok", "failed")})
        self._is_forced = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outrider-files", daemon=True)

    def __enter__(self) -> Self:
        if self._files:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._files:
            self._thread.join()

    def check_soon(self) -> None:
        """Reads all files again once they keep still. Safe in a signal handler: it takes no lock."""
        self._is_forced = True

    def _run(self) -> None:
        while not self._ended.wait(LOOK_S):
            is_forced, self._is_forced = self._is_forced, False
            for each in self._files:
                try:
                    each.check(self.counts, is_forced=is_forced)
                except Exception as error:  # a bug of ours must not end the watch
                    log_fault(error)
