"""Gives each choice of a request a seed of its own, and finds the best of several texts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from outrider.models.picks.sampling import SamplingParams

_SEED_BITS: Final = 53
"""Survives clients whose numbers are floats."""


def choice_seed(seed: int, index: int) -> int:
    """Choice 0 has the request's seed; choice i the first 53 bits of SHA-256 of "SEED/i" in ASCII."""
    if index == 0:
        return seed
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - _SEED_BITS)


def choice_params(params: SamplingParams, index: int) -> SamplingParams:
    """The sampling parameters of choice `index` of a prompt."""
    return replace(params, seed=choice_seed(params.seed, index))


def best_choices(means: Sequence[float], num_each: int, num_kept: int) -> list[int]:
    """Of every `num_each` texts of a prompt the `num_kept` with the highest mean logprob per token, best first."""
    kept: list[int] = []
    for begin in range(0, len(means), num_each):
        ranked = sorted(range(begin, begin + num_each), key=lambda index: (-means[index], index))
        kept += ranked[:num_kept]
    return kept
