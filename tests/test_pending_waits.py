"""Tests when the engine waits for a device's draft, and what it learns of devices that are late."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from tests.engine_harness import SAMPLED, VOCAB, Harness, plain
from tests.pending_drafts import commit, learn_and_wait, line_message, pending, timed

from outrider.cloud.engine import EngineConfig, Policy
from outrider.cloud.pending.draft_lag import DraftLag
from outrider.cloud.pending.drafting import Drafting
from outrider.cloud.pending.estimators import StepSize
from outrider.cloud.pending.lookup import PromptLookup
from outrider.cloud.pending.node_chances import NodeChances
from outrider.cloud.pending.pending_drafts import PendingDrafts
from outrider.cloud.pending.policy import ENOUGH_ANSWERS, NO_WAIT, bounded, plan_wait, streaming, waiting
from outrider.cloud.pending.sources import Sources
from outrider.models.wire.tree_draft import ROOT, TreeDraft

PROMPT = [(14 + i * i) % VOCAB for i in range(13)]


@pytest.mark.parametrize(("step_s", "longest_s"), [(0.02, 0.64), (0.04, 1.0)])
def test_no_hint_makes_the_engine_wait_for_long(step_s: float, longest_s: float) -> None:
    """32 steps, at most a second."""
    assert bounded([longest_s, longest_s + 0.001, 60.0, None], step_s) == [longest_s, None, None, None]


@pytest.mark.parametrize(
    ("rtt_ms", "never", "patient"),
    [(0, 1.58, 2.01), (10, 1.58, 1.71), (25, 1.58, 1.58), (50, 1.31, 1.31), (100, 1.18, 1.18), (200, 1.05, 1.05)],
)
def test_closed_form_equals_the_simulation(rtt_ms: float, never: float, patient: float) -> None:
    """The rates behind the wait decision are those of the design's table, to 2 %: acceptance 0.65, step 40 + 1.2 ms."""
    alpha, step, extra, draft, rtt = 0.65, 0.040, 0.0012, 0.0015, rtt_ms / 1e3
    streams = max(streaming(alpha, k, step, extra, rtt + draft).rate for k in range(9)) * step
    waits = max(waiting(alpha, k, step, extra, rtt + k * draft).rate for k in range(1, 9)) * step
    assert streams == pytest.approx(never, rel=0.02)
    assert max(streams, waits) == pytest.approx(patient, rel=0.02)
    lags = [rtt + k * draft for k in range(1, 9)]
    assert (plan_wait(alpha, step, extra, lags, 1.0, saves_passes=False) != NO_WAIT) == (waits > streams)


@pytest.mark.parametrize(
    ("alpha", "lag_s", "answer_rate", "saves_passes", "beta", "waits"),
    [
        (0.6, 0.002, 1.0, False, 0.0, True),
        (0.01, 0.002, 1.0, False, 0.0, False),
        (0.01, 0.002, 1.0, True, 0.0, False),
        (0.6, None, 1.0, True, 0.0, False),
        (0.6, 0.002, 0.3, True, 0.0, False),
        # A device that is soon out of sync again is not worth a wait of a step; one whose alternatives prevent that is.
        (0.6, 0.041, 1.0, False, 0.0, False),
        (0.6, 0.041, 1.0, False, 0.9, True),
    ],
)
def test_no_wait_for_a_draft_that_is_never_accepted_or_never_arrives(
    alpha: float, lag_s: float | None, answer_rate: float, saves_passes: bool, beta: float, waits: bool
) -> None:
    """With low acceptance, unknown lags or unanswered waits the engine does not wait; alternatives count, too."""
    found = plan_wait(alpha, 0.04, 0.001, [lag_s] * 8, answer_rate, saves_passes=saves_passes, beta=beta)
    assert (found != NO_WAIT) == waits


def test_waiting_resumes_once_a_late_device_answers_in_time() -> None:
    """The engine sees without waiting whether it is in time; after a late answer, or none, it does not wait."""
    lag, now = DraftLag(), 0.0
    lag.committed(0, now)
    lag.drafted(0, 4, now + 0.005)
    for _ in range(3):
        lag.waited(False)
    assert lag.answer_rate < ENOUGH_ANSWERS
    lag.committed(4, now := now + 1.0)
    lag.drafted(4, 4, now + 0.5)
    assert lag.answer_rate < ENOUGH_ANSWERS
    for base in range(8, 40, 4):
        lag.committed(base, now := now + 1.0)
        lag.drafted(base, 4, now + 0.005)
    assert lag.answer_rate >= ENOUGH_ANSWERS


