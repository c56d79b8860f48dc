"""Gives blocks to sequences: prefix sharing, growth, parking. The scheduler decides who gives way.

Parked are the blocks of finished /v1/verify passes and sessions, by the hash of their tokens, for what continues them.
Each owner has its own: nobody can use what another client's calls left, or push it out by leaving more. Where sequences
need the blocks, the owner that holds most prefixes loses its oldest first. None is used when it is older than `max_s`.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from outrider.cloud.engine.pool import BlockPool, chain_hash
from outrider.cloud.engine.sequence_state import SequenceState
from outrider.models.process.by_owner import Bounds, OwnerStore, Shares

_OWNERS_AT_MOST: Final = 8
"""Owners that may hold as many prefixes as they are allowed to; with more owners, each holds fewer."""


@dataclass(frozen=True, slots=True)
class ParkedPrefix:
    """Tokens, the blocks that hold their keys and values, how many of them are computed, and their block hashes.

    name: as `Asker.name_of` gives it for the request that continues it. since: when it was parked.
    """

    owner: bytes
    name: str
    tokens: array[int]
    blocks: tuple[int, ...]
    computed: int
    hashes: tuple[bytes, ...]
    since: float = 0.0


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


class SequenceCache:
    """The block pool as sequences see it. The engine's thread owns it, except for what any thread may call of `parked`.

    on_park: called with a prefix when it is parked.
    share_between_owners: one owner's prompts may be reused for another's. Who can time answers, or reads
    `cached_prompt_tokens`, then learns whether others have sent a prompt.
    """

    def __init__(
        self,
        parked: ParkedPrefixes,
        *,
        share_prefixes: bool,
        share_between_owners: bool,
        clock: Callable[[], float] = time.perf_counter,
        on_park: Callable[[ParkedPrefix], None] = lambda prefix: None,
    ) -> None:
        self.parked = parked
        self.pool = parked.pool
        self._on_park = on_park
        self._clock = clock
        self._share_prefixes = share_prefixes
        self._share_between_owners = share_between_owners
        self._salt = secrets.token_bytes(16)

    @property
    def num_obtainable(self) -> int:
        """Blocks that could be free without the parked prefixes; an upper bound, since sequences may share theirs."""
        return self.pool.num_available + self.parked.num_blocks

    def num_lacking(self, sequence: SequenceState, length: int) -> int:
        """Blocks that the sequence lacks for `length` tokens."""
        return max(0, -(-length // self.pool.block_size) - len(sequence.blocks))

    def grow(self, sequence: SequenceState, length: int) -> bool:
        """Gives `sequence` blocks for `length` tokens; takes idle blocks and parked prefixes if necessary.

        False, with the sequence unchanged, when there are not enough.
        """
        needed = self.num_lacking(sequence, length)
        if needed > self.num_obtainable:
            return False
        while needed > self.pool.num_available:
            if not self.parked.evict_one():
                return False
        if needed > 0:
            sequence.blocks += self.pool.allocate(needed) or []
        return True

    def room(self, sequence: SequenceState) -> int:
        """Tokens for which there may be blocks; an upper bound, as `num_obtainable`."""
        return (len(sequence.blocks) + self.num_obtainable) * self.pool.block_size

    def moves(self, sequence: SequenceState, nodes: Sequence[int]) -> tuple[list[int], list[int]]:
        """Slots of the accepted drafted tokens `nodes`, and the slots where they belong, as far as these differ.

        nodes: indices of drafted tokens, ascending, that ran behind the sequence's tokens. Call it before the accepted
        tokens are appended. A slot is block * block_size + offset.
        """
        end, size, blocks = len(sequence.tokens), self.pool.block_size, sequence.blocks

        def slot(place: int) -> int:
            return blocks[(end + place) // size] * size + (end + place) % size

        moved = [(slot(node), slot(place)) for place, node in enumerate(nodes) if node != place]
        return [source for source, _ in moved], [target for _, target in moved]

    def match_prefix(self, sequence: SequenceState) -> None:
        """Takes shared blocks that hold the sequence's beginning; leaves at least its last token to run."""
        if sequence.blocks or not self._share_prefixes:
            return
        size = self.pool.block_size
        hashes = self._chain(sequence, (len(sequence.tokens) - 1) // size)
        sequence.blocks = self.pool.match(hashes)
        sequence.hashes = hashes[: len(sequence.blocks)]
        sequence.computed = len(sequence.blocks) * size

    def register_full_blocks(self, sequence: SequenceState) -> None:
        """Registers full blocks by hash once all their tokens are committed and computed: they never change again.

        Call it after a pick from a finite row only: the row attends every token before it, and a key or value that is
        not a number makes it one too. So a prompt's chunks become known together, at its first token. Two equal long
        prompts in flight share nothing until then; sharing per chunk would cost a row of logits per chunk. A row
        cannot vouch for infinite keys, nor for what a model with sliding windows in every layer no longer attends:
        `discard` removes those with the first sequence that fails on them.
        """
        known, full = len(sequence.hashes), sequence.computed // self.pool.block_size
        if full <= known:
            return
        sequence.hashes = self._chain(sequence, full)
        if self._share_prefixes:
            for index in range(known, full):
                self.pool.register(sequence.blocks[index], sequence.hashes[index])

    def _chain(self, sequence: SequenceState, count: int) -> list[bytes]:
        """The chain hashes of the sequence's first `count` blocks."""
        size, chain = self.pool.block_size, sequence.chain
        while len(chain) < count:
            start = len(chain) * size
            parent = chain[-1] if chain else self._root(sequence)
            chain.append(chain_hash(parent, sequence.tokens[start : start + size]))
        return chain[:count]

    def _root(self, sequence: SequenceState) -> bytes:
        """Where an owner's chains begin: nobody else can compute, or match, a hash of what the owner sent.

        The owner may divide its own by salts.
        """
        request = sequence.request
        return chain_hash(self._salt + (request.asker.salt if self._share_between_owners else request.asker.client), ())

    def cut(self, sequence: SequenceState, length: int) -> None:
        """Forgets keys and values from token `length` on: other tokens stand there now.

        A block that is known by hash and holds any of them is given back: others may share it, so it never changes.
        """
        num_full = length // self.pool.block_size
        sequence.computed = min(sequence.computed, length)
        if len(sequence.hashes) > num_full:
            self.pool.release(sequence.blocks[num_full:])
            sequence.computed = min(sequence.computed, num_full * self.pool.block_size)
            del sequence.blocks[num_full:], sequence.hashes[num_full:]
        del sequence.chain[num_full:]

    def drop(self, sequence: SequenceState) -> None:
        """Releases all blocks of the sequence; its tokens must be run again."""
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.hashes, sequence.computed = [], [], 0

    def discard(self, sequence: SequenceState) -> None:
        """Releases all blocks of a sequence that failed, and shares none of them again: any may be the cause."""
        self.pool.forget(sequence.blocks)
        self.drop(sequence)

    def park(self, sequence: SequenceState) -> str:
        """Keeps a finished sequence's blocks for the request that continues it; returns the name for that request."""
        request, size = sequence.request, self.pool.block_size
        full = len(sequence.tokens) // size
        chain = self._chain(sequence, full)
        # The rest is hashed behind a token that no model has, so that no name is the hash of a block.
        rest = [-1, *sequence.tokens[full * size :]]
        name = chain_hash(chain[-1] if chain else self._root(sequence), rest).hex()
        prefix = ParkedPrefix(
            request.asker.owner,
            request.asker.name_of(name),
            array("i", sequence.tokens),
            tuple(sequence.blocks),
            sequence.computed,
            tuple(sequence.hashes),
            self._clock(),
        )
        self._on_park(prefix)
        self.parked.park(prefix)
        return name

    def release_parked(self, between: Callable[[], None] = lambda: None) -> None:
        """Releases every parked prefix. between: called after each."""
        while self.parked.evict_one():
            between()
