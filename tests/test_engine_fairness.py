"""Tests that nobody has the engine alone: places, blocks, queue, step tokens are shared evenly; caches are not."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine_harness import SAMPLED, VOCAB, Collector, Harness, plain

from outrider.cloud.engine import EngineConfig, Policy
from outrider.cloud.engine.owners import even_level, split_evenly
from outrider.cloud.engine.sequence_state import SequenceState
from outrider.cloud.pending.drafting import Drafting
from outrider.cloud.pending.estimators import AcceptanceEstimator, StepSize, StepTimeCurve
from outrider.cloud.pending.pending_drafts import PendingDrafts
from outrider.cloud.pending.policy import NO_WAIT, Wait, plan_wait
from outrider.models.errors import RequestError

ALICE, BOB = b"alice", b"bob"


def prompt_of(index: int, length: int = 6) -> list[int]:
    """A prompt that no other index has."""
    return [(index // VOCAB) % VOCAB, index % VOCAB, *((index * 5 + i * i) % VOCAB for i in range(length - 2))]


def steps_to_first_token(harness: Harness, collector: Collector, most: int = 500) -> int:
    """Steps that run until the collector has a token."""
    for count in range(most):
        if collector.tokens:
            return count
        harness.step()
    raise AssertionError(f"no token in {most} steps")


# -- the law behind it ---------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 20), max_size=8), st.integers(0, 60))
@settings(max_examples=300, deadline=None)
def test_even_shares_are_max_min_fair(wanted: list[int], total: int) -> None:
    """Nothing is wasted, nobody gets more than it wants, and who goes short has no less than any other, but for one."""
    given_ = split_evenly(wanted, total)
    assert sum(given_) == min(total, sum(wanted))
    assert all(0 <= g <= w for g, w in zip(given_, wanted, strict=True))
    short = [i for i, (g, w) in enumerate(zip(given_, wanted, strict=True)) if g < w]
    for i in short:
        assert all(given_[j] <= given_[i] + 1 for j in range(len(wanted)))
        # A unit that cannot be divided goes to earlier entries.
        assert all(given_[j] <= given_[i] for j in range(i + 1, len(wanted)))


# -- places --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", list(Policy))
def test_hints_of_a_minute_do_not_keep_a_newcomer_out(policy: Policy) -> None:
    """33 sessions that claim to answer after 60 s and never do: a newcomer's first token comes as without the hints."""

    def seconds_to_first_token(draft_lag_ms: float | None) -> float:
        harness = Harness(config=EngineConfig(max_running=8, policy=policy), num_blocks=4096)
        harness.engine.calibrate()
        for i in range(33):
            harness.submit(prompt_of(i), 200, lag_ms=draft_lag_ms)
        for _ in range(40):
            harness.step()
        arrived = harness.clock.now
        _, newcomer = harness.submit(prompt_of(99), 5)
        steps_to_first_token(harness, newcomer)
        return harness.clock.now - arrived

    assert seconds_to_first_token(60_000.0) <= 2 * seconds_to_first_token(None)


@pytest.mark.parametrize("owner", [ALICE, BOB])
def test_a_newcomer_does_not_wait_for_long_sessions_to_end(owner: bytes) -> None:
    """With every place taken by long texts, a newcomer gets its first token in the next steps, of whichever owner."""
    harness = Harness(config=EngineConfig(max_running=8), num_blocks=4096)
    texts = [harness.submit(prompt_of(i), 100, owner=ALICE)[1] for i in range(8)]
    for _ in range(20):
        harness.engine.step()
    _, newcomer = harness.submit(prompt_of(99), 30, owner=owner)
    assert steps_to_first_token(harness, newcomer) <= 2
    harness.run()
    assert max(map(len, harness.batches)) == 8
    assert [c.tokens for c in texts] == [plain(prompt_of(i), SAMPLED, 100) for i in range(8)]
    assert newcomer.tokens == plain(prompt_of(99), SAMPLED, 30)
    harness.assert_all_returned()


def test_places_are_shared_between_owners_and_between_the_sessions_of_one() -> None:
    """40 sessions against 2 for 8 places: the two run in every step, the forty take turns."""
    harness = Harness(config=EngineConfig(max_running=8), num_blocks=4096)
    many = [harness.submit(prompt_of(i), 300, owner=ALICE)[1] for i in range(40)]
    for _ in range(30):
        harness.engine.step()
    few = [harness.submit(prompt_of(90 + i), 300, owner=BOB)[1] for i in range(2)]
    before = [len(c.tokens) for c in many]
    for _ in range(100):
        harness.engine.step()
    assert min(len(c.tokens) for c in few) >= 99
    gained = [len(c.tokens) - b for c, b in zip(many, before, strict=True)]
    assert max(gained) - min(gained) <= 2
    assert sum(gained) >= 6 * 99


