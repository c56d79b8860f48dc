"""Learns how much longer a step with trees takes than one with lines, and whether trees pay in spite of it."""

from __future__ import annotations

from typing import Final

_TREE_MEMORY: Final = 0.9
_MOST_TREE_RATIO: Final = 4.0  # of one tree step: a runtime may prepare for a new shape
_FIRST_TRIAL: Final = 64  # tree steps declined before another is tried; each trial that shows no change doubles it
_SOON: Final = 8  # the same after a trial that was faster than expected
_FASTER: Final = 0.9  # of the expected time
_MOST_DECLINED: Final = 8 * _FIRST_TRIAL  # so trees are timed again within as many steps


class TreeTrials:
    """Times of steps with trees, and trials of some where they do not pay."""

    def __init__(self) -> None:
        self._tree_s = self._line_s = 0.0  # of tree steps; as the curve says of lines of the same size
        self._num_declined = 0
        self._trial_after = _FIRST_TRIAL

    @property
    def ratio(self) -> float:
        """How much longer a step with trees takes than a step of as many tokens in lines; at least 1."""
        return max(1.0, self._tree_s / self._line_s) if self._line_s else 1.0

    def ran(self, seconds: float, expected_s: float) -> None:
        """Records a step with trees. expected_s: what the curve says of as many tokens in lines."""
        if self._line_s == 0.0:
            self._tree_s = self._line_s = expected_s  # as if one step had shown no difference
        if seconds < _FASTER * self.ratio * expected_s:
            self._trial_after = _SOON
        self._tree_s = _TREE_MEMORY * self._tree_s + min(seconds, _MOST_TREE_RATIO * expected_s)
        self._line_s = _TREE_MEMORY * self._line_s + expected_s

    def pay(self, tree_rate: float, line_rate: float) -> bool:
        """Whether trees are verified although their steps take longer. Where they do not pay, one is tried at times."""
        if tree_rate > line_rate * self.ratio:
            self._num_declined, self._trial_after = 0, _FIRST_TRIAL
            return True
        self._num_declined += 1
        if self._num_declined < self._trial_after:
            return False
        self._num_declined, self._trial_after = 0, min(2 * self._trial_after, _MOST_DECLINED)
        return True
