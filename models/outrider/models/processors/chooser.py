"""Chooses the target's tokens of one sequence, row by row, where a plain pick is not enough.

`AcceptanceChooser` is for the rules that judge a draft by probabilities: rejection and tolerance. `PickedChooser` is
for runtimes that pick on a device.

The rows of a pass are read in the text's order, each after the token before it is known. So a state follows the tokens
that were chosen, and needs no fork on this side, whatever shape the drafts have.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from outrider.models.errors import ModelFault
from outrider.models.picks.acceptance import AcceptedBranch, RuleTerms, finite_pick, is_tolerated, log_probability, walk
from outrider.models.picks.rejection import Evidence, SparseDistribution, judge, probabilities
from outrider.models.picks.sampling import SamplingParams, SurvivorFilter, pick
from outrider.models.processors.processor_plan import LogitProcessor, ProcessorPlan, apply_all
from outrider.models.processors.text_rows import AskedRows, TextPath, TextRows

Row = NDArray[np.float32]
_TOGETHER: Final = 1 << 18  # logits of one call: a MiB


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's own probabilities, temperature 1, before any row transform.

    token, logprob: of the chosen token. top: the likeliest tokens with theirs, best first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


PickedRow = int | TokenLogprobs | Row | None
"""What a runtime gives of a row: its pick, with logprobs where they were asked for; None for a row that is not finite;
or the row itself."""


class RowSummary(NamedTuple):
    """What logprobs need of a whole row. norm: log(sum(exp(row))); the error is under 1e-5. top: ids, [n], among which
    are the likeliest tokens.
    """

    norm: float
    top: NDArray[np.intp]


def summaries(rows: Sequence[Row] | Row, count: int) -> list[RowSummary]:
    """Of rows, [V] float32 each, with at least the `count` likeliest tokens: several rows in one call of numpy.

    Each call lets other threads have Python, and waits to have it back.
    """
    found: list[RowSummary] = []
    num_together = max(1, _TOGETHER // len(rows[0])) if len(rows) else 1
    for first in range(0, len(rows), num_together):
        some = np.array(rows[first : first + num_together])
        tops = [np.empty(0, dtype=np.intp)] * len(some)
        if count > 0:
            kth = min(count, some.shape[1])
            whose, ids = np.nonzero(some >= np.partition(some, -kth)[:, -kth, None])
            tops = np.split(ids, np.searchsorted(whose, np.arange(1, len(some))))
        most = some.max(axis=1, keepdims=True)
        with np.errstate(invalid="ignore", over="ignore"):  # of rows that are not finite, which no pick takes
            some -= most
        np.exp(some, out=some)  # in float32, which takes a tenth of float64's time
        norms = most[:, 0] + np.log(some.sum(axis=1, dtype=np.float64))
        found += map(RowSummary, norms.tolist(), tops)
    return found


def logprobs_of(row: Row, token: int, count: int, known: RowSummary | None = None) -> TokenLogprobs:
    """Of one row, [V] float32, with the `count` likeliest tokens, ties by id. known: of the row, for as many."""
    norm, among = summaries([row], count)[0] if known is None else known
    order = among[np.lexsort((among, -row[among]))][:count]
    return TokenLogprobs(token, float(row[token]) - norm, tuple((int(each), float(row[each]) - norm) for each in order))


@dataclass(slots=True)
class TokenChooser:
    """The choices of one sequence. The states have seen what is committed, and nothing else, between two calls.

    num_logprobs: likeliest tokens to report for each token; None: no logprobs at all. narrowing: what truncates the
    distribution beyond `params`. known: the summary of the first row of the next `choose`, if any.
    """

    params: SamplingParams
    states: Sequence[LogitProcessor] = ()
    num_logprobs: int | None = None
    narrowing: SurvivorFilter | None = None
    known: RowSummary | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the tokens of the last `choose`."""

    def follow(self, tokens: Sequence[int], first: int) -> None:
        """Has the states see the text that `tokens` hold from index `first` on, and nothing else."""
        count = len(tokens) - first
        for state in self.states:
            if state.length > count:
                state.truncate(count)
            for token in tokens[first + state.length :]:
                state.advance(token)

    def go_back(self, tokens: Sequence[int], first: int, kept: int) -> None:
        """As `follow`, where of the text that the states have seen only what is before index `kept` is left."""
        for state in self.states:
            state.truncate(min(state.length, kept - first))
        self.follow(tokens, first)

    def choose(
        self,
        rows: Sequence[Row] | Row,
        drafted: Sequence[int],
        parents: Sequence[int],
        position: int,
        *,
        stop_ids: Collection[int] = (),
        max_tokens: int | None = None,
        evidence: Sequence[Any] = (),
    ) -> AcceptedBranch:
        """As `acceptance.accept_tree`. Where it raises ModelFault, the states are where they were.

        evidence: of the drafted tokens, for rules that need more than equality (`AcceptanceChooser`).
        """

        def choose_at(row: int, depth: int) -> int:
            return self._choose_one(rows, row, position + depth)

        with self._going_back():
            return walk(choose_at, drafted, parents, stop_ids, max_tokens)

    @contextmanager
    def _going_back(self) -> Iterator[None]:
        """Begins a `choose`. Where it raises, the states are where they were."""
        lengths = [state.length for state in self.states]
        self.logprobs = []
        try:
            yield
        except BaseException:
            for state, length in zip(self.states, lengths, strict=True):
                state.truncate(length)
            raise

    def _choose_one(self, rows: Sequence[Row] | Row, index: int, position: int) -> int:
        token = pick(self._changed(rows[index], position), self.params, position, self.narrowing)
        self._take(rows, index, token)
        return token

    def _changed(self, row: Row, position: int) -> Row:
        # A transform may mask with -inf, but it mends no row: what is not finite in the model's own is a fault.
        if self.states and not math.isfinite(row.max()):
            raise ModelFault(f"the model's logits at position {position} are not finite")
        return apply_all(self.states, row)

    def _take(self, rows: Sequence[Row] | Row, index: int, token: int) -> None:
        for state in self.states:
            state.advance(token)
        if self.num_logprobs is not None:
            known = self.known if index == 0 else None
            self.logprobs.append(logprobs_of(rows[index], token, self.num_logprobs, known))


