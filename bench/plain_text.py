"""Generates target-only text by the plainest loop, and explains where another text differs from it.

One sequence, one token per step, no engine, no network: every mode's text is compared with this. Where one differs, the
scores at that place are computed again from a single pass over everything before it: a near-tie in float32 is a
consequence of batching (a batch of another shape adds in another order), anything else is a bug.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.edge.results import GenerationRequest
from outrider.models.picks.sampling import gumbel, pick, survivors
from outrider.models.processors.processor_plan import LogitProcessor, apply_all
from outrider.models.runtimes.base import SequenceSlice

SCORE_NOISE: Final = 1e-3
"""Scores (logit / temperature + noise) closer than this can change places by float32 rounding alone."""

MASS_NOISE: Final = 1e-4
"""So can a token at the edge of top-p whose mass above lies this close to it."""


class PlainModel(Protocol):
    """A `BatchRuntime`, or anything else that runs one sequence."""

    @property
    def num_blocks(self) -> int:
        """Blocks of its cache."""

    def forward(self, batch: Sequence[SequenceSlice]) -> NDArray[np.float32]:
        """As `BatchRuntime.forward`, for one slice."""

    def close(self) -> None:
        """Releases the model."""


def plain_texts(runtime: PlainModel, requests: Sequence[GenerationRequest]) -> list[tuple[int, ...]]:
    """The target's own text for each request, up to `stop_ids` and `max_tokens`."""
    texts: list[tuple[int, ...]] = []
    for request in requests:
        tokens, past = list(request.prompt), 0
        states: list[LogitProcessor] | None = None
        while len(tokens) < len(request.prompt) + request.max_tokens:
            row = runtime.forward([SequenceSlice(tokens[past:], past, range(runtime.num_blocks), 1)])[0]
            past = len(tokens)
            if states is None:
                states = request.plan.states(tokens, row.size)
            tokens.append(pick(apply_all(states, row), request.params, past, request.plan.narrowing))
            for state in states:
                state.advance(tokens[-1])
            if request.stop_ids and tokens[-1] in request.stop_ids:
                break
        texts.append(tuple(tokens[len(request.prompt) :]))
    return texts


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where a text differs from the plain one.

    index: of the token in the text. expected, found: token ids, -1 where a text ended. score_gap: between their scores
    under the noise at that position. mass_gap: distance, in probability, of the nearer of the two from the edge of
    top-p; 1 without top-p.
    """

    index: int
    expected: int
    found: int
    score_gap: float
    mass_gap: float

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.score_gap < SCORE_NOISE or self.mass_gap < MASS_NOISE


def first_difference(
    runtime: PlainModel, request: GenerationRequest, expected: Sequence[int], found: Sequence[int]
) -> Difference | None:
    """None when the two are equal."""
    if list(expected) == list(found):
        return None
    index = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), None)
    if index is None:  # one continues where the other ended: never caused by rounding
        index = min(len(expected), len(found))
        ids = [text[index] if index < len(text) else -1 for text in (expected, found)]
        return Difference(index, ids[0], ids[1], float("inf"), 1.0)
    a, b = expected[index], found[index]
    score_gap, mass_gap = _gaps(runtime, request, [*request.prompt, *expected[:index]], a, b)
    return Difference(index, a, b, score_gap, mass_gap)


def _gaps(runtime: PlainModel, request: GenerationRequest, tokens: list[int], a: int, b: int) -> tuple[float, float]:
    logits = runtime.forward([SequenceSlice(tokens, 0, range(runtime.num_blocks), 1)])[0].copy()
    made = len(tokens) - len(request.prompt)
    plan = replace(request.plan, num_generated=request.num_generated + made)
    logits = apply_all(plan.states(tokens, logits.size), logits)
    params = request.params
    if params.is_greedy:
        return abs(float(logits[a] - logits[b])), 1.0
    pair = np.array([a, b])
    scores = logits[pair].astype(np.float64) / params.temperature + gumbel(params.seed, len(tokens), pair)
    score_gap = abs(float(scores[0] - scores[1]))
    if params.top_p >= 1.0:
        return score_gap, 1.0
    kept = set(survivors(logits, params).tolist())
    if a in kept and b in kept:
        # Both may be picked whichever way the edge falls; but the pick may also have been a third token at the edge.
        return score_gap, _mass_gap(logits, params.temperature, params.top_p, [a, b])
    return float("inf"), _mass_gap(logits, params.temperature, params.top_p, [a, b])


def _mass_gap(logits: np.ndarray, temperature: float, top_p: float, ids: Sequence[int]) -> float:
    weights = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    weights /= weights.sum()
    return min(abs(float(weights[weights > weights[i]].sum()) - top_p) for i in ids)