def test_a_flood_of_short_requests_does_not_stop_a_long_text_of_the_same_owner() -> None:
    """Two places, and ten requests of one token at any time, always new ones: the long text still gets its turns."""
    harness = Harness(config=EngineConfig(max_running=2), num_blocks=4096)
    _, long = harness.submit(prompt_of(0), 200)
    flood: list[Collector] = []
    for _ in range(110):
        while sum(c.end is None for c in flood[-20:]) < 10:
            flood.append(harness.submit(prompt_of(1 + len(flood)), 1)[1])
        harness.engine.step()
    assert len(long.tokens) >= 15


def test_more_owners_than_places_take_turns() -> None:
    """Twelve owners, four places: all advance alike, also one that comes late and one with many sessions."""
    harness = Harness(config=EngineConfig(max_running=4), num_blocks=4096)
    texts = [harness.submit(prompt_of(i), 300, owner=b"%d" % i)[1] for i in range(11)]
    for i in range(20):
        harness.submit(prompt_of(200 + i), 300, owner=b"0")
    for _ in range(50):
        harness.engine.step()
    texts.append(harness.submit(prompt_of(50), 300, owner=b"late")[1])
    before = [len(c.tokens) for c in texts]
    for _ in range(120):
        harness.engine.step()
    gained = [len(c.tokens) - b for c, b in zip(texts, before, strict=True)]
    assert max(gained[1:]) - min(gained[1:]) <= 2
    assert min(gained[1:]) >= 38


def test_a_flood_of_short_requests_of_other_owners_does_not_stop_a_long_text() -> None:
    """Two places, and six owners that come anew with a request of one token whenever they are done."""
    harness = Harness(config=EngineConfig(max_running=2), num_blocks=4096)
    _, long = harness.submit(prompt_of(0), 400, owner=ALICE)
    flood: dict[int, Collector] = {}
    for num in range(300):
        for i in range(6):
            if i not in flood or flood[i].end is not None:
                flood[i] = harness.submit(prompt_of(1 + 6 * num + i), 1, owner=b"%d" % i)[1]
        harness.engine.step()
    assert len(long.tokens) >= 300 * 2 // 7


def test_what_was_used_while_there_was_enough_costs_no_turns_later() -> None:
    """Eight sessions ran beside one, with a place for each. When ten owners come, all twelve advance alike."""
    harness = Harness(config=EngineConfig(max_running=10), num_blocks=4096)
    many = [harness.submit(prompt_of(i), 480, owner=ALICE)[1] for i in range(8)]
    one = harness.submit(prompt_of(8), 480, owner=BOB)[1]
    for _ in range(200):
        harness.engine.step()
    before = sum(len(c.tokens) for c in many), len(one.tokens)
    others = [harness.submit(prompt_of(20 + i), 480, owner=b"%d" % i)[1] for i in range(10)]
    for _ in range(120):
        harness.engine.step()
    after = sum(len(c.tokens) for c in many), len(one.tokens)
    gained = [*(len(c.tokens) for c in others), *(a - b for a, b in zip(after, before, strict=True))]
    assert max(gained) - min(gained) <= 2
    assert sum(gained) >= 120 * 10 - 10  # a newcomer's prompt may take two steps, so that it delays nobody


def test_a_session_that_waits_does_not_hold_up_those_that_ran_meanwhile() -> None:
    """One session ran 200 steps while another of its owner waited; beside six new ones it still gets its turns."""
    harness = Harness(config=EngineConfig(max_running=4), num_blocks=4096)
    harness.engine.calibrate()
    _, long = harness.submit(prompt_of(0), 480, patience_ms=0.0)
    waiting_id, _ = harness.submit(prompt_of(1), 480)
    harness.engine.step()
    drafts = harness.engine._sequences[waiting_id].drafts
    drafts.wait, drafts.wait_started, drafts.wait_deadline = Wait(1, 60.0), harness.clock.now, harness.clock.now + 60.0
    for _ in range(200):
        harness.engine.step()
    before = len(long.tokens)
    new = [harness.submit(prompt_of(20 + i), 480, patience_ms=0.0)[1] for i in range(6)]
    for _ in range(70):
        harness.engine.step()
    gained = [len(long.tokens) - before, *(len(c.tokens) for c in new)]
    assert max(gained) - min(gained) <= 2


