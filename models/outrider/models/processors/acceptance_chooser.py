"""Chooses the target's tokens under the rules that judge a draft by probabilities: rejection and tolerance."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from outrider.models.errors import ModelFault
from outrider.models.picks.acceptance import AcceptedBranch, RuleTerms
from outrider.models.picks.rejection import Evidence, SparseDistribution, judge, probabilities
from outrider.models.picks.sampling import pick
from outrider.models.picks.tolerance import is_tolerated, log_probability
from outrider.models.processors.base import apply_all
from outrider.models.processors.chooser import Row, TokenChooser, logprobs_of


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
        lengths = [state.length for state in self.states]
        self.logprobs, self.num_tested, self.num_tolerated = [], 0, 0
        try:
            tokens = self._by_line(rows, drafted, evidence, position, stop_ids, max_tokens)
        except BaseException:
            for state, length in zip(self.states, lengths, strict=True):
                state.truncate(length)
            raise
        return AcceptedBranch(tokens, list(range(len(tokens) - 1)))

    def _by_line(
        self,
        rows: Sequence[Row] | Row,
        drafted: Sequence[int],
        evidence: Sequence[Evidence],
        position: int,
        stop_ids: Collection[int],
        max_tokens: int | None,
    ) -> list[int]:
        tokens: list[int] = []
        for index in range(len(drafted) + 1):
            if index == len(drafted):
                token, goes_on = self._choose_one(rows[index], position + index), False
            else:
                token, goes_on = self._judge(rows[index], drafted[index], evidence[index], position + index)
                self.num_tested += 1
                self._take(rows[index], token)
            tokens.append(token)
            if not goes_on or token in stop_ids or len(tokens) == max_tokens:
                break
        return tokens

    def _judge(self, row: Row, token: int, evidence: Evidence, position: int) -> tuple[int, bool]:
        changed = self._changed(row, position)
        if isinstance(evidence, SparseDistribution):
            return judge(probabilities(changed, self.params), token, evidence, self.params.seed, position)
        is_accepted = is_tolerated(log_probability(changed, self.params, token), evidence, self.terms.delta)
        picked = pick(changed, self.params, position)
        self.num_tolerated += is_accepted and picked != token
        return (token, True) if is_accepted else (picked, False)

    def _changed(self, row: Row, position: int) -> Row:
        if not math.isfinite(row.max()):
            raise ModelFault(f"the model's logits at position {position} are not finite")
        return apply_all(self.states, row)

    def _take(self, row: Row, token: int) -> None:
        for state in self.states:
            state.advance(token)
        if self.num_logprobs is not None:
            self.logprobs.append(logprobs_of(row, token, self.num_logprobs))
