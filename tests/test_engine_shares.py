"""Tests that an owner's prompts, verify items and drafts take no more of a step's time than their share."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from tests.engine_harness import SAMPLED, Collector, Harness, calibrated, plain, prompt_of

from outrider.cloud.engine import EngineConfig, Policy

ALICE, BOB = b"alice", b"bob"


class Flood:
    """An owner that has so many prompts of fresh tokens in the engine at any time, for one token each; or items of
    /v1/verify with a draft of 64 tokens each.
    """

    def __init__(self, harness: Harness, owner: bytes, at_once: int, length: int = 400, *, has_items: bool) -> None:
        self._harness, self._owner, self._has_items = harness, owner, has_items
        self._at_once, self._length = at_once, length
        self._open: list[Collector] = []
        self.num_done = self._num = 0
        self.refill()

    def refill(self) -> None:
        self.num_done += sum(each.end is not None for each in self._open)
        self._open = [each for each in self._open if each.end is None]
        while len(self._open) < self._at_once:
            self._num += 1
            count, item = (99, {"once": True, "draft": [5] * 64}) if self._has_items else (1, {})
            self._open += self._harness.texts([1000 + self._num], count, self._length, owner=self._owner, **item)


def step_s(num_tokens: int) -> float:
    """Seconds of a step."""
    return 0.006 + 0.0005 * num_tokens


def texts_of(harness: Harness, count: int, max_tokens: int, **values: Any) -> list[Collector]:
    """Texts of so many owners, which no step waits for."""
    return [harness.texts([i], max_tokens, owner=b"text %d" % i, patience_ms=0.0, **values)[0] for i in range(count)]


def flooded(
    num_texts: int, num_steps: int, at_once: int = 4, length: int = 400, *, priority: int = 0, has_items: bool = False
) -> tuple[list[float], list[list[int]], int]:
    """Seconds of each step, its tokens by sequence, and prompts done, beside texts of so many other owners."""
    harness = calibrated(num_blocks=8192, max_positions=2048, step_s=step_s)
    texts = texts_of(harness, num_texts, 1500, priority=priority)
    harness.run_steps(2)
    assert all(text.tokens for text in texts)
    flood, times_s = Flood(harness, ALICE, at_once, length, has_items=has_items), [harness.clock.now]
    first = len(harness.batches)
    for _ in range(num_steps):
        harness.step()
        times_s.append(harness.clock.now)
        flood.refill()
    return np.diff(times_s).tolist(), harness.batches[first:], flood.num_done


@pytest.mark.parametrize(
    ("num_texts", "has_items", "at_once", "length", "slack", "least_done"),
    [
        (1, False, 4, 400, (0.9, 1.1), 4),
        (3, False, 4, 400, (0.9, 1.1), 4),
        (1, True, 32, 2, (0.8, 1.25), 40),
        (3, True, 32, 2, (0.8, 1.25), 40),
        (8, False, 1, 12, (0.9, 1.1), 40),
        (3, True, 1, 2, (0.8, 1.25), 30),
    ],
)
def test_another_owners_prompts_and_verify_items_take_their_share_of_time(
    num_texts: int, has_items: bool, at_once: int, length: int, slack: tuple[float, float], least_done: int
) -> None:
    """However many it sends, also one after another, a step with prompt tokens lasts two decode steps at most, and its
    time is its share.

    An item's draft is verified in one pass: beside others' texts a step has one, and no prompt; its owner pays for it.
    """
    steps_s, batches, num_done = flooded(num_texts, 600, at_once, length, has_items=has_items)
    decode_s = step_s(num_texts)
    assert max(steps_s) <= decode_s + (65 * 0.0005 if has_items else decode_s) + 1e-9
    assert all(batch.count(1) >= num_texts for batch in batches), "a text sat out a step"
    share = sum(each - decode_s for each in steps_s) / sum(steps_s)
    assert slack[0] / (num_texts + 1) <= share <= slack[1] / (num_texts + 1)
    assert num_done >= least_done


def test_the_debts_of_owners_that_left_are_few() -> None:
    """A client with a new address for each item leaves one behind each time: they are paid off beside the texts."""
    harness = calibrated(num_blocks=8192, max_positions=2048, step_s=step_s)
    texts_of(harness, 3, 1500)
    items, most, owners = list[Collector](), 0, harness.engine._scheduler.owners
    for step in range(200):
        items += harness.texts([9 + step], 99, 2, once=True, draft=[5] * 64, owner=b"%d" % step)
        harness.step()
        most = max(most, len(owners._owed))
    assert sum(item.end is not None for item in items) >= 100 and 5 <= most <= 100
    for _ in range(500):
        if owners._owed:
            harness.step()
    assert not owners._owed


def test_two_owners_verify_items_leave_a_third_its_prompt() -> None:
    """Where every decoding sequence is an item that delays the others, prompts go on beside them."""
    harness = calibrated(num_blocks=8192, max_positions=2048, step_s=step_s)
    floods = [Flood(harness, owner, 32, 2, has_items=True) for owner in (ALICE, BOB)]
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
    harness = calibrated(config=EngineConfig(policy=policy), num_blocks=4096, step_s=step_s)
    _, text = harness.submit(prompt_of(99), 300, owner=BOB, patience_ms=0.0)
    truths = [plain(prompt_of(i), SAMPLED, 200) for i in range(16)]
    sessions = [harness.submit(prompt_of(i), 200, owner=ALICE, patience_ms=0.0) for i in range(16)]
    harness.run_steps(4)
    longest_s, most = 0.0, 0
    while not any(session.end for _, session in sessions):
        harness.draft_all(sessions, truths, 16)
        began, num_before = harness.clock.now, len(text.tokens)
        harness.step()
        longest_s, most = max(longest_s, harness.clock.now - began), max(most, sum(harness.batches[-1]))
        assert len(text.tokens) == num_before + 1
    assert most > 17
    # The curve is measured in buckets of sizes.
    assert (longest_s <= 2.1 * step_s(17)) is (policy is not Policy.VERIFY)
    assert [c.tokens for _, c in sessions] == [t[: len(c.tokens)] for (_, c), t in zip(sessions, truths, strict=True)]


def test_prompts_delay_nobody_without_another_owners_text() -> None:
    """Alone, and beside texts of a lower priority but for every eighth step, they fill the steps."""
    _, alone, _ = flooded(0, 8)
    assert min(map(sum, alone)) == EngineConfig().token_budget
    _, beside, _ = flooded(2, 80, priority=-1)
    assert sum(sum(batch) >= EngineConfig().token_budget for batch in beside) >= 60


def test_prompts_run_while_a_text_waits_for_its_device() -> None:
    """They do not wait with it, and the draft that arrives finds a step that is short."""
    harness = calibrated(config=EngineConfig(policy=Policy.VERIFY), num_blocks=4096, max_positions=2048)
    harness.submit(prompt_of(0), 300, lag_ms=500.0, owner=BOB)
    harness.engine.step()
    _, long = harness.submit(prompt_of(1, 400), 1, owner=ALICE)
    first = len(harness.batches)
    while long.end is None:
        harness.engine.step()
    assert max(map(sum, harness.batches[first:])) <= 45  # of 1 ms each, beside a step of 41 ms


class Devices:
    """Those of some texts: each answers every commit after `lag_s`, with so many right tokens and a wrong one."""

    def __init__(
        self,
        harness: Harness,
        texts: list[tuple[int, Collector]],
        truths: list[list[int]],
        lag_s: float,
        num_right: int,
    ) -> None:
        self._harness, self._texts, self._truths = harness, texts, truths
        self._lag_s, self._num_right = lag_s, num_right
        self._answered = [0] * len(texts)
        self._due: deque[tuple[float, int, int]] = deque()  # when a draft arrives, whose, and its base

    def step(self) -> None:
        """One step of the engine; where it waits, time goes on to the next draft."""
        clock = self._harness.clock
        for index, (_, text) in enumerate(self._texts):
            if len(text.tokens) > self._answered[index]:
                self._answered[index] = len(text.tokens)
                self._due.append((clock.now + self._lag_s, index, len(text.tokens)))
        while self._due and self._due[0][0] <= clock.now:
            _, index, base = self._due.popleft()
            number, text = self._texts[index]
            if text.end is None:
                self._harness.engine.draft(number, base, [[*self._truths[index][base : base + self._num_right], 0]])
        due_s = self._due[0][0] if self._due else float("inf")
        delay = self._harness.engine.step() or 0.0
        clock.now = min(clock.now + delay, max(due_s, clock.now))


def test_a_prompt_owes_nothing_for_steps_that_nobody_shares() -> None:
    """Eight texts wait for their devices most of the time: after a long prompt its owner's next one is as quick."""
    harness = calibrated(config=EngineConfig(policy=Policy.VERIFY), num_blocks=8192, max_positions=4096, step_s=step_s)
    truths = [plain(prompt_of(index), SAMPLED, 1300) for index in range(8)]
    texts = [harness.submit(prompt_of(index), 1200, lag_ms=60.0, owner=b"text %d" % index) for index in range(8)]
    devices = Devices(harness, texts, truths, 0.060, 6)
    for _ in range(60):
        devices.step()
    for length in (1500, 20):
        before = len(harness.batches)
        _, prompt = harness.submit(prompt_of(100 + length, length), 1000, owner=ALICE, patience_ms=0.0)
        while not prompt.tokens:
            devices.step()
    assert len(harness.batches) - before <= 40


