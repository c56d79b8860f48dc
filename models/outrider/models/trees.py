"""Computes what the model needs of a drafted tree: the depth of each token, and which new tokens each one attends.

A tree is a list of parents: for each token the index of its parent, always a lower one; -1: it follows the last
committed token. A line is -1, 0, 1, ...
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def depths(parents: Sequence[int]) -> list[int]:
    """How many drafted tokens each token's path has, itself included: 1 for those after the last committed token."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


def tree_mask(parents: Sequence[int], num_before: int) -> NDArray[np.uint8]:
    """Which new tokens each new token attends: [n, n] uint8 with n = num_before + len(parents).

    The first `num_before` tokens are a line that every drafted token follows; a drafted token attends these, its
    ancestors and itself.
    """
    mask = np.tri(num_before + len(parents), dtype=np.uint8)
    mask[num_before:, num_before:] = 0
    for index, parent in enumerate(parents):
        row = mask[num_before + index]
        if parent >= 0:
            row |= mask[num_before + parent]
        row[num_before + index] = 1
    return mask