def tokens_per_s(alpha: float, beta: float, k: int, lag_s: float, *, first_k: int | None) -> float:
    """A target that waits for first_k tokens, or never (None), for a device whose alternatives cover misses; event by
    event. Passes in sync verify k. With a step of 40 ms, 1 ms per drafted token.
    """
    chance, now, committed, in_sync_at = random.Random(7).random, 0.0, 0, 0.0
    while committed < 60_000:
        accepted = 0
        is_blind = now < in_sync_at and first_k is None  # such a step must be covered by what is on its way
        here = k if first_k is None or now >= in_sync_at else first_k
        if is_blind:
            now += 0.040
        else:
            now = max(now, in_sync_at) + 0.040 + 0.001 * here
            while accepted < here and chance() < alpha:
                accepted += 1
        committed += accepted + 1
        # The next pick is the device's own, or an alternative that it has drafted below.
        is_pending = ((is_blind or accepted == here) and chance() < alpha) or chance() < beta
        if not is_pending or not is_blind:
            in_sync_at = now if is_pending else now + lag_s
    return committed / now


@pytest.mark.parametrize("beta", [0.0, 0.4, 0.7])
@pytest.mark.parametrize("lag_s", [0.010, 0.050, 0.130])
@pytest.mark.parametrize(("alpha", "k"), [(0.75, 4), (0.9, 10)])
@pytest.mark.parametrize("first_k", [None, 1, 4])
def test_the_closed_form_equals_the_simulation_of_a_tree(
    first_k: int | None, alpha: float, k: int, beta: float, lag_s: float
) -> None:
    """To 2 %; a beta of 0 is one of paths, without alternatives. A wait may be for fewer tokens than later passes."""
    times = 0.040, 0.001, lag_s
    if first_k is None:
        expected = streaming(alpha, k, *times, beta=beta)
    else:
        expected = waiting(alpha, first_k, *times, beta=beta, later_k=k)
    assert tokens_per_s(alpha, beta, k, lag_s, first_k=first_k) == pytest.approx(expected.rate, rel=0.02)


@pytest.mark.parametrize(
    ("lags_s", "answer_rate", "want"),
    [
        # The first message has few tokens, and more come slowly: the wait is for these few.
        ([0.006, 0.015, 0.025, 0.034], 1.0, 1),
        # Two waits in five are in vain: a wait that costs little is still worth it, one of half a step is not.
        ([0.007] * 4, 0.6, 4),
        ([0.020] * 4, 0.6, 0),
    ],
)
def test_a_short_wait_pays(lags_s: list[float], answer_rate: float, want: int) -> None:
    """Later passes verify what the device drafts meanwhile; a wait in vain is followed by plain steps."""
    assert plan_wait(0.7, 0.040, 0.001, lags_s, answer_rate, saves_passes=False, beta=0.4).want == want


def test_the_slower_of_two_kinds_of_answers_is_waited_for() -> None:
    """What is drafted leaves at once, what has to be drafted some milliseconds later: the median may be either. An
    answer that came late once is a hiccup, and one that would take much of a step is not waited for.
    """
    for answers_s, longest_s in (
        ([0.0] * 6 + [0.005] * 3, 1.5 * 0.005 + 0.003),
        ([0.0] * 8 + [0.5], 0.003),
        ([0.0] * 6 + [0.1] * 3, 0.003),
    ):
        drafting = Drafting(32, Policy.AUTO)
        for _ in range(3):
            drafting.stepped(StepSize(1), 0.040, False)
        drafts = pending(drafting)
        for base, answer_s in enumerate(answers_s):
            drafts.lag.committed(base, base)
            drafts.lag.drafted(base, 4, base + answer_s)
        drafting.start_wait(drafts, 100.0, crowding=1.0)
        assert drafts.wait_deadline == pytest.approx(100.0 + longest_s)


def test_misses_that_alternatives_cover_are_measured() -> None:
    """Three in four: beta approaches it. A session of paths without alternatives has none, and says nothing of those
    with them.
    """
    drafting = Drafting(32, Policy.AUTO)
    drafts = pending(drafting)
    drafts.chances.has_hints = True
    for base in range(200):
        drafting.merge_tree(drafts, TreeDraft(base, 2 * base, [1, 2], [ROOT, ROOT], [12, 6]), 0.0)
        commit(drafts, 3 if base % 4 == 0 else 2)
    assert drafts.chances.beta == pytest.approx(0.75, abs=0.1)
    assert NodeChances(drafting.learned(b"").chances).beta == 0.0
    for other in (drafting, Drafting(32, Policy.AUTO)):
        paths = pending(other)
        for base in range(50):
            other.merge(paths, base, [[1]], 0.0)
            commit(paths, 2)
        assert paths.chances.beta == 0.0
    trees = pending(other)
    other.merge_tree(trees, line_message(0, 0, [1]), 0.0)
    assert trees.chances.beta == pytest.approx(0.3)


