"""Computes the noise of `sampling` on tensors: its 32-bit hash bit for bit, and the hash's inverse.

torch has almost no unsigned arithmetic, so the hash's words are int32: addition and multiplication wrap to the same
bits, and right shifts are masked, because they repeat the sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from outrider.models.picks.sampling import noise_key

_U32: Final = 0xFFFFFFFF
_TOKEN_FACTOR: Final = 0x9E3779B1
_FACTORS: Final = (0x85EBCA6B, 0xC2B2AE35)


def signed(word: int) -> int:
    """The int32 with the bits of an unsigned 32-bit word."""
    return (word & _U32 ^ 0x80000000) - 0x80000000


def _fold(h: torch.Tensor, shift: int, scratch: torch.Tensor) -> None:
    """h ^= h >> shift, unsigned, in place."""
    torch.bitwise_right_shift(h, shift, out=scratch)
    h ^= scratch.bitwise_and_((1 << (32 - shift)) - 1)


def _fmix32(h: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """In place on int32 words; returns `h`. scratch: of the same shape, overwritten."""
    for shift, factor in zip((16, 13), _FACTORS, strict=True):
        _fold(h, shift, scratch)
        h *= signed(factor)
    _fold(h, 16, scratch)
    return h


def _unmix32(h: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """The inverse of `_fmix32`, in place. A fold by 16 undoes itself; one by 13 is undone by those by 26 and 13."""
    _fold(h, 16, scratch)
    for shifts, factor in zip(((26, 13), (16,)), reversed(_FACTORS), strict=True):
        h *= signed(pow(factor, -1, 1 << 32))
        for shift in shifts:
            _fold(h, shift, scratch)
    return h


def noise_words(low: torch.Tensor, high: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """h(token), 32 bits in an int32, of the shape that the arguments broadcast to.

    low, high: int32, the halves of each row's key; tokens: ids, integers.
    """
    h = tokens.to(torch.int32) * signed(_TOKEN_FACTOR) + low
    scratch = torch.empty_like(h)
    _fmix32(h, scratch)
    h ^= high
    return _fmix32(h, scratch)


def tokens_of_highest(low: torch.Tensor, high: torch.Tensor, count: int) -> torch.Tensor:
    """The tokens that have the `count` highest words: int32 [rows, count], unsigned; low, high: as above, [rows, 1].

    For a fixed key the hash is a bijection of all 2^32 ids, so few of these are ids of a vocabulary.
    """
    h = torch.arange(-count, 0, dtype=torch.int32, device=low.device).repeat(len(low), 1)
    scratch = torch.empty_like(h)
    _unmix32(h, scratch)
    h ^= high
    _unmix32(h, scratch)
    h -= low
    h *= signed(pow(_TOKEN_FACTOR, -1, 1 << 32))
    return h


def noise_bits(seeds: Sequence[int], positions: Sequence[int], tokens: torch.Tensor) -> torch.Tensor:
    """h(token) for each row and token id: int64 [rows, tokens], 0 to 2^32 - 1; tokens: int64 [tokens]."""
    keys = [noise_key(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    halves = [[signed(key), signed(key >> 32)] for key in keys]
    low, high = torch.tensor(halves, dtype=torch.int32, device=tokens.device).unsqueeze(2).unbind(1)
    return noise_words(low, high, tokens).to(torch.int64) & _U32


def gumbel_of(words: torch.Tensor) -> torch.Tensor:
    """g of the hash's words: float64, of the same shape."""
    u = words.to(torch.float64)
    u += (words < 0).to(torch.float64).mul_(2.0**32)  # the words are unsigned
    return u.add_(0.5).mul_(2.0**-32).log_().neg_().log_().neg_()
