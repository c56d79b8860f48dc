"""Keeps the bytes that the device sends within a budget: raises the chance from which a guess is worth sending."""

from __future__ import annotations

import math
from typing import Final

from outrider.edge.drafting.forgetting import ForgettingRatio

BYTES_PER_TOKEN: Final = 150.0
"""Bytes of draft messages per token of the text, bodies only."""

_LEAST: Final = 0.002
_MOST: Final = 0.5
_PACE: Final = 0.15


class SendPrice:
    """The floor under the reach of what is sent. budget: bytes per token of the text, over some twenty commits.

    A path has one child per node, so nothing of it is held back: floor 0.
    """

    def __init__(self, budget: float = BYTES_PER_TOKEN, *, is_path: bool = False) -> None:
        self._budget = budget
        self._is_path = is_path
        self._rate = ForgettingRatio(0.7 * budget, 8.0, keep=0.95)
        self._unpaid = 0
        self._floor = 0.01

    @property
    def floor(self) -> float:
        """No node that the target reaches with a smaller chance is worth its bytes."""
        return 0.0 if self._is_path else self._floor

    def sent(self, num_bytes: int) -> None:
        """Takes the size of a message."""
        self._unpaid += num_bytes

    def committed(self, num_tokens: int) -> None:
        """Takes a commit: what was sent since the last one bought these tokens."""
        self._rate.add(self._unpaid, num_tokens)
        self._unpaid = 0
        # Proportional control on a log scale: the number of nodes above a floor falls about as the floor rises.
        change = _PACE * math.log(max(0.05, self._rate.value / self._budget))
        self._floor = min(_MOST, max(_LEAST, self._floor * math.exp(change)))
