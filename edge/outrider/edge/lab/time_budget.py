"""Shares out the time of a measurement, so that a slow machine measures less and not longer."""

from __future__ import annotations

import time
from collections.abc import Callable


class TimeBudget:
    """A number of seconds that begin now. clock counts seconds."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends_at = clock() + seconds

    @property
    def left_s(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self._ends_at - self._clock())

    def part(self, share: float) -> TimeBudget:
        """A budget of this share, 0 to 1, of what is left."""
        return TimeBudget(self.left_s * share, self._clock)


class Pace:
    """Whether another item fits into a budget, judged by the longest so far; the first always does."""

    def __init__(self, budget: TimeBudget, expected_s: float = 0.0) -> None:
        """expected_s: how long an item is expected to take before one was measured."""
        self._budget = budget
        self._longest_s = expected_s
        self._left_at_start_s = budget.left_s

    def item_done(self) -> None:
        """Call after each item."""
        left_s = self._budget.left_s
        self._longest_s = max(self._longest_s, self._left_at_start_s - left_s)
        self._left_at_start_s = left_s

    def has_time(self) -> bool:
        """Whether what is left is enough for another item."""
        return self._budget.left_s >= self._longest_s

    @property
    def longest_s(self) -> float:
        """Time of the longest item."""
        return self._longest_s
