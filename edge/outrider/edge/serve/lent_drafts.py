"""Lends the sequences of the draft models to the texts that are being generated.

Texts get them in the order in which they came. One that finds none begins without, and takes over the next one that is
its turn at a commit.

A sequence keeps its cache when its text ends: the next turn of a conversation begins with the same tokens. So the
memory is bounded by the number of sequences and their longest text. What one client's text left there is forgotten
before another client gets the sequence: times would show what it was.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from outrider.edge.drafting.drafter import Drafter, ModelDrafter, NgramDrafter
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.drafting.ladder import LadderDrafter, Rung, WaitingDrafter
from outrider.edge.drafting.scheduler import DraftScheduler
from outrider.edge.modes.assemble import OpenModel
from outrider.edge.modes.draft_ladder import LOOKUP_WORDS, LazyModel
from outrider.models.breaker import Breaker
from outrider.models.errors import OutriderError
from outrider.models.runtimes.base import ShareableRuntime, num_shared
from outrider.models.visible import visible

_log = logging.getLogger("outrider.serve")


@dataclass(slots=True, eq=False)
class _Sequence:
    drafter: ModelDrafter
    owner: bytes = b""
    text: Sequence[int] = ()


@dataclass(slots=True, eq=False)
class _Text:
    """Who asks for sequences. taken: those that it has, by the model's place."""

    owner: bytes
    prompt: Sequence[int]
    taken: dict[int, _Sequence] = field(default_factory=dict)
    is_over: bool = False


@dataclass(slots=True)
class Loan:
    """What a text drafts with. text: set it to the whole text at its end. has_failed: set it when the drafter raised.

    drafter: None drafts nothing. can_write: whether it could write the text alone.
    """

    drafter: Drafter | None
    estimates: Estimates
    text: Sequence[int] = field(default=())
    has_failed: bool = False
    can_write: bool = False


class DraftSequences:
    """The sequences of draft models, opened as they are needed. Lives on one event loop, and in the drafting thread.

    max_sequences: of a model, at most; 1 where its runtime holds one only. is_looked_up: texts that wait for one draft
    by n-gram lookup meanwhile. others: models for texts whose draft has failed, the best first; loaded when they are
    needed. first_pause_s: before a model that failed is tried again; doubles. again: loads the first model anew where
    its device has lost it; None: it stays as it is.
    """

    def __init__(
        self,
        model: OpenModel,
        max_sequences: int,
        *,
        is_looked_up: bool,
        others: Sequence[LazyModel] = (),
        first_pause_s: float = 1.0,
        again: Callable[[], OpenModel] | None = None,
    ) -> None:
        self.scheduler = DraftScheduler()
        self._is_looked_up = is_looked_up or model.runtime is None
        self._lock = threading.Lock()
        words = model.placement.words
        models = [LazyModel(words, lambda: model), *others] if model.runtime is not None else []
        self._pools = [_Pool(each, max_sequences, self._lock, self.scheduler, first_pause_s) for each in models]
        if self._pools:
            self._pools[0].load()
            self._pools[0].lazy = LazyModel(words, again or (lambda: model))
        self._experience: list[Estimates] = []

    @property
    def max_sequences(self) -> int:
        """Texts that the first model drafts for at a time."""
        return self._pools[0].max_sequences if self._pools else 0

    @property
    def num_lent(self) -> int:
        """Sequences that texts have now."""
        return sum(len(pool.opened) - len(pool.idle) for pool in self._pools)

    @property
    def failed(self) -> list[str]:
        """Models that have failed and are not tried now, in words."""
        return [pool.words for pool in self._pools if pool.breaker.is_open]

    @contextmanager
    def lend(self, owner: bytes, prompt: Sequence[int]) -> Iterator[Loan]:
        """A drafter for one text of `owner`, and what earlier texts have measured."""
        text = _Text(owner, prompt)
        # The first is taken now and not when drafting begins: texts get sequences in the order in which they came.
        first = next((index for index, pool in enumerate(self._pools) if not pool.breaker.pause_s), None)
        if first is not None:
            self._pools[first].take(text, first, in_thread=False)
        has_model = bool(text.taken)
        may_have_one = has_model or (first is not None and self._pools[first].model is None)
        rungs = [
            Rung(pool.words, partial(self._open, text, index), pool.breaker, partial(self._give_up, text, index))
            for index, pool in enumerate(self._pools)
        ]
        if self._is_looked_up:
            rungs.append(Rung(LOOKUP_WORDS, NgramDrafter))
        elif not has_model and not self.failed:
            rungs.append(Rung("nothing", WaitingDrafter))
        drafter = LadderDrafter(rungs, on_step=_note)
        # Nobody else uses these while they are lent: texts that run at the same time would spoil each other's figures.
        estimates = self._experience.pop() if self._experience and has_model else Estimates()
        loan = Loan(drafter, estimates, can_write=may_have_one or self._is_looked_up)
        try:
            yield loan
        finally:
            if has_model:
                self._experience.append(estimates)
            with self._lock:
                text.is_over = True
                for index, sequence in text.taken.items():
                    is_lost = loan.has_failed or index in drafter.failed or not loan.text
                    self._pools[index].take_back(sequence, () if is_lost else loan.text)
                for pool in self._pools:
                    pool.waiting.pop(text, None)

    def close(self) -> None:
        """Releases the models, after the call in progress; nothing may be lent."""
        self.scheduler.join()
        for pool in self._pools:
            pool.close()

    def _open(self, text: _Text, index: int) -> Drafter | None:
        """For the drafting thread."""
        if index in text.taken:
            return text.taken[index].drafter
        pool = self._pools[index]
        # Loaded in place of one that failed, not to draft for more texts: memory was planned for one model.
        may_load = not index or pool.model is not None or any(each.breaker.is_open for each in self._pools[:index])
        sequence = pool.take(text, index, in_thread=True) if may_load else None
        if sequence is None:
            return None
        with self._lock:
            for worse in self._pools[index + 1 :]:
                worse.waiting.pop(text, None)
        return sequence.drafter

    def _give_up(self, text: _Text, index: int, _: Drafter) -> None:
        """For the drafting thread."""
        with self._lock:
            if not text.is_over:
                self._pools[index].is_lost = True
                self._pools[index].take_back(text.taken.pop(index), ())