def test_prompts_take_turns_where_a_step_has_fewer_tokens_than_owners() -> None:
    """Four prompt tokens a step, and eight owners with short prompts, always new ones: a long prompt gets its part."""
    harness = Harness(config=EngineConfig(max_running=16, step_tokens=4), num_blocks=4096)
    _, long = harness.submit(prompt_of(0, 100), 4, owner=ALICE)
    flood: dict[int, Collector] = {}
    for num in range(100 * 9 // 4 + 10):
        for i in range(8):
            if i not in flood or flood[i].end is not None:
                flood[i] = harness.submit(prompt_of(1 + 8 * num + i, 4), 1, owner=b"%d" % i)[1]
        harness.engine.step()
    assert long.tokens


def test_a_session_that_waits_leaves_its_place() -> None:
    """One place: while the first session waits for its device, the second runs."""
    harness = Harness(config=EngineConfig(max_running=1, policy=Policy.VERIFY))
    harness.engine.calibrate()
    _, first = harness.submit(prompt_of(1), 30, lag_ms=500.0)
    harness.engine.step()
    assert len(first.tokens) == 1
    _, second = harness.submit(prompt_of(2), 30, patience_ms=0.0)
    for _ in range(8):
        assert harness.engine.step() == 0.0
    assert (len(first.tokens), len(second.tokens)) == (1, 8)
    harness.run()
    assert first.tokens == plain(prompt_of(1), SAMPLED, 30)
    assert second.tokens == plain(prompt_of(2), SAMPLED, 30)


def test_waiting_is_weighed_against_the_places_that_others_can_use() -> None:
    """40 devices of 200 ms and 32 places of 20 ms: waiting leaves places empty. With ten times the devices it pays."""

    def plan(crowding: float) -> bool:
        lags = [0.2] * 8
        return plan_wait(0.7, 0.020, 0.0, lags, 1.0, saves_passes=False, crowding=crowding) != NO_WAIT

    assert not plan(1.0)
    assert not plan(40 / 32)
    assert plan(400 / 32)


def test_another_owners_many_sessions_do_not_make_mine_wait() -> None:
    """Waiting 200 ms pays where places are scarce, but an owner's own place is not scarce because another has 300."""
    harness = Harness(config=EngineConfig(max_running=8), num_blocks=20_000, step_s=lambda num_tokens: 0.020)
    harness.engine.calibrate()
    _, mine = harness.submit(prompt_of(0), 60, lag_ms=200.0, owner=BOB)
    for i in range(300):
        harness.submit(prompt_of(1 + i), 400, patience_ms=0.0, owner=ALICE)
    for _ in range(60):
        harness.engine.step()
    assert mine.tokens == plain(prompt_of(0), SAMPLED, 60)
    assert mine.end is not None and mine.end.usage.waited_s == 0.0


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(1, 60))
@settings(max_examples=300, deadline=None)
def test_the_even_level_uses_up_what_is_there(wanted: list[int], total: int) -> None:
    """Cut to the level, the demands add up to the total; where it suffices for all there is no level."""
    level = even_level(wanted, total)
    assert sum(min(want, level) for want in wanted) == pytest.approx(min(total, sum(wanted)))
    assert (level == float("inf")) == (sum(wanted) <= total)


# -- prompts, blocks, queue ------------------------------------------------------------------------------------------


def test_a_short_prompt_does_not_wait_behind_another_owners_long_ones() -> None:
    """Ten prompts of 400 tokens and one of 20: the short one's first token comes within three steps."""
    harness = Harness(config=EngineConfig(step_tokens=64), num_blocks=4096)
    for i in range(10):
        harness.submit(prompt_of(i, 400), 3, owner=ALICE)
    harness.engine.step()
    _, short = harness.submit(prompt_of(99, 20), 3, owner=BOB)
    assert steps_to_first_token(harness, short) <= 3


class Flood:
    """An owner that has four prompts of 400 fresh tokens in the engine at any time, for one token each; or 32 items of
    /v1/verify with a draft of 64 tokens each.
    """

    def __init__(self, harness: Harness, owner: bytes, *, has_items: bool = False) -> None:
        self._harness, self._owner, self._has_items = harness, owner, has_items
        self._open: list[Collector] = []
        self.num_done = self._num = 0
        self.refill()

    def refill(self) -> None:
        self.num_done += sum(each.end is not None for each in self._open)
        self._open = [each for each in self._open if each.end is None]
        while len(self._open) < (32 if self._has_items else 4):
            self._num += 1
            if self._has_items:
                one = self._harness.submit(prompt_of(self._num, 2), 99, once=True, draft=[5] * 64, owner=self._owner)
            else:
                one = self._harness.submit(prompt_of(1000 + self._num, 400), 1, owner=self._owner)
            self._open.append(one[1])


