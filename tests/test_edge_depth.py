"""Tests the laws of the three depth controllers."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.edge.drafting.belief import Belief, CommitOutcome
from outrider.edge.drafting.calibration import Guess, model_guesses
from outrider.edge.drafting.depth import (
    LEAST_REACH,
    MAX_BLOCK,
    MAX_DEPTH,
    MAX_PROBE_GAP,
    CostModelDepth,
    Effort,
    best_verified,
)
from outrider.edge.drafting.estimates import Estimates
from outrider.models.picks.sampling import Candidates


def judged(num_matched: int, is_wrong: bool) -> CommitOutcome:
    """A commit that accepts `num_matched` first guesses and then, if asked, rejects one."""
    belief = Belief(lambda cell: 0.5)
    belief.tree.add_path([guess(1)] * num_matched + [guess(2)] * is_wrong)
    return belief.on_commit(0, [1] * (num_matched + 1))


def guess(token: int) -> Guess:
    """A first guess with a lead of 1.5."""
    (found,) = model_guesses(Candidates([token], [1.5]), 1)
    return found


def estimates_at(
    acceptance: float, *, step_ms: float = 40.0, extra_ms: float = 1.0, draft_ms: float = 0.3, rtt_ms: float = 10.0
) -> Estimates:
    """Estimates after many commits."""
    estimates = begun(rtt_ms, step_ms, extra_ms)
    for _ in range(40):
        estimates.on_drafted(draft_ms, 1)
    estimates.on_posted(rtt_ms)
    rng = random.Random(0)
    for _ in range(200):
        num_matched = 0
        while num_matched < 6 and rng.random() < acceptance:
            num_matched += 1
        estimates.on_commit(judged(num_matched, num_matched < 6), step_ms)
    return estimates


def begun(rtt_ms: float = 10.0, step_ms: float = 40.0, extra_ms: float = 1.0) -> Estimates:
    """Estimates of a text that has begun."""
    estimates = Estimates()
    estimates.on_open(rtt_ms, step_ms, extra_ms)
    return estimates


def see(controller: CostModelDepth, outcome: CommitOutcome, step_ms: float = 40.0) -> None:
    """A commit, as estimates and controller see it."""
    controller._estimates.on_commit(outcome, step_ms)
    controller.observe(outcome)


def depth_at(acceptance: float, **times: float) -> int:
    """The cost model's depth after many commits, 0 when it is off."""
    controller = CostModelDepth(estimates_at(acceptance, **times))
    controller.observe(judged(0, False))
    plan = controller.plan()
    return 0 if plan.silent else plan.depth


def test_drafting_goes_on_after_the_device_has_slept_in_a_call() -> None:
    """Nobody would draft where a token seems to take a second, so nobody would measure that it does not."""
    controller = CostModelDepth(estimates_at(0.7))
    controller._estimates.on_drafted(20_000.0, 1)
    controller.observe(judged(1, True))
    plan = controller.plan()
    assert plan.depth > 0 and not plan.silent and plan.floor < 0.5


@settings(deadline=None, max_examples=25)
@given(st.floats(0, 1), st.floats(1, 200), st.floats(0, 50), st.floats(0.05, 100), st.floats(0, 400))
def test_cost_model_stays_in_range(acceptance: float, step: float, extra: float, draft: float, rtt: float) -> None:
    """0 to 64 for any measurement, and at least one token in stop-and-wait."""
    controller = CostModelDepth(estimates_at(acceptance, step_ms=step, extra_ms=extra, draft_ms=draft, rtt_ms=rtt))
    for outcome in (judged(0, True), judged(3, False)):
        controller.observe(outcome)
        assert 0 <= controller.plan().depth <= MAX_DEPTH
    assert 1 <= controller.block() <= MAX_DEPTH


def test_cost_model_runs_further_ahead_for_a_better_draft_and_a_longer_way() -> None:
    """Depth grows with acceptance and, while acceptance allows it, with the round trip. So does the block of stop-and-
    wait; `tools/simulate.py` finds the same blocks best by search.
    """
    assert 0 < depth_at(0.4) < depth_at(0.65) < depth_at(0.9)
    assert depth_at(0.8, rtt_ms=0.0) < depth_at(0.8, rtt_ms=100.0)
    assert depth_at(0.3, extra_ms=40.0) == 0  # tokens that cost a step each are not drafted
    for rtt_ms, expected in ((0.0, range(3, 10)), (50.0, range(5, 12))):
        estimates = estimates_at(0.65, step_ms=40.0, extra_ms=1.2, draft_ms=1.5, rtt_ms=rtt_ms)
        assert CostModelDepth(estimates).block() in expected


def test_the_answer_is_what_one_pass_verifies_and_the_depth_is_more() -> None:
    """So a pass that accepts all its drafts finds the next ones waiting."""
    e = estimates_at(0.8, rtt_ms=0.0)
    plan = CostModelDepth(e).plan()
    assert plan.answer == best_verified(e.acceptance, e.step_ms, e.extra_ms, MAX_BLOCK) < plan.depth
    # On predictable text a pass verifies the longest block, and twice as much is drafted ahead.
    sure = CostModelDepth(estimates_at(1.0, step_ms=10.0, extra_ms=0.01, draft_ms=0.5, rtt_ms=10.0)).plan()
    assert sure.answer > 16 and sure.depth == MAX_DEPTH
    ks = [best_verified(0.65, 40.0, extra, 16) for extra in (0.1, 1.2, 5.0, 20.0)]
    assert ks == sorted(ks, reverse=True) and ks[0] > ks[-1]  # more where they are cheaper