def test_a_first_tree_message_answers_its_commit_with_its_deepest_node() -> None:
    """Lag and size come from it; what is looked up is no answer."""
    drafting = Drafting(32, Policy.AUTO)
    drafting.curve.observe(StepSize(1), 0.040)
    drafts = pending(drafting)
    drafts.sources = Sources([PromptLookup([1, 2, 3, 1, 2, 3, 1, 2])])
    for base in range(1, 6):
        commit(drafts, 9)
        learn_and_wait(drafting, drafts, [], [9], base)
        message = TreeDraft(base, 3 * base, [4, 5, 6], [ROOT, 3 * base, ROOT], [9, 9, 3])
        drafting.merge_tree(drafts, message, base + 0.005)
    assert drafts.lag.seconds_until(3) == [pytest.approx(0.005), pytest.approx(0.005), None]
    commit(drafts, 9)
    learn_and_wait(drafting, drafts, [4, 5], [9], 6.0)
    drafting.choose([drafts], 99, StepSize(1, 0), 0.0)
    assert drafts.trie and drafts.trie.num_looked_up == drafts.trie.num_nodes


@pytest.mark.parametrize("is_tree", [True, False])
@pytest.mark.parametrize("num_wrong", [0, 1, 100])
def test_drafts_that_are_always_late_are_learned_from(num_wrong: int, is_tree: bool) -> None:
    """Each answer comes when the commits have passed it by; all it guessed was right, so it is worth a wait.

    Also where other sessions' wrong drafts make a new one expect nothing.
    """
    drafting = Drafting(8, Policy.VERIFY)
    for _ in range(num_wrong):
        drafting.learned(b"").acceptance.observe([1], [2])
    drafting.curve.observe(StepSize(1), 0.020)
    drafts = pending(drafting)
    for base in range(1, 40):
        commit(drafts, base)
        learn_and_wait(drafting, drafts, [], [base], 0.020 * base)
        late, now = list(range(base - 4, base + 1)), 0.020 * base + 0.001
        if base > 5 and is_tree:
            drafting.merge_tree(drafts, line_message(base - 5, 10 * base, late), now)
        elif base > 5:
            drafting.merge(drafts, base - 5, [late], now)
    assert drafts.acceptance.rate > 0.9 and drafts.wait != NO_WAIT and not drafts.trie


def test_sure_drafts_are_verified_and_waited_for_beyond_eight() -> None:
    """Forty tokens that have always been right: a pass verifies 32, and a wait is for more than 8."""
    drafting = timed(32, Policy.AUTO, 0.030, 0.0002)
    drafts = pending(drafting)
    for now in range(10):
        text = range(40 * now, 40 * now + 40)
        drafting.merge_tree(drafts, line_message(40 * now, 40 * now, text, 15), now + 0.004)
        chosen = drafting.choose([drafts], 99, StepSize(1, 0), 0.0)[drafts]
        line = drafts.trie.likeliest_of_device(32)
        commit(drafts, *text)
        learn_and_wait(drafting, drafts, line, text, now + 1.0)
    assert len(chosen.tokens) == 32 and drafts.wait.want > 16


def guessed(tokens: Sequence[int], level: int) -> tuple[Drafting, PendingDrafts]:
    """A device that answers in 4 ms beside steps of 40, whose guess came with the first commit."""
    drafting = timed(8, Policy.AUTO, 0.039, 0.001)
    drafts = pending(drafting)
    drafts.lag = DraftLag(4.0)
    commit(drafts, 1)
    drafting.merge_tree(drafts, line_message(1, 0, tokens, level), 0.001)
    learn_and_wait(drafting, drafts, [], [1], 0.001)
    return drafting, drafts


@pytest.mark.parametrize(("level", "waits"), [(0, True), (6, True), (15, False)], ids=["hopeless", "unlikely", "sure"])
def test_an_unlikely_guess_does_not_rule_out_a_wait(level: int, waits: bool) -> None:
    """What is pending is weighed against what would come in 4 ms; a sure path is verified at once."""
    drafting, drafts = guessed([2] * (1 if waits else 6), level)
    assert (drafts.wait != NO_WAIT) == waits
    if not waits:
        return
    assert drafting.is_waiting(drafts, 0.002)  # the guess was here before
    drafting.merge_tree(drafts, line_message(1, 1, [3], 13), 0.003)
    assert drafting.is_waiting(drafts, 0.003)  # not all that is waited for
    drafting.merge_tree(drafts, line_message(1, 2, [3] * 8, 13), 0.004)
    assert not drafting.is_waiting(drafts, 0.004) and drafts.lag.answer_rate == 1.0


