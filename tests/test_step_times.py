"""Tests what is measured of steps and devices, and made of it: estimates, sizes that vLLM captures, busy spells.

Pure simulations: times are numbers, nothing runs and nothing waits; no vLLM is needed.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.cloud.api.stream import StepTimes
from outrider.cloud.pending import estimators
from outrider.cloud.pending.draft_lag import DraftLag
from outrider.cloud.pending.drafting import Drafting
from outrider.cloud.pending.estimators import (
    AcceptanceEstimator,
    StepSize,
    StepTimeCurve,
    tokens_within_a_step,
)
from outrider.cloud.pending.pending_drafts import PendingDrafts
from outrider.cloud.pending.policy import Policy
from outrider.cloud.seam import DraftHints
from outrider.cloud.vllm.graph_sizes import MOST_TOKENS, graph_arguments, sizes_to_capture
from outrider.edge.drafting.belief import CommitOutcome
from outrider.edge.drafting.depth import CostModelDepth
from outrider.edge.drafting.estimates import Estimates
from outrider.models.wire.tree_draft import ROOT, TreeDraft


def test_acceptance_is_a_ratio_of_sums_by_position() -> None:
    """First tokens accepted, second ones rejected: the rates show it; a new session starts at its parent's average."""
    parent = AcceptanceEstimator(4)
    own = AcceptanceEstimator(4, parent)
    for _ in range(200):
        own.observe([1, 2, 3], [1, 9])
    assert own.rates(2) == pytest.approx([1.0, 0.0], abs=0.1)
    assert AcceptanceEstimator(4, parent).rate == pytest.approx(0.5, abs=0.1)


def test_step_time_curve_is_monotone_and_robust() -> None:
    """Medians drop outliers; times that fall are drawn together; beyond the last knot the curve rises."""
    curve = StepTimeCurve()
    for size, seconds in [(1, 0.040), (2, 0.039), (4, 0.044)]:
        for _ in range(9):
            curve.observe(StepSize(size), seconds)
        curve.observe(StepSize(size), 5.0)
    times = curve.seconds(8)
    assert times[:2].tolist() == pytest.approx([0.0395, 0.0395])
    assert (np.diff(times) >= 0).all() and times[7] > times[3]


def test_a_curve_may_be_read_while_it_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `stats` does from another thread, also in the middle of the first step's record and of a prediction."""
    curve, found = StepTimeCurve(), list[object]()
    median_s, rising = estimators._median_s, estimators._rising

    def reading(seen: Iterable[tuple[int, float]]) -> float:
        found.append(curve.is_known and curve.step_and_extra()[0])
        return median_s(seen)

    def learning(times: Sequence[float], weights: Sequence[int]) -> list[float]:
        curve.passed()
        return rising(times, weights)

    monkeypatch.setattr(estimators, "_median_s", reading)
    monkeypatch.setattr(estimators, "_rising", learning)
    for _ in range(2):
        curve.observe(StepSize(1), 0.040)
    assert found == [False, pytest.approx(0.040)] and curve.step_and_extra()[0] == pytest.approx(0.040)


def test_draft_lag_measures_the_first_answer_and_the_rate_after_it() -> None:
    """5 ms to a first answer of two tokens, then 3 ms per token."""
    lag, now = DraftLag(), 0.0
    assert lag.seconds_until(1) == [None]
    for base in range(5):
        lag.committed(base, now)
        lag.drafted(base, 2, now + 0.005)
        lag.drafted(base, 4, now + 0.011)
        now += 1.0
    *lags, never = lag.seconds_until(5)
    assert lags == pytest.approx([0.005, 0.005, 0.008, 0.011]) and never is None  # never so many at once