def flooded(
    num_texts: int, num_steps: int, *, priority: int = 0, has_items: bool = False
) -> tuple[list[float], list[list[int]], int]:
    """Seconds of each step, its tokens by sequence, and prompts done, beside texts of so many other owners."""
    clock_s = lambda num_tokens: 0.006 + 0.0005 * num_tokens  # noqa: E731
    harness = Harness(num_blocks=8192, max_positions=2048, step_s=clock_s)
    harness.engine.calibrate()
    texts = [
        harness.submit(prompt_of(i), 1500, owner=b"text %d" % i, patience_ms=0.0, priority=priority)[1]
        for i in range(num_texts)
    ]
    harness.run_steps(2)
    assert all(text.tokens for text in texts)
    flood, steps_s = Flood(harness, ALICE, has_items=has_items), list[float]()
    first = len(harness.batches)
    for _ in range(num_steps):
        began = harness.clock.now
        harness.step()
        steps_s.append(harness.clock.now - began)
        flood.refill()
    return steps_s, harness.batches[first:], flood.num_done


@pytest.mark.parametrize("num_texts", [1, 3])
def test_another_owners_prompts_take_no_more_time_than_a_step(num_texts: int) -> None:
    """However many it sends, a step with prompt tokens lasts two decode steps at most, and its time is its share."""
    steps_s, batches, num_done = flooded(num_texts, 600)
    decode_s = 0.006 + 0.0005 * num_texts
    assert max(steps_s) <= 2 * decode_s + 1e-9
    assert all(batch.count(1) >= num_texts for batch in batches), "a text sat out a step"
    for_prompts_s = sum(each - decode_s for each in steps_s)
    share = for_prompts_s / sum(steps_s)
    assert 0.9 / (num_texts + 1) <= share <= 1.1 / (num_texts + 1)
    assert num_done >= 4


@pytest.mark.parametrize("num_texts", [1, 3])
def test_another_owners_verify_items_take_their_share_of_time(num_texts: int) -> None:
    """An item's draft is verified in one pass: beside others' texts a step has one, and no prompt; its owner pays for
    the time.
    """
    steps_s, batches, num_done = flooded(num_texts, 600, has_items=True)
    decode_s = 0.006 + 0.0005 * num_texts
    assert max(steps_s) <= decode_s + 65 * 0.0005 + 1e-9
    assert all(batch.count(1) >= num_texts for batch in batches), "a text sat out a step"
    for_items_s = sum(each - decode_s for each in steps_s)
    share = for_items_s / sum(steps_s)
    assert 0.8 / (num_texts + 1) <= share <= 1.25 / (num_texts + 1)
    assert num_done >= 40


def test_two_owners_verify_items_leave_a_third_its_prompt() -> None:
    """Where every decoding sequence is an item that delays the others, prompts go on beside them."""
    harness = Harness(num_blocks=8192, max_positions=2048, step_s=lambda n: 0.006 + 0.0005 * n)
    harness.engine.calibrate()
    floods = [Flood(harness, owner, has_items=True) for owner in (ALICE, BOB)]
    harness.run_steps(2)
    _, third = harness.submit(prompt_of(7, 400), 3, owner=b"third")
    for _ in range(150):
        harness.step()
        for flood in floods:
            flood.refill()
    assert third.tokens


@pytest.mark.parametrize("policy", list(Policy))
def test_another_owners_sure_drafts_add_no_more_time_than_a_step(policy: Policy) -> None:
    """Sixteen texts with right drafts beside one without: its steps last two decode steps at most, but for capacity."""
    harness = Harness(
        config=EngineConfig(policy=policy), num_blocks=4096, max_positions=512, step_s=lambda n: 0.006 + 0.0005 * n
    )
    harness.engine.calibrate()
    _, text = harness.submit(prompt_of(99), 300, owner=BOB, patience_ms=0.0)
    truths = [plain(prompt_of(i), SAMPLED, 200) for i in range(16)]
    sessions = [harness.submit(prompt_of(i), 200, owner=ALICE, patience_ms=0.0) for i in range(16)]
    harness.run_steps(4)
    longest_s, most = 0.0, 0
    while not any(session.end for _, session in sessions):
        for (sequence_id, session), truth in zip(sessions, truths, strict=True):
            base = len(session.tokens)
            harness.engine.draft(sequence_id, base, [truth[base : base + 16]])
        began, num_before = harness.clock.now, len(text.tokens)
        harness.step()
        longest_s, most = max(longest_s, harness.clock.now - began), max(most, sum(harness.batches[-1]))
        assert len(text.tokens) == num_before + 1
    assert most > 17
    # The curve is measured in buckets of sizes.
    assert (longest_s <= 2.1 * (0.006 + 0.0005 * 17)) is (policy is not Policy.VERIFY)
    for (_, session), truth in zip(sessions, truths, strict=True):
        assert session.tokens == truth[: len(session.tokens)]


