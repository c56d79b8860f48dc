"""The acceptance rules that judge drafts by probabilities: as pure functions, and what the engine asks of drafts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.chi_square import CHANCE, PROMPT, Languages
from tests.engine_harness import VOCAB, Collector, Harness, refused
from tests.requests import flat_request
from tests.test_choosers import NoneTwice

from outrider.cloud.engine.cache import SequenceCache
from outrider.models.errors import ModelFault
from outrider.models.picks.acceptance import WARM_UP, DeltaCalibrator, Rule, RuleTerms, is_tolerated, log_probability
from outrider.models.picks.rejection import WHOLE, Evidence, SparseDistribution, draw, probabilities, sparse
from outrider.models.picks.sampling import SamplingParams, pick
from outrider.models.processors.chooser import AcceptanceChooser

REJECTION = RuleTerms(Rule.REJECTION)


def write(languages: Languages, seed: int, num_verified: Callable[[list[float]], int] = len) -> list[int]:
    """A text by rejection. num_verified: how many of the drafted tokens a pass looks at, given their q."""
    chooser, lengths = AcceptanceChooser(languages.with_seed(seed), terms=REJECTION), random.Random(seed)
    text: list[int] = []
    while len(text) < languages.length:
        tokens, qs = languages.block(text, min(lengths.randrange(4), languages.length - len(text) - 1), seed)
        count = num_verified([q.of(token) for q, token in zip(qs, tokens, strict=True)])
        rows = [languages.target_row((*text, *tokens[:index])) for index in range(count + 1)]
        at, parents = len(PROMPT) + len(text), range(-1, count - 1)
        text += chooser.choose(rows, tokens[:count], parents, at, evidence=qs[:count]).tokens
    return text[: languages.length]


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_rejection_writes_every_text_as_often_as_the_target(top_p: float) -> None:
    """Chi-square over all texts of three tokens, with drafts of 0 to 2 tokens per pass."""
    languages = Languages(top_p=top_p)
    assert languages.excess([write(languages, seed) for seed in range(4000)]) < CHANCE


def test_a_policy_that_looks_at_the_drawn_token_is_biased_and_the_test_shows_it() -> None:
    """The same test fails where only tokens that the draft finds likely are verified."""
    languages = Languages()

    def only_likely(chances: list[float]) -> int:
        return next((index for index, chance in enumerate(chances) if chance < 0.5), len(chances))

    assert languages.excess([write(languages, seed, only_likely) for seed in range(2000)]) > 2 * CHANCE


def test_the_target_s_distribution_is_what_pick_draws_from() -> None:
    row = np.array([1.0, 3.0, 2.0, -4.0, 2.5], dtype=np.float32)
    params = SamplingParams(temperature=0.7, top_k=4, top_p=0.95)
    p, picks = probabilities(row, params), [pick(row, replace(params, seed=seed), 3) for seed in range(4000)]
    assert p.sum() == pytest.approx(1.0) and np.bincount(picks, minlength=5) / 4000 == pytest.approx(p, abs=0.03)
    assert probabilities(row, SamplingParams()).tolist() == [0, 1, 0, 0, 0]
    with pytest.raises(ModelFault):
        probabilities(np.array([np.nan, 1.0], dtype=np.float32), params)


@given(
    logits=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40),
    count=st.integers(1, 16),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    top_p=st.sampled_from([1.0, 0.5]),
    seed=st.integers(0, 2**63 - 1),
)
@example(logits=[0.0, 1e-9], count=2, temperature=1.0, top_p=0.5, seed=0)  # one weight, and top-p keeps the first
def test_a_sparse_distribution_sums_to_one_exactly_and_has_what_is_drawn(
    logits: list[float], count: int, temperature: float, top_p: float, seed: int
) -> None:
    """Its length depends on the parameters and the vocabulary only."""
    row = np.array(logits, dtype=np.float32)
    q = sparse(row, SamplingParams(temperature=temperature, top_p=top_p), count)
    assert sum(q.weights) == WHOLE and min(q.weights) >= 0 and q.weights[0] == max(q.weights)
    assert len(q.ids) == (1 if temperature == 0.0 else min(count, len(logits)))
    assert q.fault(draw(q, seed, 7)) is None


def test_masked_ids_get_no_weight_and_the_length_stays() -> None:
    row = np.array([-np.inf, 2.0, -np.inf, 1.0, -np.inf], dtype=np.float32)
    q = sparse(row, SamplingParams(temperature=1.0), 4)
    assert q.ids[:2] == (1, 3) and len(set(q.ids)) == 4 and q.weights[2:] == (0, 0) and sum(q.weights) == WHOLE


def test_states_change_both_rules_rows_and_follow_the_tokens() -> None:
    """p is the distribution after the row's states: a token that they forbid is never accepted, nor written twice."""
    rows = np.zeros((4, 3), dtype=np.float32)
    q = SparseDistribution((0, 1, 2), (WHOLE - 2, 1, 1))
    for seed in range(50):
        state = NoneTwice()
        chooser = AcceptanceChooser(SamplingParams(temperature=1.0, seed=seed), [state], terms=REJECTION)
        branch = chooser.choose(rows, [0, 0], [-1, 0], 5, evidence=[q, q], max_tokens=3)
        assert branch.tokens == state.seen and len(set(branch.tokens)) == len(branch.tokens)
    terms = RuleTerms(Rule.TOLERANCE, delta=9.0)
    chooser = AcceptanceChooser(SamplingParams(temperature=1.0), [NoneTwice()], 1, terms=terms)
    branch = chooser.choose(rows, [1, 1], [-1, 0], 5, evidence=[-0.1, -0.1])
    assert branch.tokens[0] == 1 and branch.nodes == [0] and 1 not in branch.tokens[1:]
    assert [each.token for each in chooser.logprobs] == branch.tokens and (rows == 0.0).all()


