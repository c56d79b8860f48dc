"""Lays out a step's slices as the flat arrays that paged attention takes, and checks them.

The checks are asserts: a slice that fails them is a bug of the engine, and running it would read or write outside the
cache. Knows numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.models.runtimes.base import SequenceSlice


@dataclass(frozen=True, slots=True)
class RaggedStep:
    """T new tokens of B sequences, N cache blocks, R rows of logits.

    With `lay_out(..., is_split=True)`, B counts the pieces of the split sequences.

    input_ids, position_ids: int64 [T].
    past_lens: int32 [B]. subsequence_begins: int32 [B + 1], where each sequence's tokens start.
    block_indices: int32 [N]. block_indices_begins: int32 [B + 1], where each sequence's blocks start.
    max_context_len: int32 [], the longest past + new.
    logit_rows: int64 [R], indices into T.
    mask: uint8 [sum of n * n], the masks row by row, and mask_begins int32 [B + 1]; [0] and [0] when all are causal.
    """

    input_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    past_lens: NDArray[np.int32]
    subsequence_begins: NDArray[np.int32]
    block_indices: NDArray[np.int32]
    block_indices_begins: NDArray[np.int32]
    max_context_len: NDArray[np.int32]
    logit_rows: NDArray[np.int64]
    mask: NDArray[np.uint8]
    mask_begins: NDArray[np.int32]

    def slots(self, block_size: int, firsts: NDArray[np.integer], lengths: NDArray[np.integer]) -> NDArray[np.int64]:
        """Cache slots (block * block_size + offset) of the runs firsts[b] .. firsts[b] + lengths[b] - 1 of each
        sequence b, one after the other: [sum of lengths] int64.
        """
        within = np.arange(lengths.sum()) - np.repeat(begins(lengths)[:-1] - firsts, lengths)
        blocks = self.block_indices[np.repeat(self.block_indices_begins[:-1], lengths) + within // block_size]
        slots: NDArray[np.int64] = blocks.astype(np.int64) * block_size + within % block_size
        return slots


def begins(lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """Where each of the runs of these lengths starts, and where the last ends: [B + 1] int64."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def lay_out(
    batch: Sequence[SequenceSlice],
    *,
    vocab_size: int,
    max_positions: int,
    block_size: int,
    num_blocks: int,
    is_split: bool = False,
    min_pieces: int = 1,
    min_rows: int = 1,
) -> RaggedStep:
    """The flat arrays of a step; asserts that every id, position and block number is inside its range.

    is_split: each token of a slice without a mask becomes a piece of its own, as if decoded alone, and pieces share
      their slice's block table (their `block_indices_begins` are equal). Only for a runtime that writes the
      keys and values of the whole step before anything attends.
    min_pieces: repeats the last piece, its slot included, to reach this number; only with is_split.
    min_rows: repeats the last row of logits, if there is one, to reach this number.
    """
    assert batch, "a step needs at least one sequence"
    tokens: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    rows: list[int] = []
    past_lens: list[int] = []
    token_begins = [0]
    block_begins: list[int] = []
    longest = 0
    has_mask = False
    for item in batch:
        num_new = len(item.tokens)
        context = item.past + num_new
        num_used = -(-context // block_size)
        assert num_new and 0 <= item.num_rows <= num_new, f"{item.num_rows} rows of {num_new} new tokens"
        assert item.past >= 0 and num_used <= len(item.blocks), f"{len(item.blocks)} blocks for {context} tokens"
        if is_split and item.mask is None:
            past_lens += range(item.past, context)
            token_begins += range(len(tokens) + 1, len(tokens) + num_new + 1)
            block_begins += [len(blocks)] * num_new
        else:
            past_lens.append(item.past)
            token_begins.append(len(tokens) + num_new)
            block_begins.append(len(blocks))
        tokens += item.tokens
        if item.positions is None:
            positions += range(item.past, context)
        else:
            assert len(item.positions) == num_new
            positions += item.positions
        blocks += item.blocks[:num_used]
        rows += range(len(tokens) - item.num_rows, len(tokens))
        longest = max(longest, context)
        has_mask = has_mask or item.mask is not None
    if is_split and not has_mask and len(past_lens) < min_pieces:
        num_more = min_pieces - len(past_lens)
        token_begins += range(len(tokens) + 1, len(tokens) + num_more + 1)
        for repeated in (tokens, positions, past_lens, block_begins):
            repeated += repeated[-1:] * num_more
    rows += rows[-1:] * (min_rows - len(rows))
    block_begins.append(len(blocks))
    mask, mask_begins = _masks(batch, is_split) if has_mask else (np.zeros(0, np.uint8), np.zeros(1, np.int32))
    step = RaggedStep(
        input_ids=np.array(tokens, np.int64),
        position_ids=np.array(positions, np.int64),
        past_lens=np.array(past_lens, np.int32),
        subsequence_begins=np.array(token_begins, np.int32),
        block_indices=np.array(blocks, np.int32),
        block_indices_begins=np.array(block_begins, np.int32),
        max_context_len=np.array(longest, np.int32),
        logit_rows=np.array(rows, np.int64),
        mask=mask,
        mask_begins=mask_begins,
    )
    assert _inside(step.input_ids, vocab_size), "a token id outside the vocabulary"
    assert _inside(step.position_ids, max_positions), f"a position outside 0 .. {max_positions - 1}"
    assert _inside(step.block_indices, num_blocks), f"a block number outside 0 .. {num_blocks - 1}"
    return step


def _inside(values: NDArray[np.integer], end: int) -> bool:
    return bool(values.min() >= 0 and values.max() < end)


def _masks(batch: Sequence[SequenceSlice], is_split: bool) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """When one sequence has a mask all need one: causal masks are written out."""
    flat: list[NDArray[np.uint8]] = []
    sizes: list[int] = []
    for item in batch:
        num_new = len(item.tokens)
        if item.mask is None:
            causal = np.ones(num_new, np.uint8) if is_split else np.tri(num_new, dtype=np.uint8).reshape(-1)
            flat.append(causal)
            sizes += [1] * num_new if is_split else [num_new * num_new]
        else:
            mask = item.mask
            assert mask.shape == (num_new, num_new), f"a mask of shape {mask.shape} for {num_new} new tokens"
            assert mask.dtype == np.uint8 and mask.diagonal().all(), "a token must attend itself"
            flat.append(mask.reshape(-1))
            sizes.append(mask.size)
    return np.concatenate(flat), begins(np.array(sizes)).astype(np.int32)
