"""Decides from late answers when a store is left out, and for how long. Knows no store.

Each late answer counts, and ten answers in time take one back: so a store is left out after three late ones in a row,
or in the long run where more than one in eleven is late. When it is asked again, the next late answer leaves it out for
twice as long, until twenty answers in time have shown that it has recovered.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

_LATE: Final = 10
"""What a late answer adds, and an answer in time takes one of."""
_LIMIT: Final = 3 * _LATE
MAX_PAUSE_S: Final = 60.0


class Breaker:
    """Late answers of one store. One thread reports them; any thread reads `left_s`."""

    def __init__(self, pause_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """pause_s: how long the store is left out for the first time; MAX_PAUSE_S at most later."""
        self._first_pause_s = self._pause_s = pause_s
        self._clock = clock
        self._counted_s = self._until_s = float("-inf")
        self._score = 0

    @property
    def left_s(self) -> float:
        """Seconds for which the store is still left out; 0: it may be asked."""
        return max(0.0, self._until_s - self._clock())

    def late(self, began_s: float) -> bool:
        """Counts an answer that is late now; True where the store is left out for it.

        began_s: when it was asked. Calls that began before the last late answer was counted are of the same burst.
        """
        now = self._clock()
        if began_s < self._counted_s:
            return False
        self._counted_s = now
        self._score += _LATE
        if self._score < _LIMIT:
            return False
        self._score = _LIMIT - _LATE
        self._until_s = now + self._pause_s
        self._pause_s = max(self._first_pause_s, min(2.0 * self._pause_s, MAX_PAUSE_S))
        return True

    def in_time(self) -> None:
        """Counts an answer in time."""
        self._score = max(0, self._score - 1)
        if self._score == 0:
            self._pause_s = self._first_pause_s
