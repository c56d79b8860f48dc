"""Runs the shares of a step: one sequence's part of it each, picks where the runtime makes them, every call watched."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from outrider.cloud.engine.health import Health
from outrider.cloud.engine.sequence_state import SequenceState
from outrider.cloud.pending.selected_drafts import NOTHING, SelectedDrafts
from outrider.models.errors import ModelFault
from outrider.models.picks.acceptance import AcceptedBranch, accept_tree, accept_tree_picks
from outrider.models.picks.sampling import SamplingParams
from outrider.models.processors.chooser import PickedChooser, PickedRow, TokenChooser
from outrider.models.processors.text_rows import AskedRows
from outrider.models.runtimes.base import Ask, BatchRuntime, Beside, PickingRuntime, SequenceSlice, TreeRuntime

Rows = NDArray[np.float32] | list[PickedRow]
"""Logits [rows, V], or what the runtime picked."""


_USUAL_S: Final = sys.getswitchinterval()
_SOON_S: Final = 0.0005
"""How long another thread may keep Python from the engine's while rows are chosen. Each call of numpy gives Python
away, some ten a row: beside a busy event loop, at 5 ms each, a step of 70 ms took 200."""


def _nothing(is_over: Callable[[], bool]) -> None:
    """Beside a step that stands alone."""


@contextmanager
def python_soon() -> Iterator[None]:
    """Has the engine's thread get Python back sooner, inside."""
    sys.setswitchinterval(_SOON_S)
    try:
        yield
    finally:
        sys.setswitchinterval(_USUAL_S)


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


@dataclass(slots=True)
class Share:
    """One sequence's part of a step: `new` tokens to run, the last of them `drafted`. Not to be changed;
    not frozen, which would take longer between two steps.

    is_complete: the tokens reach the sequence's end, so the target picks its next token in this step.
    depths: of the drafted tokens, where they are no line.
    """

    sequence: SequenceState
    new: list[int]
    drafted: SelectedDrafts
    is_complete: bool
    depths: list[int] | None = field(init=False)

    def __post_init__(self) -> None:
        self.depths = None if self.drafted.is_line else depths(self.drafted.parents)

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

    def asked(self) -> AskedRows:
        """What decides its rows, for a runtime that picks."""
        chooser = self.sequence.chooser
        if isinstance(chooser, PickedChooser):
            return chooser.ask(self.drafted.tokens, self.drafted.parents, self.row_positions)
        return AskedRows(self.sequence.request.pick.params, self.row_positions, is_whole=chooser is not None)

    def without_drafts(self) -> Share:
        """The same without drafted tokens."""
        return Share(self.sequence, self.new[: len(self.new) - self.num_drafted], NOTHING, self.is_complete)


class ModelRunner:
    """The runtime as the engine calls it. Engine's thread only."""

    def __init__(self, runtime: BatchRuntime, health: Health, clock: Callable[[], float]) -> None:
        self._runtime = runtime
        self._health = health
        self._clock = clock

    def forward(self, shares: Sequence[Share], beside: Beside = _nothing) -> Rows:
        """Runs the shares of a step. Raises what the runtime raises, ModelFault when rows are missing.

        beside: called where a device runs the model, while it does.
        """
        num_rows = sum(share.num_rows for share in shares)
        slices = [share.as_slice() for share in shares]

        def ask() -> list[AskedRows]:
            with python_soon() if any(share.sequence.chooser for share in shares) else nullcontext():
                return [share.asked() for share in shares if share.num_rows]

        return self._run(slices, num_rows, ask, beside)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Moves keys and values of an accepted branch into place. Raises what the runtime raises."""
        assert isinstance(self._runtime, TreeRuntime)
        with self._health.watched():
            self._runtime.move(sources, targets)

    def probe(self, blocks: Sequence[int]) -> None:
        """Runs one token in `blocks`. Raises what the runtime raises, ModelFault when the row is not finite."""
        rows = self._run([SequenceSlice([0], 0, blocks, 1)], 1, lambda: [AskedRows(SamplingParams(), [1])])
        picked(rows, NOTHING, SamplingParams(), 1)

    def time(self, num_new: int, past: int, blocks: Sequence[int], num_rows: int) -> float:
        """Seconds of a step of `num_new` tokens after `past`, as `forward` runs it: the runtime's picks included."""
        started = self._clock()
        end = past + num_new
        positions = range(end - num_rows + 1, end + 1)
        asked = [AskedRows(SamplingParams(), positions)]
        self._run([SequenceSlice([0] * num_new, past, blocks, num_rows)], num_rows, lambda: asked)
        return self._clock() - started

    def _run(
        self,
        slices: Sequence[SequenceSlice],
        num_rows: int,
        ask: Ask,
        beside: Beside = _nothing,
    ) -> Rows:
        with self._health.watched():
            if isinstance(self._runtime, PickingRuntime):
                rows: Rows = self._runtime.forward_picks(slices, ask, beside)
            else:
                rows = self._runtime.forward(slices)
            if len(rows) != num_rows:
                raise ModelFault(f"the runtime returned {len(rows)} rows of logits; expected {num_rows}")
        return rows


def picked(
    rows: Rows,
    drafted: SelectedDrafts,
    params: SamplingParams,
    position: int,
    *,
    chooser: TokenChooser | None = None,
    stop_ids: Collection[int] = (),
    max_tokens: int | None = None,
) -> AcceptedBranch:
    """The target's tokens from `position` on, as `accept_tree` gives them, from logits or from picks.

    chooser: chooses in place of the plain pick.
    """
    tokens, parents = drafted.tokens, drafted.parents
    if chooser is not None:
        return chooser.choose(
            cast(Sequence[NDArray[np.float32]], rows),
            tokens,
            parents,
            position,
            stop_ids=stop_ids,
            max_tokens=max_tokens,
            evidence=drafted.evidence,
        )
    if isinstance(rows, list):
        picks = cast(list[int | None], rows)
        return accept_tree_picks(picks, tokens, parents, stop_ids=stop_ids, max_tokens=max_tokens)
    return accept_tree(rows, tokens, parents, params, position, stop_ids=stop_ids, max_tokens=max_tokens)
