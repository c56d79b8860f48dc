"""Accepts drafted tokens by rejection sampling: the text is distributed exactly as the target's.

Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318). The draft draws x from its own
distribution q and sends both. The target has p, after temperature, truncation and logit processors. It accepts x with
probability min(1, p(x) / q(x)), else draws from norm(max(p - q, 0)); after all drafted tokens it draws one from p.

q is sparse and quantized: up to MAX_IDS ids whose integer weights sum to WHOLE. The draft draws from these very
weights in integer arithmetic, so the q that the target uses is the one that x was drawn from, without rounding.

Streams: the draft's draw, the accept coin and the residual draw are three hash streams of the seed, each keyed by
position, and none is the Gumbel noise of `sampling.pick`. So x does not depend on anything that the target uses at its
position. A position without a draft, and the token after the last drafted one, is `pick`'s.

Why the text is exact. Let F be everything up to a position: the text so far, and the noise of earlier positions. Given
F, x is drawn from q, and coin, residual and pick are fresh. If the choice whether to verify x is made from F and q
alone, the token is drawn from p either way: by rejection sampling where x is verified, by `pick` where not. If it
depends on x itself, it is biased: a policy that verifies only likely tokens commits those too often. So a block is
verified whole, as far as the server has room, and there are no alternatives: one path. A step that fails in the model
runs again without drafts; it is the one exception, and it is logged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.models.errors import ModelFault
from outrider.models.picks.sampling import MAX_SEED, SamplingParams, candidates, gumbel, noise_key, survivors

WHOLE: Final = 1 << 16
"""The sum of a distribution's weights: 1."""
MAX_IDS: Final = 16
NUM_IDS: Final = 8
"""Ids that a device sends by default."""

_DRAFT: Final = 0x243F6A8885A308D3  # digits of pi: the streams differ, and none is the plain one
_COIN: Final = 0x13198A2E03707344
_RESIDUAL: Final = 0x24093822299F31D0

Probabilities = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SparseDistribution:
    """A draft's distribution of one token. ids: distinct. weights: not negative, WHOLE in all."""

    ids: tuple[int, ...]
    weights: tuple[int, ...]

    def of(self, token: int) -> float:
        """The token's probability; exact."""
        return self.weights[self.ids.index(token)] / WHOLE if token in self.ids else 0.0

    def fault(self, token: int) -> str | None:
        """Why `token` cannot have been drawn from this; None where it can."""
        if not 0 < len(self.ids) == len(self.weights) <= MAX_IDS:
            return f"it has {len(self.ids)} ids and {len(self.weights)} weights; expected 1 to {MAX_IDS} of both"
        if len(set(self.ids)) != len(self.ids):
            return "it has an id twice; expected distinct ids"
        if min(self.ids) < 0:
            return f"it has the id {min(self.ids)}; expected ids from 0 on"
        if min(self.weights) < 0:
            return f"it has the weight {min(self.weights)}; expected weights from 0 on"
        if sum(self.weights) != WHOLE:
            return f"its weights sum to {sum(self.weights)}; expected {WHOLE}"
        if self.of(token) == 0.0:
            return f"the drafted token {token} has no weight in it; expected a token drawn from it"
        return None


Evidence = SparseDistribution | float
"""What comes with a drafted token: the distribution that it was drawn from (rejection), or its log q (tolerance)."""

# -- the draft's side --------------------------------------------------------------------------------------------------


def sparse(logits: NDArray[np.float32], params: SamplingParams, count: int = NUM_IDS) -> SparseDistribution:
    """The `count` likeliest tokens of one row, [V] float32, after temperature and truncation, heaviest first.

    The number of ids depends on `params` and V alone, so that a message's length does not show the distribution.
    Raises ModelFault on a row that is not finite.
    """
    count = min(1 if params.is_greedy else count, logits.size, params.top_k or count)
    p = probabilities(logits, params)
    # By logits, whose order temperature keeps. What is truncated comes last, also where its weight rounds to the same.
    able = np.where(p > 0.0, logits, np.float32(-np.inf))
    order = candidates(able, SamplingParams(), 0, count).tokens[:count]
    if len(order) < count:  # truncated, or masked by the model
        others = (token for token in range(logits.size) if token not in order)
        order += islice(others, count - len(order))
    exact = p[order] * (WHOLE / p[order].sum())
    weights = np.floor(exact).astype(np.int64)
    weights[0] += WHOLE - int(weights.sum())  # the heaviest stays the heaviest
    return SparseDistribution(tuple(map(int, order)), tuple(map(int, weights)))


def draw(q: SparseDistribution, seed: int, position: int) -> int:
    """The draft's token at absolute `position`, from q exactly."""
    left = noise_key(_stream(seed, _DRAFT), position) >> 48  # 16 bits: 0 to WHOLE - 1
    for token, weight in zip(q.ids, q.weights, strict=True):
        if left < weight:
            return token
        left -= weight
    raise AssertionError("the weights sum to less than WHOLE")


# -- the target's side -------------------------------------------------------------------------------------------------


def probabilities(row: NDArray[np.float32], params: SamplingParams) -> Probabilities:
    """p: the distribution that `pick` draws from, [V] float64. Raises ModelFault on a row that is not finite."""
    best = int(row.argmax())
    if not math.isfinite(row[best]):
        raise ModelFault("the model's logits are not finite; check the export with a parity run")
    if params.is_greedy:
        sure = np.zeros(row.size)
        sure[best] = 1.0
        return sure
    # float32, as top-p has it: four times as fast as float64 at 152k ids, and off by some 1e-6 of each probability.
    weights = row - row[best]
    weights /= np.float32(params.temperature)
    np.exp(weights, out=weights)
    if 0 < params.top_k < row.size or params.top_p < 1.0 or params.min_p > 0.0:
        ids = survivors(row, params)
        kept = np.zeros_like(weights)
        kept[ids] = weights[ids]
        weights = kept
    p: Probabilities = weights.astype(np.float64)
    p /= p.sum()
    return p


def judge(p: Probabilities, token: int, q: SparseDistribution, seed: int, position: int) -> tuple[int, bool]:
    """The token at `position`, and whether it is the drafted one."""
    if _coin(seed, position) * q.of(token) < p[token]:
        return token, True
    residual = p.copy()
    ids = np.array(q.ids)
    # q may name ids that the target does not have.
    known = ids < p.size
    residual[ids[known]] -= np.array(q.weights)[known] / WHOLE
    np.maximum(residual, 0.0, out=residual)
    return _draw_residual(residual, p, seed, position), False


def _draw_residual(residual: Probabilities, p: Probabilities, seed: int, position: int) -> int:
    ids = np.flatnonzero(residual)
    if not ids.size:  # p equals q up to rounding
        residual, ids = p, np.flatnonzero(p)
    scores = np.log(residual[ids])
    scores += gumbel(_stream(seed, _RESIDUAL), position, ids)
    return int(ids[scores.argmax()])


def _coin(seed: int, position: int) -> float:
    """Uniform in [0, 1), 53 bits."""
    return (noise_key(_stream(seed, _COIN), position) >> 11) * 2.0**-53


def _stream(seed: int, salt: int) -> int:
    """The seed of a stream."""
    return (seed ^ salt) & MAX_SEED
