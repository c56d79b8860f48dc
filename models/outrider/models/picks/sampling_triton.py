"""Picks on a GPU by Triton's kernels: hash, noise and maximum in one pass, and thresholds without a sort.

`best_scores` reads each logit once. A block of a row finds in float32 which of its tokens can have its best score, with
a margin far over float32's error, and computes in float64 the scores of those alone: one or two in a block. So the
picks are those of float64, also on GPUs that have next to none of it.

`reach` has one program per row. Each round splits the range of keys that is left into 16, and sums up the weights below
each border: 8 rounds for 32 bits. The row stays in the GPU's cache between the rounds.

Sums are taken in an order that depends on the row alone, never on the batch.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
from triton import language as tl

from outrider.models.picks.row_terms import RowPart

_BLOCK: Final = 2048
_REACH_BLOCK: Final = 4096
_REACH_WARPS: Final = 16
_NUM_BORDERS: Final = 16
_NONE: Final = tl.constexpr((1 << 31) - 1)  # no id is as high
_MARGIN: Final = tl.constexpr(1e-3)
"""Of a variate in float32: its error is under 1e-4."""
_RELATIVE_MARGIN: Final = tl.constexpr(1e-6)
"""Of logit / temperature in float32, and of its sum with the variate."""


@triton.jit
def _fmix32(h):
    h ^= h >> 16
    h *= 0x85EBCA6B
    h ^= h >> 13
    h *= 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def noise_words(low, high, ids):
    """`sampling.noise_bits`; all uint32."""
    return _fmix32(_fmix32(ids * 0x9E3779B1 + low) ^ high)


@triton.jit
def _rough_gumbel(word):
    """-log(-log(u)) in float32, u = (word + 0.5) / 2^32; the error is under 1e-4 also where u is next to 1."""
    rest = (~word).to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10  # 1 - u
    u = word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    series = rest * (1.0 + rest * (0.5 + rest * (0.3333333333 + rest * 0.25)))
    return -tl.log(tl.where(rest < 0.02, series, -tl.log(u)))


@triton.jit
def _best_of_block(
    logits, logits_stride, low, high, temperatures, terms_stride, scores, tokens, peaks, vocab_size, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    place = row * tl.num_programs(1) + block
    ids = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * logits_stride + ids, mask=ids < vocab_size, other=float("-inf"))
    temperature = tl.load(temperatures + row)
    is_greedy = temperature == 0.0
    divisor = tl.where(is_greedy, 1.0, temperature)
    low_word = tl.load(low + row * terms_stride).to(tl.uint32, bitcast=True)
    high_word = tl.load(high + row * terms_stride).to(tl.uint32, bitcast=True)
    words = noise_words(low_word, high_word, ids.to(tl.uint32))
    noise = tl.where(is_greedy, 0.0, _rough_gumbel(words))
    rough = values / divisor.to(tl.float32) + noise
    highest = tl.max(rough, axis=0)
    bar = highest - tl.where(is_greedy, 0.0, _MARGIN + _RELATIVE_MARGIN * (tl.abs(highest) + 64.0))
    is_able = (rough >= bar) & (rough > float("-inf"))
    best_score = tl.full((), float("-inf"), tl.float64)
    best_token = tl.full((), _NONE, tl.int32)
    left = tl.sum(is_able.to(tl.int32), axis=0)
    while left > 0:
        token = tl.min(tl.where(is_able, ids, _NONE), axis=0)
        is_it = ids == token
        value = tl.sum(tl.where(is_it, values, 0.0), axis=0).to(tl.float64)
        word = tl.sum(tl.where(is_it, words, 0).to(tl.int64), axis=0)
        u = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2^-32, exactly
        score = value / divisor
        if temperature != 0.0:
            score = score - tl.log(-tl.log(u))
        is_better = score > best_score  # of equal scores, the lower id's came first
        best_score = tl.where(is_better, score, best_score)
        best_token = tl.where(is_better, token, best_token)
        is_able = is_able & (ids != token)
        left -= 1
    tl.store(scores + place, best_score)
    tl.store(tokens + place, best_token)
    # A NaN makes the row's maximum infinite, and so not finite.
    tl.store(peaks + place, tl.max(tl.where(values == values, values, float("inf")), axis=0))


def best_scores(logits: torch.Tensor, part: RowPart) -> tuple[torch.Tensor, torch.Tensor]:
    """The best scores' tokens, int64 [rows], greedy rows too, and each row's maximum, float32 [rows].

    logits: float32 [rows, V], -inf for what may not be picked. The token is any, and the maximum not finite, where the
    row's maximum is not finite.
    """
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows, size = logits.shape
    num_blocks = triton.cdiv(size, _BLOCK)
    scores = torch.empty((num_rows, num_blocks), dtype=torch.float64, device=logits.device)
    tokens = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=logits.device)
    peaks = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=logits.device)
    low, high = part.low, part.high
    _best_of_block[(num_rows, num_blocks)](
        logits,
        logits.stride(0),
        low,
        high,
        part.temperature,
        low.stride(0),
        scores,
        tokens,
        peaks,
        size,
        BLOCK=_BLOCK,
    )
    best = scores.argmax(1, keepdim=True)  # the first, and so the lowest id, of equal ones
    return tokens.gather(1, best).squeeze(1).long(), peaks.amax(1)


@triton.jit
def _reach_of_row(keys, weights, wanted, found, size, BLOCK: tl.constexpr, NUM_BORDERS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    goal = tl.load(wanted + row)
    low = tl.full((), -2147483648, tl.int64)  # the least key that may be the one
    width = tl.full((), 1 << 32, tl.int64)  # of the keys from there on
    while width > 1:
        step = width // NUM_BORDERS
        borders = (low + step * (tl.arange(0, NUM_BORDERS) + 1) - 1).to(tl.int32)  # the last key of each part
        masses = tl.zeros((NUM_BORDERS,), tl.float64)
        for start in range(0, size, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            is_there = ids < size
            own = tl.load(keys + row * size + ids, mask=is_there, other=0)
            mass = tl.load(weights + row * size + ids, mask=is_there, other=0.0)
            below = tl.where(own[:, None] <= borders[None, :], mass[:, None], 0.0)
            masses += tl.sum(below, axis=0).to(tl.float64)
        short = tl.sum((masses < goal).to(tl.int64), axis=0)
        low += step * tl.minimum(short, NUM_BORDERS - 1)
        width = step
    tl.store(found + row, low.to(tl.int32))


def reach(keys: torch.Tensor, weights: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """`narrowing_torch.reach_by_bisection`: the least key up to which the weights sum up to `wanted`.

    keys: int32 [rows, n]; weights: float32 [rows, n]; wanted: float64 [rows, 1]. Returns int32 [rows, 1].
    """
    keys, weights = keys.contiguous(), weights.contiguous()
    found = torch.empty((len(keys), 1), dtype=torch.int32, device=keys.device)
    _reach_of_row[(len(keys),)](
        keys,
        weights,
        wanted.contiguous(),
        found,
        keys.shape[1],
        BLOCK=_REACH_BLOCK,
        NUM_BORDERS=_NUM_BORDERS,
        num_warps=_REACH_WARPS,
    )
    return found
