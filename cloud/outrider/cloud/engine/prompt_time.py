"""Measures what prompt tokens cost the sequences that decode in the same step, by the step-time curve."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.cloud.pending.estimators import StepSize, StepTimeCurve

PLAIN_STEPS: Final = 64
"""One step of so many has no prompts that delay others: what they add is measured by it."""


def steps_added(curve: StepTimeCurve, most: int, fixed: StepSize, context: float) -> NDArray[np.float64]:
    """What 1, 2, ... tokens add to a step of `fixed`, in times of that step: [at most `most`], not decreasing.

    context: positions that each of them attends to. It ends at sizes that nothing is known of, so a caller that takes
    more and more tokens learns what they cost.
    """
    if not curve.is_known or fixed.tokens == 0 or most <= 0:
        return np.zeros(max(0, most))
    most = min(most, max(1, 2 * max(fixed.tokens, curve.largest) - fixed.tokens))
    times = curve.seconds(fixed.tokens + most, fixed, context)
    step_s = times[fixed.tokens - 1]
    added: NDArray[np.float64] = np.maximum(0.0, times[fixed.tokens :] / step_s - 1.0)
    return added


def tokens_within_a_step(added: NDArray[np.float64]) -> int:
    """As many tokens as at most double the step's time; one at least, so that a prompt ends."""
    return min(len(added), max(1, int(np.searchsorted(added, 1.0, side="right"))))
