"""Makes the chooser of a sequence from its request, and prepares a step's choosers together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import cast

from outrider.cloud.engine.runner import Rows, Share, python_soon
from outrider.cloud.seam import GenerateRequest
from outrider.models.processors.chooser import AcceptanceChooser, PickedChooser, Row, TokenChooser, summaries
from outrider.models.processors.processor_plan import ProcessorPlan


def chooser_of(
    request: GenerateRequest, tokens: Sequence[int], vocab_size: int, *, picks: bool = False
) -> TokenChooser | None:
    """None where a plain pick is enough. tokens: all before the first one to generate. picks: whether the runtime
    does.
    """
    pick = request.pick
    plan = ProcessorPlan(pick.processors, request.stop_ids, request.num_generated, pick.grammar)
    narrowing, count = plan.narrowing, pick.num_logprobs
    if pick.terms.rule.needs_evidence:
        states = plan.states(tokens, vocab_size)
        return AcceptanceChooser(pick.params, states, count, narrowing, terms=pick.terms)
    if not plan.changes_rows and narrowing is None and count is None:
        return None
    if picks:
        return PickedChooser(plan, pick.params, count, tokens, vocab_size)
    return TokenChooser(pick.params, plan.states(tokens, vocab_size), count, narrowing)


@contextmanager
def choosing(shares: Sequence[Share], rows: Rows) -> Iterator[None]:
    """Around the choices of a step's rows. rows: of all shares, in their order.

    What logprobs need of each text's first row, which is always chosen from, is computed of all texts together.
    """
    choosers = [share.sequence.chooser for share in shares]
    if not any(choosers):
        yield
        return
    with python_soon():
        asking: defaultdict[int, list[tuple[TokenChooser, Row]]] = defaultdict(list)  # by tokens to report
        ends = accumulate(share.num_rows for share in shares)
        for share, chooser, end in zip(shares, choosers, ends, strict=True):
            if chooser is None or isinstance(chooser, PickedChooser):
                continue
            if chooser.num_logprobs is not None and share.num_rows:
                asking[chooser.num_logprobs].append((chooser, cast(Row, rows[end - share.num_rows])))
        for count, pairs in asking.items():
            for (chooser, _), known in zip(pairs, summaries([row for _, row in pairs], count), strict=True):
                chooser.known = known
        yield