def test_a_prompt_of_lower_priority_bounds_no_higher_one() -> None:
    """ALICE's is above all texts; BOB's, beside which it runs, is not."""
    num_steps = []
    for has_lower in (False, True):
        harness = calibrated(num_blocks=8192, max_positions=8192)
        texts_of(harness, 3, 3000)
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
    harness = calibrated(config=config, num_blocks=100, step_s=lambda num_tokens: 0.020)
    truths = [plain(prompt_of(i, 100), SAMPLED, 60) for i in range(6)]
    texts = [harness.submit(prompt_of(i, 100), 60, lag_ms=100.0) for i in range(6)]
    devices = Devices(harness, texts, truths, 0.100, 3)
    while harness.engine.has_work:
        devices.step()
    stats = harness.engine.stats()
    assert [text.tokens for _, text in texts] == truths
    assert stats.distributions.wait_s.total > 1.0 and stats.totals.step_tokens < 3 * 6 * 160


@pytest.mark.parametrize("is_held", [False, True])
def test_every_item_of_a_verify_call_gets_its_whole_draft_verified(is_held: bool) -> None:
    """32 items with 64 correct tokens each do not fit a step of 256: they take several, beside another's session."""
    harness = Harness(config=EngineConfig(max_running=33, step_tokens=256), num_blocks=4096)
    prompts = [prompt_of(i) for i in range(32)]
    names = [harness.parked(prompt, ALICE) if is_held else None for prompt in prompts]
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
    assert session.tokens == mine[: len(session.tokens)] and all(commit.accepted for commit in session.commits[1:-1])


def test_verify_items_without_room_do_not_keep_places_from_sessions_of_their_owner() -> None:
    """A loop of 20 items of 64 tokens, of which a step has room for one: the owner's session gets its turns."""
    harness = Harness(config=EngineConfig(max_running=8, step_tokens=256), num_blocks=8192)
    _, session = harness.submit(prompt_of(0), 100, patience_ms=0.0)
    items: list[Collector] = []
    for _ in range(60):
        while sum(item.end is None for item in items) < 20:
            items += harness.texts([1 + len(items)], 99, once=True, draft=[5] * 64)
        harness.engine.step()
    assert len(session.tokens) >= 60 * 8 // 21 and sum(item.end is not None for item in items) >= 40


def test_drafts_beside_a_prompt_are_priced_as_part_of_its_step() -> None:
    """Up to 64 tokens a further one is free, beyond them it is dear: beside a prompt of 63, one draft is verified."""
    harness = Harness(config=EngineConfig(step_tokens=128), step_s=lambda n: 0.02 + 0.05 * max(0, n - 64))
    harness.engine.calibrate(max_tokens=32)
    for prompt in ([5] * 64, [6] * 96):
        harness.finished(prompt, 1)
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
