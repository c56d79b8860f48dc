"""Drafts for the acceptance rules that need more than token ids: rejection and tolerance.

One path: a position has one sample. Under rejection the token is drawn from the distribution that is sent with it, with
noise that is not the target's. Under tolerance it is the draft's own pick, sent with its log-probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.edge.drafting.calibration import Guess, sampled_guess
from outrider.edge.drafting.drafter import Logits, Propose, ProposingDrafter
from outrider.models.acceptance import Rule, RuleTerms
from outrider.models.rejection import NUM_IDS, WHOLE, draw, probabilities, sparse
from outrider.models.sampling import SamplingParams, pick
from outrider.models.tolerance import LEAST_LOG, log_probability
from outrider.models.transforms.plan import NO_PLAN, RowPlan


class RuleDrafter:
    """A Drafter that makes one guess, with evidence. Belongs to one agent; several may share `model`."""

    max_branches = 1

    def __init__(self, model: ProposingDrafter, terms: RuleTerms, num_ids: int = NUM_IDS) -> None:
        """num_ids: of each distribution that is sent."""
        self._model = model
        self._propose = _tolerance if terms.rule is Rule.TOLERANCE else _rejection(num_ids)

    def begin(self, prompt: Sequence[int], params: SamplingParams, plan: RowPlan = NO_PLAN) -> None:
        """Starts a new text."""
        self._model.begin(prompt, params, plan)

    @property
    def length(self) -> int:
        """Tokens of the text."""
        return self._model.length

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens."""
        self._model.extend(tokens)

    @property
    def is_behind(self) -> bool:
        """The model's."""
        return self._model.is_behind

    def read_on(self) -> None:
        """The model reads a piece."""
        self._model.read_on()

    def guess(self, branches: Sequence[Sequence[int]], width: int) -> list[list[Guess]]:
        """One guess after each branch, whatever the width."""
        return self._model.guess_by(branches, self._propose)

    def continuation(self, max_tokens: int) -> list[Guess]:
        """None: what is looked up has no probabilities."""
        return []

    def close(self) -> None:
        """Releases the model."""
        self._model.close()


def _rejection(num_ids: int) -> Propose:
    def propose(logits: Logits, params: SamplingParams, position: int) -> list[Guess]:
        q = sparse(logits, params, num_ids)
        token = draw(q, params.seed, position)
        return [sampled_guess(token, q.weights[0] / WHOLE, q)]

    return propose


def _tolerance(logits: Logits, params: SamplingParams, position: int) -> list[Guess]:
    token = pick(logits, params, position)
    log_q = max(LEAST_LOG, log_probability(logits, params, token))
    warm = replace(params, temperature=1.0) if params.is_greedy else params
    return [sampled_guess(token, float(probabilities(logits, warm).max()), log_q)]