def test_a_wait_ends_where_its_path_is_unlikely_to_go_on() -> None:
    """The device would draft other guesses first; a wait that ends with nothing new was not answered."""
    drafting, drafts = guessed([2], 0)
    assert drafts.wait.want > 2
    drafting.merge_tree(drafts, line_message(1, 1, [3, 4], 8), 0.002)
    assert not drafting.is_waiting(drafts, 0.002)
    commit(drafts, 9)
    learn_and_wait(drafting, drafts, [], [9], 0.003)
    assert drafting.is_waiting(drafts, 0.004) and not drafting.is_waiting(drafts, 1.0)
    assert drafts.lag.answer_rate < 1.0


class Device:
    """Answers every commit after `lag_s` with six guesses of what follows, every third of them wrong."""

    def __init__(self, lag_s: float, *, policy: Policy = Policy.AUTO) -> None:
        self.lag_s, self.answered, self.sequence_id = lag_s, 0, -1
        self.due, self.guess = list[tuple[float, int]](), list[int]()
        self.harness = Harness(config=EngineConfig(policy=policy), on_step=lambda batch: self.deliver())
        self.harness.engine.calibrate()

    def deliver(self) -> None:
        """Delivers the answers due by now, with the times at which they were due."""
        clock, now = self.harness.clock, self.harness.clock.now
        while self.due and self.due[0][0] <= now:
            clock.now, base = self.due.pop(0)
            self.harness.engine.draft(self.sequence_id, base, [self.guess[base : base + 6] or [0]])
        clock.now = now

    def waited_s(self, count: int = 60, **hints: Any) -> float:
        """Generates `count` tokens, checks them, and returns how long the engine waited for drafts."""
        clock, truth = self.harness.clock, plain(PROMPT, SAMPLED, count)
        self.guess = [t if i % 3 else (t + 1) % VOCAB for i, t in enumerate(truth, start=1)]
        self.sequence_id, collector = self.harness.submit(PROMPT, count, **hints)
        while collector.end is None:
            delay = self.harness.engine.step()
            if (base := len(collector.tokens)) > self.answered:
                self.answered = base
                self.due.append((clock.now + self.lag_s, base))
            if delay:
                clock.now = min([clock.now + delay, *(due for due, _ in self.due)])
                self.deliver()
        assert collector.tokens == truth
        return collector.ended.usage.waited_s


@pytest.mark.parametrize(
    ("lag_s", "patience_ms", "least_s"),
    [(0.002, None, 0.01), (0.100, None, None), (0.002, 0.0, None), (0.006, 2.0, None), (0.006, 50.0, 0.0)],
)
def test_the_engine_waits_for_a_fast_device_as_long_as_its_session_allows(
    lag_s: float, patience_ms: float | None, least_s: float | None
) -> None:
    """With 40 ms steps a device 2 ms away is worth a wait, one 100 ms away is not. A wait longer than the patience does
    not begin.
    """
    waited_s = Device(lag_s).waited_s(patience_ms=patience_ms)
    assert waited_s == 0.0 if least_s is None else waited_s > least_s


def test_with_a_lag_hint_the_engine_waits_from_the_first_token() -> None:
    """The engine waits after the first commits only with the hint; measurements soon outweigh a wrong hint."""
    assert Device(0.004).waited_s(count=6, lag_ms=4.0) > Device(0.004).waited_s(count=6)
    assert Device(0.100).waited_s(lag_ms=1.0) < 0.03


def test_the_verify_policy_waits_longer_than_latency_alone_allows() -> None:
    """When passes are scarce a wait of one step is allowed, and passes per token fall."""
    device = Device(0.030, policy=Policy.VERIFY)
    assert device.waited_s() > 0.05 and Device(0.030).waited_s() == 0.0
    assert device.harness.engine.stats().totals.passes < 27


def test_the_engine_soon_stops_waiting_for_a_silent_device() -> None:
    """After a few useless waits the engine goes on without."""
    harness, truth = Harness(), plain(PROMPT, SAMPLED, 200)
    sequence_id, collector = harness.submit(PROMPT, 200)
    while collector.end is None:
        base = len(collector.tokens)
        if base < 60 and base:
            harness.engine.draft(sequence_id, base, [[truth[base], (truth[base + 1] + 1) % VOCAB]])
        if delay := harness.engine.step():
            harness.clock.now += 0.002 if base < 60 else delay
    assert collector.tokens == truth and collector.end.usage.waited_s < 0.5


def test_calibration_measures_the_curve_and_frees_its_blocks() -> None:
    """Afterwards the step time and the cost of a drafted token are known."""
    harness = Harness()
    harness.engine.calibrate(max_tokens=8)
    stats = harness.engine.stats()
    assert stats.step_ms == pytest.approx(41.0) and stats.draft_token_ms == pytest.approx(1.0)
    assert stats.free_blocks == stats.num_blocks