def test_a_hopeless_draft_is_soon_off_and_then_probed_silently_and_ever_more_rarely() -> None:
    """Depth 0: the gaps between probes double up to the longest, and nearly nothing is sent."""
    controller = CostModelDepth(begun())
    num_on, num_sent, probed_at = 0, 0, list[int]()
    for i in range(120):
        plan = controller.plan()
        num_on += controller.is_on
        if not controller.is_on and plan.depth:
            probed_at.append(i - num_on)
            num_sent += not plan.silent
        see(controller, judged(0, plan.depth > 0))
    gaps = [b - a for a, b in pairwise(probed_at)]
    assert gaps[:4] == [2, 4, 8, 16] and set(gaps[4:]) == {MAX_PROBE_GAP}
    assert 1 <= num_on <= 20 and num_sent == 1  # of 100


def test_the_depth_follows_the_last_commits() -> None:
    """A hard passage after a long easy one is drafted shallowly or not at all, and the next easy one deep again."""
    controller = CostModelDepth(estimates_at(0.9))
    deep = controller.plan().depth
    for num_matched in (0, 6):
        for _ in range(150):
            see(controller, judged(num_matched, num_matched == 0))
        plan = controller.plan()
        assert (plan.depth > deep / 2 and not plan.silent) == (num_matched > 0)


@pytest.mark.parametrize(
    ("effort", "slow_ms", "calm_ms"), [(Effort.NORMAL, 95.0, 3.0), (Effort.LOW, 9.0, 2.0), (Effort.LOW, 500.0, 2.0)]
)
@pytest.mark.parametrize("is_new_text", [True, False])
def test_a_draft_that_was_slow_for_a_while_is_timed_again(
    effort: Effort, slow_ms: float, calm_ms: float, is_new_text: bool
) -> None:
    """Slow calls can make even the next token not worth its cost. Its time must still be measured, within 256 commits
    and mostly far fewer, in this text and in later ones, which begin with what this process has measured.
    """
    estimates = estimates_at(0.7, step_ms=8.0, draft_ms=slow_ms)
    controller = CostModelDepth(estimates, effort)
    if is_new_text:
        assert controller.plan().floor <= 1.0  # a root has a reach of 1: it is run
    for _ in range(16 * 16):
        plan = controller.plan()
        if plan.depth and plan.floor <= 1.0:
            estimates.on_drafted(calm_ms, 1)
        see(controller, judged(min(1, plan.depth), False), 8.0)
        if controller.is_on and controller.plan().floor < 0.6:
            break
    assert controller.is_on and estimates.draft_ms < 2.0 * slow_ms / 3.0


def test_a_draft_that_stays_too_slow_is_timed_seldom() -> None:
    """Nothing is drafted but a probe in 16 commits, however right it is."""
    controller, num_probes = CostModelDepth(estimates_at(0.9, step_ms=8.0, draft_ms=95.0)), 0
    controller.observe(judged(1, False))
    assert not controller.is_on and controller.is_slow
    for _ in range(320):
        depth = controller.plan().depth
        num_probes += depth > 0
        controller.observe(judged(depth, False))
        controller._estimates.on_drafted(95.0, 1)
    assert not controller.is_on and 15 <= num_probes <= 30


def test_a_device_whose_drafting_is_off_sends_a_probe_now_and_then() -> None:
    """A server can time only what it gets. Its newer figure turns drafting on again."""
    controller, other = (CostModelDepth(estimates_at(0.7, step_ms=6.0, extra_ms=26.6)) for _ in range(2))
    sent_at = list[int]()
    for i in range(200):
        controller.observe(judged(0, controller.plan().depth > 0))
        assert not controller.is_on
        if controller.plan().depth and not controller.plan().silent:
            sent_at.append(i)
    first, second = sent_at
    assert first < 64 + 16 and second - first < 64 + 16
    other.observe(judged(0, False))
    other._estimates.on_times(6.0, 0.5)
    other.observe(judged(0, False))
    assert other.is_on


def test_a_node_must_be_worth_its_cost() -> None:
    """The floor rises with the draft's time and falls with the step's; less effort, and more energy is saved.

    A node that is seldom reached is never worth it.
    """

    def floor(effort: Effort = Effort.NORMAL, draft_ms: float = 10.0, step_ms: float = 40.0) -> float:
        return CostModelDepth(estimates_at(0.7, draft_ms=draft_ms, step_ms=step_ms), effort).plan().floor

    assert floor(draft_ms=2.0) < floor() < floor(draft_ms=40.0)
    assert floor(step_ms=200.0) < floor() < floor(step_ms=10.0)
    assert floor(Effort.HIGH) < floor(Effort.NORMAL) < floor(Effort.LOW)
    assert floor() == pytest.approx((0.1 * 10.0 + 0.1) / 40.0, rel=0.02)
    assert floor(Effort.HIGH, draft_ms=0.05, step_ms=200.0) == LEAST_REACH
