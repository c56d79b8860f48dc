"""Defines a row transform: what stands between a row of logits and the pick, and follows the text token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class LogitProcessor(Protocol):
    """Changes the rows of one text. A pure function of its options and the tokens that it was given.

    It goes along drafted tokens, and back to what was committed.
    """

    @property
    def length(self) -> int:
        """Tokens of the text that it has seen, the prompt left out."""

    def apply(self, row: NDArray[np.float32]) -> None:
        """Changes one row, [V] float32, in place: that of the token after those seen. Leaves a finite maximum."""

    def advance(self, token: int) -> None:
        """Goes on by a token of the text."""

    def truncate(self, length: int) -> None:
        """Goes back to its first `length` tokens."""


def apply_all(states: Sequence[LogitProcessor], row: NDArray[np.float32]) -> NDArray[np.float32]:
    """A changed copy of the row; the row itself where there is no state."""
    if not states:
        return row
    changed = np.array(row, dtype=np.float32)
    for state in states:
        state.apply(changed)
    return changed
