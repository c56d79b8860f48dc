"""Keeps the caches of finished /v1/verify passes, by the hash of their tokens, for the call that continues them.

Each owner has its own: nobody can use what another client's calls left, or push it out by leaving more. Where sequences
need the blocks, the owner that holds most prefixes loses its oldest first.
"""

from __future__ import annotations

import threading
from array import array
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Final

from outrider.cloud.engine.pool import BlockPool

_OWNERS_AT_MOST: Final = 8
"""Owners that may hold as many prefixes as they are allowed to; with more owners, each holds fewer."""


@dataclass(frozen=True, slots=True)
class ParkedPrefix:
    """Tokens, the blocks that hold their keys and values, how many of them are computed, and their block hashes.

    name: what the call that continues it sends.
    """

    owner: bytes
    name: str
    tokens: array[int]
    blocks: tuple[int, ...]
    computed: int
    hashes: tuple[bytes, ...]


class ParkedPrefixes:
    """Prefixes kept, at most `max_each` of an owner, evicted oldest first.

    Any thread may call `take`; the engine's thread releases blocks.
    """

    def __init__(self, pool: BlockPool, max_each: int) -> None:
        self._pool = pool
        self._max_each = max_each
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
                spare.append(self._pop(prefix.owner, prefix.name))
                held = self._of_owner.setdefault(prefix.owner, OrderedDict())
            held[prefix.name] = prefix
            self._num += 1
            self._uses.update(prefix.blocks)
            while len(held) > self._max_each:
                spare.append(self._pop(prefix.owner, next(iter(held))))
            while self._num > self._max_each * _OWNERS_AT_MOST:
                spare.append(self._pop_oldest())
        for entry in spare:
            self._pool.release(entry.blocks)

    def take(self, owner: bytes, name: str) -> ParkedPrefix | None:
        """Hands an owner's prefix over with its references; None when it is not held."""
        with self._lock:
            return self._pop(owner, name) if name in self._of_owner.get(owner, ()) else None

    def evict_one(self) -> bool:
        """Releases the oldest of the owner that holds most; False when there is none. Engine's thread only."""
        with self._lock:
            if not self._num:
                return False
            entry = self._pop_oldest()
        self._pool.release(entry.blocks)
        return True

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
