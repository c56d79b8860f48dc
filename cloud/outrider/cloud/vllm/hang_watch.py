"""Notices that vLLM hangs, and that it has dropped a request, by what is reported between ticks.

Ticks are counted, not read from a clock: time in which this process itself stood still is no silence of vLLM's. Knows
no vLLM.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

TICK_S: Final = 1.0
HUNG_AFTER: Final = 60
"""Ticks without a report, while sequences are open, after which the engine takes no new work."""
DEAD_AFTER: Final = 120
"""And after which it is given up."""
LOST_AFTER: Final = 5
"""Ticks in which the report of an end may come after vLLM's own answer; it comes before, mostly."""


class HangWatch:
    """One engine's. The engine's thread calls it; `heard` may come from any."""

    def __init__(self) -> None:
        self._silent = 0
        self._answered: dict[int, int] = {}

    def heard(self) -> None:
        """A report came, or the first sequence of an idle engine."""
        self._silent = 0

    def answered(self, number: int) -> None:
        """vLLM has answered a request; its end has to be reported soon."""
        self._answered[number] = 0

    def tick(self, open_now: Collection[int]) -> list[int]:
        """Call it each `TICK_S`. Returns the open sequences that vLLM has dropped without a report."""
        self._silent = self._silent + 1 if open_now else 0
        answered = {number: count + 1 for number, count in self._answered.items() if number in open_now}
        self._answered = {number: count for number, count in answered.items() if count < LOST_AFTER}
        return list(answered.keys() - self._answered.keys())

    @property
    def is_hung(self) -> bool:
        """Whether nothing was reported for long."""
        return self._silent >= HUNG_AFTER

    @property
    def is_dead(self) -> bool:
        """Whether nothing was reported for too long."""
        return self._silent >= DEAD_AFTER
