"""What the agent measures while it runs: times, rates and how often the draft is right.

Every rate is a ratio of sums with exponential forgetting, never a mean of ratios: a mean of per-commit acceptance rates
weighs a commit that judged one token as much as one that judged ten. Kept across generations by the agent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from outrider.edge.drafting.belief import CommitOutcome

_NUM_BUCKETS = 8
_ANSWER_TOKENS = 4  # drafted before the answer to a commit leaves, give or take


class ForgettingRatio:
    """sum(numerators) / sum(denominators), old ones fading by `keep` with every update; starts at `prior`.

    prior_weight: how much of a denominator the prior is worth at the start.
    """

    def __init__(self, prior: float, prior_weight: float, keep: float) -> None:
        self._top = prior * prior_weight
        self._bottom = prior_weight
        self._keep = keep

    def add(self, numerator: float, denominator: float) -> None:
        """Takes one observation."""
        self._top = self._top * self._keep + numerator
        self._bottom = self._bottom * self._keep + denominator

    @property
    def value(self) -> float:
        """The ratio."""
        return self._top / self._bottom

    @property
    def weight(self) -> float:
        """The faded sum of denominators: how much stands behind the value."""
        return self._bottom


class Estimates:
    """Everything a depth controller may know. All times in ms.

    The acceptance starts at an optimistic 0.6 worth two tokens, so that an always-wrong draft is found out within ten.
    """

    def __init__(self) -> None:
        self.accepted = ForgettingRatio(0.6, 2.0, keep=0.98)
        self._buckets = [ForgettingRatio(0.0, 0.0, keep=0.98) for _ in range(_NUM_BUCKETS)]
        self._draft = ForgettingRatio(1.0, 0.01, keep=0.98)
        self._interval = ForgettingRatio(40.0, 0.01, keep=0.9)
        self._tokens_per_commit = ForgettingRatio(1.0, 0.01, keep=0.9)
        self._round_trips: deque[float] = deque(maxlen=24)
        self._opened_in_ms = 0.0
        self._step_ms: float | None = None
        self._extra_ms: float | None = None

    def on_open(self, took_ms: float, step_ms: float | None, draft_token_ms: float | None) -> None:
        """A session was opened; the server told what it measured, or None."""
        self._opened_in_ms = took_ms
        self._step_ms = step_ms
        self._extra_ms = draft_token_ms

    def on_commit(self, outcome: CommitOutcome, confidences: Sequence[float], interval_ms: float | None) -> None:
        """A commit judged `outcome.num_tested` drafted tokens whose confidences come first in `confidences`."""
        if outcome.num_tested:
            self.accepted.add(outcome.num_right, outcome.num_tested)
        for i in range(outcome.num_tested):
            self._buckets[_bucket(confidences[i])].add(float(i < outcome.num_right), 1.0)
        if interval_ms is not None and outcome.tokens:
            self._interval.add(interval_ms, 1.0)
            self._tokens_per_commit.add(len(outcome.tokens), 1.0)

    def on_drafted(self, took_ms: float, num_tokens: int) -> None:
        """The drafter spent `took_ms` on `num_tokens` tokens."""
        self._draft.add(took_ms, num_tokens)

    def on_posted(self, took_ms: float) -> None:
        """A draft message was answered after `took_ms`."""
        self._round_trips.append(took_ms)

    @property
    def acceptance(self) -> float:
        """Chance that a drafted token is right, given those before it."""
        return self.accepted.value

    @property
    def draft_ms(self) -> float:
        """Time to draft a token."""
        return self._draft.value

    @property
    def round_trip_ms(self) -> float:
        """Round trip of a message: the least of the recent ones, since what is above it is queueing, not distance."""
        return min(self._round_trips) if self._round_trips else self._opened_in_ms

    @property
    def lag_ms(self) -> float | None:
        """Time from a commit on the server until drafts that know of it are back there; None before the first post."""
        if not self._round_trips:
            return None
        return round(self.round_trip_ms + _ANSWER_TOKENS * self.draft_ms, 1)

    @property
    def step_ms(self) -> float:
        """The target's step with nothing drafted: as the server measured it, or else the mean time between commits."""
        return self._step_ms if self._step_ms is not None else self._interval.value

    @property
    def extra_ms(self) -> float:
        """Extra time that a drafted token costs in a step; 3 % of a step until the server tells."""
        return self._extra_ms if self._extra_ms is not None else 0.03 * self.step_ms

    @property
    def interval_ms(self) -> float:
        """Mean time between commits."""
        return self._interval.value

    @property
    def tokens_per_commit(self) -> float:
        """Mean tokens of a commit."""
        return self._tokens_per_commit.value

    def survival(self, confidences: Sequence[float]) -> float:
        """Chance that all of these drafted tokens are right: the product of their calibrated confidences.

        A bucket that has seen little leans on the overall acceptance with the weight of four tokens.
        """
        product = 1.0
        for confidence in confidences:
            bucket = self._buckets[_bucket(confidence)]
            right = bucket.value * bucket.weight if bucket.weight else 0.0
            product *= (right + 4.0 * self.acceptance) / (bucket.weight + 4.0)
        return product


def _bucket(confidence: float) -> int:
    return min(_NUM_BUCKETS - 1, int(confidence * _NUM_BUCKETS))
