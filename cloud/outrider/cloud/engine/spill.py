"""Keeps parked prefixes on disk for the request that continues them, here or in another replica with the directory.

A thread of its own looks, writes and reads, so a directory that hangs stops nobody else; the engine's thread only
copies blocks. An owner finds only what it left, and may have only so many calls wait. Where there is too much, the
owner with most bytes loses its oldest files. A file that fails a check is removed, never used.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import stat
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from outrider.cloud.engine.config import SpillConfig
from outrider.cloud.engine.spill_file import (
    PART_SUFFIX,
    SUFFIX,
    BadFile,
    Spilled,
    SpillTarget,
    read_blocks,
    read_head,
    write,
)
from outrider.cloud.seam import Totals
from outrider.models.errors import ConfigError
from outrider.models.faults import log_fault
from outrider.models.process.by_owner import OwnerStore, Shares

_MAX_WAITING_BYTES: Final = 256 << 20
"""Of blocks that are copied and not written yet."""
_MAX_CALLS: Final = 64
"""Prefixes that are looked for, read, or wait with their blocks for room; beyond, their tokens run again."""
_MAX_CALLS_EACH: Final = 16
"""Of one owner."""
_MAX_READ_BYTES: Final = 256 << 20
"""Of blocks that are read and wait for room."""
_STUCK_S: Final = 2.0
"""Nothing more is asked of a disk that has not answered for so long."""
_FLUSH_S: Final = 30.0
_SWEEP_S: Final = 60.0
"""How often what is too old is removed, at least."""
_PART_S: Final = 600.0
"""Age from which a file that was never finished is a leftover."""
_SCAN_S: Final = 1.0
"""Between two looks for files of other replicas, at least; and ten times as long as one takes."""
_LAST: Final = 1 << 30

_log = logging.getLogger("outrider.cloud")
T = TypeVar("T")


class SpillStore:
    """Prefixes in `config.directory`. The engine's thread puts and loads; any thread seeks."""

    def __init__(
        self,
        config: SpillConfig,
        target: SpillTarget,
        totals: Totals,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """totals: nothing else counts `spill...` in it. Raises ConfigError for a directory that cannot be used, or that
        others may read.
        """
        self._config = config
        self._target = target
        self.totals = totals
        self._clock = clock
        self._work: queue.PriorityQueue[tuple[int, int, Callable[[], None] | None]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._waiting_bytes = self._read_bytes = 0
        self._calls = Shares[bytes](_MAX_CALLS_EACH, _MAX_CALLS)  # that wait
        self._returned: deque[tuple[bytes, int]] = deque()  # owner and bytes of blocks that nobody has any more
        self._busy_since: float | None = None
        self._files = _Files(config, clock)
        self._lock = threading.Lock()
        self._has_warned = self._is_hung = False
        self._max_waiting_bytes = _MAX_WAITING_BYTES
        _prepare(config.directory)
        self._thread = threading.Thread(target=self._run, name="outrider-spill", daemon=True)
        self._thread.start()

    def has_room(self, num_blocks: int) -> bool:
        """Whether so many blocks would be taken; else a fault is counted."""
        size = num_blocks * self._target.block_bytes
        with self._lock:
            has_room = size <= self._config.max_bytes and self._waiting_bytes + size <= self._max_waiting_bytes
            self.totals.spill_faults += not has_room
        return has_room

    def put(self, owner: bytes, name: str, tokens: Sequence[int], data: NDArray[np.uint8], age_s: float = 0.0) -> None:
        """Writes a prefix in the background. data: its full blocks. age_s: since it was parked."""
        path = self._config.directory / self._target.place(owner, name)
        created = self._clock() - age_s
        with self._lock:
            self._waiting_bytes += data.nbytes
        self._begin(_LAST, partial(self._write, path, tokens, data, created))

    def seek(self, owner: bytes, name: str, done: Callable[[Spilled | None], None]) -> bool:
        """Looks for an owner's prefix in the background, and calls `done` on the store's thread. Any thread.

        False, and `done` is not called, where too many calls wait already or the disk hangs.
        """
        return self._call(owner, partial(self.find, owner, name), done)

    def load(self, owner: bytes, spilled: Spilled, done: Callable[[NDArray[np.uint8] | None], None]) -> None:
        """Reads the blocks in the background and gives them to `done`, on the store's thread; None if it cannot.

        They count among the owner's calls until nobody has them any more.
        """
        if not self._call(owner, partial(self._read, spilled), done, spilled.num_blocks * self._target.block_bytes):
            done(None)

    def gave_up(self, num_loads: int) -> None:
        """The blocks of so many prefixes were not read in time."""
        self._warn(f"--spill-dir {self._config.directory} does not answer in time", num_loads)

    def _call(self, owner: bytes, ask: Callable[[], T | None], done: Callable[[T | None], None], size: int = 0) -> bool:
        """Queues a call: each owner's first before the second of any. size: of the array that it gives."""
        with self._lock:
            while self._returned:
                other, freed = self._returned.popleft()
                self._calls.add(other, -1)
                self._read_bytes -= freed
            since = self._busy_since
            is_stuck = since is not None and time.monotonic() - since > _STUCK_S
            if is_stuck or self._read_bytes + size > _MAX_READ_BYTES or not self._calls.add(owner):
                return False
            self._read_bytes += size
            rank = self._calls[owner]
        self._begin(rank, partial(self._answer, owner, ask, done, size))
        return True

    def flush(self) -> bool:
        """Waits until what was put is written. Blocking, for some time at most; False if it was too short."""
        reached = threading.Event()
        self._begin(_LAST, reached.set)
        return reached.wait(_FLUSH_S)

    def settle(self) -> None:
        """Waits if so much is not written yet that more might be dropped. Not on a disk that hangs."""
        if self._waiting_bytes > self._max_waiting_bytes // 2 and not self._is_hung:
            self._is_hung = not self.flush()

    def close(self) -> None:
        """Writes what waits, and ends the thread."""
        self._work.put((_LAST, next(self._order), None))
        self._thread.join(_FLUSH_S)

    # -- the store's thread ------------------------------------------------------------------------------------------

    def find(self, owner: bytes, name: str) -> Spilled | None:
        """An owner's prefix, its ids checked; it stays. Reads some kilobytes of disk, and waits for it."""
        path = self._config.directory / self._target.place(owner, name)
        return self._checked(path, lambda: read_head(path, self._target, self._clock(), self._config.max_s))

    def _read(self, spilled: Spilled) -> NDArray[np.uint8] | None:
        data = self._checked(spilled.path, lambda: read_blocks(spilled))
        self.totals.restored += data is not None
        return data

    def _checked(self, path: Path, read: Callable[[], T]) -> T | None:
        """What is read of a file; None where another replica has removed it, or where it is bad, so removed."""
        try:
            return read()
        except FileNotFoundError:
            return None
        except (BadFile, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            why = str(error) if isinstance(error, BadFile) else type(error).__name__
        self._warn(f"{path} is not used, and removed: {why}")
        with suppress(OSError):  # a directory, or not ours
            path.unlink(missing_ok=True)
        return None

    def _answer(self, owner: bytes, ask: Callable[[], T | None], done: Callable[[T | None], None], size: int) -> None:
        """Makes a call, which counts until nobody has its array any more."""
        found: Any = None
        try:
            found = ask()
        finally:
            if found is None or size == 0:
                self._returned.append((owner, size))
            else:  # takes no lock: it may run anywhere
                weakref.finalize(found, self._returned.append, (owner, size)).atexit = False
            done(found)

    def _begin(self, priority: int, work: Callable[[], None]) -> None:
        self._work.put((priority, next(self._order), work))

    def _run(self) -> None:
        work: Callable[[], None] | None = self._sweep
        while work is not None:
            self._busy_since = time.monotonic()
            try:
                work()
            except Exception as error:  # the thread must go on
                log_fault(error)
            self._busy_since = None
            try:
                work = self._work.get(timeout=min(_SWEEP_S, self._config.max_s / 4))[2]
            except queue.Empty:
                work = self._sweep

    def _sweep(self) -> None:
        try:
            self._files.keep_to_size(scans=True)
        except OSError as error:
            self._warn(f"--spill-dir {self._config.directory} cannot be read: {error.strerror}")

    def _write(self, path: Path, tokens: Sequence[int], data: NDArray[np.uint8], created: float) -> None:
        try:
            num_bytes = write(path, self._target, tokens, data, created)
            self.totals.spilled += 1
            self._files.note(path.name, num_bytes)
            self._files.keep_to_size(scans=False)
        except OSError as error:
            self._warn(f"--spill-dir {self._config.directory} cannot be written: {error.strerror}")
        finally:
            with self._lock:
                self._waiting_bytes -= data.nbytes

    def _warn(self, words: str, num_faults: int = 1) -> None:
        """The first time; later faults are only counted."""
        self.totals.spill_faults += num_faults
        if not self._has_warned:
            _log.warning("%s; further faults of --spill-dir are only counted", words)
        self._has_warned = True


class _Files:
    """The files in the directory, which other replicas write and remove too; on the store's thread."""

    def __init__(self, config: SpillConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._index = OwnerStore[str, str, str]()  # names, by owner
        self._scan_at = 0.0

    def keep_to_size(self, *, scans: bool) -> None:
        """Removes the oldest files of whoever has most, until all fit. Raises OSError.

        scans: looks at all files first; else only where the last look is some time ago.
        """
        if scans or time.monotonic() >= self._scan_at:
            self._scan()
        while self._index.size > self._config.max_bytes:
            (self._config.directory / self._index.pop_from_most()).unlink(missing_ok=True)

    def note(self, name: str, size: int) -> None:
        """Indexes a file as its owner's newest."""
        self._index.put(name.partition("-")[0], name, name, size)

    def _scan(self) -> None:
        """Indexes the files, which other replicas write and remove too; removes what is too old."""
        began = time.monotonic()
        now = self._clock()
        files: list[tuple[float, str, int]] = []
        with os.scandir(self._config.directory) as entries:
            for entry in entries:
                age_s = self._config.max_s if entry.name.endswith(SUFFIX) else _PART_S
                if not entry.name.endswith((SUFFIX, PART_SUFFIX)) or not entry.is_file(follow_symlinks=False):
                    continue
                with suppress(FileNotFoundError):  # another replica has removed it
                    found = entry.stat(follow_symlinks=False)
                    if found.st_mtime <= now - age_s:
                        Path(entry.path).unlink()
                    elif entry.name.endswith(SUFFIX):
                        files.append((found.st_mtime, entry.name, found.st_size))
        self._index = OwnerStore()
        for _, name, size in sorted(files):
            self.note(name, size)
        ended = time.monotonic()
        self._scan_at = ended + max(_SCAN_S, 10.0 * (ended - began))


def _prepare(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
    except OSError as error:
        raise ConfigError(f"--spill-dir {directory} cannot be made: {error.strerror}; name another") from None
    if not stat.S_ISDIR(found.st_mode) or not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"--spill-dir {directory} is no directory that this user may write to; name another")
    if os.name == "posix" and (found.st_mode & 0o077 or found.st_uid != os.geteuid()):
        raise ConfigError(
            f"--spill-dir {directory} is open to other users, and will hold prompts; run: chmod 700 {directory}"
        )
