"""Truncates the distribution that top-k, top-p and min-p leave: typical-p, then XTC.

Both see the distribution after temperature, over the tokens that are left, and change nothing at temperature 0.
Typical-p follows the others as in transformers. XTC ("exclude top choices") is llama.cpp's, and comes last there too;
llama.cpp applies temperature after it, so the two agree at temperature 1.

* typical-p (Meister et al. 2022, arXiv 2202.00666) keeps the tokens whose surprise, -log p, is nearest to the entropy,
  until their mass reaches typical_p; ties with the last one are kept.
* XTC, by a coin of probability xtc_probability: of the tokens with p >= xtc_threshold only the least likely is kept,
  with all below the threshold. Of equally likely ones the highest id counts as the least likely.

The coin is a second stream of the position-keyed noise, so the output stays a pure function of the seed:

    coin(seed, position) = (mix64(key + 0xA0761D6478BD642F) >> 11) / 2^53        float64, in [0, 1)

with `key` and mix64 of `outrider.models.picks.sampling`. XTC acts where coin < xtc_probability. Golden vectors in
tests/test_row_rules.py pin it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.models.picks.sampling import SamplingParams, mix64, noise_key
from outrider.models.processors.options import ProcessorOptions

_U64: Final = (1 << 64) - 1
_COIN: Final = 0xA0761D6478BD642F
_FEW: Final = 256
_MANY: Final = 16_384
_NUM_BINS: Final = 1024
_MOST: Final = np.float32(200.0)
"""Surprise, as in torch's twin: what is less likely weighs 0 in float32, and where it is infinite 0 times it is NaN."""
_Ids = NDArray[np.int64]


def coin(seed: int, position: int) -> float:
    """The position's second variate, in [0, 1)."""
    return float((mix64((noise_key(seed, position) + _COIN) & _U64) >> 11) * 2.0**-53)


@dataclass(frozen=True, slots=True)
class Narrowing:
    """Which of the surviving tokens may be picked, by the options' last three fields. A pure function."""

    options: ProcessorOptions

    def narrow(self, logits: NDArray[np.float32], ids: _Ids, params: SamplingParams, position: int) -> _Ids:
        """A part of `ids`, ascending and not empty. logits: the row, [V]; ids: ascending, one at least is finite."""
        ids = ids[logits[ids] > -np.inf]
        surprise = logits[ids]  # copied
        with np.errstate(over="ignore"):
            surprise -= surprise.max()
            surprise /= np.float32(params.temperature)
        np.negative(surprise, out=surprise)
        np.minimum(surprise, _MOST, out=surprise)
        weights = np.exp(-surprise)  # the most likely token weighs 1, and has surprise 0
        if self.options.typical_p < 1.0:
            kept = self._typical(surprise, weights)
            ids, weights = ids[kept], weights[kept]
        if self.options.xtc_probability > 0.0 and coin(params.seed, position) < self.options.xtc_probability:
            ids = ids[self._not_top(weights)]
        return ids

    def _typical(self, surprise: NDArray[np.float32], weights: NDArray[np.float32]) -> NDArray[np.intp]:
        total = float(weights.sum(dtype=np.float64))
        # |-log p - entropy|: log(total) is in both, so it cancels.
        mean = float((weights * surprise).sum(dtype=np.float64)) / total
        distance = np.abs(surprise - np.float32(mean))
        return np.flatnonzero(distance <= _reach(distance, weights, self.options.typical_p * total))

    def _not_top(self, weights: NDArray[np.float32]) -> NDArray[np.intp]:
        least = self.options.xtc_threshold * float(weights.sum(dtype=np.float64))
        is_top = weights >= least
        top = np.flatnonzero(is_top)
        if top.size > 1:
            is_top[top[weights[top] == weights[top].min()][-1]] = False
            return np.flatnonzero(~is_top)
        return np.arange(weights.size)


def _reach(distance: NDArray[np.float32], weights: NDArray[np.float32], wanted: float) -> np.float32:
    """The least distance within which the weights sum up to `wanted`. By histograms: no row is sorted as a whole."""
    for most in (0.5, 1.0, 2.0, 4.0, 8.0) if distance.size > _MANY else ():
        near = np.flatnonzero(distance <= most)
        if float(weights[near].sum(dtype=np.float64)) >= wanted:
            distance, weights = distance[near], weights[near]
            break
    while distance.size > _FEW:
        low, high = float(distance.min()), float(distance.max())
        if not high > low:
            break
        places = ((distance - np.float32(low)) * np.float32((_NUM_BINS - 1) / (high - low))).astype(np.intp)
        mass_to = np.cumsum(np.bincount(places, weights))
        place = min(int(np.searchsorted(mass_to, wanted)), mass_to.size - 1)
        wanted -= float(mass_to[place - 1]) if place else 0.0
        is_there = places == place
        if is_there.all() or not is_there.any():
            break
        distance, weights = distance[is_there], weights[is_there]
    order = np.argsort(distance, kind="stable")
    mass_to = np.cumsum(weights[order], dtype=np.float64)
    found: np.float32 = distance[order[min(int(np.searchsorted(mass_to, wanted)), order.size - 1)]]
    return found
