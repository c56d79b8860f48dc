"""Changes a draft's rows as the target's are: logit processors that follow the text, go along a branch and back.

A target that leaves its grammar, or a grammar beyond its limits: the draft goes on without any processor.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.edge.drafting.cached_text import Logits
from outrider.models.errors import RequestError
from outrider.models.grammar.state import GrammarState
from outrider.models.processors.processor_plan import NO_PLAN, LogitProcessor, ProcessorPlan, apply_all


class DraftProcessors:
    """The processors of one text, whose tokens are `text`: a list that grows as the target commits."""

    def __init__(self, text: Sequence[int], plan: ProcessorPlan = NO_PLAN, vocab_size: int = 0) -> None:
        """vocab_size: ids of the draft's rows."""
        self._text = text
        self.narrowing = plan.narrowing
        self._num_seen = len(text)
        try:
            self._states: list[LogitProcessor] = plan.states(text, vocab_size)
        except RequestError:  # a text that is outside its grammar already: the target decides
            self._states = []

    def follow(self) -> bool:
        """Gives the processors the tokens committed since; False where there are none."""
        if not self._states:
            return False
        try:
            for state in self._states:
                for token in self._text[self._num_seen :]:
                    state.advance(token)
        except RequestError:
            self._states = []
        self._num_seen = len(self._text)
        return bool(self._states)

    def changed(self, row: Logits, branch: Sequence[int]) -> Logits | None:
        """The row after a branch as the target's would be changed. No processor is copied: all go back.

        None where no token may follow the branch: it is outside the grammar, so the target rejects it.
        """
        if not self.follow():
            return row
        lengths = [state.length for state in self._states]
        try:
            for state in self._states:
                for token in branch:
                    state.advance(token)
            return apply_all(self._states, row)
        except RequestError:
            return None
        finally:
            for state, length in zip(self._states, lengths, strict=True):
                state.truncate(length)

    def allows(self, branch: Sequence[int], token: int) -> bool:
        """Whether the grammar allows a token after a branch; True without one."""
        grammar = self._grammar()
        try:
            return grammar is None or grammar.validate([*branch, token]) > len(branch)
        except RequestError:
            self._states = []
            return True

    def forced(self, branch: Sequence[int]) -> list[int]:
        """The tokens that the grammar leaves no choice for after a branch."""
        grammar = self._grammar()
        try:
            if grammar is None or grammar.validate(branch) < len(branch):
                return []
            state = grammar.fork() if branch else grammar
            return state.forced() if all(map(state.accept, branch)) else []
        except RequestError:
            self._states = []
            return []

    def _grammar(self) -> GrammarState | None:
        """The grammar's state after the text; None without one."""
        if not self.follow():
            return None
        return next((state for state in self._states if isinstance(state, GrammarState)), None)