class PickedChooser(TokenChooser):
    """As `TokenChooser`, for a runtime that changes the rows and picks from them (`PickingRuntime`)."""

    def __init__(
        self, plan: ProcessorPlan, params: SamplingParams, num_logprobs: int | None, text: Sequence[int], size: int
    ) -> None:
        """text: all before the first token to generate. size: of the rows. Raises RequestError as `TextRows`."""
        self._text = TextRows(plan, text, size)
        self._options = plan.processors if plan.processors.narrows else None
        self._path: TextPath | None = None
        self._error: BaseException | None = None
        super().__init__(params, self._text.states, num_logprobs)

    def ask(self, drafted: Sequence[int], parents: Sequence[int], positions: Sequence[int]) -> AskedRows:
        """What the runtime has to know of the rows of the next `choose`, which raises what goes wrong here."""
        self._path = self._error = None
        try:
            if self.states:
                self._path = self._text.walk(drafted, parents)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a library's bugs are raised past Exception, too
            self._error = error
        return AskedRows(self.params, positions, self._options, self._path, self.num_logprobs)

    def _choose_one(self, rows: Sequence[Any] | Row, index: int, position: int) -> int:
        if self._error is not None:
            raise self._error
        picked = rows[index]
        token = finite_pick(picked.token if isinstance(picked, TokenLogprobs) else cast(int | None, picked))
        if self._path is not None:
            error = self._path.error_of(index, token, self.states[0].length - self._path.length)
            if error is not None:
                raise error
        for state in self.states:
            state.advance(token)
        if isinstance(picked, TokenLogprobs):
            self.logprobs.append(picked)
        return token


@dataclass(slots=True)
class AcceptanceChooser(TokenChooser):
    """As `TokenChooser`, for drafts that are a line, with evidence. A rule of equality has no use for it.

    num_tested, num_tolerated: of the last `choose`: drafted tokens judged, and of those accepted the ones that the
    target would not have picked.
    """

    terms: RuleTerms = field(default_factory=RuleTerms)
    num_tested: int = 0
    num_tolerated: int = 0

    def choose(
        self,
        rows: Sequence[Row] | Row,
        drafted: Sequence[int],
        parents: Sequence[int],
        position: int,
        *,
        stop_ids: Collection[int] = (),
        max_tokens: int | None = None,
        evidence: Sequence[Evidence] = (),
    ) -> AcceptedBranch:
        """As `TokenChooser.choose`; `parents` is a line's."""
        assert len(evidence) == len(drafted), "each drafted token has its evidence"
        self.num_tested = self.num_tolerated = 0
        tokens: list[int] = []
        with self._going_back():
            for index in range(len(drafted) + 1):
                if index == len(drafted):
                    token, goes_on = self._choose_one(rows, index, position + index), False
                else:
                    token, goes_on = self._judge(rows[index], drafted[index], evidence[index], position + index)
                    self.num_tested += 1
                    self._take(rows, index, token)
                tokens.append(token)
                if not goes_on or token in stop_ids or len(tokens) == max_tokens:
                    break
        return AcceptedBranch(tokens, list(range(len(tokens) - 1)))

    def _judge(self, row: Row, token: int, evidence: Evidence, position: int) -> tuple[int, bool]:
        changed = self._changed(row, position)
        if isinstance(evidence, SparseDistribution):
            return judge(probabilities(changed, self.params), token, evidence, self.params.seed, position)
        is_accepted = is_tolerated(log_probability(changed, self.params, token), evidence, self.terms.delta)
        picked = pick(changed, self.params, position)
        self.num_tolerated += is_accepted and picked != token
        return (token, True) if is_accepted else (picked, False)
