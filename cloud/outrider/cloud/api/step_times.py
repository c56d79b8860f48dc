"""Gives the engine's step times to devices: at most twice a second, for all streams together."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

from outrider.cloud.seam import EngineStats

_EVERY_S: Final = 0.5
_MUCH: Final = 0.2
"""Of a time, or of a step for a drafted token's: what a device decides by has changed."""
_LITTLE: Final = 0.02
"""Of a step: a drafted token's time that changed by less changes no decision."""


class StepTimes(NamedTuple):
    """Of a step without drafts, and what a drafted token adds to it; None: not measured yet."""

    step_ms: float | None = None
    draft_token_ms: float | None = None

    def has_changed(self, before: StepTimes) -> bool:
        """Whether a device that knows those `before` may decide otherwise."""
        if self.step_ms is None or self.draft_token_ms is None or before.step_ms is None:
            return self != before
        token_ms = before.draft_token_ms or 0.0
        return (
            abs(self.step_ms - before.step_ms) > _MUCH * before.step_ms
            or abs(self.draft_token_ms - token_ms) > _MUCH * token_ms + _LITTLE * before.step_ms
        )


class NewestTimes:
    """Calls it for the newest times. stats: of the engine, which takes some time to gather."""

    def __init__(self, stats: Callable[[], EngineStats], clock: Callable[[], float] = time.monotonic) -> None:
        self._stats = stats
        self._clock = clock
        self._found = StepTimes()
        self._until_s = float("-inf")

    def __call__(self) -> StepTimes:
        if (now := self._clock()) >= self._until_s:
            stats = self._stats()
            self._found, self._until_s = StepTimes(stats.step_ms, stats.draft_token_ms), now + _EVERY_S
        return self._found
