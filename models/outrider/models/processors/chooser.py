"""Chooses the target's tokens of one sequence, row by row, where a plain pick is not enough.

The rows of a pass are read in the text's order, each after the token before it is known. So a state follows the tokens
that were chosen, and needs no fork on this side, whatever shape the drafts have.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.models.errors import ModelFault
from outrider.models.picks.acceptance import AcceptedBranch, walk
from outrider.models.picks.sampling import SamplingParams, SurvivorFilter, pick
from outrider.models.processors.base import LogitProcessor, apply_all

Row = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's own probabilities, temperature 1, before any row transform.

    token, logprob: of the chosen token. top: the likeliest tokens with theirs, best first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def logprobs_of(row: Row, token: int, count: int) -> TokenLogprobs:
    """Of one row, [V] float32, with the `count` likeliest tokens, ties by id. The error is under 1e-5."""
    most = row.max()
    chances = row - most
    np.exp(chances, out=chances)  # in float32, which takes a tenth of float64's time
    norm = float(most) + math.log(chances.sum(dtype=np.float64))
    top: list[tuple[int, float]] = []
    if count > 0:
        count = min(count, row.size)
        among = np.flatnonzero(row >= np.partition(row, row.size - count)[row.size - count])
        order = among[np.lexsort((among, -row[among]))][:count]
        top = [(int(each), float(row[each]) - norm) for each in order]
    return TokenLogprobs(token, float(row[token]) - norm, tuple(top))


@dataclass(slots=True)
class TokenChooser:
    """The choices of one sequence. The states have seen what is committed, and nothing else, between two calls.

    num_logprobs: likeliest tokens to report for each token; None: no logprobs at all. narrowing: what truncates the
    distribution beyond `params`.
    """

    params: SamplingParams
    states: Sequence[LogitProcessor] = ()
    num_logprobs: int | None = None
    narrowing: SurvivorFilter | None = None
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

        evidence: of the drafted tokens, for rules that need more than equality (`acceptance_chooser`).
        """
        lengths = [state.length for state in self.states]
        self.logprobs = []

        def choose_at(row: int, depth: int) -> int:
            return self._choose_one(rows[row], position + depth)

        try:
            return walk(choose_at, drafted, parents, stop_ids, max_tokens)
        except BaseException:
            for state, length in zip(self.states, lengths, strict=True):
                state.truncate(length)
            raise

    def _choose_one(self, row: Row, position: int) -> int:
        # A transform may mask with -inf, but it mends no row: what is not finite in the model's own is a fault.
        if self.states and not math.isfinite(row.max()):
            raise ModelFault(f"the model's logits at position {position} are not finite")
        token = pick(apply_all(self.states, row), self.params, position, self.narrowing)
        for state in self.states:
            state.advance(token)
        if self.num_logprobs is not None:
            self.logprobs.append(logprobs_of(row, token, self.num_logprobs))
        return token
