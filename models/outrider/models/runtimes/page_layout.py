"""Lays out where a step's new tokens find their keys in a paged cache, for the kernels of `triton_attention`.

Knows numpy only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isqrt
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.models.runtimes.ragged import RaggedStep

NO_TAIL: Final = np.int32(2**31 - 1)
_Ids = NDArray[np.int32]


def tiles_of(token_begins: NDArray[np.integer], tokens: int) -> _Ids:
    """Cuts each sequence's new tokens into tiles of at most `tokens`: [2, tiles], each one's first token and its count.

    token_begins: [B + 1], where each sequence's tokens start.
    """
    num_tiles = -(-np.diff(token_begins) // tokens)
    of_tile = np.repeat(np.arange(len(num_tiles)), num_tiles)
    within = np.arange(num_tiles.sum()) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    firsts = token_begins[of_tile] + within * tokens
    return np.stack([firsts, np.minimum(token_begins[of_tile + 1] - firsts, tokens)]).astype(np.int32)


def tails_of(step: RaggedStep, slots: NDArray[np.integer]) -> tuple[_Ids, _Ids]:
    """Where the tokens of trees find their ancestors: the position from which on each sequence's tokens have slots of
    their own, [B], and these slots by position, -1 behind the end: [T, deepest], [T, 1] without a tree.

    slots: [T], of the new tokens.
    """
    begins = np.full(len(step.past_lens), NO_TAIL, np.int32)
    # Most sequences are lines. A prompt's mask is large: the arrays below would have its size for each of them.
    pieces = [step.mask[begin:end] for begin, end in pairwise(step.mask_begins.tolist())]
    lines = {size: np.tri(isqrt(size), dtype=np.uint8).tobytes() for size in {piece.size for piece in pieces}}
    trees = [index for index, piece in enumerate(pieces) if piece.tobytes() != lines[piece.size]]
    if not trees:
        return begins, np.full((len(slots), 1), -1, np.int32)
    num_new = np.diff(step.subsequence_begins)
    longest = int(num_new[trees].max())
    # The masks of trees as one array, [trees, n, n], with no token behind a sequence's end.
    is_new = np.arange(longest) < num_new[trees, None]
    masks = np.zeros((len(trees), longest, longest), np.bool_)
    masks[is_new[:, :, None] & is_new[:, None, :]] = np.concatenate([pieces[index] for index in trees])
    # The first tokens of a sequence are a line that all others follow.
    place = np.arange(longest)
    is_line = (masks.sum(axis=2) == place + 1) & (masks.sum(axis=1) == num_new[trees, None] - place)
    before = (is_line | ~is_new).argmin(axis=1)
    begins[trees] = step.past_lens[trees] + before
    tree, token, other = np.nonzero(masks & (place >= before[:, None])[:, None, :])
    sequence = np.take(trees, tree)
    token, other = (step.subsequence_begins[sequence] + each for each in (token, other))
    at = step.position_ids[other] - begins[sequence]
    tails = np.full((len(slots), int(at.max(initial=0)) + 1), -1, np.int32)
    tails[token, at] = slots[other]
    whose = np.repeat(np.arange(len(num_new)), num_new)
    expected = np.maximum(step.position_ids + 1 - begins[whose].astype(np.int64), 0)
    assert ((tails >= 0).sum(axis=1) == expected).all(), "a token of a tree attends one token at each position"
    return begins, tails


@dataclass(frozen=True, slots=True)
class PageArrays:
    """Where a step's T new tokens find their keys, on the host.

    positions: [T], of each token in its text, from 0. sequences: [T]. tables: [B, most blocks]. tail_begins,
    tail_slots: as `tails_of`. tiles: as `tiles_of`, by tokens of a tile. num_splits: parts of the longest context.
    """

    positions: NDArray[np.integer]
    sequences: NDArray[np.integer]
    tables: _Ids
    tail_begins: _Ids
    tail_slots: _Ids
    tiles: dict[int, _Ids]
    num_splits: int

    @property
    def has_tree(self) -> bool:
        """Whether a token has slots of its own."""
        return bool((self.tail_begins != NO_TAIL).any())

    @classmethod
    def of(cls, step: RaggedStep, slots: NDArray[np.integer], tile_tokens: Iterable[int], split: int) -> PageArrays:
        """slots: [T], of the new tokens. tile_tokens: that the layers want. split: positions of a part of a context."""
        num_new, num_blocks = np.diff(step.subsequence_begins), np.diff(step.block_indices_begins)
        # A text may begin behind position 0, as one of the exporter's check does. Keys are found by place in the text.
        first, past = (np.repeat(each, num_new) for each in (step.subsequence_begins[:-1], step.past_lens))
        step = replace(step, position_ids=step.position_ids - step.position_ids[first] + past)
        tables = np.zeros((len(num_new), int(num_blocks.max())), np.int32)
        tables[np.arange(tables.shape[1]) < num_blocks[:, None]] = step.block_indices
        return cls(
            step.position_ids,
            np.repeat(np.arange(len(num_new)), num_new),
            tables,
            *tails_of(step, slots),
            {tokens: tiles_of(step.subsequence_begins, tokens) for tokens in tile_tokens},
            int(step.position_ids.max()) // split + 1,
        )

    def parts(self) -> list[NDArray[np.integer]]:
        """What the device gets."""
        arrays = [self.positions, self.sequences, self.tables, self.tail_begins, self.tail_slots]
        return [*arrays, *self.tiles.values()]
