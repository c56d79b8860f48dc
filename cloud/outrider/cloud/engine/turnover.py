"""Measures how fast sequences end, for the advice when to come back to a full queue."""

from __future__ import annotations

import math
from collections import deque
from typing import Final

_NUM_ENDS: Final = 64
_MOST_S: Final = 60
"""Nobody is sent away for longer: the measure is of what ran, and what comes may be shorter."""


class Turnover:
    """Remembers when the newest sequences ended. The engine's thread notes; any thread may ask."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=_NUM_ENDS)

    def note(self, now: float) -> None:
        """A sequence has ended."""
        self._ends.append(now)

    def retry_after_s(self, num_sequences: int, now: float) -> int:
        """Seconds until `num_sequences` more will have ended, 1 to 60, if they go on as the newest did."""
        ends = tuple(self._ends)
        gap_s = (now - ends[0]) / len(ends) if ends else 0.0
        return max(1, min(_MOST_S, math.ceil(gap_s * num_sequences)))
