"""Samples from torch tensors: the hash of `sampling` bit for bit, the same picks, many rows at a time.

For targets whose logits are on a GPU. torch has almost no unsigned arithmetic, so the hash's 32-bit words are int32:
addition and multiplication wrap to the same bits, and right shifts are masked, because they repeat the sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from outrider.models.picks.sampling import SamplingParams, noise_key

_U32: Final = 0xFFFFFFFF
_CHUNK: Final = 1 << 21
"""Logits worked on at a time: with top-p, the hungriest, some 50 bytes of temporaries each, so 100 MB at any batch."""


def _signed(word: int) -> int:
    """The int32 with the bits of an unsigned 32-bit word."""
    return (word & _U32 ^ 0x80000000) - 0x80000000


def _fmix32(h: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """In place on int32 words; returns `h`. scratch: of the same shape, overwritten."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        torch.bitwise_right_shift(h, shift, out=scratch)
        h ^= scratch.bitwise_and_((1 << (32 - shift)) - 1)
        if factor != 1:
            h *= _signed(factor)
    return h


def _noise_words(seeds: Sequence[int], positions: Sequence[int], tokens: torch.Tensor) -> torch.Tensor:
    """h(token) for each row and token id: int32 [rows, tokens] with the hash's 32 bits; tokens: integers [tokens]."""
    keys = [noise_key(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    halves = [[_signed(key), _signed(key >> 32)] for key in keys]
    low, high = torch.tensor(halves, dtype=torch.int32, device=tokens.device).unsqueeze(2).unbind(1)
    h = tokens.to(torch.int32) * _signed(0x9E3779B1) + low
    scratch = torch.empty_like(h)
    _fmix32(h, scratch)
    h ^= high
    return _fmix32(h, scratch)


def noise_bits(seeds: Sequence[int], positions: Sequence[int], tokens: torch.Tensor) -> torch.Tensor:
    """h(token) for each row and token id: int64 [rows, tokens], 0 to 2^32 - 1; tokens: int64 [tokens]."""
    return _noise_words(seeds, positions, tokens).to(torch.int64) & _U32


def gumbel(seeds: Sequence[int], positions: Sequence[int], tokens: torch.Tensor) -> torch.Tensor:
    """g(seed, position, token) for each row and token id: float64 [rows, tokens]."""
    words = _noise_words(seeds, positions, tokens)
    u = words.to(torch.float64)
    u += (words < 0).to(torch.float64).mul_(2.0**32)  # the words are unsigned
    return u.add_(0.5).mul_(2.0**-32).log_().neg_().log_().neg_()


def survivors(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Mask, bool [rows, V], of the tokens that top-k, top-p and min-p leave; logits: float32 [rows, V].

    The truncation of `sampling.survivors`: ties with the k-th token are kept; in top-p equally likely ones rank by id.
    """
    size = logits.shape[1]
    kept = torch.ones_like(logits, dtype=torch.bool)
    counts = [p.top_k if 0 < p.top_k < size else 0 for p in params]
    if any(counts):
        ranks = torch.tensor([[max(k - 1, 0)] for k in counts], device=logits.device)
        is_on = torch.tensor([[k > 0] for k in counts], device=logits.device)
        kth = torch.topk(logits, max(counts), dim=1).values.gather(1, ranks)
        kept = (logits >= kth) | ~is_on
    if any(p.top_p < 1.0 or p.min_p > 0.0 for p in params):
        temperature = torch.tensor([[p.temperature or 1.0] for p in params], dtype=torch.float32, device=logits.device)
        weights = (logits - logits.amax(1, keepdim=True)).div_(temperature).exp_().mul_(kept)
        min_p = torch.tensor([[p.min_p] for p in params], dtype=torch.float32, device=logits.device)
        kept &= weights >= min_p
        if any(p.top_p < 1.0 for p in params):
            kept &= _nucleus(weights, torch.tensor([[p.top_p] for p in params], dtype=torch.float64).to(logits.device))
    return kept


def _nucleus(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Mask, bool [rows, V], of each row's heaviest entries whose share of the whole reaches its `top_p`, [rows, 1]."""
    limit = top_p * weights.sum(1, keepdim=True, dtype=torch.float64)
    heavy, order = torch.sort(weights, dim=1, descending=True, stable=True)
    above = heavy.to(torch.float64).cumsum_(1).sub_(heavy)
    inside = (above < limit) | (top_p >= 1.0)
    inside[:, 0] = True
    return torch.zeros_like(inside).scatter_(1, order, inside)


def pick_rows(logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int | None]:
    """The token at each row's absolute position, as `sampling.pick` gives it; logits float32 [rows, V].

    None for a row whose maximum is not finite. Memory for temporaries does not grow with the number of rows. Greedy
    rows cost one argmax.
    """
    picks = logits.argmax(1)  # the first of several maxima, as numpy's
    is_finite = torch.isfinite(logits.gather(1, picks.unsqueeze(1)).squeeze(1))  # a NaN counts as the maximum
    sampled = [row for row, p in enumerate(params) if not p.is_greedy]
    num_rows = max(1, _CHUNK // logits.shape[1])
    tokens = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    for start in range(0, len(sampled), num_rows):
        rows = sampled[start : start + num_rows]
        index = torch.tensor(rows, device=logits.device)
        picks[index] = _sample(logits[index], [params[row] for row in rows], [positions[row] for row in rows], tokens)
    return [token if finite else None for token, finite in zip(picks.tolist(), is_finite.tolist(), strict=True)]


def _sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int], tokens: torch.Tensor
) -> torch.Tensor:
    """The picks, int64 [rows], of rows that are not greedy."""
    kept = survivors(logits, params) if any(p.top_k or p.top_p < 1.0 or p.min_p > 0.0 for p in params) else None
    temperature = torch.tensor([[p.temperature] for p in params], dtype=torch.float64, device=logits.device)
    scores = logits.to(torch.float64).div_(temperature)
    scores += gumbel([p.seed for p in params], positions, tokens)
    if kept is not None:
        scores.masked_fill_(kept.logical_not_(), -torch.inf)
    return scores.argmax(1)
