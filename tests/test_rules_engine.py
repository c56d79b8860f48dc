"""What the engine asks of drafts whose rule judges by probabilities."""

from __future__ import annotations

import pytest
from tests.engine_harness import VOCAB, Collector, Harness

from outrider.cloud.seam import GenerateRequest
from outrider.models.errors import RequestError
from outrider.models.picks.acceptance import Rule, RuleTerms
from outrider.models.picks.rejection import WHOLE, Evidence, SparseDistribution
from outrider.models.picks.sampling import SamplingParams

REJECTION, TOLERANCE = RuleTerms(Rule.REJECTION), RuleTerms(Rule.TOLERANCE, delta=1.0)
SURE = SparseDistribution((1, 2), (WHOLE - 9, 9))


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
    ],
)
def test_a_draft_without_what_its_rule_needs_is_refused_by_name(
    terms: RuleTerms, evidence: tuple[Evidence, ...]
) -> None:
    request = GenerateRequest((1, 2), SamplingParams(), 4, draft=(1,), once=True, terms=terms, evidence=evidence)
    with pytest.raises(RequestError) as refused:
        Harness().engine.submit(request, Collector())
    assert refused.value.code == "wrong_evidence"


def test_ids_beyond_the_vocabulary_are_refused_in_a_distribution_too() -> None:
    beyond = (SparseDistribution((1, VOCAB), (WHOLE - 1, 1)),)
    request = GenerateRequest((1, 2), SamplingParams(), 4, draft=(1,), once=True, terms=REJECTION, evidence=beyond)
    with pytest.raises(RequestError) as refused:
        Harness().engine.submit(request, Collector())
    assert refused.value.code == "token_out_of_range"
