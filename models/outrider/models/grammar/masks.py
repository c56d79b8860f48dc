"""Applies a mask of allowed tokens to a row of logits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_FEW = 512  # allowed tokens up to which they are listed


def unpack(bits: bytes, size: int) -> NDArray[np.bool_]:
    """Which of the first `size` tokens a bit mask allows, lowest bit first; tokens beyond its end are forbidden."""
    packed = np.frombuffer(bits, np.uint8)
    found = np.unpackbits(packed, count=min(size, packed.size * 8), bitorder="little").view(np.bool_)
    if found.size == size:
        return found
    padded = np.zeros(size, np.bool_)
    padded[: found.size] = found
    return padded


def apply(bits: bytes, row: NDArray[np.float32]) -> int:
    """Sets logits of forbidden tokens to -inf, in place; returns how many tokens stay allowed."""
    packed = np.frombuffer(bits, np.uint8)
    filled = np.flatnonzero(packed)
    if filled.size <= _FEW:  # most places of JSON: listing the allowed tokens costs less than a pass over the row
        inside = np.unpackbits(packed[filled], bitorder="little").view(np.bool_)
        allowed = (filled[:, None] * 8 + np.arange(8)).ravel()[inside]
        allowed = allowed[allowed < row.size]
        kept = row[allowed]
        row.fill(-np.inf)
        row[allowed] = kept
        return int(allowed.size)
    is_allowed = unpack(bits, row.size)
    np.copyto(row, -np.inf, where=~is_allowed)
    return int(np.count_nonzero(is_allowed))