def test_the_curve_learns_what_a_long_context_costs() -> None:
    """Steps of one size at growing contexts: the time is told apart from the time of more tokens."""
    curve = StepTimeCurve()
    for past in range(0, 2_000, 5):
        for tokens in (1, 5):
            size = StepSize.of(tokens, past)
            curve.observe(size, 0.040 + 0.001 * tokens + 20e-6 * size.attended)
    for past in (10, 1_500):
        times = curve.seconds(5, StepSize.of(1, past), past)
        assert times[[0, 4]] == pytest.approx([0.041 + 20e-6 * past, 0.045 + 20e-6 * 5 * past], rel=0.03)


# -- sizes that vLLM captures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_draft", "max_running", "step_tokens"), [(16, 32, 2048), (1, 1, 2), (64, 256, 2048)])
def test_sizes_cover_the_steps_that_may_come(max_draft: int, max_running: int, step_tokens: int) -> None:
    """One token, a sequence's whole draft, and all sequences', as far as graphs pay; padding stays small."""
    sizes = sizes_to_capture(max_draft, max_running, step_tokens)
    most = min(step_tokens, MOST_TOKENS, max_running * (1 + max_draft))
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most and min(most, 1 + max_draft) in sizes
    assert all(b - a <= max(8, a / 4) for a, b in pairwise(sizes)) and len(sizes) < 50
    assert graph_arguments(max_draft, max_running, step_tokens)["compilation_config"] == {
        "cudagraph_mode": "FULL",
        "cudagraph_capture_sizes": sizes,
    }


def run_as(tokens: int, captured: list[int]) -> int:
    """The size of a step of so many tokens."""
    return next((size for size in captured if size >= tokens), tokens)


def curve_of(captured: list[int]) -> StepTimeCurve:
    """Steps of 10 ms and 0.1 ms for each token that they run as."""
    curve = StepTimeCurve(captured)
    for tokens in (1, 3, 6, 12, 20, 40, 100) * 3:
        curve.observe(StepSize(tokens, 0), 0.010 + 0.0001 * run_as(tokens, captured))
    return curve


def test_a_step_costs_what_the_next_captured_size_costs() -> None:
    """Tokens up to it are free, beyond the largest each costs; without graphs too."""
    curve = curve_of([4, 8, 16, 32])
    times, added = curve.seconds(100), curve.steps_added(8, StepSize(6, 0), 0.0)
    assert times[0] == times[3] < times[4] == times[7] < times[8] == times[15] < times[31] == times[16]
    assert np.all(np.diff(times[31:]) > 0) and np.all(np.diff(curve_of([]).seconds(40)) > 0)
    assert added[0] == added[1] == 0.0 < added[2]


def chosen(captured: list[int], num_sequences: int, chance_of: int = 7) -> int:
    """Drafted tokens that a step of so many sequences verifies, whose drafts have this level's chance."""
    drafting = Drafting(16, Policy.AUTO, captured=captured)
    for tokens in (1, 2, 4, 8, 16, 32, 64) * 4:
        drafting.stepped(StepSize(tokens, 0), 0.010 * run_as(tokens, captured), False)  # as long as all its tokens
    everyone = [drafting.pending(b"%d" % n, [], 100, DraftHints()) for n in range(num_sequences)]
    tree = TreeDraft(0, 0, list(range(5, 13)), [ROOT, *range(7)], [chance_of] * 8)
    for drafts in everyone:
        drafting.merge_tree(drafts, tree, 0.0)
    return sum(len(each.tokens) for each in drafting.choose(everyone, 500, StepSize(num_sequences, 0), 0.0).values())


def test_a_step_is_filled_to_its_captured_size() -> None:
    """Where a token costs as much as a step, none is drafted; where the padding is there anyway, it is used."""
    captured = [8, 16, 32, 64]
    assert (chosen([], 5), chosen(captured, 5), chosen(captured, 8), chosen(captured[1:], 5)) == (0, 3, 0, 11)


