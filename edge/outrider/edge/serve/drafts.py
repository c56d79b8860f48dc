"""Lends the sequences of one draft model to the texts that are being generated.

A sequence keeps its cache when its text ends: the next turn of a conversation begins with the same tokens. So the
memory is bounded by the number of sequences and their longest text. What one client's text left there is forgotten
before another client gets the sequence: times would show what it was.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from outrider.edge.drafting.drafter import Drafter, ModelDrafter, NgramDrafter
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.drafting.scheduler import DraftScheduler
from outrider.edge.modes.assemble import OpenModel
from outrider.models.errors import OutriderError
from outrider.models.runtimes.base import SequenceRuntime, ShareableRuntime

_log = logging.getLogger("outrider.serve")


@dataclass(slots=True, eq=False)
class _Sequence:
    runtime: SequenceRuntime
    drafter: ModelDrafter
    owner: bytes = b""
    text: Sequence[int] = ()


@dataclass(slots=True)
class Loan:
    """What a text drafts with. text: set it to the whole text at its end. has_failed: set it when the drafter raised.

    drafter: None drafts nothing.
    """

    drafter: Drafter | None
    estimates: Estimates
    text: Sequence[int] = field(default=())
    has_failed: bool = False


class DraftSequences:
    """The sequences of a draft model, opened as they are needed. Lives on one event loop.

    max_sequences: at most; 1 where the runtime holds one only. is_looked_up: texts beyond that draft by n-gram lookup.
    """

    def __init__(self, model: OpenModel, max_sequences: int, *, is_looked_up: bool) -> None:
        self.scheduler = DraftScheduler()
        self.max_sequences = 0
        if model.runtime is not None:
            self.max_sequences = max_sequences if isinstance(model.runtime, ShareableRuntime) else 1
        self._model = model
        self._is_looked_up = is_looked_up or model.runtime is None
        self._opened: list[_Sequence] = []
        self._idle: list[_Sequence] = []  # the one used longest ago first
        self._experience: list[Estimates] = []

    @property
    def num_lent(self) -> int:
        """Sequences that texts have now."""
        return len(self._opened) - len(self._idle)

    @contextmanager
    def lend(self, owner: bytes, prompt: Sequence[int]) -> Iterator[Loan]:
        """A drafter for one text of `owner`, and what earlier texts have measured."""
        sequence = self._take(owner, prompt)
        drafter: Drafter | None = sequence.drafter if sequence is not None else None
        if drafter is None and self._is_looked_up:
            drafter = NgramDrafter()
        # Nobody else uses these while they are lent: texts that run at the same time would spoil each other's figures.
        estimates = self._experience.pop() if self._experience and sequence is not None else Estimates()
        loan = Loan(drafter, estimates)
        try:
            yield loan
        finally:
            if sequence is not None:
                self._experience.append(estimates)
                self._take_back(sequence, loan)

    def close(self) -> None:
        """Releases the model, after the call in progress; nothing may be lent."""
        self.scheduler.join()
        for sequence in reversed(self._opened):  # the model's own comes last
            sequence.drafter.close()
        if self._model.runtime is not None:
            self._model.runtime.close()
        self._opened, self._idle = [], []

    def _take(self, owner: bytes, prompt: Sequence[int]) -> _Sequence | None:
        own = [sequence for sequence in self._idle if sequence.owner == owner]
        found = max(own, key=lambda sequence: _num_shared(sequence.text, prompt), default=None)
        if found is None or 2 * _num_shared(found.text, prompt) < max(1, len(found.text)):  # another conversation's
            found = self._open() or (self._idle[0] if self._idle else None)
        if found is None:
            return None
        if found in self._idle:
            self._idle.remove(found)
        if found.owner != owner:
            self.scheduler.do(found.drafter.forget)
            found.owner = owner
        return found

    def _open(self) -> _Sequence | None:
        """A new sequence; None where the model holds no more, or has no room for it."""
        if len(self._opened) >= self.max_sequences:
            return None
        runtime = self._model.runtime
        assert runtime is not None
        if self._opened:
            assert isinstance(runtime, ShareableRuntime)
            try:
                runtime = runtime.open_sequence()
            except OutriderError as error:  # the cache does not fit
                _log.warning("%d texts at a time have drafts, no more: %s", len(self._opened), error)
                self.max_sequences = len(self._opened)
                return None
        self._opened.append(_Sequence(runtime, ModelDrafter(runtime, self._model.num_ids)))
        return self._opened[-1]

    def _take_back(self, sequence: _Sequence, loan: Loan) -> None:
        sequence.text = loan.text
        if loan.has_failed or not loan.text:
            sequence.text = ()
            self.scheduler.do(sequence.drafter.forget)
        self._idle.append(sequence)


def _num_shared(text: Sequence[int], prompt: Sequence[int]) -> int:
    """First tokens that both have."""
    shared = 0
    for one, other in zip(text, prompt, strict=False):
        if one != other:
            break
        shared += 1
    return shared