def test_a_fault_in_a_row_leaves_states_where_they_were() -> None:
    for terms, q in ((REJECTION, SparseDistribution((0,), (WHOLE,))), (RuleTerms(Rule.TOLERANCE, delta=5.0), -1.0)):
        rows, state = np.array([[9.0, -9.0, -9.0], [np.nan] * 3], dtype=np.float32), NoneTwice()
        chooser = AcceptanceChooser(SamplingParams(temperature=1.0, seed=2), [state], terms=terms)
        with pytest.raises(ModelFault):
            chooser.choose(rows, [0], [-1], 5, evidence=[q])
        assert state.seen == []


# -- tolerance ---------------------------------------------------------------------------------------------------------


def test_tolerance_accepts_while_the_target_is_not_much_less_sure() -> None:
    rows = np.log(np.array([[0.2, 0.7, 0.1]] * 3, dtype=np.float32))
    params = SamplingParams(temperature=1.0, seed=3)
    for own in (params, SamplingParams()):  # at 0: those of temperature 1
        assert log_probability(rows[0], own, 0) == pytest.approx(np.log(0.2))
    assert log_probability(rows[0], SamplingParams(temperature=1.0, top_k=1), 0) == -np.inf
    assert is_tolerated(-1.0, -0.5, 0.5) and not is_tolerated(-1.01, -0.5, 0.5)

    def accepted(delta: float) -> int:
        chooser = AcceptanceChooser(params, terms=RuleTerms(Rule.TOLERANCE, delta=delta))
        log_q = float(np.log(0.5))
        return len(chooser.choose(rows, [0, 2], [-1, 0], 4, evidence=[log_q, log_q]).nodes)

    # log q - log p is 0.92 of the first, 1.61 of the second.
    assert [accepted(delta) for delta in (0.9, 1.0, 1.7)] == [0, 1, 2]


@pytest.mark.parametrize("goal", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0])
def test_tolerance_is_calibrated_to_the_acceptance_that_is_asked_for(goal: float, spread: float) -> None:
    """Within 0.03 after the warm-up, whatever the scale of log q - log p, and where it drifts."""
    chance, calibrator, fixed = random.Random(7), DeltaCalibrator(0.5, goal), DeltaCalibrator(0.5)
    num_accepted, num = 0, 1000
    for index in range(WARM_UP + num):
        gap = chance.gauss(spread / 2 + index / 1000, spread)
        is_accepted = is_tolerated(-gap, 0.0, calibrator.delta)
        calibrator.observe(is_accepted)
        num_accepted += is_accepted and index >= WARM_UP
    assert num_accepted / num == pytest.approx(goal, abs=0.03 if spread < 3.0 else 0.05)
    fixed.observe(True)
    assert fixed.delta == 0.5


TOLERANCE = RuleTerms(Rule.TOLERANCE, delta=1.0)
SURE = SparseDistribution((1, 2), (WHOLE - 9, 9))
NO_DISTRIBUTIONS = (
    SparseDistribution((1, 2), (WHOLE + 5, -5)),
    SparseDistribution((1, 2), (WHOLE, 1)),
    SparseDistribution((1, 1), (WHOLE // 2, WHOLE // 2)),
    SparseDistribution((), ()),
    SparseDistribution(tuple(range(17)), (WHOLE, *[0] * 16)),
    SparseDistribution((1, 2), (WHOLE,)),
    SparseDistribution((2, 3), (WHOLE // 2, WHOLE // 2)),  # without the drafted token
    SparseDistribution((1, 2), (0, WHOLE)),
)
BEYOND = SparseDistribution((1, VOCAB), (WHOLE - 1, 1))


@pytest.mark.parametrize(
    ("terms", "evidence"),
    [
        (REJECTION, ()),
        (REJECTION, (-0.1,)),
        *((REJECTION, (each,)) for each in NO_DISTRIBUTIONS),
        (TOLERANCE, ()),
        (TOLERANCE, (SURE,)),
        (RuleTerms(), (SURE,)),
        (REJECTION, (BEYOND,)),
    ],
)
def test_a_draft_without_what_its_rule_needs_is_refused_by_name(
    terms: RuleTerms, evidence: tuple[Evidence, ...]
) -> None:
    """So are what is no distribution, and ids beyond the vocabulary in one."""
    request = flat_request((1, 2), SamplingParams(), 4, draft=(1,), once=True, terms=terms, evidence=evidence)
    with refused("token_out_of_range" if evidence == (BEYOND,) else "wrong_evidence"):
        Harness().engine.submit(request, Collector())


def test_a_draft_with_probabilities_is_cut_where_the_cache_lacks_room_for_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether its first token is judged must not depend on how many follow: a client may stop by its tokens."""
    terms, params, grow = RuleTerms(Rule.TOLERANCE, delta=1e9), SamplingParams(1.0), SequenceCache.grow
    monkeypatch.setattr(
        SequenceCache, "grow", lambda cache, sequence, length: length <= 4 and grow(cache, sequence, length)
    )
    drafted = {"draft": (5, 6, 7, 8), "once": True, "terms": terms, "evidence": (-0.1,) * 4}
    tokens = Harness().finished((1, 2), 9, params=params, **drafted).tokens
    assert tokens[:2] == [5, 6] and len(tokens) == 3
