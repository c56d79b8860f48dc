"""Measures acceptance by position, the step-time curve, and how long a device takes to answer a commit.

All are ratios of sums, or medians where a shared machine causes outliers; never means of ratios.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from statistics import median

import numpy as np

from outrider.cloud.pending.policy import ENOUGH_ANSWERS, longest_wait

# Weight of the earlier sessions' average in a new session, in tokens tested.
_PRIOR_WEIGHT = 3.0
_FIRST_GUESS = 0.6
_SHORTEST_S = 1e-6  # a clock may show no time for a very fast step
_EXPECTED_TOKENS = 4  # of a device's first answer, until one has arrived
_UNSEEN_DISCOUNT = 0.01
_MEMORY = 0.97  # weight of an observation after a newer one at its position


class AcceptanceEstimator:
    """Estimates the chance that a pending token is accepted, given that those before it are.

    It learns from every commit, also from one that verified nothing: it compares the pending path with the commit.
    """

    def __init__(self, max_draft: int, parent: AcceptanceEstimator | None = None) -> None:
        self._accepted = [0.0] * max_draft
        self._tested = [0.0] * max_draft
        self._parent = parent

    def observe(self, pending: Sequence[int], committed: Sequence[int]) -> None:
        """Compares the likeliest pending path, as it was before the step, with the tokens committed."""
        for i, (guess, truth) in enumerate(zip(pending, committed, strict=False)):
            if i >= len(self._accepted):
                return
            self._accepted[i] = _MEMORY * self._accepted[i] + (guess == truth)
            self._tested[i] = _MEMORY * self._tested[i] + 1.0
            if guess != truth:
                break
        if self._parent is not None:
            self._parent.observe(pending, committed)

    @property
    def rate(self) -> float:
        """Acceptance over all positions: tokens accepted per token tested."""
        prior = _FIRST_GUESS if self._parent is None else self._parent.rate
        return (sum(self._accepted) + _PRIOR_WEIGHT * prior) / (sum(self._tested) + _PRIOR_WEIGHT)

    def survival(self, count: int) -> list[float]:
        """P(the first i + 1 pending tokens are all accepted), i < count; the overall rate is each position's prior."""
        overall, alive, out = self.rate, 1.0, []
        for i in range(min(count, len(self._accepted))):
            alive *= (self._accepted[i] + _PRIOR_WEIGHT * overall) / (self._tested[i] + _PRIOR_WEIGHT)
            out.append(alive)
        return out


class StepTimeCurve:
    """Seconds of a step by its number of tokens: the median of recent steps at each size, made monotone."""

    _SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512, 1024)
    _RECENT = 25

    def __init__(self) -> None:
        self._seen: dict[int, deque[float]] = {}
        self._knots: tuple[list[int], list[float]] | None = None

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Records one step: the model's time, without the engine around it."""
        size = min(self._SIZES, key=lambda s: abs(s - num_tokens))
        self._seen.setdefault(size, deque(maxlen=self._RECENT)).append(max(seconds, _SHORTEST_S))
        self._knots = None

    @property
    def is_known(self) -> bool:
        """Whether any step was recorded."""
        return bool(self._seen)

    def seconds(self, max_tokens: int) -> np.ndarray:
        """Predicted seconds of a step of 1 .. max_tokens tokens: float64 [max_tokens], not decreasing.

        Before the first step, every size costs 1: only ratios are used then.
        """
        if not self._seen:
            return np.ones(max_tokens)
        if self._knots is None:
            sizes = sorted(self._seen)
            medians = [median(self._seen[s]) for s in sizes]
            self._knots = sizes, list(accumulate(medians, max))
        sizes, times = self._knots
        wanted = np.arange(1, max_tokens + 1)
        out = np.interp(wanted, sizes, times)
        # Below the smallest size seen: a little cheaper, so that no hopeless draft seems free.
        below = slice(0, sizes[0] - 1)
        out[below] *= 1.0 - np.minimum(0.5, _UNSEEN_DISCOUNT * (sizes[0] - wanted[below]))
        if max_tokens > sizes[-1]:
            # Beyond the largest: along the chord from the first knot.
            slope = (times[-1] - times[0]) / (sizes[-1] - sizes[0]) if len(sizes) > 1 else 0.02 * times[0]
            beyond = wanted > sizes[-1]
            out[beyond] = times[-1] + slope * (wanted[beyond] - sizes[-1])
        return out

    def step_and_extra(self) -> tuple[float, float]:
        """Seconds of a one-token step, and of each further token (mean over the next four)."""
        times = self.seconds(5)
        return float(times[0]), float(times[4] - times[0]) / 4


class DraftLag:
    """How a device answers commits: seconds to the first draft that knows of one, its size, then seconds per token."""

    _RECENT = 9

    def __init__(self, expected_ms: float | None = None) -> None:
        """expected_ms: the device's own hint; the first measured answers outweigh it."""
        self._first: deque[float] = deque(maxlen=self._RECENT)
        self._size: deque[int] = deque(maxlen=self._RECENT)
        self._token_s: deque[float] = deque(maxlen=self._RECENT)
        self._longest: deque[int] = deque(maxlen=self._RECENT)  # of each answer, with later additions
        self._sent: dict[int, float] = {}  # commits not answered yet: base -> when it was sent
        self._answered: tuple[int, float, int] = (-1, 0.0, 0)  # base, when, longest path so far
        self._hits = 2.0
        self._waits = 2.0
        if expected_ms is not None:
            self._first.append(expected_ms / 1e3)
            self._size.append(_EXPECTED_TOKENS)

    def committed(self, base: int, now: float) -> None:
        """Records that a commit was sent which makes the total `base`."""
        self._sent[base] = now
        while len(self._sent) > 32:
            del self._sent[next(iter(self._sent))]

    def drafted(self, base: int, length: int, now: float) -> None:
        """Records a draft that knows of `base` committed tokens and guesses `length` more."""
        sent = self._sent.pop(base, None)
        if sent is not None:
            if self._first and self.answer_rate < ENOUGH_ANSWERS:
                # Waiting has stopped. Would this draft have been in time? Otherwise one hiccup would end all waiting.
                self.waited(now - sent <= longest_wait(median(self._first)))
            self._first.append(now - sent)
            self._size.append(length)
            self._longest.append(length)
            self._answered = (base, now, length)
            for older in [b for b in self._sent if b < base]:
                del self._sent[older]
        elif base == self._answered[0] and length > self._answered[2]:
            self._token_s.append((now - self._answered[1]) / (length - self._answered[2]))
            self._longest[-1] = length
            self._answered = (base, now, length)

    def waited(self, was_answered: bool) -> None:
        """Records a wait that ended, or would have ended, with a draft or without."""
        self._hits = 0.9 * self._hits + was_answered
        self._waits = 0.9 * self._waits + 1.0

    @property
    def answer_rate(self) -> float:
        """Share of waits that a draft ended."""
        return self._hits / self._waits

    def seconds_until(self, count: int) -> float | None:
        """Seconds from a commit until `count` drafted tokens that know of it arrive.

        None while unknown, and for more tokens than the device has lately drafted at once.
        """
        if not self._first or (self._longest and count > max(self._longest)):
            return None
        more = count - median(self._size)
        if more <= 0:
            return median(self._first)
        if not self._token_s:
            return None
        return median(self._first) + more * median(self._token_s)
