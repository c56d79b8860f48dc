"""Measures acceptance by position, and the step-time curve.

All are ratios of sums, or medians where a shared machine causes outliers; never means of ratios.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median

import numpy as np
from numpy.typing import NDArray

# Weight of the earlier sessions' average in a new session, in tokens tested.
_PRIOR_WEIGHT = 3.0
_FIRST_GUESS = 0.6
_PRIOR_RANGE = 0.3, 0.9  # whatever earlier sessions did: no client spoils it for later ones
_SHORTEST_S = 1e-6  # a clock may show no time for a very fast step
_UNSEEN_DISCOUNT = 0.01
CHEAP = 0.02
"""Of a step: what a further token costs where it costs little, and where nothing is known of it."""
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512, 1024)
"""Step sizes that have a time of their own."""
_CONTEXT_SHARE = 0.05  # of a step in the usual context
_MEMORY = 0.97  # weight of an observation after a newer one at its position


class AcceptanceEstimator:
    """Estimates the chance that a pending token is accepted, given that those before it are.

    It learns from every commit, also from one that verified nothing: it compares the pending path with the commit.
    """

    def __init__(self, max_draft: int, parent: AcceptanceEstimator | None = None) -> None:
        self._accepted = [0.0] * max_draft
        self._tested = [0.0] * max_draft
        self._all_accepted = self._all_tested = 0.0
        self._parent = parent

    def observe(self, pending: Sequence[int], committed: Sequence[int]) -> None:
        """Compares the likeliest pending path, as it was before the step, with the tokens committed."""
        num_tested = min(len(pending), len(committed), len(self._accepted))
        num_right = 0
        while num_right < num_tested and pending[num_right] == committed[num_right]:
            num_right += 1
        self._count(num_right, min(num_right + 1, num_tested))

    def _count(self, num_right: int, num_tested: int) -> None:
        for i in range(num_tested):
            accepted, tested = self._accepted[i], self._tested[i]
            self._accepted[i] = _MEMORY * accepted + (i < num_right)
            self._tested[i] = _MEMORY * tested + 1.0
            self._all_accepted += self._accepted[i] - accepted
            self._all_tested += self._tested[i] - tested
        if self._parent is not None:
            self._parent._count(num_right, num_tested)

    @property
    def rate(self) -> float:
        """Acceptance over all positions: tokens accepted per token tested."""
        low, high = _PRIOR_RANGE
        prior = _FIRST_GUESS if self._parent is None else min(high, max(low, self._parent.rate))
        return (max(0.0, self._all_accepted) + _PRIOR_WEIGHT * prior) / (self._all_tested + _PRIOR_WEIGHT)

    def rates(self, count: int) -> list[float]:
        """P(pending token i is accepted if those before it are), i < count; the overall rate is each one's prior."""
        prior = _PRIOR_WEIGHT * self.rate
        return [
            (accepted + prior) / (tested + _PRIOR_WEIGHT)
            for accepted, tested in zip(self._accepted[:count], self._tested, strict=False)
        ]


