"""Picks on a GPU by Triton's kernels: hash, noise and maximum in one pass, and thresholds without a sort.

`best_scores` reads each logit once. A block of a row finds in float32 which of its tokens can have its best score, with
a margin far over float32's error, and computes in float64 the scores of those alone: one or two in a block. So the
picks are those of float64, also on GPUs that have next to none of it.

`reach` and `truncated` have one program per row. Each round splits the range of keys that is left into 16, and sums up
the weights below each border: 8 rounds for 32 bits. The row stays in the GPU's cache between the rounds.

Sums are taken in an order that depends on the row alone, never on the batch.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
from triton import language as tl

from outrider.models.picks.row_terms import RowPart

_BLOCK: Final = 2048
_REACH_BLOCK: Final = 2048  # for larger ones a GPU lacks registers
_REACH_WARPS: Final = 16
_NUM_BORDERS: Final = 16
_NONE: Final = tl.constexpr((1 << 31) - 1)  # no id is as high
_MARGIN: Final = tl.constexpr(1e-3)
"""Of a variate in float32: its error is under 1e-4."""
_LOWEST: Final = tl.constexpr(-200.0)  # `narrowing_torch.LOWEST`, which cannot be imported: it imports this
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


@triton.jit(do_not_specialize_on_alignment=["low", "high", "temperatures"])
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
def _masses_to(keys, masses, borders):
    """The mass of what has each border's key or a lower one: float64 [borders]."""
    return tl.sum(tl.where(keys[:, None] <= borders[None, :], masses[:, None], 0.0), axis=0).to(tl.float64)


@triton.jit
def _borders_of(low, step, NUM_BORDERS: tl.constexpr):
    """The last key of each part."""
    return (low + step * (tl.arange(0, NUM_BORDERS) + 1) - 1).to(tl.int32)


@triton.jit
def _low_of(low, step, masses, goal, NUM_BORDERS: tl.constexpr):
    """Where the part begins in which the goal is reached: the last one, where it never is."""
    return low + step * tl.minimum(tl.sum((masses < goal).to(tl.int64), axis=0), NUM_BORDERS - 1)


