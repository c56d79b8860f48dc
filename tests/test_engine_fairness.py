"""Tests that nobody has the engine alone: places, blocks, queue, step tokens are shared evenly; caches are not."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine_harness import SAMPLED, Collector, Harness, calibrated, plain, prompt_of, refused

from outrider.cloud.engine import EngineConfig, Policy
from outrider.cloud.engine.owners import even_level, split_evenly
from outrider.cloud.engine.sequence_state import SequenceState
from outrider.cloud.pending.policy import NO_WAIT, Wait, plan_wait

ALICE, BOB = b"alice", b"bob"


def steps_to_first_token(harness: Harness, collector: Collector, most: int = 500) -> int:
    """Steps that run until the collector has a token."""
    for count in range(most):
        if collector.tokens:
            return count
        harness.step()
    pytest.fail(f"no token in {most} steps")


# -- the law behind it ---------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 20), max_size=8), st.integers(0, 60))
@settings(max_examples=300, deadline=None)
def test_even_shares_are_max_min_fair(wanted: list[int], total: int) -> None:
    """Nothing is wasted, nobody gets more than it wants, and who goes short has no less than any other, but for one."""
    given_ = split_evenly(wanted, total)
    assert sum(given_) == min(total, sum(wanted)) and all(0 <= g <= w for g, w in zip(given_, wanted, strict=True))
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
        harness = calibrated(config=EngineConfig(max_running=8, policy=policy), num_blocks=4096)
        harness.texts(range(33), 200, lag_ms=draft_lag_ms)
        harness.run_steps(40)
        arrived = harness.clock.now
        steps_to_first_token(harness, harness.texts([99], 5)[0])
        return harness.clock.now - arrived

    assert seconds_to_first_token(60_000.0) <= 2 * seconds_to_first_token(None)


@pytest.mark.parametrize("owner", [ALICE, BOB])
@pytest.mark.parametrize(
    ("room", "num_texts", "length", "count", "warm_up", "most"),
    [({"num_blocks": 4096}, 8, 6, 100, 20, 2), ({"num_blocks": 64}, 4, 50, 150, 60, 60)],
    ids=["places", "blocks"],
)
def test_a_newcomer_does_not_wait_for_long_sessions_to_end(
    owner: bytes, room: dict[str, Any], num_texts: int, length: int, count: int, warm_up: int, most: int
) -> None:
    """With every place or the whole cache taken by long texts, one of whichever owner soon gets its first token."""
    harness = Harness(config=EngineConfig(max_running=8), **room)
    texts = harness.texts(range(num_texts), count, length, owner=ALICE)
    harness.run_steps(warm_up)
    _, newcomer = harness.submit(prompt_of(99, 40), 30, owner=owner)
    assert steps_to_first_token(harness, newcomer) <= most and not all(c.end for c in texts)
    harness.run()
    assert num_texts == 4 or max(map(len, harness.batches)) == 8
    assert [c.tokens for c in texts] == [plain(prompt_of(i, length), SAMPLED, count) for i in range(num_texts)]
    assert newcomer.tokens == plain(prompt_of(99, 40), SAMPLED, 30)


def gained(harness: Harness, texts: Sequence[Collector], num_steps: int) -> list[int]:
    """The tokens that each text gets in so many steps."""
    before = [len(text.tokens) for text in texts]
    harness.run_steps(num_steps)
    return [len(text.tokens) - count for text, count in zip(texts, before, strict=True)]


def test_places_are_shared_between_owners_and_between_the_sessions_of_one() -> None:
    """40 sessions against 2 for 8 places: the two run in every step, the forty take turns."""
    harness = Harness(config=EngineConfig(max_running=8), num_blocks=4096)
    many = harness.texts(range(40), 300, owner=ALICE)
    harness.run_steps(30)
    few = harness.texts(range(90, 92), 300, owner=BOB)
    of_many = gained(harness, many, 100)
    assert min(len(c.tokens) for c in few) >= 99 and max(of_many) - min(of_many) <= 2 and sum(of_many) >= 6 * 99


def test_more_owners_than_places_take_turns() -> None:
    """Twelve owners, four places: all advance alike, also one that comes late and one with many sessions."""
    harness = Harness(config=EngineConfig(max_running=4), num_blocks=4096)
    texts = [harness.submit(prompt_of(i), 300, owner=b"%d" % i)[1] for i in range(11)]
    harness.texts(range(200, 220), 300, owner=b"0")
    harness.run_steps(50)
    texts += harness.texts(range(50, 51), 300, owner=b"late")
    of_others = gained(harness, texts, 120)[1:]
    assert max(of_others) - min(of_others) <= 2 and min(of_others) >= 38


@pytest.mark.parametrize(
    ("limits", "long_length", "owners", "length", "num_steps", "least"),
    [
        ({"max_running": 2}, 6, [b"long"] * 10, 6, 110, 15),
        ({"max_running": 2}, 6, [b"%d" % i for i in range(6)], 6, 300, 300 * 2 // 7),
        ({"max_running": 16, "step_tokens": 4}, 100, [b"%d" % i for i in range(8)], 4, 100 * 9 // 4 + 10, 1),
    ],
    ids=["places of its owner", "places", "prompt tokens of a step"],
)
def test_a_flood_of_short_requests_does_not_stop_a_long_text(
    limits: dict[str, Any], long_length: int, owners: list[bytes], length: int, num_steps: int, least: int
) -> None:
    """Owners that come anew with a request of one token whenever they are done: a long text or prompt gets its part."""
    harness = Harness(config=EngineConfig(**limits), num_blocks=4096)
    (long,) = harness.texts([0], 400, long_length, owner=b"long")
    numbers, flood = itertools.count(1), dict[int, Collector]()
    for _ in range(num_steps):
        for i, owner in enumerate(owners):
            if i not in flood or flood[i].end is not None:
                (flood[i],) = harness.texts([next(numbers)], 1, length, owner=owner)
        harness.engine.step()
    assert len(long.tokens) >= least


def test_what_was_used_while_there_was_enough_costs_no_turns_later() -> None:
    """Eight sessions ran beside one, with a place for each. When ten owners come, all twelve advance alike."""
    harness = Harness(config=EngineConfig(max_running=10), num_blocks=4096)
    texts = harness.texts(range(8), 480, owner=ALICE) + harness.texts(range(8, 9), 480, owner=BOB)
    harness.run_steps(200)
    texts += [harness.submit(prompt_of(20 + i), 480, owner=b"%d" % i)[1] for i in range(10)]
    of_each = gained(harness, texts, 120)
    of_owners = [sum(of_each[:8]), *of_each[8:]]
    assert max(of_owners) - min(of_owners) <= 2
    assert sum(of_owners) >= 120 * 10 - 10  # a newcomer's prompt may take two steps, so that it delays nobody


def test_a_session_that_waits_does_not_hold_up_those_that_ran_meanwhile() -> None:
    """One session ran 200 steps while another of its owner waited; beside six new ones it still gets its turns."""
    harness = calibrated(config=EngineConfig(max_running=4), num_blocks=4096)
    texts = harness.texts(range(1), 480, patience_ms=0.0)
    waiting_id, _ = harness.submit(prompt_of(1), 480)
    harness.engine.step()
    drafts = harness.engine._sequences[waiting_id].drafts
    drafts.wait, drafts.wait_started, drafts.wait_deadline = Wait(1, 60.0), harness.clock.now, harness.clock.now + 60.0
    harness.run_steps(200)
    texts += harness.texts(range(20, 26), 480, patience_ms=0.0)
    of_each = gained(harness, texts, 70)
    assert max(of_each) - min(of_each) <= 2


def test_a_session_that_waits_leaves_its_place() -> None:
    """One place: while the first session waits for its device, the second runs."""
    harness = calibrated(config=EngineConfig(max_running=1, policy=Policy.VERIFY))
    texts = harness.texts(range(1, 2), 30, lag_ms=500.0)
    harness.engine.step()
    texts += harness.texts(range(2, 3), 30, patience_ms=0.0)
    assert [harness.engine.step() for _ in range(8)] == [0.0] * 8 and [len(c.tokens) for c in texts] == [1, 8]
    harness.run()
    assert [c.tokens for c in texts] == [plain(prompt_of(i), SAMPLED, 30) for i in (1, 2)]


@pytest.mark.parametrize(("crowding", "is_waiting"), [(1.0, False), (40 / 32, False), (400 / 32, True)])
def test_waiting_is_weighed_against_the_places_that_others_can_use(crowding: float, is_waiting: bool) -> None:
    """40 devices of 200 ms and 32 places of 20 ms: waiting leaves places empty. With ten times the devices it pays."""
    plan = plan_wait(0.7, 0.020, 0.0, [0.2] * 8, 1.0, saves_passes=False, crowding=crowding)
    assert (plan != NO_WAIT) == is_waiting


def test_another_owners_many_sessions_do_not_make_mine_wait() -> None:
    """Waiting 200 ms pays where places are scarce, but an owner's own place is not scarce because another has 300."""
    harness = calibrated(config=EngineConfig(max_running=8), num_blocks=20_000, step_s=lambda num_tokens: 0.020)
    (mine,) = harness.texts(range(1), 60, lag_ms=200.0, owner=BOB)
    harness.texts(range(1, 301), 400, patience_ms=0.0, owner=ALICE)
    harness.run_steps(60)
    assert mine.tokens == plain(prompt_of(0), SAMPLED, 60) and mine.ended.usage.waited_s == 0.0


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
    harness.texts(range(10), 3, 400, owner=ALICE)
    harness.engine.step()
    assert steps_to_first_token(harness, harness.texts([99], 3, 20, owner=BOB)[0]) <= 3


