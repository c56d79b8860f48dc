"""Makes the chooser of a sequence from its request, and prepares a step's choosers together."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, Final

from outrider.cloud.engine.runner import Share
from outrider.cloud.seam import GenerateRequest
from outrider.models.processors.chooser import AcceptanceChooser, TokenChooser, summaries
from outrider.models.processors.processor_plan import ProcessorPlan

_USUAL_S: Final = sys.getswitchinterval()
_SOON_S: Final = 0.0005
"""How long another thread may keep Python from the engine's while rows are chosen. Each call of numpy gives Python
away, some ten a row: beside a busy event loop, at 5 ms each, a step of 70 ms took 200."""


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


@contextmanager
def choosing(shares: Sequence[Share], rows: Any) -> Iterator[None]:
    """Around the choices of a step's rows: for choosers that report logprobs, computes what these need of all rows at
    once. rows: of all shares, in their order.
    """
    choosers = [(share.sequence.chooser, share.num_rows) for share in shares]
    if not any(chooser is not None for chooser, _ in choosers):
        yield
        return
    sys.setswitchinterval(_SOON_S)
    try:
        asking: list[tuple[TokenChooser, range]] = []
        first = 0
        for chooser, num_rows in choosers:
            if chooser is not None and chooser.num_logprobs is not None:
                asking.append((chooser, range(first, first + num_rows)))
            first += num_rows
        count = max((each.num_logprobs or 0 for each, _ in asking), default=0)
        known = iter(summaries([rows[index] for _, indices in asking for index in indices], count))
        for each, indices in asking:
            each.known = list(islice(known, len(indices)))
        yield
    finally:
        sys.setswitchinterval(_USUAL_S)
