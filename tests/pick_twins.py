"""Compares picks with numpy's, and tells near ties from errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.models.errors import ModelFault
from outrider.models.picks.sampling import MAX_SEED, SamplingParams, candidates, pick
from outrider.models.processors.narrowing import Narrowing
from outrider.models.processors.options import ProcessorOptions

Logits = NDArray[np.float32]

_SCORE = 1e-9
_SHARE = 1e-6
"""From the same logits only the last bits of exponentials, logarithms and their sums differ."""
_MOST_TRIED = 5_000


def twin_pick(row: Logits, params: SamplingParams, position: int, options: ProcessorOptions | None = None) -> int:
    """numpy's pick; -1 for a row that is not finite."""
    try:
        return pick(row, params, position, Narrowing(options) if options is not None and options.narrows else None)
    except ModelFault:
        return -1


def near_ties(
    logits: Logits,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    options: Sequence[ProcessorOptions | None],
    found: Sequence[int],
) -> int:
    """How many of the picks `found` are another near tie's than numpy's. Fails on any other difference.

    A near tie has the same score but for its last bits, or numpy picks it where a share of the mass is a millionth more
    or less.
    """
    count = 0
    for row, own, position, more, token in zip(logits, params, positions, options, found, strict=True):
        expected = twin_pick(row, own, position, more)
        if token != expected:
            assert token != -1 and expected != -1, (own, more, position, token, expected)
            assert _is_near(row, own, position, more, token), (own, more, position, token, expected)
            count += 1
    return count


def _is_near(row: Logits, params: SamplingParams, position: int, options: ProcessorOptions | None, token: int) -> bool:
    more = options or ProcessorOptions()
    # The temperature stands for the mean surprise, which decides what is typical.
    on = {
        "temperature": more.typical_p < 1.0,
        "top_p": params.top_p < 1.0,
        "min_p": params.min_p > 0.0,
        "typical_p": more.typical_p < 1.0,
        "xtc_threshold": more.xtc_probability > 0.0,
    }
    names = [name for name, is_on in on.items() if is_on]
    count = int(_MOST_TRIED ** (1 / max(1, len(names))))
    shifts = sorted([0.0, *np.linspace(-_SHARE, _SHARE, count | 1).tolist()], key=abs)
    for by in product(shifts, repeat=len(names)):
        moved = {name: 1.0 + each for name, each in zip(names, by, strict=True)}
        near, near_options = _moved(params, moved), _moved(more, moved)
        narrowing = Narrowing(near_options) if more.narrows else None
        best = candidates(row, near, position, 2, narrowing)
        if best.tokens[0] == token or (token in best.tokens and best.gaps[0] < _SCORE):
            return True
    return False


def _moved(of: Any, by: dict[str, float]) -> Any:
    """The same with some fields multiplied, those that are shares kept under 1."""
    found = {name: getattr(of, name) * factor for name, factor in by.items() if hasattr(of, name)}
    return dataclasses.replace(
        of, **{name: each if name == "temperature" else min(1.0 - 1e-12, each) for name, each in found.items()}
    )


def zipf(rng: np.random.Generator, num_rows: int, size: int, exponent: float) -> Logits:
    """Rows as of a language model: the log-probability falls with the rank's logarithm, and the ids are shuffled.

    exponent: 1.2 is a flat row, 2.5 a peaked one.
    """
    fall = -exponent * np.log(np.arange(1, size + 1))
    rows = [rng.permutation(fall) + rng.normal(size=size) * 0.3 for _ in range(num_rows)]
    return np.stack(rows).astype(np.float32)


def row_kinds(rng: np.random.Generator, num_rows: int, size: int) -> dict[str, Logits]:
    """Rows of every flatness; with equal logits, as in bf16; with few tokens left, as under a grammar; with faults."""
    normal = (rng.standard_normal((num_rows, size)) * 3.0).astype(np.float32)
    few = np.where(rng.random((num_rows, size)) < 20 / size, normal, -np.inf).astype(np.float32)
    few[:, -1] = 0.25  # one at least, in no whole group
    faulty = normal.copy()
    faulty[0::3, size // 2], faulty[1::3, -1], faulty[2::3] = np.nan, np.inf, -np.inf
    return {
        "peaked": zipf(rng, num_rows, size, 2.5),
        "ordinary": zipf(rng, num_rows, size, 1.6),
        "flat": zipf(rng, num_rows, size, 1.2),
        "normal": normal,
        "equal": (np.round(normal * 2) / 2).astype(np.float32),
        "level": (normal * 0.03).astype(np.float32),
        "few": few,
        "faulty": faulty,
    }


def every_way(seed: int) -> list[tuple[SamplingParams, ProcessorOptions | None]]:
    """Parameters of every kind of truncation, alone and together, and of none."""
    sampled = [
        SamplingParams(),
        SamplingParams(0.8),
        SamplingParams(0.0001),
        SamplingParams(100.0),
        SamplingParams(0.8, top_k=1),
        SamplingParams(0.8, top_k=50),
        SamplingParams(1.0, top_k=6_000),
        SamplingParams(1.0, top_k=10**9),
        SamplingParams(0.8, top_p=0.9),
        SamplingParams(0.8, top_p=0.001),
        SamplingParams(1.3, top_p=0.9999),
        SamplingParams(0.8, min_p=0.02),
        SamplingParams(0.8, min_p=1.0),
        SamplingParams(0.9, top_p=0.95, min_p=0.001),
        SamplingParams(0.7, top_k=40, top_p=0.95),
        SamplingParams(0.9, top_k=900, top_p=0.97, min_p=0.01),
    ]
    narrowed = [
        ProcessorOptions(typical_p=0.9),
        ProcessorOptions(typical_p=0.2),
        ProcessorOptions(xtc_probability=0.5, xtc_threshold=0.1),
        ProcessorOptions(xtc_probability=1.0, xtc_threshold=0.02),
        ProcessorOptions(xtc_probability=1.0, xtc_threshold=0.0),
        ProcessorOptions(typical_p=0.95, xtc_probability=1.0, xtc_threshold=0.05),
    ]
    pairs: list[tuple[SamplingParams, ProcessorOptions | None]] = [(own, None) for own in sampled]
    pairs += [(SamplingParams(0.8), more) for more in narrowed]
    pairs += [(own, more) for own, more in zip(sampled[4:], [*narrowed, *narrowed], strict=True)]
    return [
        (dataclasses.replace(own, seed=(seed + 977 * place) % MAX_SEED), more)
        for place, (own, more) in enumerate(pairs)
    ]