@triton.jit
def _reach_of_row(keys, weights, wanted, found, size, BLOCK: tl.constexpr, NUM_BORDERS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    goal = tl.load(wanted + row)
    low = tl.full((), -2147483648, tl.int64)  # the least key that may be the one
    width = tl.full((), 1 << 32, tl.int64)  # of the keys from there on
    while width > 1:
        width = width // NUM_BORDERS
        borders = _borders_of(low, width, NUM_BORDERS)
        masses = tl.zeros((NUM_BORDERS,), tl.float64)
        for start in range(0, size, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            own = tl.load(keys + row * size + ids, mask=ids < size, other=0)
            mass = tl.load(weights + row * size + ids, mask=ids < size, other=0.0)
            masses += _masses_to(own, mass, borders)
        low = _low_of(low, width, masses, goal, NUM_BORDERS)
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


@triton.jit
def _rank(values):
    """int32, the lower the higher the logit."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # both zeros are equal
    return ~(bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _weights(values, peak, divisor, last_rank):
    """exp((logit - maximum) / temperature), 0 for what top-k drops, or is not there; and keys, the heaviest first."""
    logs = tl.maximum((values - peak) / divisor, _LOWEST)
    is_in = (values > float("-inf")) & (_rank(values) <= last_rank)
    weights = tl.where(is_in, tl.exp(logs), 0.0)
    return weights, ~weights.to(tl.int32, bitcast=True)


@triton.jit
def _searched(
    logits,
    size,
    peak,
    divisor,
    last_rank,
    goal,
    is_on,
    BY_RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_BORDERS: tl.constexpr,
):
    """The least key up to which a row's weights, or by rank its tokens, reach the goal: int64, the highest of all where
    the search is not on.
    """
    low = tl.where(is_on, -2147483648, 2147483647).to(tl.int64)
    width = tl.where(is_on, 1 << 32, 1).to(tl.int64)
    while width > 1:
        width = width // NUM_BORDERS
        borders = _borders_of(low, width, NUM_BORDERS)
        masses = tl.zeros((NUM_BORDERS,), tl.float64)
        for start in range(0, size, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            values = tl.load(logits + ids, mask=ids < size, other=float("-inf"))
            if BY_RANK:
                masses += _masses_to(_rank(values), (values > float("-inf")).to(tl.float32), borders)
            else:
                weights, keys = _weights(values, peak, divisor, last_rank)
                masses += _masses_to(keys, weights, borders)
        low = _low_of(low, width, masses, goal, NUM_BORDERS)
    return low


# Columns of a step's terms begin at any place: else there would be a variant for each.
@triton.jit(do_not_specialize_on_alignment=["temperatures", "top_k", "top_p", "min_p"])
def _truncated_row(
    logits,
    logits_stride,
    temperatures,
    top_k,
    top_p,
    min_p,
    truncated,
    peaks,
    size,
    BLOCK: tl.constexpr,
    NUM_BORDERS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    truncated += row * size
    divisor = tl.load(temperatures + row).to(tl.float32)
    peak = tl.full((), float("-inf"), tl.float32)
    for start in range(0, size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        values = tl.load(logits + ids, mask=ids < size, other=float("-inf"))
        peak = tl.maximum(peak, tl.max(tl.where(values == values, values, float("inf")), axis=0))
    tl.store(peaks + row, peak)

    # Top-k: the rank up to which there are as many tokens. Top-p: the weight down to which the mass is reached.
    most = tl.load(top_k + row)
    last_rank = _searched(
        logits, size, peak, divisor, 2147483647, most.to(tl.float64), most > 0, True, BLOCK, NUM_BORDERS
    )
    share = tl.load(top_p + row)
    total = tl.zeros((), tl.float64)
    for start in range(0, size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        values = tl.load(logits + ids, mask=ids < size, other=float("-inf"))
        weights, _ = _weights(values, peak, divisor, last_rank)
        total += tl.sum(weights.to(tl.float64), axis=0)
    goal = share * total
    last_key = _searched(logits, size, peak, divisor, last_rank, goal, share < 1.0, False, BLOCK, NUM_BORDERS)
    heavier = tl.zeros((), tl.float64)
    for start in range(0, size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        values = tl.load(logits + ids, mask=ids < size, other=float("-inf"))
        weights, keys = _weights(values, peak, divisor, last_rank)
        heavier += tl.sum(tl.where(keys < last_key, weights, 0.0).to(tl.float64), axis=0)
    lightest = (~last_key.to(tl.int32)).to(tl.float32, bitcast=True).to(tl.float64)
    short = tl.maximum(tl.ceil((goal - heavier) / lightest), 1.0)  # of the equally likely, as many as it takes

    least = tl.load(min_p + row).to(tl.float32)
    num_equal = tl.zeros((), tl.int32)
    for start in range(0, size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        values = tl.load(logits + ids, mask=ids < size, other=float("-inf"))
        weights, keys = _weights(values, peak, divisor, last_rank)
        is_equal = (keys == last_key).to(tl.int32)
        is_kept = (keys < last_key) | ((is_equal == 1) & (num_equal + tl.cumsum(is_equal, axis=0) <= short))
        is_kept = is_kept & (weights >= least) & (values > float("-inf")) & (_rank(values) <= last_rank)
        num_equal += tl.sum(is_equal, axis=0)
        tl.store(truncated + ids, tl.where(is_kept, values, float("-inf")), mask=ids < size)


def truncated(logits: torch.Tensor, part: RowPart) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows with -inf for what top-k, top-p and min-p drop, as `narrowing_torch.survivors` says; and each row's
    maximum, float32 [rows], not finite where a number is none.

    logits: float32 [rows, V]; not changed.
    """
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows, size = logits.shape
    found = torch.empty((num_rows, size), dtype=torch.float32, device=logits.device)
    peaks = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    _truncated_row[(num_rows,)](
        logits,
        logits.stride(0),
        part.temperature,
        part.top_k,
        part.top_p,
        part.min_p,
        found,
        peaks,
        size,
        BLOCK=_REACH_BLOCK,
        NUM_BORDERS=_NUM_BORDERS,
        num_warps=_REACH_WARPS,
    )
    return found, peaks
