"""Decides from late answers when a store has failed, for its breaker. Knows no store.

Each late answer counts, and ten answers in time take one back: so a store is left out after three late ones in a row,
or in the long run where more than one in eleven is late. When it is asked again, the next late answer leaves it out for
twice as long, until twenty answers in time have shown that it has recovered.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from outrider.models.breaker import Breaker

_LATE: Final = 10
"""What a late answer adds, and an answer in time takes one of."""
_LIMIT: Final = 3 * _LATE


class LateAnswers:
    """Late answers of one store, on one thread."""

    def __init__(self, breaker: Breaker, clock: Callable[[], float] = time.monotonic) -> None:
        self._breaker = breaker
        self._clock = clock
        self._counted_s = float("-inf")
        self._score = 0

    def late(self, began_s: float) -> bool:
        """Counts an answer that is late now; True where the breaker opens for it.

        began_s: when it was asked. Calls that began before the last late answer was counted are of the same burst.
        """
        if began_s < self._counted_s:
            return False
        self._counted_s = self._clock()
        self._score += _LATE
        if self._score < _LIMIT:
            return False
        self._score = _LIMIT - _LATE
        self._breaker.failed()
        return True

    def in_time(self) -> None:
        """Counts an answer in time."""
        self._score = max(0, self._score - 1)
        if self._score == 0:
            self._breaker.succeeded()