def test_a_large_prompt_is_not_overtaken_for_ever() -> None:
    """One that needs most of the cache is served although small ones of other owners keep coming."""
    harness = Harness(config=EngineConfig(max_running=4), num_blocks=64)
    numbers = iter(range(2_000))

    def keep_coming() -> None:
        while harness.engine.stats().queued < 4 and (num := next(numbers, None)) is not None:
            harness.submit(prompt_of(num, 30), 40, owner=b"%d" % (num % 5))
            harness.engine.step()

    keep_coming()
    _, large = harness.submit(prompt_of(999, 200), 8, owner=BOB)
    for _ in range(1_000):
        keep_coming()
        harness.engine.step()
        if large.end is not None:
            break
    assert large.tokens == plain(prompt_of(999, 200), SAMPLED, 8)


def test_a_step_looks_at_few_of_those_that_have_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 300 owners queued for blocks that are all in use, a step tries 16 of them; all are served in the end."""
    harness = Harness(config=EngineConfig(max_running=8), num_blocks=32)
    texts = [harness.submit(prompt_of(i, 10), 5, owner=b"%d" % i)[1] for i in range(300)]
    tried: list[bool] = []
    admit = harness.engine._scheduler._admit

    def counted(sequence: SequenceState) -> bool:
        tried.append(admit(sequence))
        return tried[-1]

    monkeypatch.setattr(harness.engine._scheduler, "_admit", counted)
    num_failed = list[int]()
    for _ in range(5):
        tried.clear()
        harness.engine.step()
        num_failed.append(tried.count(False))
    assert 0 < max(num_failed) <= 16
    harness.run()
    assert all(len(c.tokens) == 5 for c in texts)


def assert_queue_full(harness: Harness, index: int, owner: bytes, length: int = 6) -> None:
    """Asserts that a request of the owner finds no place in the queue."""
    with refused("overloaded", 503, "queued already"):
        harness.submit(prompt_of(index, length), owner=owner)


def test_a_full_queue_refuses_the_owner_that_filled_it() -> None:
    """An owner with less than its share of the queue is still let in."""
    harness = Harness(config=EngineConfig(max_queue=10, max_running=1))
    harness.texts(range(11), 20, owner=ALICE)
    assert_queue_full(harness, 20, ALICE)
    harness.texts(range(30, 35), 20, owner=BOB)
    assert_queue_full(harness, 40, BOB)
    harness.texts(range(50, 51), 20, owner=b"carol")


def test_the_queue_is_bounded_over_all_owners_and_by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Owners that never come twice, and prompts that fill many caches, are refused before they fill the memory."""
    harness = Harness(config=EngineConfig(max_queue=10, max_running=1))
    for i in range(21):
        harness.submit(prompt_of(i), owner=b"%d" % i)
    assert_queue_full(harness, 30, b"new")
    monkeypatch.setattr("outrider.cloud.engine.request_checks._MIN_QUEUED_TOKENS", 0)
    harness = Harness(config=EngineConfig(max_running=1), num_blocks=16)
    harness.texts(range(9), 20, 60, owner=ALICE)
    assert_queue_full(harness, 20, ALICE, 60)
    harness.submit(prompt_of(21, 60), owner=BOB)


