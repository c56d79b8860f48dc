"""Drafts with the best drafter that works: steps down when one fails, and tries it again later.

A driver may crash in mid-text, a device may be unplugged or run out of memory. The text is the target's whatever
drafts, so it goes on with the next drafter, which reads the text so far.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

from outrider.edge.drafting.calibration import Guess
from outrider.edge.drafting.drafter import Drafter, ModelDrafter, NgramDrafter, Propose
from outrider.models.breaker import Breaker
from outrider.models.picks.sampling import SamplingParams
from outrider.models.processors.processor_plan import NO_PLAN, ProcessorPlan
from outrider.models.runtimes.ngram import QuotedText

logger = logging.getLogger(__name__)

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Rung:
    """A drafter that a text may use.

    words: what drafts, for people. open: gives the drafter, once per text; may take long. None: it has no room now, and
    is asked again at each commit. breaker: shared by all texts. give_up: takes a drafter that failed as often as
    `Breaker.failed` says: its device may have lost the model, so `open` gives another one.
    """

    words: str
    open: Callable[[], Drafter | None]
    breaker: Breaker = field(default_factory=Breaker)
    give_up: Callable[[Drafter], None] = lambda drafter: drafter.close()


class LadderDrafter(Drafter):
    """A Drafter made of several, the best first. Raises what the last one raises when none is left.

    on_step: called in the drafting thread with a sentence at each change. failed: rungs that raised, by index.
    """

    def __init__(
        self,
        rungs: Sequence[Rung],
        on_step: Callable[[str], None] = lambda words: None,
        opened: Drafter | None = None,
    ) -> None:
        """opened: the first rung's drafter, where it is open already."""
        self._rungs = rungs
        self._on_step = on_step
        self._is_looked_up = False
        self._quoted: Sequence[QuotedText] = ()
        self._is_closed = False
        self._opened: dict[int, Drafter] = {} if opened is None else {0: opened}
        self._full: set[int] = set()  # without room for this text so far
        self._current: int | None = None
        self._text: list[int] = []
        self._num_prompt = 0
        self._params = SamplingParams()
        self._plan = NO_PLAN
        self.failed: set[int] = set()

    def with_lookup(self, quoted: Sequence[QuotedText] = ()) -> LadderDrafter:
        """Itself: from the next text on, each of its drafters does."""
        self._is_looked_up, self._quoted = True, quoted
        self._opened = {index: drafter.with_lookup(quoted) for index, drafter in self._opened.items()}
        return self

    def begin(self, prompt: Sequence[int], params: SamplingParams, plan: ProcessorPlan = NO_PLAN) -> None:
        """Starts a new text with the best drafter that works now."""
        self._text, self._params, self._plan = list(prompt), params, plan
        self._num_prompt = len(prompt)
        self._current = None
        self._full.clear()
        self._climb(None)

    @property
    def length(self) -> int:
        """Tokens of the text."""
        return len(self._text)

    @property
    def max_branches(self) -> int:
        """The present drafter's."""
        return self._opened[self._current].max_branches if self._current is not None else 1

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens. A better drafter that may be tried again, or has room now, takes over here."""
        self._text.extend(tokens)
        before = self._current
        self._climb(None)
        if self._current == before and before is not None:
            self._do(lambda drafter: drafter.extend(tokens))

    @property
    def is_behind(self) -> bool:
        """The present drafter's."""
        return self._do(lambda drafter: drafter.is_behind)

    def read_on(self) -> None:
        """The present drafter reads a piece."""
        drafter = self._opened.get(self._current) if self._current is not None else None
        # One that takes over in here may have nothing to read.
        self._do(lambda present: present.read_on() if present is drafter or present.is_behind else None)

    def guess(self, branches: Sequence[Sequence[int]], width: int) -> list[list[Guess]]:
        """The present drafter's guesses."""
        return self._do(lambda drafter: drafter.guess(branches, width), is_guess=True)

    def guess_by(self, branches: Sequence[Sequence[int]], propose: Propose) -> list[list[Guess]]:
        """The present drafter's."""
        return self._do(lambda drafter: drafter.guess_by(branches, propose), is_guess=True)

    def continuation(self, max_tokens: int) -> list[Guess]:
        """The present drafter's."""
        return self._do(lambda drafter: drafter.continuation(max_tokens))

    @property
    def model_drafter(self) -> ModelDrafter | None:
        """The present drafter's."""
        return self._opened[self._current].model_drafter if self._current is not None else None

    def complete(self, found: list[list[Guess]], branches: Sequence[Sequence[int]], width: int) -> list[list[Guess]]:
        """The present drafter's."""
        assert self._current is not None, "a ladder without a rung guesses alone"
        completed = self._opened[self._current].complete(found, branches, width)
        self._rungs[self._current].breaker.succeeded()
        return completed

    def close(self) -> None:
        """Releases all drafters; opens no more."""
        self._is_closed = True
        for drafter in list(self._opened.values()):  # the thread may give one up meanwhile
            drafter.close()

    def _do(self, call: Callable[[Drafter], Found], *, is_guess: bool = False) -> Found:
        """The call's result by the best drafter that does not fail. is_guess: one that guesses works again."""
        while True:
            if self._current is None:
                self._climb(None)
            index = self._current
            assert index is not None, "a ladder without a rung that works raises"
            try:
                found = call(self._opened[index])
            except Exception as error:  # each runtime has its own types
                if self._is_closed:
                    raise
                self._current = None
                self._climb(error, self._failed(index, error))
            else:
                if is_guess:
                    self._rungs[index].breaker.succeeded()
                return found

    def _failed(self, index: int, error: Exception) -> str:
        """Leaves out a rung that raised; says so in words."""
        rung = self._rungs[index]
        self.failed.add(index)
        if rung.breaker.failed() and (drafter := self._opened.pop(index, None)) is not None:
            with suppress(Exception):  # a lost device may fail at this, too
                rung.give_up(drafter)
        logger.warning("drafting with %s failed: %s", rung.words, error, exc_info=error)
        return f"{rung.words} failed ({type(error).__name__}: {error})"

    def _climb(self, error: Exception | None, why: str = "") -> None:
        """Goes to the best rung that may be used now, if it is not the present one. Raises where none is left."""
        last = error
        best = len(self._rungs) if self._current is None else self._current
        for index in range(best):
            rung = self._rungs[index]
            is_waiting = index in self._full
            # One that waits must not use up the trial of a rung that failed: others could use the rung.
            if rung.breaker.pause_s > 0.0 if is_waiting else not rung.breaker.allows():
                continue
            try:
                drafter = self._open(index)
                if drafter is None:
                    self._full.add(index)
                    continue
                self._full.discard(index)
                if is_waiting and not rung.breaker.allows():
                    continue
                num_new = len(self._text) - self._num_prompt
                plan = replace(self._plan, num_generated=self._plan.num_generated + num_new)
                drafter.begin(self._text, self._params, plan)
            except Exception as failure:
                self._full.discard(index)
                why, last = self._failed(index, failure), failure
                continue
            is_change = (self._current is not None and not is_waiting) or bool(why)
            self._current = index
            if is_change:
                self._on_step(f"{why or f'{rung.words} is tried again'}; drafting goes on with {rung.words}")
            return
        if self._current is None:
            if why:
                self._on_step(f"{why}; this text goes on without drafts")
            raise last or RuntimeError("every draft has failed a moment ago; the next text tries again")

    def _open(self, index: int) -> Drafter | None:
        if index not in self._opened:
            drafter = self._rungs[index].open()
            if drafter is None:
                return None
            self._opened[index] = drafter.with_lookup(self._quoted) if self._is_looked_up else drafter
        return self._opened[index]


class WaitingDrafter(NgramDrafter):
    """A Drafter that guesses nothing: the last rung of a text that waits for a better one."""

    def continuation(self, max_tokens: int) -> list[Guess]:
        """No path, and no guess."""
        return []
