"""The error bounds of docs/numerics.md as functions of the weights, and weights that quantizers have trouble with."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.stored_weights import Wide

from outrider.export.convert.onnx_quantize import BLOCK_SIZE
from outrider.export.source.weight_files import FP16_MAX

Matrix = NDArray[np.float32]
FP16, BF16 = 2.0**-11, 2.0**-8
"""Unit roundoffs: half the distance of two neighbours, over the smaller one."""
SMALLEST_FP16, SMALLEST_BF16 = 2.0**-24, 2.0**-133
EPSILON = 2.0**-23
"""The smallest scale that nncf takes."""


def rounding_bound(weights: Wide, unit: float, smallest: float) -> Wide:
    """Of a cast, rounded to nearest: relative, and half the smallest number where that is more."""
    bound: Wide = np.maximum(np.abs(weights) * unit, smallest / 2)
    return bound


def asymmetric_bound(weights: Wide, group: int, levels: int) -> Wide:
    """Of nncf's asymmetric integers: half a step, and the FP16 scale's own rounding times the steps from zero.

    The step reaches over the group's weights and zero. 2**-12 of a step is what FP32 arithmetic loses on the way.
    """
    grouped = weights.reshape(len(weights), -1, group)
    reach = np.maximum(grouped.max(-1, keepdims=True), 0) - np.minimum(grouped.min(-1, keepdims=True), 0)
    step = np.maximum(reach / levels, EPSILON)
    of_scale = np.maximum(FP16 * step, SMALLEST_FP16 / 2)
    bound = (0.5 + 2.0**-12) * step + (np.abs(grouped) / step + 0.5) * of_scale
    of_each: Wide = bound.reshape(weights.shape)
    return of_each


def symmetric_bound(weights: Wide) -> Wide:
    """Of our symmetric integers: half of absmax / 127, whose FP32 rounding is 2**-24 of it; rows of nothing are 0."""
    largest = np.abs(weights).max(axis=1, keepdims=True)
    bound = (0.5 + 2.0**-23) * largest / 127
    return np.broadcast_to(np.where(largest < 127 * np.finfo(np.float32).tiny, largest, bound), weights.shape)


def block_bound(weights: Wide, integers: Wide, bits: int) -> Wide:
    """Of ONNX Runtime's blocks of 32: half a step, a whole one where the top integer is too small by one.

    The step is the block's largest magnitude over 2**(bits - 1), and its sign makes that weight the lowest integer. Of
    steps below the normal numbers the reciprocal is not finite: then all of a weight may be lost, and its double.
    """
    rows, columns = weights.shape
    grouped = np.pad(weights, ((0, 0), (0, -columns % BLOCK_SIZE))).reshape(rows, -1, BLOCK_SIZE)
    largest = np.abs(grouped).max(-1, keepdims=True)
    step = np.broadcast_to(largest / 2 ** (bits - 1), grouped.shape).reshape(rows, -1)[:, :columns]
    is_top = integers == 2**bits - 1
    bound = np.where(is_top, 1.0, 0.5 + 2.0 ** (bits - 23)) * step
    lost: Wide = np.where(step < 2.0**-126, 2.0 * step * 2 ** (bits - 1), bound)
    return lost


@st.composite
def drawn(draw: st.DrawFn, rows: int, columns: int) -> Matrix:
    """A matrix whose rows are of kinds that quantizers have trouble with; every magnitude that FP16 can hold."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    matrix = rng.standard_normal((rows, columns)) * 10.0 ** draw(st.integers(-7, 3))
    kinds = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=8, max_size=8))
    for row in range(rows):
        matrix[row] = KINDS[kinds[row % len(kinds)]](matrix[row], rng)
    place = st.tuples(st.integers(0, rows - 1), st.integers(0, columns - 1))
    for at, value in draw(st.dictionaries(place, st.floats(-FP16_MAX, FP16_MAX, width=32), max_size=8)).items():
        matrix[at] = value
    return np.clip(matrix, -FP16_MAX, FP16_MAX).astype(np.float32)


def one_huge(row: Wide, rng: np.random.Generator) -> Wide:
    """An outlier: the others share what is left of the steps."""
    row[rng.integers(len(row))] = rng.choice([-1, 1]) * FP16_MAX * 0.99
    return row


KINDS: dict[str, Callable[[Wide, np.random.Generator], Wide]] = {
    "as drawn": lambda row, rng: row,
    "zeros": lambda row, rng: row * 0,
    "negative only": lambda row, rng: -np.abs(row),
    "positive only": lambda row, rng: np.abs(row),
    "constant": lambda row, rng: np.full_like(row, row[0]),
    "one huge": one_huge,
    "one weight": lambda row, rng: np.where(np.arange(len(row)) == rng.integers(len(row)), row, 0),
    "denormal": lambda row, rng: row / np.abs(row).max() * 1e-40,
    "far from zero": lambda row, rng: row * 1e-3 + 1,
    "scale below FP16": lambda row, rng: row / np.abs(row).max() * 1e-3,
    "two values": lambda row, rng: np.where(row > 0, 1.0, -1.0) * np.abs(row).max(),
}


# Vocabulary, width, inner width. nncf computes matrices of more than 10,000 weights another way; a width of 96 has
# groups of 32, not 64; one of 48 has none, so that INT4 becomes INT8 there.
SHAPES = {"large": (96, 192, 128), "groups of 32": (16, 96, 32), "no groups": (16, 48, 32)}


@st.composite
def small_models(draw: st.DrawFn) -> dict[str, Matrix]:
    """The three matrices of `write_ir`."""
    vocab, width, inner = SHAPES[draw(st.sampled_from(sorted(SHAPES)))]
    return {
        "embedding": draw(drawn(vocab, width)),
        "middle": draw(drawn(inner, width)),
        "head": draw(drawn(vocab, inner)),
    }
