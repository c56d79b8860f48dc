"""Computes endless shuffled orders as pure functions of a place in them, so that a resumed run continues exactly.

Knows nothing of models, prompts or files.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BATCHES_SORTED = 16


def shuffled(count: int, seed: int, first: int, size: int) -> NDArray[np.int64]:
    """Places `first` to `first + size` of an endless row of shuffles of `range(count)`: int64 `[size]`.

    Raises `ValueError` when there is nothing to shuffle.
    """
    if count < 1:
        raise ValueError(f"there are {count} things to shuffle; expected at least one")
    parts: list[NDArray[np.int64]] = []
    place = first
    while place < first + size:
        epoch, offset = divmod(place, count)
        order = np.random.default_rng([seed, epoch]).permutation(count)
        parts.append(order[offset : offset + first + size - place])
        place += len(parts[-1])
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def batch_by_length(
    lengths: Sequence[int], rows: int, seed: int, number: int, sort_over: int = BATCHES_SORTED
) -> NDArray[np.int64]:
    """Which prompts batch `number` holds, int64 `[rows]`: prompts of like length, each drawn as often as the others.

    `sort_over` batches are filled from the shuffled prompts, sorted by length, cut and shuffled again: there is
    little padding, and every prompt comes once before one comes twice.
    """
    block, place = divmod(number, sort_over)
    drawn = shuffled(len(lengths), seed, block * sort_over * rows, sort_over * rows)
    drawn = drawn[np.argsort(np.asarray(lengths)[drawn], kind="stable")]
    turn = np.random.default_rng([seed, 1, block]).permutation(sort_over)[place]
    batch = drawn.reshape(sort_over, rows)[turn]
    return np.random.default_rng([seed, 2, number]).permutation(batch)