@dataclass(frozen=True, slots=True)
class StepSize:
    """What a step's time depends on: its tokens, and the positions that they attend to, in all."""

    tokens: int = 0
    attended: int = 0

    @classmethod
    def of(cls, count: int, past: int) -> StepSize:
        """Of `count` tokens of one sequence behind `past` others."""
        return cls(count, count * past + count * (count + 1) // 2)

    def __add__(self, other: StepSize) -> StepSize:
        return StepSize(self.tokens + other.tokens, self.attended + other.attended)


class StepTimeCurve:
    """Seconds of a step: by its number of tokens, plus a time for each position attended.

    By tokens: the median of recent steps at each size, made monotone. A time counts for `_LONG` steps: what the machine
    was doing then says nothing about it now. A size that was not run since is predicted from those that were, so
    whoever chooses sizes tries it again (`untried`, `lacks`). By positions: the slope of a straight line
    (least squares on the steps of one size, with slow forgetting), which is 0 until contexts of different lengths were
    seen.

    captured: sizes that the runtime has graphs of. A step of up to the largest runs as the next of them, whose padding
    costs as much as tokens: further tokens up to it are free.
    """

    _RECENT = 25
    _LONG = 256  # steps
    _FEW = 3  # times of a size that are needed to know it; as many stay, however old, while the size is run at all
    _KEPT = 0.999  # of older steps' weight in the slope, per step
    _DOUBT = 1e6  # positions squared: the slope is drawn to 0 until steps differed by more than this
    _OUTLIER = 3.0  # a step this much longer than its median says nothing about positions

    def __init__(self, captured: Iterable[int] = ()) -> None:
        self._captured = sorted(set(captured))
        largest = self._captured[-1] if self._captured else 0
        self._sizes = [*self._captured, *([size for size in SIZES if size > largest] or [2 * largest])]
        self._bucket = cache(self._nearest)
        self._num_steps = 0
        # By size: the number of each step and its seconds at no position attended.
        self._seen: dict[int, deque[tuple[int, float]]] = {}
        self._medians: dict[int, float] = {}
        self._by_tokens: NDArray[np.float64] | None = None  # seconds of 1, 2, ... tokens; None: out of date
        self._longest = SIZES[-1]  # of the next one, at least: long enough that none is made between two steps
        self._means: dict[int, tuple[float, float, float]] = {}  # weight, mean positions, mean seconds, by size
        self._spread = self._slant = 0.0  # sums of squares and products around the means
        self._slope_s = 0.0
        self._context = 0.0  # positions that a token of late attended to
        self._step_and_extra: tuple[float, float] | None = None

    def _nearest(self, num_tokens: int) -> int:
        """The size whose time a step has: the next captured one; else the nearest, of two the smaller."""
        at = bisect_left(self._captured, num_tokens)
        if at < len(self._captured):
            return self._captured[at]
        return min(self._sizes[at:], key=lambda size: abs(size - num_tokens))

    def observe(self, size: StepSize, seconds: float) -> None:
        """Records one step: the model's time, without the engine around it."""
        seconds = max(seconds, _SHORTEST_S)
        bucket = self._bucket(size.tokens)
        self._learn_slope(bucket, size.attended, seconds)
        seen = self._seen.setdefault(bucket, deque(maxlen=self._RECENT))
        seen.append((self._num_steps + 1, max(seconds - self._slope_s * size.attended, _SHORTEST_S)))
        self._medians[bucket] = _median_s(seen)
        self._context += _CONTEXT_SHARE * (size.attended / max(1, size.tokens) - self._context)
        self.passed()

    def passed(self) -> None:
        """Counts a step, and forgets old times. `observe` calls it; call it for a step that teaches no times."""
        self._num_steps += 1
        oldest = self._num_steps - self._LONG
        newest = max((seen[-1][0] for seen in self._seen.values()), default=0)
        for bucket, seen in list(self._seen.items()):
            if seen[-1][0] <= oldest and seen[-1][0] < newest:
                del self._seen[bucket], self._medians[bucket], self._means[bucket]
            elif len(seen) > self._FEW and seen[0][0] <= oldest:
                seen.popleft()
                self._medians[bucket] = _median_s(seen)
        self._by_tokens = self._step_and_extra = None

    def _learn_slope(self, bucket: int, attended: int, seconds: float) -> None:
        weight, mean_attended, mean_s = self._means.get(bucket, (0.0, 0.0, 0.0))
        if (typical_s := self._medians.get(bucket)) is not None:
            # The median, not the mean: it follows a machine that has become slower for good.
            if seconds - self._slope_s * attended > self._OUTLIER * typical_s:
                return
            usual_s = mean_s - self._slope_s * mean_attended
            if not typical_s < self._OUTLIER * max(usual_s, _SHORTEST_S) < self._OUTLIER**2 * typical_s:
                weight = 0.0  # a mean of another time
        off, off_s = attended - mean_attended, seconds - mean_s
        share = 1.0 / (weight + 1.0)
        # Welford's update of sums around a moving mean.
        self._spread = self._KEPT * self._spread + (1.0 - share) * off * off
        self._slant = self._KEPT * self._slant + (1.0 - share) * off * off_s
        self._means[bucket] = (self._KEPT * (weight + 1.0), mean_attended + share * off, mean_s + share * off_s)
        self._slope_s = max(0.0, self._slant / (self._spread + self._DOUBT))

    @property
    def is_known(self) -> bool:
        """Whether any step was recorded. Any thread, as the times of a step: `stats` asks while the engine learns."""
        return bool(self._medians)

    @property
    def largest(self) -> int:
        """The largest size with a recent time; 0: none."""
        return max(self._seen, default=0)

    def lacks(self, num_tokens: int) -> bool:
        """Whether only larger steps than this were run of late. The times of these then seem to be a step's own."""
        return self._num_steps >= self._LONG and min(self._seen) > self._bucket(num_tokens)

    def untried(self, num_tokens: int, most: int) -> int | None:
        """The next larger size, where neither it nor any size up to twice as large has recent times enough; None where
        it is known, or larger than `most`.
        """
        above = bisect_right(self._sizes, self._bucket(num_tokens))
        if above == len(self._sizes) or (size := self._sizes[above]) > most:
            return None
        is_known = any(size <= each <= 2 * size and len(seen) >= self._FEW for each, seen in self._seen.items())
        return None if is_known else size

    def seconds(self, max_tokens: int, fixed: StepSize | None = None, context: float = 0.0) -> np.ndarray:
        """Predicted seconds of a step of 1 .. max_tokens tokens: float64 [max_tokens], not decreasing.

        fixed: the part of the step that is known; each token beyond it attends to `context` positions. Before the
        first step, every size costs 1: only ratios are used then.
        """
        if not self._medians:
            return np.ones(max_tokens)
        out = self._without_context(max_tokens)
        if self._slope_s:
            fixed = fixed or StepSize()
            further = np.maximum(0, np.arange(1 - fixed.tokens, max_tokens + 1 - fixed.tokens))
            return out + self._slope_s * (fixed.attended + context * further)
        return out

    def _without_context(self, max_tokens: int) -> NDArray[np.float64]:
        """Seconds of 1 .. max_tokens tokens that attend to nothing; not to be changed."""
        if (by_tokens := self._by_tokens) is None or len(by_tokens) < max_tokens:
            longest = self._longest = max(self._longest, max_tokens)
            by_tokens = self._by_tokens = self._predicted(longest)
        return by_tokens[:max_tokens]

    def expected_s(self, size: StepSize) -> float:
        """Seconds that a step of this size likely takes; 0 where nothing is known."""
        return float(self.seconds(size.tokens, size)[-1]) if size.tokens and self._medians else 0.0

    def _predicted(self, most: int) -> NDArray[np.float64]:
        """Seconds of 1, 2, ... `most` tokens that attend to nothing; not to be changed."""
        medians, counts = dict(self._medians), {size: len(seen) for size, seen in list(self._seen.items())}
        sizes = sorted(medians.keys() & counts.keys())
        times = _rising([medians[size] for size in sizes], [counts[size] for size in sizes])
        run_as = np.arange(1, most + 1)
        if self._captured:
            captured = np.array(self._captured)
            at = np.searchsorted(captured, run_as)
            run_as = np.where(at < len(captured), captured[np.minimum(at, len(captured) - 1)], run_as)
        out = np.interp(run_as, sizes, times)
        slope = (times[-1] - times[0]) / (sizes[-1] - sizes[0]) if len(sizes) > 1 else CHEAP * times[0]
        # Below the smallest size seen: cheaper by a little at least, so that no hopeless draft seems free.
        below = run_as < sizes[0]
        least = max(slope, _UNSEEN_DISCOUNT * times[0])
        out[below] -= np.minimum(0.5 * times[0], least * (sizes[0] - run_as[below]))
        beyond = run_as > sizes[-1]  # along the chord from the first knot
        out[beyond] = times[-1] + slope * (run_as[beyond] - sizes[-1])
        out.flags.writeable = False
        return out

    def steps_added(self, most: int, fixed: StepSize, context: float) -> NDArray[np.float64]:
        """What 1, 2, ... tokens add to a step of `fixed`, in times of that step: [at most `most`], not decreasing.

        context: positions that each of them attends to. It ends at sizes that nothing is known of, so a caller that
        takes more and more tokens learns what they cost.
        """
        if not self.is_known or fixed.tokens == 0 or most <= 0:
            return np.zeros(max(0, most))
        most = min(most, max(1, 2 * max(fixed.tokens, self.largest) - fixed.tokens))
        times = self.seconds(fixed.tokens + most, fixed, context)
        added: NDArray[np.float64] = np.maximum(0.0, times[fixed.tokens :] / times[fixed.tokens - 1] - 1.0)
        return added

    def tokens_in_a_step(self, most: int, fixed: StepSize, context: float) -> int:
        """`tokens_within_a_step` of `steps_added`, with a few sizes in place of all: it is asked between two steps."""
        if not self.is_known or fixed.tokens == 0 or most <= 0:
            return max(0, most)
        most = min(most, max(1, 2 * max(fixed.tokens, self.largest) - fixed.tokens))
        by_tokens, slope_s = self._without_context(fixed.tokens + most), self._slope_s

        def seconds(further: int) -> float:
            return float(by_tokens[fixed.tokens - 1 + further]) + slope_s * (fixed.attended + context * further)

        alone_s = seconds(0)
        return max(1, bisect_right(range(1, most + 1), 1.0, key=lambda further: seconds(further) / alone_s - 1.0))

    def step_and_extra(self) -> tuple[float, float]:
        """Seconds of a one-token step at the usual context, and of each further token (mean of the next four)."""
        if (found := self._step_and_extra) is None:
            times = self.seconds(5, context=self._context)
            found = self._step_and_extra = float(times[0]), float(times[4] - times[0]) / 4
        return found


def tokens_within_a_step(added: NDArray[np.float64]) -> int:
    """As many tokens as at most double the step's time, `added` as `StepTimeCurve.steps_added` gives it; one at least,
    so that a prompt ends.
    """
    return min(len(added), max(1, int(np.searchsorted(added, 1.0, side="right"))))


def _median_s(seen: Iterable[tuple[int, float]]) -> float:
    return median(seconds for _, seconds in seen)


def _rising(times: Sequence[float], weights: Sequence[int]) -> list[float]:
    """The nearest times that do not fall, by weighted least squares: neighbours that fall share their mean.

    Ayer et al. 1955, "pool adjacent violators". So one slow step of a seldom size lifts no other size by much.
    """
    levels: list[tuple[float, int, int]] = []  # time, weight, how many share it
    for time, weight in zip(times, weights, strict=True):
        level = (time, weight, 1)
        while levels and levels[-1][0] > level[0]:
            before = levels.pop()
            total = before[1] + level[1]
            level = ((before[0] * before[1] + level[0] * level[1]) / total, total, before[2] + level[2])
        levels.append(level)
    return [time for time, _, count in levels for _ in range(count)]