@given(st.lists(st.integers(1, 600), max_size=8, unique=True), st.data())
@settings(max_examples=100, deadline=None)
def test_times_do_not_fall_with_size(captured: list[int], data: st.DataObject) -> None:
    """Whatever was captured, and run; and without graphs each size stands for those next to it."""
    curve, sizes = StepTimeCurve(captured), data.draw(st.lists(st.integers(1, 2500), min_size=1, max_size=20))
    for tokens in sizes:
        curve.observe(StepSize(tokens, 10 * tokens), data.draw(st.floats(0.001, 0.1)))
    times = curve.seconds(2600)
    assert np.all(np.diff(times) >= -1e-12) and np.all(times > 0)
    for smaller, size in pairwise([0, *sorted(captured)]):
        assert len(set(times[smaller:size].tolist())) == 1
    untried = curve.untried(max(sizes), 2600)
    assert untried is None or untried > max(sizes)
    most, fixed, context = data.draw(st.integers(0, 2000)), StepSize(data.draw(st.integers(0, 200)), 900), 50.0
    in_a_step = tokens_within_a_step(curve.steps_added(most, fixed, context))
    assert curve.tokens_in_a_step(most, fixed, context) == in_a_step


# -- a machine that other work slows for a while: what was measured then is measured again, within bounds --------------

StepTime = Callable[[int], float]
"""Seconds of a step by its number of drafted tokens."""

CALM: StepTime = lambda count: 0.006 + 0.0005 * count  # noqa: E731
BUSY: StepTime = lambda count: 0.060 + 0.0266 * count  # noqa: E731
STEEP: StepTime = lambda count: 0.040 + 0.030 * count  # noqa: E731


class Device:
    """A device that decides by the times that the server sends with its commits; its drafts are right as expected."""

    def __init__(self) -> None:
        self.estimates = Estimates()
        self.controller = CostModelDepth(self.estimates)
        self._sent, self._asked_s = StepTimes(), 0.0

    def depth_of_message(self) -> int:
        """Drafted tokens of what it sends now, at most."""
        plan = self.controller.plan()
        return 0 if plan.silent else plan.depth

    def take(self, committed: list[int], drafting: Drafting, now_s: float) -> None:
        """A commit, and the time at which the server sends it."""
        if now_s >= self._asked_s + 0.5:
            self._asked_s = now_s
            step_s, extra_s = drafting.curve.step_and_extra()
            if (newest := StepTimes(step_s * 1e3, extra_s * 1e3)).has_changed(self._sent):
                self._sent = newest
                self.estimates.on_times(*newest)
        self.controller.observe(CommitOutcome(tuple(committed)))


@dataclass
class Server:
    """One endless text whose drafts, always `depth` of them, are right with the chance `alpha`, on a given machine."""

    alpha: float
    step_s: StepTime
    depth: int = 8
    per_position_s: float = 0.0
    now_s: float = 0.0
    num_tokens: int = 0
    device: Device | None = None  # else one that always sends its drafts

    def __post_init__(self) -> None:
        self.drafting = Drafting(self.depth, Policy.AUTO)
        self.rng = random.Random(5)
        self.drafts = PendingDrafts([], 10**9, AcceptanceEstimator(self.depth))
        for count in (0, 1, 2, 3, 4, 5, 7) * 3:
            self.drafting.stepped(StepSize.of(1 + count, 64), self.step_s(count), False)

    def run(self, num_steps: int) -> Iterator[int]:
        """Steps; the number of drafted tokens that each verified."""
        truth = list(range(1, self.depth + 2))
        for step in range(num_steps):
            past = step % 400  # texts of 400 steps
            num_right = next((i for i in range(self.depth) if self.rng.random() >= self.alpha), self.depth)
            path = [*truth[:num_right], *[0] * (self.depth - num_right)]
            if self.device is not None:
                path = path[: self.device.depth_of_message()]
            if path:
                self.drafts.trie.merge(path, prefer=True)
            chosen = self.drafting.choose([self.drafts], 64, StepSize.of(1, past), float(past))[self.drafts]
            count = len(chosen.tokens)
            took_s = self.step_s(count) * self.rng.choice((1.0, 1.0, 1.0, 1.1, 1.3))
            took_s += self.per_position_s * StepSize.of(1 + count, past).attended
            self.drafting.stepped(StepSize.of(1 + count, past), took_s, False)
            committed = truth[: 1 + min(count, num_right)]
            self.drafts.acceptance.observe(path, committed)
            if self.device is not None:
                self.device.take(committed, self.drafting, self.now_s)
            self.drafts.trie = type(self.drafts.trie)()
            self.now_s, self.num_tokens = self.now_s + took_s, self.num_tokens + len(committed)
            yield count

    def rate(self, num_steps: int) -> float:
        """Tokens per second over as many steps."""
        began_s, began = self.now_s, self.num_tokens
        deque(self.run(num_steps), 0)
        return (self.num_tokens - began) / (self.now_s - began_s)


