"""Tests that the engine serves higher priorities first, starves nobody, keeps deadlines, and changes no text by it."""

from __future__ import annotations

import pytest
from tests.engine_harness import SAMPLED, Collector, Harness, plain, prompt_of

from outrider.cloud.engine import EngineConfig
from outrider.cloud.engine.request_checks import Turnover
from outrider.models.errors import RequestError

ALICE, BOB, CAROL = b"alice", b"bob", b"carol"


# -- priorities ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("owner", [ALICE, BOB])
def test_places_go_to_higher_priorities_first(owner: bytes) -> None:
    """Two texts of a higher priority beside eight for two places: they run in seven steps of eight, of any owner."""
    harness = Harness(config=EngineConfig(max_running=2), num_blocks=4096)
    low = harness.texts(range(8), 100, owner=ALICE)
    harness.run_steps(10)
    high = harness.texts(range(90, 92), 100, owner=owner, priority=1)
    before = sum(len(c.tokens) for c in low)
    harness.run_steps(80)
    assert min(len(c.tokens) for c in high) >= 66
    # Nobody starves: every eighth step goes by age, and evenly between owners.
    gained = sum(len(c.tokens) for c in low) - before
    assert (18 if owner == ALICE else 9) <= gained <= (22 if owner == ALICE else 11)
    harness.run()
    assert [c.tokens for c in low + high] == [plain(prompt_of(i), SAMPLED, 100) for i in (*range(8), 90, 91)]


def test_owners_share_evenly_among_equals() -> None:
    """Beneath two texts of a higher priority, an owner with twelve texts gets no more than one with two."""
    harness = Harness(config=EngineConfig(max_running=6), num_blocks=4096)
    harness.texts(range(2), 400, owner=CAROL, priority=5)
    many, few = harness.texts(range(10, 22), 400, owner=ALICE), harness.texts(range(40, 42), 400, owner=BOB)
    harness.run_steps(150)
    of_many, of_few = (sum(len(c.tokens) for c in texts) for texts in (many, few))
    assert 0.8 <= of_many / of_few <= 1.3


def test_blocks_go_to_higher_priorities_first() -> None:
    """A cache full of long texts, and a queue: what comes last with a higher priority is admitted before the queue."""
    harness = Harness(config=EngineConfig(max_running=4), num_blocks=32)
    texts = harness.texts(range(12), 60, owner=ALICE)
    harness.run_steps(40)
    (patient,) = harness.texts([98], 20, owner=CAROL, priority=-3)
    (urgent,) = harness.texts([99], 20, owner=BOB, priority=3)
    for _ in range(400):
        if urgent.end is None:
            harness.step()
    assert urgent.end is not None and patient.end is None
    harness.run()
    assert [c.tokens for c in texts] == [plain(prompt_of(i), SAMPLED, 60) for i in range(12)]
    assert patient.tokens == plain(prompt_of(98), SAMPLED, 20)


def test_a_flood_of_a_high_priority_does_not_starve_a_low_one() -> None:
    """One place, and always two texts of the highest priority, in the low one's own queue: it still gets its turns."""
    harness = Harness(config=EngineConfig(max_running=1), num_blocks=8)
    _, low = harness.submit(prompt_of(0), 10, owner=ALICE, priority=-100)
    flood = list[Collector]()
    for _ in range(2000):
        if low.end is None:
            while sum(c.end is None for c in flood[-8:]) < 2:
                flood += harness.texts([1 + len(flood)], 4, owner=ALICE, priority=100)
            harness.step()
    assert low.tokens == plain(prompt_of(0), SAMPLED, 10)


def test_under_overload_fewer_drafts_are_verified() -> None:
    """The same right drafts, alone and beside fifteen others: less of them fits a step, and the texts are the same."""

    def proposed_per_pass(num_texts: int) -> float:
        harness = Harness(config=EngineConfig(max_running=16, step_tokens=24), num_blocks=512)
        texts = [plain(prompt_of(i), SAMPLED, 48) for i in range(num_texts)]
        running = [harness.submit(prompt_of(i), 48, patience_ms=0.0) for i in range(num_texts)]
        while harness.engine.has_work:
            harness.draft_all(running, texts, 8)
            harness.step()
        totals = harness.engine.stats().totals
        assert [c.tokens for _, c in running] == texts
        return totals.proposed / totals.passes

    assert proposed_per_pass(16) < 0.5 * proposed_per_pass(1)


# -- deadlines -------------------------------------------------------------------------------------------------------


def test_queued_work_past_its_deadline_costs_no_pass() -> None:
    """It ends with `deadline_exceeded` before a step runs its tokens; what runs ends with the text that it has."""
    harness = Harness(config=EngineConfig(max_running=1), num_blocks=8)
    texts = harness.texts([0], 20) + harness.texts([1], 20, owner=BOB, deadline_ms=5_000.0)
    harness.run()
    assert [c.tokens for c in texts] == [plain(prompt_of(i), SAMPLED, 20) for i in range(2)]
    harness.texts([2], 20)
    harness.step()
    num_tokens = sum(map(sum, harness.batches))
    (late,) = harness.texts([3], 20, owner=BOB, deadline_ms=30.0)
    harness.clock.now += 0.031
    harness.run()
    assert late.ended.reason == "error" and late.ended.error is not None
    assert (late.ended.error.code, late.ended.error.status) == ("deadline_exceeded", 504)
    assert sum(map(sum, harness.batches)) - num_tokens == 19  # those of the other
    cut = harness.finished(prompt_of(4), 200, deadline_ms=500.0)
    assert cut.ended.reason == "deadline" and 5 < len(cut.tokens) < 20
    assert cut.tokens == plain(prompt_of(4), SAMPLED, len(cut.tokens))


def test_a_deadline_ends_a_wait_for_drafts() -> None:
    """The engine wakes up for it, and remembers nothing of sequences that ended before."""
    harness = Harness(num_blocks=64)
    harness.finished(prompt_of(0), 3, deadline_ms=86_400_000.0)
    assert not harness.engine.has_work and harness.engine.step() is None
    _, cut = harness.submit(prompt_of(1), 50, patience_ms=10_000.0, lag_ms=5.0, deadline_ms=400.0)
    began = harness.clock.now
    harness.run()
    assert cut.ended.reason == "deadline" and 0.4 <= harness.clock.now - began < 0.5


# -- advice ----------------------------------------------------------------------------------------------------------


def test_a_full_queue_says_when_to_come_back() -> None:
    """By how fast the newest sequences ended; a minute at most."""
    turnover = Turnover()
    assert turnover.retry_after_s(3, 0.0) == 1
    for second in range(0, 40, 4):
        turnover.note(float(second))
    assert [turnover.retry_after_s(num_waiting, 40.0) for num_waiting in (3, 100)] == [12, 60]
    harness = Harness(config=EngineConfig(max_running=1, max_queue=2), num_blocks=64, step_s=lambda _: 1.0)
    for i in range(3):
        harness.finished(prompt_of(i), 5)
    harness.texts(range(3), 5)
    with pytest.raises(RequestError, match="queued already") as error:
        harness.submit(prompt_of(9), 5)
    assert error.value.retry_after_s is not None and 2 <= error.value.retry_after_s <= 8
