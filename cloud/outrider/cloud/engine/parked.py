"""Keeps the caches of finished /v1/verify passes and sessions, by the hash of their tokens, for what continues them.

Each owner has its own: nobody can use what another client's calls left, or push it out by leaving more. Where sequences
need the blocks, the owner that holds most prefixes loses its oldest first. None is used when it is older than `max_s`.
"""

from __future__ import annotations

import math
import threading
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from outrider.cloud.engine.pool import BlockPool

_OWNERS_AT_MOST: Final = 8
"""Owners that may hold as many prefixes as they are allowed to; with more owners, each holds fewer."""


@dataclass(frozen=True, slots=True)
class ParkedPrefix:
    """Tokens, the blocks that hold their keys and values, how many of them are computed, and their block hashes.

    name: as `Asker.name_of` gives it for the request that continues it. since: when it was parked.
    is_lossy: as `SequenceState.is_lossy`.
    """

    owner: bytes
    name: str
    tokens: array[int]
    blocks: tuple[int, ...]
    computed: int
    hashes: tuple[bytes, ...]
    since: float = 0.0
    is_lossy: bool = False


class ParkedPrefixes:
    """Prefixes kept, at most `max_each` of an owner for `max_s` seconds each, evicted oldest first.

    Any thread may call `take` and `has`; the engine's thread releases blocks.
    """

    def __init__(
        self,
        pool: BlockPool,
        max_each: int,
        max_s: float = math.inf,
        clock: Callable[[], float] = time.perf_counter,
        on_evict: Callable[[ParkedPrefix], None] = lambda prefix: None,
    ) -> None:
        """on_evict: called on the engine's thread before the blocks of a prefix are released."""
        self.pool = pool
        self._on_evict = on_evict
        self._max_each = max_each
        self._max_s = max_s
        self._clock = clock
        self._due = math.inf  # when the oldest is too old
        self._of_owner: dict[bytes, OrderedDict[str, ParkedPrefix]] = {}
        self._uses: Counter[int] = Counter()  # of each block, by the prefixes
        self._num = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._num

    @property
    def num_blocks(self) -> int:
        """Blocks that all prefixes hold; they may share some."""
        return len(self._uses)

    def park(self, prefix: ParkedPrefix) -> None:
        """Keeps the prefix with its references on blocks. Engine's thread only."""
        spare: list[ParkedPrefix] = []
        with self._lock:
            held = self._of_owner.setdefault(prefix.owner, OrderedDict())
            if prefix.name in held:
                replaced = self._pop(prefix.owner, prefix.name)
                self.pool.release(replaced.blocks)
                held = self._of_owner.setdefault(prefix.owner, OrderedDict())
            held[prefix.name] = prefix
            self._num += 1
            self._due = min(self._due, prefix.since + self._max_s)
            self._uses.update(prefix.blocks)
            while len(held) > self._max_each:
                spare.append(self._pop(prefix.owner, next(iter(held))))
            while self._num > self._max_each * _OWNERS_AT_MOST:
                spare.append(self._pop_oldest())
        for entry in spare:
            self._release(entry)

    def take(self, owner: bytes, name: str) -> ParkedPrefix | None:
        """Hands an owner's prefix over with its references; None when it is not held, or too old."""
        with self._lock:
            return self._pop(owner, name) if self._has(owner, name) else None

    def has(self, owner: bytes, name: str) -> bool:
        """Whether `take` would hand it over. Any thread."""
        with self._lock:
            return self._has(owner, name)

    def _has(self, owner: bytes, name: str) -> bool:
        held = self._of_owner.get(owner)
        return held is not None and name in held and not self._is_old(held[name])  # the engine's thread releases those

    def evict_old(self) -> None:
        """Releases those that are too old. Engine's thread only."""
        if self._clock() < self._due:
            return
        with self._lock:
            entries = [entry for held in self._of_owner.values() for entry in held.values()]
            old = [self._pop(entry.owner, entry.name) for entry in entries if self._is_old(entry)]
            left = (entry.since for held in self._of_owner.values() for entry in held.values())
            self._due = min(left, default=math.inf) + self._max_s
        for entry in old:
            self._release(entry)

    def evict_one(self) -> bool:
        """Releases the oldest of the owner that holds most; False when there is none. Engine's thread only."""
        with self._lock:
            if not self._num:
                return False
            entry = self._pop_oldest()
        self._release(entry)
        return True

    def _release(self, entry: ParkedPrefix) -> None:
        self._on_evict(entry)
        self.pool.release(entry.blocks)

    def _is_old(self, entry: ParkedPrefix) -> bool:
        return self._clock() - entry.since >= self._max_s

    def _pop_oldest(self) -> ParkedPrefix:
        owner, held = max(self._of_owner.items(), key=lambda item: len(item[1]))
        return self._pop(owner, next(iter(held)))

    def _pop(self, owner: bytes, name: str) -> ParkedPrefix:
        held = self._of_owner[owner]
        entry = held.pop(name)
        if not held:
            del self._of_owner[owner]
        self._num -= 1
        self._uses.subtract(entry.blocks)
        for block in entry.blocks:
            if not self._uses[block]:
                del self._uses[block]
        return entry