@pytest.mark.parametrize("spell", [100, 1_000])
def test_drafts_are_verified_again_soon_after_a_busy_spell(spell: int) -> None:
    """Times of sizes that are no longer run must not keep them from being run: within 600 steps all is as before."""
    server = Server(0.7, CALM)
    before = server.rate(600)
    server.step_s = BUSY
    server.rate(spell)
    server.step_s = CALM
    server.rate(600)
    step_s, extra_s = server.drafting.curve.step_and_extra()
    assert step_s == pytest.approx(0.006, rel=0.3) and extra_s < 0.001
    assert server.rate(600) > 0.9 * before


def test_a_device_that_has_switched_off_drafts_again_soon_after_a_busy_spell() -> None:
    """Device and server together: the one drafts nothing, so the other times nothing but plain steps."""
    device = Device()
    server = Server(0.7, lambda count: 0.020 + 0.001 * count, device=device)
    before = server.rate(600)
    assert device.controller.is_on
    server.step_s = lambda count: 0.060 + 0.100 * count
    server.rate(300)
    assert not device.controller.is_on
    server.step_s = lambda count: 0.020 + 0.001 * count
    server.rate(600)
    assert device.controller.is_on and device.estimates.extra_ms < 2.0
    assert server.rate(600) > 0.9 * before


def test_a_plain_step_is_timed_again_where_drafts_are_always_verified() -> None:
    """The mirror: a slow old time of the step without drafts makes all drafts seem free, so it would never be run."""
    server = Server(0.95, lambda count: 0.120)
    server.rate(60)
    server.step_s = lambda count: 0.020 + 0.010 * count
    server.rate(600)
    step_s, extra_s = server.drafting.curve.step_and_extra()
    assert step_s == pytest.approx(0.020, rel=0.3) and extra_s == pytest.approx(0.010, rel=0.3)


def test_what_a_position_costs_is_learned_again_on_a_machine_that_is_slower_for_good() -> None:
    """Steps that take over three times their old mean are no outliers once they are the rule."""
    server = Server(0.0, CALM)
    server.rate(400)
    server.step_s, server.per_position_s = (lambda count: 0.060 + 0.005 * count), 100e-6
    server.rate(5_000)
    times = server.drafting.curve.seconds(1, StepSize.of(1, 390), 390.0)
    assert times[0] == pytest.approx(0.060 + 100e-6 * 391, rel=0.15)
    assert server.drafting.curve.seconds(1)[0] == pytest.approx(0.060, rel=0.25)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("step_s", [STEEP, BUSY], ids=["steep", "busy"])
def test_trying_sizes_again_costs_little_where_no_draft_pays(alpha: float, step_s: StepTime) -> None:
    """Tokens per second over those of plain steps, where a drafted token costs most of a step."""
    plain = 1.0 / (step_s(0) * 1.08)  # the mean of the noise
    assert Server(alpha, step_s).rate(4_000) > 0.98 * plain


def test_one_slow_step_of_a_seldom_size_keeps_no_other_size_from_being_run() -> None:
    """Sizes are drawn together by how often they were run."""
    server = Server(0.7, CALM)
    server.rate(300)
    server.drafting.stepped(StepSize.of(2, 64), 1.0, False)
    assert max(server.run(8)) >= 3
