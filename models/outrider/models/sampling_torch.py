"""Samples from torch tensors: the hash of `sampling` bit for bit, the same picks, a whole batch at a time.

For targets whose logits are on a GPU. torch has almost no unsigned arithmetic, so 32-bit words are stored in int64 and
masked after each operation that can overflow them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from outrider.models.sampling import SamplingParams, noise_key

_U32: Final = 0xFFFFFFFF


def _fmix32(h: torch.Tensor) -> torch.Tensor:
    h = h ^ (h >> 16)
    h = (h * 0x85EBCA6B) & _U32
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE35) & _U32
    return h ^ (h >> 16)


def noise_bits(seeds: Sequence[int], positions: Sequence[int], tokens: torch.Tensor) -> torch.Tensor:
    """h(token) for each row and token id: int64 [rows, tokens] holding 32-bit words; tokens: int64 [tokens]."""
    keys = [noise_key(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    low = torch.tensor([key & _U32 for key in keys], device=tokens.device).unsqueeze(1)
    high = torch.tensor([key >> 32 for key in keys], device=tokens.device).unsqueeze(1)
    h = (tokens.unsqueeze(0) * 0x9E3779B1 + low) & _U32
    return _fmix32(_fmix32(h) ^ high)


def gumbel(seeds: Sequence[int], positions: Sequence[int], tokens: torch.Tensor) -> torch.Tensor:
    """g(seed, position, token) for each row and token id: float64 [rows, tokens]."""
    u = (noise_bits(seeds, positions, tokens).to(torch.float64) + 0.5) * 2.0**-32
    return -torch.log(-torch.log(u))


def survivors(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Mask, bool [rows, V], of the tokens that top-k, top-p and min-p leave; logits: float32 [rows, V].

    The truncation of `sampling.survivors`: ties with the k-th token are kept; in top-p equally likely ones rank by id.
    """
    size = logits.shape[1]
    kept = torch.ones_like(logits, dtype=torch.bool)
    if any(0 < p.top_k < size for p in params):
        ranks = torch.tensor([[(p.top_k or size) - 1] for p in params], device=logits.device).clamp(max=size - 1)
        kth = torch.sort(logits, dim=1, descending=True).values.gather(1, ranks)
        kept = logits >= kth
    if any(p.top_p < 1.0 or p.min_p > 0.0 for p in params):
        temperature = torch.tensor([[p.temperature or 1.0] for p in params], dtype=torch.float32, device=logits.device)
        weights = torch.exp((logits - logits.amax(1, keepdim=True)) / temperature) * kept
        top_p = torch.tensor([[p.top_p] for p in params], dtype=torch.float64, device=logits.device)
        heavy, order = torch.sort(weights, dim=1, descending=True, stable=True)
        above = heavy.to(torch.float64).cumsum(1) - heavy
        inside = (above < top_p * weights.sum(1, keepdim=True, dtype=torch.float64)) | (top_p >= 1.0)
        inside[:, 0] = True
        min_p = torch.tensor([[p.min_p] for p in params], dtype=torch.float32, device=logits.device)
        kept = kept & torch.zeros_like(kept).scatter(1, order, inside) & (weights >= min_p)
    return kept


def pick_rows(logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int | None]:
    """The token at each row's absolute position, as `sampling.pick` gives it; logits float32 [rows, V].

    None for a row whose maximum is not finite.
    """
    is_finite = torch.isfinite(logits.amax(1)).tolist()
    tokens = torch.arange(logits.shape[1], device=logits.device)
    temperature = torch.tensor([[p.temperature or 1.0] for p in params], dtype=torch.float64, device=logits.device)
    is_greedy = torch.tensor([[p.is_greedy] for p in params], device=logits.device)
    scores = logits.to(torch.float64) / temperature
    scores = torch.where(is_greedy, scores, scores + gumbel([p.seed for p in params], positions, tokens))
    scores = scores.masked_fill(~(survivors(logits, params) | is_greedy), -torch.inf)
    # torch.argmax may return any of several maxima; the lowest id must win.
    is_best = scores == scores.amax(1, keepdim=True)
    picks = is_best.to(torch.uint8).argmax(1).tolist()
    return [token if finite else None for token, finite in zip(picks, is_finite, strict=True)]
