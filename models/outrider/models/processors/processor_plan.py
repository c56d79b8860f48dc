"""Lists what changes the rows of one text, and makes its states: for the engine, and for devices that draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.models.grammar.compiler import CompiledGrammar
from outrider.models.picks.sampling import SurvivorFilter
from outrider.models.processors.base import LogitProcessor
from outrider.models.processors.narrowing import Narrowing
from outrider.models.processors.options import PLAIN, ProcessorOptions
from outrider.models.processors.options_processor import OptionsProcessor


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
    def narrowing(self) -> SurvivorFilter | None:
        """What truncates the distribution; None where nothing does."""
        return Narrowing.of(self.processors)


NO_PLAN = ProcessorPlan()
"""A plain pick."""