class _Pool:
    """One model's sequences."""

    def __init__(
        self,
        lazy: LazyModel,
        max_sequences: int,
        lock: threading.Lock,
        scheduler: DraftScheduler,
        first_pause_s: float,
    ) -> None:
        self.words = lazy.words
        self.breaker = Breaker(first_pause_s)
        self.max_sequences = max_sequences
        self.opened: list[_Sequence] = []
        self.idle: list[_Sequence] = []  # the one used longest ago first
        self.waiting: dict[_Text, None] = {}  # in the order in which they came
        self.model: OpenModel | None = None  # None while it is not in memory
        self.is_lost = False  # whether the model goes once nothing of it is lent: it is loaded anew
        self.lazy = lazy
        self._lock = lock
        self._scheduler = scheduler

    def load(self) -> OpenModel:
        """The model. Raises what its runtime raises."""
        if self.model is None:
            self.model = self.lazy.open()
            self.words = self.model.placement.words
            if not isinstance(self.model.runtime, ShareableRuntime):
                self.max_sequences = 1
        return self.model

    def take(self, text: _Text, index: int, *, in_thread: bool) -> _Sequence | None:
        """A sequence for a text; None where those that are free are for texts that have waited longer: it waits, too.

        index: this model's place. in_thread: this is the drafting thread, the only one that loads models: elsewhere a
        text waits for one that is not in memory.
        """
        if in_thread:
            try:
                self.load()  # takes long, so without the lock
            except BaseException:
                with self._lock:
                    self.waiting.pop(text, None)
                raise
        with self._lock:
            if text.is_over:
                return None
            self.waiting.setdefault(text)
            num_free = len(self.idle) + self.max_sequences - len(self.opened)
            may_take = self.model is not None and not self.is_lost
            is_next = may_take and text in itertools.islice(self.waiting, num_free)
            try:
                found = self._find(text.owner, text.prompt) if is_next else None
            except BaseException:
                self.waiting.pop(text)  # it goes on without this model, and keeps nobody waiting
                raise
            if found is None:
                return None
            del self.waiting[text]
            if found in self.idle:
                self.idle.remove(found)
            text.taken[index] = found
            is_others, found.owner = found.owner != text.owner, text.owner
        if is_others and in_thread:
            _forget(found)
        elif is_others:
            self._scheduler.do(partial(_forget, found))
        return found

    def take_back(self, sequence: _Sequence, text: Sequence[int]) -> None:
        """Takes a sequence back that holds a beginning of `text`. Call it with the lock held."""
        sequence.text = text
        if not text:
            self._scheduler.do(partial(_forget, sequence))
        self.idle.append(sequence)
        if self.is_lost and len(self.idle) == len(self.opened):
            self._scheduler.do(self._unload)

    def close(self) -> None:
        """Releases the model, which may be loaded anew then."""
        with self._lock:
            opened, model = self.opened, self.model
            self.opened, self.idle, self.model, self.is_lost = [], [], None, False
        for sequence in reversed(opened):  # the model's own comes last
            sequence.drafter.close()
        if model is not None and model.runtime is not None:
            model.runtime.close()

    def _unload(self) -> None:
        """Closes a lost model. Raises nothing: its device may fail at this too."""
        try:
            self.close()
        except Exception as error:
            _log.warning("a draft that failed cannot be closed: %s", error)

    def _find(self, owner: bytes, prompt: Sequence[int]) -> _Sequence | None:
        own = [sequence for sequence in self.idle if sequence.owner == owner]
        found = max(own, key=lambda sequence: num_shared(sequence.text, prompt), default=None)
        if found is None or 2 * num_shared(found.text, prompt) < max(1, len(found.text)):  # another conversation's
            found = self._open() or (self.idle[0] if self.idle else None)
        return found

    def _open(self) -> _Sequence | None:
        """A new sequence; None where the model holds no more, or has no room for it."""
        if len(self.opened) >= self.max_sequences:
            return None
        model = self.load()
        runtime = model.runtime
        assert runtime is not None, "lookup alone has no sequences"
        if self.opened and isinstance(runtime, ShareableRuntime):
            try:
                runtime = runtime.open_sequence()
            except OutriderError as error:  # the cache does not fit
                _log.warning("%d texts at a time have drafts, no more: %s", len(self.opened), error)
                self.max_sequences = len(self.opened)
                return None
        self.opened.append(_Sequence(ModelDrafter(runtime, model.num_ids, model=self)))
        return self.opened[-1]


def _forget(sequence: _Sequence) -> None:
    """Forgets a sequence's text. Raises nothing: a device that has failed may fail at this too, and is tried later."""
    try:
        sequence.drafter.forget()
    except Exception as error:
        _log.warning("a sequence of the draft cannot be emptied: %s", error)


def _note(words: str) -> None:
    _log.warning("%s", visible(words))
