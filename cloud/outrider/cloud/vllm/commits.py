"""Defines what the engine process reports of a pass. A tuple, because one is made for each sequence of each step."""

from __future__ import annotations

from typing import NamedTuple

from outrider.cloud.seam import CommitEvent
from outrider.models.processors.chooser import TokenLogprobs


class Commit(NamedTuple):
    """A pass of the sequence `number`; the rest is as in CommitEvent."""

    number: int
    base: int
    tokens: list[int]
    accepted: int
    proposed: int
    looked_up: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def event(self) -> CommitEvent:
        """The same as the sequence's sink gets it."""
        return CommitEvent(
            self.base, tuple(self.tokens), self.accepted, self.proposed, self.looked_up, tuple(self.logprobs)
        )
