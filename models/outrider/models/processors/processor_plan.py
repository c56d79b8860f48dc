"""Lists what changes the rows of one text, and makes its states: for the engine, and for devices that draft.

A state is a row transform: it stands between a row of logits and the pick, and follows the text token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.models.grammar.compiler import CompiledGrammar
from outrider.models.picks.sampling import SurvivorFilter
from outrider.models.processors.narrowing import Narrowing
from outrider.models.processors.options import PLAIN, ProcessorOptions
from outrider.models.processors.options_processor import OptionsProcessor


class LogitProcessor(Protocol):
    """Changes the rows of one text. A pure function of its options and the tokens that it was given.

    It goes along drafted tokens, and back to what was committed.
    """

    @property
    def length(self) -> int:
        """Tokens of the text that it has seen, the prompt left out."""

    def apply(self, row: NDArray[np.float32]) -> None:
        """Changes one row, [V] float32, in place: that of the token after those seen. Leaves a finite maximum."""

    def advance(self, token: int) -> None:
        """Goes on by a token of the text."""

    def truncate(self, length: int) -> None:
        """Goes back to its first `length` tokens."""


def apply_all(states: Sequence[LogitProcessor], row: NDArray[np.float32]) -> NDArray[np.float32]:
    """A changed copy of the row; the row itself where there is no state."""
    if not states:
        return row
    changed = np.array(row, dtype=np.float32)
    for state in states:
        state.apply(changed)
    return changed


@dataclass(frozen=True, slots=True)
class ProcessorPlan:
    """What changes the rows of one text, besides `SamplingParams`.

    stop_ids: those that end the text; a minimum of tokens forbids them. num_generated: so many of the last tokens
    before the first one to generate belong to the text. grammar: the texts that are allowed; None allows all.
    """

    processors: ProcessorOptions = PLAIN
    stop_ids: frozenset[int] = frozenset()
    num_generated: int = 0
    grammar: CompiledGrammar | None = None

    def states(self, tokens: Sequence[int], vocab_size: int) -> list[LogitProcessor]:
        """States that have seen the text so far; none where a plain pick is enough.

        tokens: all before the first one to generate. vocab_size: of the rows. Raises RequestError `grammar_excluded`
        where the text so far is outside the grammar.
        """
        states: list[LogitProcessor] = []
        first = max(0, len(tokens) - self.num_generated)
        if self.grammar is not None:
            grammar = self.grammar.state()
            grammar.replay(tokens[first:])
            states.append(grammar)
        if self.processors.changes_rows:
            options = OptionsProcessor(self.processors, tokens[:first], vocab_size, self.stop_ids)
            for token in tokens[first:]:
                options.advance(token)
            states.append(options)
        return states

    @property
    def changes_rows(self) -> bool:
        """Whether there is a state."""
        return self.grammar is not None or self.processors.changes_rows

    @property
    def narrowing(self) -> SurvivorFilter | None:
        """What truncates the distribution; None where nothing does."""
        return Narrowing(self.processors) if self.processors.narrows else None


NO_PLAN = ProcessorPlan()
"""A plain pick."""
