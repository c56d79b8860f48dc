"""Defines the seam of a source of drafts in the verifier: what it proposes, and what it may learn from a pass.

A source belongs to one sequence. Whatever it proposes, the text is the target's: a wrong guess costs time only. The
device's drafts are no such source: they arrive by themselves (`trie`). `selection` chooses among sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from outrider.cloud.pending.chosen import Chosen


class DraftSource(Protocol):
    """Guesses of what follows one sequence's committed tokens. The engine's thread owns it."""

    @property
    def kinds(self) -> range:
        """The kinds of its nodes (`trie`): how sure it is, by which their chances are measured."""
        ...

    @property
    def goes_first(self) -> bool:
        """Whether its guess goes before all others: it repeats what the same request got."""
        ...

    def propose(self, most: int) -> tuple[list[int], list[int]]:
        """A path of at most `most` tokens that follow the committed ones, and their kinds; nothing where it has none.

        Changes no text; how long it takes is measured.
        """
        ...


@dataclass(frozen=True, slots=True)
class Verified:
    """A pass over one sequence: what it ran, and what the target picked after each row.

    text: all tokens before the commit, prompt included. committed: those that the pass added. drafted: what it
    verified; nodes: indices of the accepted ones. picks: [1 + len(drafted)] the target's token after the last of `text`
    and after each drafted token, rejected ones included: by its noise where the runtime picks, else the likeliest; None
    where the row is not finite. hidden: [1 + len(drafted), H] the last hidden states of the same rows; None where
    nothing asks for them.
    """

    text: Sequence[int]
    committed: Sequence[int]
    drafted: Chosen
    nodes: Sequence[int]
    picks: Sequence[int | None]
    hidden: NDArray[np.float32] | None = None

    @property
    def last_row(self) -> int:
        """The row that picked the last committed token."""
        return self.nodes[-1] + 1 if self.nodes else 0


@runtime_checkable
class LearningSource(Protocol):
    """A source that learns from each pass."""

    def learn(self, verified: Verified) -> None:
        """Called once for each pass, before its tokens are part of the text. Must not keep the arrays."""
        ...
