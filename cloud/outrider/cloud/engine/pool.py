"""Manages blocks of the KV cache: reference-counted, reused by content hash, evicted least-recently-used.

Knows numbers and hashes, no tensors. A block is free (content worthless), in use (one reference or more), or idle (no
reference, but its content is known by hash and can be reused).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

import numpy as np


def chain_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Hash (16 bytes) of a prefix: of the parent prefix's hash and the tokens that follow it."""
    return hashlib.blake2b(parent + np.asarray(tokens, dtype="<i8").tobytes(), digest_size=16).digest()


class BlockPool:
    """Hands out block numbers 0 .. num_blocks - 1. Not thread-safe: the engine's thread owns it."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = deque(range(num_blocks))
        self._references = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # oldest first

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out now: free and idle ones."""
        return len(self._free) + len(self._idle)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each; None, with nothing taken, when there are too few."""
        if count > self.num_available:
            return None
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._idle.popitem(last=False)
            del self._block_of[self._hash_of.pop(block)]
        self._references[block] = 1
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one reference of each. Later blocks become idle first, so that a prefix outlives its continuation."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} released twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._hash_of:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def register(self, block: int, content: bytes) -> None:
        """Records that a block in use is full and final and holds the prefix that `content` hashes.

        The first block registered under a hash keeps it; a later equal one stays anonymous.
        """
        assert self._references[block] > 0, f"block {block} registered while not in use"
        if content not in self._block_of and block not in self._hash_of:
            self._block_of[content] = block
            self._hash_of[block] = content

    def forget(self, blocks: Sequence[int]) -> None:
        """Makes blocks in use unknown: nobody matches them again, and their last reference frees them."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} forgotten while not in use"
            content = self._hash_of.pop(block, None)
            if content is not None:
                del self._block_of[content]

    def match(self, contents: Iterable[bytes]) -> list[int]:
        """The longest run of known blocks for these hashes, in order; takes a reference on each."""
        matched: list[int] = []
        for content in contents:
            block = self._block_of.get(content)
            if block is None:
                break
            self._references[block] += 1
            self._idle.pop(block, None)
            matched.append(block)
        return matched
