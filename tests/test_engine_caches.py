"""Tests that caches are their owner's own, and estimates of a step."""

from __future__ import annotations

import pytest
from tests.engine_harness import SAMPLED, Harness, plain, prompt_of, refused

from outrider.cloud.engine import EngineConfig, Policy
from outrider.cloud.pending.drafting import Drafting
from outrider.cloud.pending.estimators import AcceptanceEstimator, StepSize, StepTimeCurve
from outrider.cloud.pending.pending_drafts import PendingDrafts
from outrider.cloud.pending.policy import NO_WAIT

ALICE, BOB = b"alice", b"bob"


@pytest.mark.parametrize("is_shared", [False, True])
def test_cached_prompts_are_the_owners_own(is_shared: bool) -> None:
    """Neither usage nor a shorter prefill shows what another owner has sent, unless the operator shares caches."""
    harness = Harness(config=EngineConfig(share_between_owners=is_shared), block_size=4)
    prompt = list(range(30))

    def cached(owner: bytes) -> int:
        harness.batches.clear()
        collector = harness.finished(prompt, 3, owner=owner)
        assert collector.tokens == plain(prompt, SAMPLED, 3)
        assert harness.batches[0] == [30 - collector.ended.usage.cached_prompt_tokens]
        return collector.ended.usage.cached_prompt_tokens

    assert [cached(ALICE), cached(ALICE)] == [0, 28]
    assert [cached(BOB), cached(BOB)] == [28 if is_shared else 0, 28]


def test_a_parked_prefix_is_its_owners_and_its_name_cannot_be_computed() -> None:
    """Another owner that knows the text or even the name gets 409, and the owner's own call still finds its prefix."""
    harness = Harness()
    prompt = prompt_of(3)
    name = harness.parked(prompt, ALICE)
    assert harness.parked(prompt, BOB) != name
    assert Harness().parked(prompt, ALICE) != name  # another server
    with refused("prefix_not_held"):
        harness.submit([], 1, once=True, prefix_hash=name, owner=BOB)
    assert harness.finished([], 1, once=True, prefix_hash=name, owner=ALICE).tokens == plain(prompt, SAMPLED, 2)[1:]


def test_as_many_prefixes_are_held_as_one_call_can_have() -> None:
    """256 items leave 256 prefixes, and another owner's do not push them out."""
    harness = Harness(num_blocks=4096)
    names = [harness.parked(prompt_of(i), ALICE) for i in range(256)]
    for i in range(300):
        harness.parked(prompt_of(i), BOB)
    assert harness.engine.stats().parked == 2 * 256
    for name in names:
        harness.submit([], 1, once=True, prefix_hash=name, owner=ALICE)
    harness.run()


def test_a_sequence_that_gave_way_does_not_count_its_own_blocks_as_cached() -> None:
    """Two prompts that share nothing take turns in a small cache: nothing of them was cached when they came."""
    harness = Harness(num_blocks=20)
    texts = [harness.submit(prompt_of(i, 30), 40)[1] for i in range(2)]
    harness.run()
    assert harness.engine.stats().totals.preempted > 0
    assert [c.end.usage.cached_prompt_tokens for c in texts if c.end] == [0, 0]
    assert harness.engine.stats().totals.prefix_hit_tokens == 0


def test_the_curve_learns_what_a_long_context_costs() -> None:
    """Steps of one size at growing contexts: the time is told apart from the time of more tokens."""
    curve = StepTimeCurve()
    for past in range(0, 2_000, 5):
        for tokens in (1, 5):
            size = StepSize.of(tokens, past)
            curve.observe(size, 0.040 + 0.001 * tokens + 20e-6 * size.attended)
    for past in (10, 1_500):
        times = curve.seconds(5, StepSize.of(1, past), past)
        assert times[0] == pytest.approx(0.041 + 20e-6 * past, rel=0.03)
        assert times[4] == pytest.approx(0.045 + 20e-6 * 5 * past, rel=0.03)


@pytest.mark.parametrize("num_wrong", [0, 100])
def test_a_device_whose_answers_are_late_is_learned_from(num_wrong: int) -> None:
    """Other sessions' wrong drafts make a new one expect nothing. Its own late answers, all correct, tell better."""
    drafting = Drafting(8, Policy.VERIFY)
    for _ in range(num_wrong):
        drafting.learned(b"").acceptance.observe([1], [2])
    drafts = PendingDrafts([], 100, AcceptanceEstimator(8, drafting.learned(b"").acceptance))
    drafting.curve.observe(StepSize.of(1, 10), 0.020)
    for base in range(1, 40):
        drafts.committed.append(base)
        drafting.committed(drafts, [], [base], 0.020 * base, crowding=1.0)
        if base > 5:
            drafting.merge(drafts, base - 5, [list(range(base - 4, base + 1))], 0.020 * base + 0.001)
    assert drafts.acceptance.rate > 0.9
    assert drafts.wait != NO_WAIT


def test_under_policy_verify_the_likeliest_drafts_of_all_are_verified() -> None:
    """Where a step has no room for all that is likely, no session goes without because others came before it."""
    drafting = Drafting(8, Policy.VERIFY)
    sessions = [PendingDrafts([], 100, AcceptanceEstimator(8)) for _ in range(6)]
    for drafts in sessions:
        drafts.trie.merge(range(8), prefer=True)
        drafts.acceptance.observe(range(8), range(8))
    chosen = drafting.choose(sessions, 12, StepSize(6, 0), 0.0)
    assert [len(chosen[drafts].tokens) for drafts in sessions] == [2] * 6