def test_prompts_delay_nobody_without_another_owners_text() -> None:
    """Alone, and beside texts of a lower priority but for every eighth step, they fill the steps."""
    _, alone, _ = flooded(0, 8)
    assert min(map(sum, alone)) == EngineConfig().token_budget
    _, beside, _ = flooded(2, 80, priority=-1)
    full = [sum(batch) for batch in beside if sum(batch) >= EngineConfig().token_budget]
    assert len(full) >= 60


def test_prompts_run_while_a_text_waits_for_its_device() -> None:
    """They do not wait with it, and the draft that arrives finds a step that is short."""
    harness = Harness(config=EngineConfig(policy=Policy.VERIFY), num_blocks=4096, max_positions=2048)
    harness.engine.calibrate()
    harness.submit(prompt_of(0), 300, lag_ms=500.0, owner=BOB)
    harness.engine.step()
    _, long = harness.submit(prompt_of(1, 400), 1, owner=ALICE)
    first = len(harness.batches)
    while long.end is None:
        harness.engine.step()
    assert max(map(sum, harness.batches[first:])) <= 45  # of 1 ms each, beside a step of 41 ms


def test_a_prompt_owes_nothing_for_steps_that_nobody_shares() -> None:
    """Eight texts wait for their devices most of the time: after a long prompt its owner's next one is as quick."""

    def step_s(num_tokens: int) -> float:
        return 0.006 + 0.0005 * num_tokens

    harness = Harness(config=EngineConfig(policy=Policy.VERIFY), num_blocks=8192, max_positions=4096, step_s=step_s)
    harness.engine.calibrate()
    truths = [plain(prompt_of(index), SAMPLED, 1300) for index in range(8)]
    texts = [harness.submit(prompt_of(index), 1200, lag_ms=60.0, owner=b"text %d" % index) for index in range(8)]
    answered = [0] * 8
    due: deque[tuple[float, int, int]] = deque()  # when a device's draft arrives, whose, and its base

    def step() -> None:
        for index, (_, text) in enumerate(texts):
            if len(text.tokens) > answered[index]:
                answered[index] = len(text.tokens)
                due.append((harness.clock.now + 0.060, index, answered[index]))
        while due and due[0][0] <= harness.clock.now:
            _, index, base = due.popleft()
            with suppress(RequestError):  # stale: the engine did not wait
                harness.engine.draft(texts[index][0], base, [truths[index][base : base + 6]])
        before = harness.clock.now
        delay = harness.engine.step()
        if harness.clock.now == before:
            harness.clock.now += delay or 0.001

    for _ in range(60):
        step()
    for length in (1500, 20):
        before = len(harness.batches)
        _, prompt = harness.submit(prompt_of(100 + length, length), 1000, owner=ALICE, patience_ms=0.0)
        while not prompt.tokens:
            step()
    assert len(harness.batches) - before <= 40


def test_a_prompt_of_lower_priority_bounds_no_higher_one() -> None:
    """ALICE's is above all texts; BOB's, beside which it runs, is not."""
    num_steps = []
    for has_lower in (False, True):
        harness = Harness(num_blocks=8192, max_positions=8192)
        harness.engine.calibrate()
        for index in range(3):
            harness.submit(prompt_of(index), 3000, owner=b"text %d" % index, patience_ms=0.0)
        harness.run_steps(3)
        if has_lower:
            harness.submit(prompt_of(50, 4000), 1, owner=BOB)
        harness.run_steps(2)
        before = len(harness.batches)
        _, higher = harness.submit(prompt_of(9, 1000), 1, owner=ALICE, priority=1)
        while higher.end is None:
            harness.step()
        num_steps.append(len(harness.batches) - before)
    assert num_steps[1] <= 2 * num_steps[0]


def test_a_wait_for_a_device_does_not_cost_the_context() -> None:
    """Six sessions that wait 100 ms now and then, blocks for three: none computes its context anew for each wait."""
    config = EngineConfig(max_running=8, policy=Policy.VERIFY)
    harness = Harness(config=config, num_blocks=100, block_size=4, step_s=lambda num_tokens: 0.020)
    harness.engine.calibrate()
    prompts = [prompt_of(i, 100) for i in range(6)]
    truths = [plain(prompt, SAMPLED, 60) for prompt in prompts]
    sessions = [harness.submit(prompt, 60, lag_ms=100.0) for prompt in prompts]
    answers: dict[int, tuple[int, float]] = {}  # by session: base, and when its device answers
    while harness.engine.has_work:
        for (sequence_id, collector), truth in zip(sessions, truths, strict=True):
            base = len(collector.tokens)
            if collector.end is None and base > answers.get(sequence_id, (0, 0.0))[0]:
                answers[sequence_id] = base, harness.clock.now + 0.1
            if collector.end is None and answers.get(sequence_id) and harness.clock.now >= answers[sequence_id][1]:
                harness.engine.draft(sequence_id, base, [[*truth[base : base + 3], 0]])
                answers[sequence_id] = base, float("inf")
            if collector.end is not None:
                answers.pop(sequence_id, None)
        due = min((when for _, when in answers.values()), default=float("inf"))
        delay = harness.engine.step() or 0.0
        harness.clock.now = min(harness.clock.now + delay, max(due, harness.clock.now))
    assert [c.tokens for _, c in sessions] == truths
    stats = harness.engine.stats()
    assert stats.distributions.wait_s.total > 1.0
    assert stats.totals.step_tokens < 3 * 6 * 160
    harness.assert_all_returned()