def test_a_step_has_room_for_drafts_however_many_sequences_run() -> None:
    """At 256 places every sequence's draft can be verified in one step."""
    assert EngineConfig(max_running=256).token_budget >= 256 * 8
    assert EngineConfig(max_running=256, step_tokens=300).token_budget == 300


# -- all of it at once -----------------------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_sharing_never_changes_a_text_and_loses_nothing(data: st.DataObject) -> None:
    """Any mix of owners, priorities, cache sizes, places, drafts and cancellations: exact texts, every block back."""
    config = EngineConfig(
        max_running=data.draw(st.integers(1, 4)),
        step_tokens=data.draw(st.sampled_from([3, 16, None])),
        max_parked=data.draw(st.integers(1, 3)),
        policy=data.draw(st.sampled_from(list(Policy))),
    )
    harness = Harness(config=config, num_blocks=data.draw(st.sampled_from([14, 40])))
    texts: list[tuple[Collector, list[int]]] = []
    for index in range(data.draw(st.integers(1, 7))):
        harness.run_steps(data.draw(st.integers(0, 40)))
        prompt = prompt_of(index, data.draw(st.sampled_from([3, 20])))
        owner, once = data.draw(st.sampled_from([ALICE, BOB, b"carol"])), data.draw(st.booleans())
        truth, lag = plain(prompt, SAMPLED, 24), data.draw(st.sampled_from([None, 5.0, 300.0]))
        hints, priority = {"draft": truth[:4]} if once else {"lag_ms": lag}, data.draw(st.integers(-2, 2))
        sequence_id, collector = harness.submit(prompt, 24, owner=owner, once=once, priority=priority, **hints)
        texts.append((collector, truth))
        if data.draw(st.integers(0, 9)) == 0:
            harness.engine.cancel(sequence_id)
    harness.run()
    for collector, truth in texts:
        assert collector.tokens == truth[: len(collector.tokens)]
        assert collector.ended.reason != "length" or len(collector.tokens) == 24
    harness.assert_all_returned()
