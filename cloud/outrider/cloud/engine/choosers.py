"""Makes the chooser of a sequence from its request."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.cloud.seam import GenerateRequest
from outrider.models.transforms.by_rule import RuleChooser
from outrider.models.transforms.chooser import RowChooser
from outrider.models.transforms.plan import RowPlan


def chooser_of(request: GenerateRequest, tokens: Sequence[int], vocab_size: int) -> RowChooser | None:
    """None where a plain pick is enough. tokens: all before the first one to generate."""
    plan = RowPlan(request.rules, request.stop_ids, request.num_generated, request.grammar)
    states, narrowing = plan.states(tokens, vocab_size), plan.narrowing
    if request.terms.rule.needs_evidence:
        return RuleChooser(request.params, states, request.num_logprobs, narrowing, terms=request.terms)
    if not states and narrowing is None and request.num_logprobs is None:
        return None
    return RowChooser(request.params, states, request.num_logprobs, narrowing)
