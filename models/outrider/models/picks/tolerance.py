"""Accepts drafted tokens by tolerance: if log p(x) >= log q(x) - delta. Lossy: the text is not the target's.

p and q are those of target and draft after temperature and truncation; at temperature 0, those of temperature 1. The
target's pick replaces a token that is not accepted. delta is fixed, or calibrated to an acceptance: after each tested
token it moves by step * (acceptance - accepted). So after n tokens the mean is within |delta_n - delta_0| / (step * n)
of the goal, whatever the text (adaptive conformal inference: Gibbs and Candes 2021, arXiv 2106.00170).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.models.picks.acceptance import MAX_DELTA
from outrider.models.picks.rejection import probabilities
from outrider.models.picks.sampling import SamplingParams

LEAST_LOG: Final = -32.0
"""Of a draft's log-probability: smaller ones are sent as this."""
WARM_UP: Final = 64
"""Tested tokens after which delta moves by the smallest step."""

_FIRST_STEP: Final = 0.5
_LEAST_STEP: Final = 0.1


def log_probability(row: NDArray[np.float32], params: SamplingParams, token: int) -> float:
    """Natural logarithm of the token's probability, -inf for one that truncation drops; one row, [V] float32."""
    if params.is_greedy:
        params = replace(params, temperature=1.0)
    chance = float(probabilities(row, params)[token])
    return math.log(chance) if chance > 0.0 else -math.inf


def is_tolerated(log_p: float, log_q: float, delta: float) -> bool:
    """The rule."""
    return log_p >= log_q - delta


@dataclass(slots=True)
class DeltaCalibrator:
    """Moves delta so that a share of tested tokens is accepted. goal: that share; None leaves delta as it is."""

    delta: float
    goal: float | None = None
    num_tested: int = 0

    def observe(self, is_accepted: bool) -> None:
        """Takes the outcome of one tested token."""
        if self.goal is None:
            return
        step = max(_LEAST_STEP, _FIRST_STEP * (1.0 - self.num_tested / WARM_UP))
        self.num_tested += 1
        self.delta = min(MAX_DELTA, max(-MAX_DELTA, self.delta + step * (self.goal - is_accepted)))
