"""Makes the chooser of a sequence from its request."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.cloud.seam import GenerateRequest
from outrider.models.processors.chooser import AcceptanceChooser, TokenChooser
from outrider.models.processors.processor_plan import ProcessorPlan


def chooser_of(request: GenerateRequest, tokens: Sequence[int], vocab_size: int) -> TokenChooser | None:
    """None where a plain pick is enough. tokens: all before the first one to generate."""
    pick = request.pick
    plan = ProcessorPlan(pick.processors, request.stop_ids, request.num_generated, pick.grammar)
    states, narrowing = plan.states(tokens, vocab_size), plan.narrowing
    if pick.terms.rule.needs_evidence:
        return AcceptanceChooser(pick.params, states, pick.num_logprobs, narrowing, terms=pick.terms)
    if not states and narrowing is None and pick.num_logprobs is None:
        return None
    return TokenChooser(pick.params, states, pick.num_logprobs, narrowing)