@pytest.mark.parametrize("owner", [ALICE, BOB])
def test_blocks_change_hands(owner: bytes) -> None:
    """Long texts fill the cache: a newcomer still gets blocks, and every text is exact."""
    harness = Harness(config=EngineConfig(max_running=8), num_blocks=64, block_size=4)
    texts = [harness.submit(prompt_of(i, 50), 150, owner=ALICE)[1] for i in range(4)]
    for _ in range(60):
        harness.engine.step()
    _, newcomer = harness.submit(prompt_of(99, 40), 20, owner=owner)
    assert steps_to_first_token(harness, newcomer) <= 60
    assert not all(c.end for c in texts)
    harness.run()
    assert [c.tokens for c in texts] == [plain(prompt_of(i, 50), SAMPLED, 150) for i in range(4)]
    assert newcomer.tokens == plain(prompt_of(99, 40), SAMPLED, 20)
    harness.assert_all_returned()


def test_a_large_prompt_is_not_overtaken_for_ever() -> None:
    """One that needs most of the cache is served although small ones of other owners keep coming."""
    harness = Harness(config=EngineConfig(max_running=4), num_blocks=64, block_size=4)
    num = 0

    def keep_coming() -> None:
        nonlocal num
        while num < 2_000 and harness.engine.stats().queued < 4:
            harness.submit(prompt_of(num, 30), 40, owner=b"%d" % (num % 5))
            num += 1
            harness.engine.step()

    keep_coming()
    _, large = harness.submit(prompt_of(999, 200), 8, owner=BOB)
    for _ in range(1_000):
        keep_coming()
        harness.engine.step()
        if large.end is not None:
            break
    assert large.tokens == plain(prompt_of(999, 200), SAMPLED, 8)


def test_a_step_looks_at_few_of_those_that_have_no_room() -> None:
    """With 300 owners queued for blocks that are all in use, a step tries 16 of them; all are served in the end."""
    harness = Harness(config=EngineConfig(max_running=8), num_blocks=32, block_size=4)
    texts = [harness.submit(prompt_of(i, 10), 5, owner=b"%d" % i)[1] for i in range(300)]
    scheduler, num_tried = harness.engine._scheduler, 0
    admit = scheduler._admit

    def counted(sequence: SequenceState) -> bool:
        nonlocal num_tried
        is_admitted = admit(sequence)
        num_tried += not is_admitted
        return is_admitted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "_admit", counted)
        for _ in range(5):
            before = num_tried
            harness.engine.step()
            assert num_tried - before <= 16
        assert num_tried > 0
    harness.run()
    assert all(len(c.tokens) == 5 for c in texts)
    harness.assert_all_returned()


def test_a_full_queue_refuses_the_owner_that_filled_it() -> None:
    """An owner with less than its share of the queue is still let in."""
    harness = Harness(config=EngineConfig(max_queue=10, max_running=1))
    for i in range(11):
        harness.submit(prompt_of(i), owner=ALICE)
    with pytest.raises(RequestError, match="queued already"):
        harness.submit(prompt_of(20), owner=ALICE)
    for i in range(5):
        harness.submit(prompt_of(30 + i), owner=BOB)
    with pytest.raises(RequestError, match="queued already"):
        harness.submit(prompt_of(40), owner=BOB)
    harness.submit(prompt_of(50), owner=b"carol")


