"""Keeps the caches of finished /v1/verify passes and sessions, by the hash of their tokens, for what continues them.

Each owner has its own: nobody can use what another client's calls left, or push it out by leaving more. Where sequences
need the blocks, the owner that holds most prefixes loses its oldest first. None is used when it is older than `max_s`.
"""

from __future__ import annotations

import math
import threading
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from outrider.cloud.engine.pool import BlockPool
from outrider.models.process.by_owner import Bounds, OwnerStore, Shares

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
        bounds = Bounds(max_each, max_each * _OWNERS_AT_MOST)
        self._parked = OwnerStore[bytes, str, ParkedPrefix](bounds, max_s, clock)
        self._uses = Shares[int]()  # of each block, by the prefixes
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._parked)

    @property
    def num_blocks(self) -> int:
        """Blocks that all prefixes hold; they may share some."""
        return len(self._uses)

    def park(self, prefix: ParkedPrefix) -> None:
        """Keeps the prefix with its references on blocks. Engine's thread only."""
        with self._lock:
            replaced = self._parked.pop(prefix.owner, prefix.name)
            spare = self._parked.put(prefix.owner, prefix.name, prefix, since=prefix.since)
            self._count((prefix,), 1)
            self._count([*spare, replaced] if replaced is not None else spare, -1)
        if replaced is not None:
            self.pool.release(replaced.blocks)
        self._release(spare)

    def take(self, owner: bytes, name: str) -> ParkedPrefix | None:
        """Hands an owner's prefix over with its references; None when it is not held, or too old."""
        with self._lock:
            found = self._parked.get(owner, name)  # the engine's thread releases those that are too old
            if found is not None:
                self._parked.pop(owner, name)
                self._count((found,), -1)
        return found

    def has(self, owner: bytes, name: str) -> bool:
        """Whether `take` would hand it over. Any thread."""
        with self._lock:
            return self._parked.get(owner, name) is not None

    def evict_old(self) -> None:
        """Releases those that are too old. Engine's thread only."""
        with self._lock:
            old = self._parked.pop_old()
            self._count(old, -1)
        self._release(old)

    def evict_one(self) -> bool:
        """Releases the oldest of the owner that holds most; False when there is none. Engine's thread only."""
        with self._lock:
            evicted = [self._parked.pop_from_most()] if self._parked else []
            self._count(evicted, -1)
        self._release(evicted)
        return bool(evicted)

    def _count(self, prefixes: Iterable[ParkedPrefix], sign: int) -> None:
        for prefix in prefixes:
            for block in prefix.blocks:
                self._uses.add(block, sign)

    def _release(self, prefixes: Iterable[ParkedPrefix]) -> None:
        for prefix in prefixes:
            self._on_evict(prefix)
            self.pool.release(prefix.blocks)
