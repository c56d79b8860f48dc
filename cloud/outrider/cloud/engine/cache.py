"""Gives blocks to sequences: prefix sharing, growth, parking. The scheduler decides who gives way."""

from __future__ import annotations

from outrider.cloud.engine.parked import ParkedPrefix, ParkedPrefixes
from outrider.cloud.engine.pool import ROOT_HASH, BlockPool, chain_hash
from outrider.cloud.engine.sequence_state import SequenceState


class SequenceCache:
    """The block pool as sequences see it. The engine's thread owns it, except for `take_parked`."""

    def __init__(self, num_blocks: int, block_size: int, *, max_parked: int, share_prefixes: bool) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self._parked = ParkedPrefixes(self.pool, max_parked)
        self._share_prefixes = share_prefixes

    @property
    def num_parked(self) -> int:
        """Prefixes kept for the /v1/verify call that continues them."""
        return len(self._parked)

    @property
    def num_parked_blocks(self) -> int:
        """Blocks that parked prefixes hold."""
        return self._parked.num_blocks

    def grow(self, sequence: SequenceState, length: int) -> bool:
        """Gives `sequence` blocks for `length` tokens; takes idle blocks and parked prefixes if necessary.

        False, with the sequence unchanged, when there are not enough.
        """
        needed = -(-length // self.pool.block_size) - len(sequence.blocks)
        if needed > self.pool.num_available + self._parked.num_blocks:
            return False  # not enough even without the parked prefixes
        while needed > self.pool.num_available:
            if not self._parked.evict_one():
                return False
        if needed > 0:
            sequence.blocks += self.pool.allocate(needed) or []
        return True

    def match_prefix(self, sequence: SequenceState) -> None:
        """Takes shared blocks that hold the sequence's beginning; leaves at least its last token to run."""
        if sequence.blocks or not self._share_prefixes:
            return
        size, hashes, parent = self.pool.block_size, [], ROOT_HASH
        for start in range(0, len(sequence.tokens) - size, size):
            parent = chain_hash(parent, sequence.tokens[start : start + size])
            hashes.append(parent)
        sequence.blocks = self.pool.match(hashes)
        sequence.hashes = hashes[: len(sequence.blocks)]
        sequence.computed = len(sequence.blocks) * size
        sequence.usage.cached_prompt_tokens = min(sequence.computed, sequence.usage.prompt_tokens)

    def register_full_blocks(self, sequence: SequenceState) -> None:
        """Registers full blocks by hash once all their tokens are committed and computed: they never change again.

        Call it after a pick from a finite row only: the row attends every token before it, and a key or value that is
        not a number makes it one too. So a prompt's chunks become known together, at its first token. Two equal long
        prompts in flight share nothing until then; sharing per chunk would cost a row of logits per chunk. A row
        cannot vouch for infinite keys, nor for what a model with sliding windows in every layer no longer attends:
        `discard` removes those with the first sequence that fails on them.
        """
        size = self.pool.block_size
        while (len(sequence.hashes) + 1) * size <= sequence.computed:
            index = len(sequence.hashes)
            parent = sequence.hashes[-1] if sequence.hashes else ROOT_HASH
            content = chain_hash(parent, sequence.tokens[index * size : (index + 1) * size])
            sequence.hashes.append(content)
            if self._share_prefixes:
                self.pool.register(sequence.blocks[index], content)

    def drop(self, sequence: SequenceState) -> None:
        """Releases all blocks of the sequence; its tokens must be run again."""
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.hashes, sequence.computed = [], [], 0

    def discard(self, sequence: SequenceState) -> None:
        """Releases all blocks of a sequence that failed, and shares none of them again: any may be the cause."""
        self.pool.forget(sequence.blocks)
        self.drop(sequence)

    def park(self, sequence: SequenceState) -> str:
        """Keeps a finished sequence's blocks for the call that continues it; returns the hash of its tokens."""
        kept = ParkedPrefix(tuple(sequence.tokens), tuple(sequence.blocks), sequence.computed, tuple(sequence.hashes))
        return self._parked.park(kept)

    def take_parked(self, name: str) -> ParkedPrefix | None:
        """Any thread: hands over a parked prefix with the references on its blocks, or None."""
        return self._parked.take(name)

    def park_again(self, prefix: ParkedPrefix) -> None:
        """Undoes `take_parked`."""
        self._parked.park(prefix)

    def release_parked(self) -> None:
        """Releases every parked prefix."""
        while self._parked.evict_one():
            pass
