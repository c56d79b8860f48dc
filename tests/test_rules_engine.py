"""What the engine asks of drafts whose rule judges by probabilities."""

from __future__ import annotations

import pytest
from tests.engine_harness import VOCAB, Collector, Harness, refused
from tests.requests import flat_request

from outrider.cloud.engine.cache import SequenceCache
from outrider.models.picks.acceptance import Rule, RuleTerms
from outrider.models.picks.rejection import WHOLE, Evidence, SparseDistribution
from outrider.models.picks.sampling import SamplingParams

REJECTION, TOLERANCE = RuleTerms(Rule.REJECTION), RuleTerms(Rule.TOLERANCE, delta=1.0)
SURE = SparseDistribution((1, 2), (WHOLE - 9, 9))
BEYOND = SparseDistribution((1, VOCAB), (WHOLE - 1, 1))


@pytest.mark.parametrize(
    ("terms", "evidence"),
    [
        (REJECTION, ()),
        (REJECTION, (-0.1,)),
        (REJECTION, (SparseDistribution((1, 2), (WHOLE, 1)),)),
        (REJECTION, (SparseDistribution((2, 3), (WHOLE - 1, 1)),)),
        (TOLERANCE, ()),
        (TOLERANCE, (SURE,)),
        (RuleTerms(), (SURE,)),
        (REJECTION, (BEYOND,)),
    ],
)
def test_a_draft_without_what_its_rule_needs_is_refused_by_name(
    terms: RuleTerms, evidence: tuple[Evidence, ...]
) -> None:
    """So are ids beyond the vocabulary in its distribution."""
    request = flat_request((1, 2), SamplingParams(), 4, draft=(1,), once=True, terms=terms, evidence=evidence)
    with refused("token_out_of_range" if evidence == (BEYOND,) else "wrong_evidence"):
        Harness().engine.submit(request, Collector())


def test_a_draft_with_probabilities_is_cut_where_the_cache_lacks_room_for_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether its first token is judged must not depend on how many follow: a client may stop by its tokens."""
    harness, sink = Harness(), Collector()
    grow = SequenceCache.grow
    monkeypatch.setattr(
        SequenceCache, "grow", lambda cache, sequence, length: length <= 4 and grow(cache, sequence, length)
    )
    terms = RuleTerms(Rule.TOLERANCE, delta=1e9)
    request = flat_request(
        (1, 2), SamplingParams(1.0), 9, draft=(5, 6, 7, 8), once=True, terms=terms, evidence=(-0.1,) * 4
    )
    harness.engine.submit(request, sink)
    harness.run()
    assert sink.tokens[:2] == [5, 6] and len(sink.tokens) == 3
