"""Keeps the caches of finished /v1/verify passes, by the hash of their tokens, for the call that continues them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from outrider.cloud.engine.pool import ROOT_HASH, BlockPool, chain_hash


@dataclass(frozen=True, slots=True)
class ParkedPrefix:
    """Tokens, the blocks that hold their keys and values, how many of them are computed, and their block hashes."""

    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    computed: int
    hashes: tuple[bytes, ...]


def prefix_hash(tokens: tuple[int, ...]) -> str:
    """The prefix's name on the wire: 32 hexadecimal digits over all its token ids."""
    return chain_hash(ROOT_HASH, tokens).hex()


class ParkedPrefixes:
    """Prefixes kept, evicted oldest first. Any thread may call `take`; the engine's thread releases blocks."""

    def __init__(self, pool: BlockPool, max_parked: int) -> None:
        self._pool = pool
        self._max = max_parked
        self._entries: OrderedDict[str, ParkedPrefix] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_blocks(self) -> int:
        """Blocks that all prefixes hold; they may share some."""
        with self._lock:
            return len({block for entry in self._entries.values() for block in entry.blocks})

    def park(self, prefix: ParkedPrefix) -> str:
        """Keeps the prefix with its references on blocks; returns its hash. Engine's thread only."""
        name = prefix_hash(prefix.tokens)
        with self._lock:
            older = self._entries.pop(name, None)
            self._entries[name] = prefix
            spare = [self._entries.popitem(last=False)[1] for _ in range(len(self._entries) - self._max)]
        for entry in spare if older is None else [older, *spare]:
            self._pool.release(entry.blocks)
        return name

    def take(self, name: str) -> ParkedPrefix | None:
        """Hands the prefix over with its references; None when it is not held."""
        with self._lock:
            return self._entries.pop(name, None)

    def evict_one(self) -> bool:
        """Releases the oldest; False when there is none. Engine's thread only."""
        with self._lock:
            if not self._entries:
                return False
            _, entry = self._entries.popitem(last=False)
        self._pool.release(entry.blocks)
        return True