def test_the_queue_is_bounded_over_all_owners_and_by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Owners that never come twice, and prompts that fill many caches, are refused before they fill the memory."""
    harness = Harness(config=EngineConfig(max_queue=10, max_running=1))
    for i in range(21):
        harness.submit(prompt_of(i), owner=b"%d" % i)
    with pytest.raises(RequestError, match="queued already"):
        harness.submit(prompt_of(30), owner=b"new")
    monkeypatch.setattr("outrider.cloud.engine.request_checks._MIN_QUEUED_TOKENS", 0)
    harness = Harness(config=EngineConfig(max_running=1), num_blocks=16, block_size=4)
    for i in range(9):
        harness.submit(prompt_of(i, 60), owner=ALICE)
    with pytest.raises(RequestError, match="queued already"):
        harness.submit(prompt_of(20, 60), owner=ALICE)
    harness.submit(prompt_of(21, 60), owner=BOB)


def test_a_step_has_room_for_drafts_however_many_sequences_run() -> None:
    """At 256 places every sequence's draft can be verified in one step."""
    config = EngineConfig(max_running=256)
    assert config.token_budget >= 256 * 8
    assert EngineConfig(max_running=256, step_tokens=300).token_budget == 300


# -- caches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_shared", [False, True])
def test_cached_prompts_are_the_owners_own(is_shared: bool) -> None:
    """Neither usage nor a shorter prefill shows what another owner has sent, unless the operator shares caches."""
    harness = Harness(config=EngineConfig(share_between_owners=is_shared), block_size=4)
    prompt = list(range(30))

    def cached(owner: bytes) -> int:
        harness.batches.clear()
        _, collector = harness.submit(prompt, 3, owner=owner)
        harness.run()
        assert collector.tokens == plain(prompt, SAMPLED, 3)
        assert collector.end is not None
        assert harness.batches[0] == [30 - collector.end.usage.cached_prompt_tokens]
        return collector.end.usage.cached_prompt_tokens

    assert [cached(ALICE), cached(ALICE)] == [0, 28]
    assert [cached(BOB), cached(BOB)] == [28 if is_shared else 0, 28]
    harness.assert_all_returned()


def parked_name(harness: Harness, prompt: Sequence[int], owner: bytes) -> str:
    """The name under which a verify pass left its cache."""
    _, collector = harness.submit(prompt, 1, once=True, owner=owner)
    harness.run()
    assert collector.end is not None and collector.end.prefix_hash is not None
    return collector.end.prefix_hash


def test_a_parked_prefix_is_its_owners_and_its_name_cannot_be_computed() -> None:
    """Another owner that knows the text or even the name gets 409, and the owner's own call still finds its prefix."""
    harness = Harness()
    prompt = prompt_of(3)
    name = parked_name(harness, prompt, ALICE)
    assert parked_name(harness, prompt, BOB) != name
    assert parked_name(Harness(), prompt, ALICE) != name  # another server
    with pytest.raises(RequestError) as refused:
        harness.submit([], 1, once=True, prefix_hash=name, owner=BOB)
    assert refused.value.code == "prefix_not_held"
    _, again = harness.submit([], 1, once=True, prefix_hash=name, owner=ALICE)
    harness.run()
    assert again.tokens == plain(prompt, SAMPLED, 2)[1:]


def test_as_many_prefixes_are_held_as_one_call_can_have() -> None:
    """256 items leave 256 prefixes, and another owner's do not push them out."""
    harness = Harness(num_blocks=4096)
    names = [parked_name(harness, prompt_of(i), ALICE) for i in range(256)]
    for i in range(300):
        parked_name(harness, prompt_of(i), BOB)
    for name in names:
        harness.submit([], 1, once=True, prefix_hash=name, owner=ALICE)
    harness.run()
    harness.assert_all_returned()


@pytest.mark.parametrize("is_held", [False, True])
def test_every_item_of_a_verify_call_gets_its_whole_draft_verified(is_held: bool) -> None:
    """32 items with 64 correct tokens each do not fit a step of 256: they take several, beside another's session."""
    harness = Harness(config=EngineConfig(max_running=33, step_tokens=256), num_blocks=4096)
    prompts = [prompt_of(i) for i in range(32)]
    names = [parked_name(harness, prompt, ALICE) if is_held else None for prompt in prompts]
    truths = [plain(prompt, SAMPLED, 66) for prompt in prompts]
    mine = plain(prompt_of(99), SAMPLED, 40)
    session_id, session = harness.submit(prompt_of(99), 40, patience_ms=0.0, owner=BOB)
    harness.engine.step()
    items = [
        harness.submit(() if name else prompt, 99, once=True, draft=t[n : 64 + n], prefix_hash=name, owner=ALICE)[1]
        for prompt, name, t in zip(prompts, names, truths, strict=True)
        for n in [int(is_held)]
    ]
    while not all(item.end for item in items):
        if session.end is None and len(session.tokens) < 40:
            harness.engine.draft(session_id, len(session.tokens), [mine[len(session.tokens) :]])
        harness.engine.step()
    assert [item.commits[0].accepted for item in items] == [64] * 32
    assert session.tokens == mine[: len(session.tokens)]
    assert all(commit.accepted > 0 for commit in session.commits[1:-1])
    harness.assert_all_returned()


