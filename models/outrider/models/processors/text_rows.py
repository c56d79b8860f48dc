"""Follows a text on the host, and says before the logits are there what decides the rows of its next step.

A row counts only if the drafted tokens before it were right, so what changes it follows from the text and these tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.models.grammar.state import GrammarState, TookTooLong, excluded
from outrider.models.picks.sampling import SamplingParams
from outrider.models.processors.options import ProcessorOptions
from outrider.models.processors.options_processor import OptionsProcessor
from outrider.models.processors.processor_plan import ProcessorPlan

_FEW: Final = 8192
"""Ids of 152,000 that are listed in less time than the others are masked in."""
_Ids = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class RowChange:
    """What changes one row, in the order in which it acts; each step as in `options_processor`.

    mask: the ids that grammar and options allow, [(V + 7) // 8], one bit an id, lowest first; None: all. counts: of the
    penalized ids among the drafted tokens before the row, how often it comes after each; `TextPath.penalized` has the
    others. bad, stops: forbidden ids; of those that the options, or else a grammar, do not allow, none.
    """

    mask: NDArray[np.uint8] | None
    counts: dict[int, np.float32]
    bad: _Ids
    stops: _Ids

    def allows(self, token: int) -> bool:
        """Whether the mask does. Where a model masks all that the options allow, others are picked than a grammar's."""
        return self.mask is None or bool(self.mask[token // 8] >> token % 8 & 1)


@dataclass(slots=True)
class TextPath:
    """The rows of one text in a step: 0 is the one after the text, i + 1 the one after drafted token i.

    rows: those that can be reached, ascending: a path ends with the text, and before a drafted token that the grammar
    forbids. errors: what a row raises if it is reached. length: tokens of the text before the first row.
    allowed: by the options: ids, ascending, and a mask. factors: repetition, frequency, presence. penalized: ids, and
    how often the text has each: once for all rows, as a long prompt has many.
    """

    length: int
    biased: _Ids
    biases: NDArray[np.float32]
    factors: tuple[np.float32, np.float32, np.float32]
    allowed: tuple[_Ids, NDArray[np.uint8]] | None
    penalized: tuple[_Ids, NDArray[np.float32]]
    rows: dict[int, RowChange] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)

    def error_of(self, row: int, token: int, depth: int) -> BaseException | None:
        """What comes of picking `token` from a row that is reached, after `depth` drafted tokens; None: nothing."""
        if row in self.errors:
            return self.errors[row]
        change = self.rows.get(row)  # a row that no path should reach has none
        return None if change is not None and change.allows(token) else excluded(token, self.length + depth)

    def few(self, row: int) -> _Ids | None:
        """The ids that a row's mask allows, ascending, where they are few; None where options and a grammar make it."""
        mask = self.rows[row].mask
        if mask is None:
            return None
        if self.allowed is not None:
            ids, own = self.allowed
            return ids if mask is own else None
        filled = np.flatnonzero(mask)
        if filled.size > _FEW:
            return None
        inside = np.unpackbits(mask[filled], bitorder="little").view(np.bool_)
        ids = (filled[:, None] * 8 + np.arange(8)).ravel()[inside]
        return ids if ids.size <= _FEW else None


class TextRows:
    """The states of one text. Between two calls they have seen what is committed, and nothing else."""

    def __init__(self, plan: ProcessorPlan, prompt: Sequence[int], vocab_size: int) -> None:
        """prompt: all before the first token to generate. vocab_size: of the rows.

        Raises RequestError `grammar_excluded` where what of the prompt belongs to the text is outside the grammar.
        """
        self._vocab_size = vocab_size
        self._first = max(0, len(prompt) - plan.num_generated)
        self._stop_ids = plan.stop_ids
        self._grammar: GrammarState | None = None
        self._options = OptionsProcessor(plan.processors, (), vocab_size)
        self.states = plan.states(prompt, vocab_size)
        for state in self.states:
            if isinstance(state, GrammarState):
                self._grammar = state
            elif isinstance(state, OptionsProcessor):
                self._options = state
        self._allowed: tuple[_Ids, NDArray[np.uint8]] | None = None
        if self._options.allowed is not None:
            is_allowed = np.zeros(vocab_size, np.bool_)
            is_allowed[self._options.allowed] = True
            self._allowed = np.flatnonzero(is_allowed), np.packbits(is_allowed, bitorder="little")

    @property
    def length(self) -> int:
        """Tokens of the text that the states have seen."""
        return self.states[0].length if self.states else 0

    def follow(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Has the states see the text: what of the prompt belongs to it, and `output`. Raises RequestError."""
        own = len(prompt) - self._first
        for state in self.states:
            if state.length > own + len(output):
                state.truncate(own + len(output))
            length = state.length
            missing = [*prompt[self._first + length :], *output] if length < own else output[length - own :]
            for token in missing:
                state.advance(token)

    def walk(self, drafted: Sequence[int], parents: Sequence[int] | None = None) -> TextPath:
        """What changes the rows after the text and after each drafted token. The states stay where they are.

        parents: as in `acceptance.accept_tree`; None: a line. Raises what the first row raises; and TookTooLong, as
        what drafted tokens cost counts as well.
        """
        options, grammar = self._options, self._grammar
        factors = options.repetition, options.frequency, options.presence
        penalized = options.ids.copy(), options.counts.copy()
        path = TextPath(self.length, options.biased, options.biases, factors, self._allowed, penalized)
        length, before = options.length, list[int]()
        path.rows[0] = self._row(None if grammar is None else grammar.mask(self._vocab_size), before)
        following: defaultdict[int, list[int]] = defaultdict(list)
        for node, parent in enumerate(range(-1, len(drafted) - 1) if parents is None else parents):
            following[parent].append(node)
        # A guess's limits are not the text's.
        walkers = {-1: grammar.fork() if grammar is not None and drafted else None}
        waiting = [(node, -1, 0) for node in reversed(following[-1])]
        try:
            while waiting:
                node, parent, depth = waiting.pop()
                is_last = node == following[parent][-1]
                walker = walkers.pop(parent) if is_last else walkers[parent]
                if walker is not None and not is_last:
                    walker = walker.fork()
                if drafted[node] in self._stop_ids:
                    continue
                options.truncate(length + depth)
                try:
                    mask = self._after(walker, drafted[node])
                except (KeyboardInterrupt, SystemExit, TookTooLong):
                    raise
                except BaseException as error:  # a library's bugs are raised past Exception, too
                    path.errors[node + 1] = error
                    continue
                if walker is not None and mask is None:
                    continue
                options.advance(drafted[node])
                before[depth:] = [drafted[node]]
                path.rows[node + 1] = self._row(mask, before)
                walkers[node] = walker
                waiting += [(each, node, depth + 1) for each in reversed(following[node])]
        finally:
            options.truncate(length)
        path.rows = dict(sorted(path.rows.items()))
        return path

    def _after(self, walker: GrammarState | None, token: int) -> NDArray[np.uint8] | None:
        """The mask of the row after a drafted token; None without a grammar, or where it forbids the token."""
        if walker is None:
            return None
        with walker.cost.drafting():
            return walker.mask(self._vocab_size) if walker.accept(token) else None

    def _row(self, mask: NDArray[np.uint8] | None, before: Sequence[int]) -> RowChange:
        """The row that the options are before. mask: of the grammar. before: the drafted tokens before it."""
        options, among = self._options, mask
        slots, all_counts = options.slots, options.counts
        counts = {token: all_counts[slots[token]] for token in before if token in slots}
        if self._allowed is not None:
            _, among = self._allowed
            mask = among if mask is None else mask & among
        bad = options.bad_ids
        if ends := options.word_ends():
            bad = np.concatenate([bad, np.array(ends, dtype=np.intp)])
        stops = options.stop_ids if options.is_short else options.stop_ids[:0]
        if among is not None:
            bad, stops = (ids[(among[ids >> 3] >> (ids & 7) & 1) == 1] for ids in (bad, stops))
        return RowChange(mask, counts, bad, stops)


@dataclass(frozen=True, slots=True)
class AskedRows:
    """What a step needs to know of the rows of one text, besides their logits.

    positions: of the token that each row is for. narrowing: what truncates rows beyond `params`. path: what changes
    them; None: nothing. num_logprobs: likeliest tokens to report of each row; None: no logprobs at all. is_whole: that
    nothing is picked, and the caller gets the rows.
    """

    params: SamplingParams
    positions: Sequence[int]
    narrowing: ProcessorOptions | None = None
    path: TextPath | None = None
    num_logprobs: int | None = None
    is_whole: bool = False
