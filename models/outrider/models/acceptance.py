"""Rules by which a target accepts drafted tokens. Here the two exact ones, which need nothing but ids.

| rule    | what is accepted                              | output            |
|---------|-----------------------------------------------|-------------------|
| coupled | a drafted token that equals the target's pick | the target's, exactly |
| greedy  | the same, with temperature 0                  | the target's, exactly |

Never mix shared noise with p/q rejection: the draft's token is then no independent sample, and the result is biased.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from outrider.models.sampling import SamplingParams, pick


class Rule(StrEnum):
    """How drafted tokens are judged; see the table above."""

    COUPLED = "coupled"
    GREEDY = "greedy"

    def apply(self, params: SamplingParams) -> SamplingParams:
        """The sampling parameters under this rule."""
        return dataclasses.replace(params, temperature=0.0) if self is Rule.GREEDY else params


def accept(
    logits: NDArray[np.float32],
    drafted: Sequence[int],
    params: SamplingParams,
    position: int,
    *,
    stop_ids: Collection[int] = (),
    max_tokens: int | None = None,
) -> list[int]:
    """The target's tokens from `position` on: the drafted ones that equal its picks, and the one that follows them.

    logits: [len(drafted) + 1, vocab_size] float32, row i computed after the i-th drafted token. Ends early with a token
    in stop_ids or after max_tokens. One token at least; all but the last were drafted. Raises ModelFault on logits that
    are not finite.
    """
    tokens: list[int] = []
    for row, guess in zip(logits, [*drafted, None], strict=True):
        token = pick(row, params, position + len(tokens))
        tokens.append(token)
        if token != guess or token in stop_ids or len(tokens) == max_tokens:
            break
    return tokens