def test_verify_items_without_room_do_not_keep_places_from_sessions_of_their_owner() -> None:
    """A loop of 20 items of 64 tokens, of which a step has room for one: the owner's session gets its turns."""
    harness = Harness(config=EngineConfig(max_running=8, step_tokens=256), num_blocks=8192)
    _, session = harness.submit(prompt_of(0), 100, patience_ms=0.0)
    items: list[Collector] = []
    for _ in range(60):
        while sum(item.end is None for item in items) < 20:
            items.append(harness.submit(prompt_of(1 + len(items)), 99, once=True, draft=[5] * 64)[1])
        harness.engine.step()
    assert len(session.tokens) >= 60 * 8 // 21
    assert sum(item.end is not None for item in items) >= 40


def test_a_sequence_that_gave_way_does_not_count_its_own_blocks_as_cached() -> None:
    """Two prompts that share nothing take turns in a small cache: nothing of them was cached when they came."""
    harness = Harness(num_blocks=20)
    texts = [harness.submit(prompt_of(i, 30), 40)[1] for i in range(2)]
    harness.run()
    assert harness.engine.stats().totals.preempted > 0
    assert [c.end.usage.cached_prompt_tokens for c in texts if c.end] == [0, 0]
    assert harness.engine.stats().totals.prefix_hit_tokens == 0


# -- estimates -------------------------------------------------------------------------------------------------------


def test_the_curve_learns_what_a_long_context_costs() -> None:
    """Steps of one size at growing contexts: the time is told apart from the time of more tokens."""
    curve = StepTimeCurve()
    for past in range(0, 2_000, 5):
        for tokens in (1, 5):
            size = StepSize.of(tokens, past)
            curve.observe(size, 0.040 + 0.001 * tokens + 20e-6 * size.attended)
    for past in (10, 1_500):
        fixed = StepSize.of(1, past)
        times = curve.seconds(5, fixed, past)
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


def test_drafts_beside_a_prompt_are_priced_as_part_of_its_step() -> None:
    """Up to 64 tokens a further one is free, beyond them it is dear: beside a prompt of 63, one draft is verified."""
    harness = Harness(config=EngineConfig(step_tokens=128), step_s=lambda n: 0.02 + 0.05 * max(0, n - 64))
    harness.engine.calibrate(max_tokens=32)
    for prompt in ([5] * 64, [6] * 96):
        harness.submit(prompt, 1)
        harness.run()
    truth = plain(prompt_of(1), SAMPLED, 40)
    sequence_id, collector = harness.submit(prompt_of(1), 40)
    harness.engine.step()
    for prompt, expected in (([], 6), (prompt_of(9, 62), 1)):
        if prompt:
            harness.submit(prompt, 1)
        base = len(collector.tokens)
        harness.engine.draft(sequence_id, base, [truth[base : base + 6]])
        harness.engine.step()
        assert collector.commits[-1].proposed == expected
    harness.run()
    assert collector.tokens == truth


# -- all of it at once -----------------------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_sharing_never_changes_a_text_and_loses_nothing(data: st.DataObject) -> None:
    """Any mix of owners, cache sizes, places, drafts and cancellations: exact texts, every block back."""
    config = EngineConfig(
        max_running=data.draw(st.integers(1, 4)),
        step_tokens=data.draw(st.sampled_from([3, 16, None])),
        max_parked=data.draw(st.integers(1, 3)),
        policy=data.draw(st.sampled_from(list(Policy))),
    )
    harness = Harness(config=config, num_blocks=data.draw(st.sampled_from([14, 40])))
    texts: list[tuple[int, Collector, list[int]]] = []
    for index in range(data.draw(st.integers(1, 7))):
        for _ in range(data.draw(st.integers(0, 40))):
            harness.step()
        prompt = prompt_of(index, data.draw(st.sampled_from([3, 20])))
        owner = data.draw(st.sampled_from([ALICE, BOB, b"carol"]))
        once = data.draw(st.booleans())
        truth = plain(prompt, SAMPLED, 24)
        draft = truth[:4] if once else []
        lag = data.draw(st.sampled_from([None, 5.0, 300.0]))
        sequence_id, collector = harness.submit(
            prompt, 24, owner=owner, once=once, draft=draft, lag_ms=None if once else lag
        )
        texts.append((sequence_id, collector, truth))
        if data.draw(st.integers(0, 9)) == 0:
            harness.engine.cancel(sequence_id)
    harness.run()
    for _, collector, truth in texts:
        assert collector.end is not None
        assert collector.tokens == truth[: len(collector.tokens)]
        if collector.end.reason == "length":
            assert len(collector.tokens) == 24
    harness.assert_all_returned()
