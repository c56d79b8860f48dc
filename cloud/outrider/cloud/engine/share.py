"""One sequence's part of a step: which tokens run, which of them are drafted, what the runtime is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.cloud.engine.sequence_state import SequenceState
from outrider.cloud.pending.selected_drafts import NOTHING, SelectedDrafts
from outrider.models.runtimes.base import SequenceSlice


def depths(parents: Sequence[int]) -> list[int]:
    """How many drafted tokens each token's path has, itself included: 1 for those after the last committed token."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return found


def tree_mask(parents: Sequence[int], num_before: int) -> NDArray[np.uint8]:
    """Which new tokens each new token attends: [n, n] uint8 with n = num_before + len(parents).

    The first `num_before` tokens are a line that every drafted token follows; a drafted token attends these, its
    ancestors and itself.
    """
    mask = np.tri(num_before + len(parents), dtype=np.uint8)
    mask[num_before:, num_before:] = 0
    for index, parent in enumerate(parents):
        row = mask[num_before + index]
        if parent >= 0:
            row |= mask[num_before + parent]
        row[num_before + index] = 1
    return mask


@dataclass(frozen=True, slots=True)
class Share:
    """One sequence's part of a step: `new` tokens to run, the last of them `drafted`.

    is_complete: the tokens reach the sequence's end, so the target picks its next token in this step.
    depths: of the drafted tokens, where they are no line.
    """

    sequence: SequenceState
    new: list[int]
    drafted: SelectedDrafts
    is_complete: bool
    depths: list[int] | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "depths", None if self.drafted.is_line else depths(self.drafted.parents))

    @property
    def num_drafted(self) -> int:
        """Drafted tokens in it."""
        return len(self.drafted.tokens)

    @property
    def num_rows(self) -> int:
        """Rows of logits that it needs."""
        return 1 + self.num_drafted if self.is_complete else 0

    @property
    def row_positions(self) -> Sequence[int]:
        """The position of the token that each row picks."""
        end = len(self.sequence.tokens)
        if self.depths is None:
            return range(end, end + self.num_rows)
        return [end, *(end + depth for depth in self.depths)]

    @property
    def num_attended(self) -> int:
        """Positions that its tokens attend to, in all."""
        count = len(self.new)
        if self.depths is None:
            return count * self.sequence.computed + count * (count + 1) // 2
        before = count - self.num_drafted
        own = before * (before + 1) // 2 + self.num_drafted * before + sum(self.depths)
        return count * self.sequence.computed + own

    def as_slice(self) -> SequenceSlice:
        """The same for the runtime."""
        past, blocks = self.sequence.computed, self.sequence.blocks
        if self.depths is None:
            return SequenceSlice(self.new, past, blocks, self.num_rows)
        before = len(self.new) - self.num_drafted
        end = past + before
        positions = [*range(past, end), *(end + depth - 1 for depth in self.depths)]
        mask = tree_mask(self.drafted.parents, before)
        return SequenceSlice(self.new, past, blocks, self.num_rows, positions, mask)

    def without_drafts(self) -> Share:
        """The same without drafted tokens."""
        return Share(self.sequence, self.new[: len(self.new) - self.num_drafted], NOTHING, self.is_complete)
