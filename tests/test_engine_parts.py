"""Tests the laws of the engine's parts: trie, block pool, estimators, policy, thread."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.engine_harness import SAMPLED, Harness, plain, refused, submitted
from tests.fake_runtime import FakeBatchRuntime
from tests.requests import flat_request

from outrider.cloud.engine import EngineThread
from outrider.cloud.engine.pool import BlockPool, chain_hash
from outrider.cloud.pending import estimators
from outrider.cloud.pending.estimators import AcceptanceEstimator, DraftLag, StepSize, StepTimeCurve
from outrider.cloud.pending.policy import (
    ENOUGH_ANSWERS,
    NO_WAIT,
    choose_drafts,
    plan_wait,
    rate_streaming,
    rate_waiting,
)
from outrider.cloud.pending.trie import MAX_NODES, DraftTrie
from outrider.cloud.seam import Event
from outrider.models.runtimes.base import SequenceSlice

short_paths = st.lists(st.integers(0, 3), min_size=1, max_size=6)


@given(st.lists(st.one_of(st.tuples(st.just("merge"), short_paths), st.tuples(st.just("advance"), st.integers(0, 3)))))
@settings(max_examples=300, deadline=None)
def test_trie_equals_a_set_of_paths(actions: list[tuple[str, list[int] | int]]) -> None:
    """Merging and committing leave exactly the paths that are consistent with the commits."""
    trie, paths = DraftTrie(), set[tuple[int, ...]]()
    for kind, value in actions:
        if kind == "merge":
            assert isinstance(value, list)
            trie.merge(value, prefer=True)
            paths.add(tuple(value))
            assert trie.likeliest(len(value)) == value
        else:
            trie.advance(value)  # type: ignore[arg-type]
            paths = {p[1:] for p in paths if p[0] == value and len(p) > 1}
        assert bool(trie) == bool(paths)
        likeliest = tuple(trie.likeliest(10))
        assert not paths or any(p[: len(likeliest)] == likeliest for p in paths)


def test_a_path_that_is_not_preferred_only_fills_gaps() -> None:
    """An older message that arrives late does not overrule a newer one."""
    trie = DraftTrie()
    trie.merge([1, 2, 3], prefer=True)
    trie.merge([1, 5, 6], prefer=False)
    assert trie.likeliest(9) == [1, 2, 3]
    trie.advance(1)
    trie.advance(5)
    assert trie.likeliest(9) == [6]


def test_a_trie_is_bounded() -> None:
    """A flood of alternatives is dropped, not stored."""
    trie = DraftTrie()
    for i in range(MAX_NODES):
        trie.merge([i, 1, 2], prefer=True)
    assert sum(1 for i in range(MAX_NODES) if _has(trie, i)) < MAX_NODES
    trie.advance(10**6)
    trie.merge([1, 2], prefer=True)
    assert trie.likeliest(5) == [1, 2]


def _has(trie: DraftTrie, token: int) -> bool:
    return token in (trie.root.children or {})


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_pool_never_hands_out_a_block_twice_and_loses_none(data: st.DataObject) -> None:
    """Random allocation, release, registration and matching: references and availability always add up."""
    pool = BlockPool(12, 4)
    held: list[list[int]] = []
    contents = [chain_hash(b"", [i]) for i in range(6)]
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["allocate", "release", "register", "match"]))
        if action == "allocate":
            count = data.draw(st.integers(1, 5))
            blocks = pool.allocate(count)
            assert (blocks is None) == (count > pool.num_available + (count if blocks else 0))
            if blocks:
                assert not set(blocks) & set(itertools.chain(*held))
                held.append(blocks)
        elif action == "match":
            matched = pool.match(data.draw(st.lists(st.sampled_from(contents), max_size=3)))
            if matched:
                held.append(matched)
        elif held:
            index = data.draw(st.integers(0, len(held) - 1))
            if action == "release":
                pool.release(held.pop(index))
            else:
                pool.register(held[index][0], data.draw(st.sampled_from(contents)))
        assert pool.num_blocks - pool.num_available == len(set(itertools.chain(*held)))
    for blocks in held:
        pool.release(blocks)
    assert pool.num_available == 12
    assert pool.allocate(12) is not None


def test_pool_evicts_the_least_recently_used_content() -> None:
    """Content stays known until its block is needed; the longest unused goes first."""
    pool = BlockPool(2, 4)
    names = [chain_hash(b"", [i]) for i in range(2)]
    for name in names:
        blocks = pool.allocate(1)
        assert blocks
        pool.register(blocks[0], name)
        pool.release(blocks)
    pool.release(pool.match([names[0]]))  # now names[1] is the older one
    assert pool.allocate(1) is not None
    assert pool.match([names[1]]) == []
    assert len(pool.match([names[0]])) == 1


@given(
    st.lists(st.lists(st.floats(0.05, 0.99), max_size=3), min_size=1, max_size=3),
    st.lists(st.floats(0.0, 0.5), min_size=14, max_size=14),
    st.integers(0, 9),
)
@settings(max_examples=200, deadline=None)
def test_drafts_chosen_are_the_best_of_all_choices(rows: list[list[float]], steps: list[float], budget: int) -> None:
    """No other choice of counts commits more tokens per second, for any step-time curve that does not fall."""
    survivals = [list(np.cumprod(row)) for row in rows]
    step_s = 1.0 + np.cumsum(steps)
    counts, _ = choose_drafts(survivals, len(rows), len(rows), step_s, budget)

    def rate(chosen: tuple[int, ...]) -> float:
        gained = len(rows) + sum(sum(s[:n]) for s, n in zip(survivals, chosen, strict=True))
        return float(gained / step_s[len(rows) + sum(chosen) - 1])

    every = itertools.product(*(range(len(s) + 1) for s in survivals))
    best = max(rate(chosen) for chosen in every if sum(chosen) <= budget)
    assert sum(counts) <= budget
    assert rate(tuple(counts)) == pytest.approx(best)


@pytest.mark.parametrize(
    ("rtt_ms", "never", "patient"),
    [(0, 1.58, 2.01), (10, 1.58, 1.71), (25, 1.58, 1.58), (50, 1.31, 1.31), (100, 1.18, 1.18), (200, 1.05, 1.05)],
)
def test_closed_form_equals_the_simulation(rtt_ms: float, never: float, patient: float) -> None:
    """The rates behind the wait decision are those of the design's table, to 2 %: acceptance 0.65, step 40 + 1.2 ms."""
    alpha, step, extra, draft, rtt = 0.65, 0.040, 0.0012, 0.0015, rtt_ms / 1e3
    streaming = max(rate_streaming(alpha, k, step, extra, rtt + draft) for k in range(9)) * step
    waiting = max(rate_waiting(alpha, k, step, extra, rtt + k * draft) for k in range(1, 9)) * step
    assert streaming == pytest.approx(never, rel=0.02)
    assert max(streaming, waiting) == pytest.approx(patient, rel=0.02)
    lags = [rtt + k * draft for k in range(1, 9)]
    assert (plan_wait(alpha, step, extra, lags, 1.0, saves_passes=False) != NO_WAIT) == (waiting > streaming)


def test_no_wait_for_a_draft_that_is_never_accepted_or_never_arrives() -> None:
    """With low acceptance, unknown lags or unanswered waits the engine does not wait."""
    lags = [0.002] * 8
    assert plan_wait(0.6, 0.04, 0.001, lags, 1.0, saves_passes=False) != NO_WAIT
    assert plan_wait(0.01, 0.04, 0.001, lags, 1.0, saves_passes=False) == NO_WAIT
    assert plan_wait(0.01, 0.04, 0.001, lags, 1.0, saves_passes=True) == NO_WAIT
    assert plan_wait(0.6, 0.04, 0.001, [None] * 8, 1.0, saves_passes=True) == NO_WAIT
    assert plan_wait(0.6, 0.04, 0.001, lags, 0.3, saves_passes=True) == NO_WAIT


def test_acceptance_is_a_ratio_of_sums_by_position() -> None:
    """First tokens accepted, second ones rejected: the rates show it; a new session starts at its parent's average."""
    parent = AcceptanceEstimator(4)
    own = AcceptanceEstimator(4, parent)
    for _ in range(200):
        own.observe([1, 2, 3], [1, 9])
    first, second = own.rates(2)
    assert first > 0.9
    assert second < 0.1
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
    assert (np.diff(times) >= 0).all()
    assert times[7] > times[3]


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
    lags = lag.seconds_until(5)
    assert lags[:4] == pytest.approx([0.005, 0.005, 0.008, 0.011])
    assert lags[4] is None  # it has never drafted so many at once


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


def test_engine_thread_serves_drains_and_refuses() -> None:
    """Requests from another thread end exactly; a drain lets them finish; after it no request is accepted."""
    gate = threading.Event()
    thread = EngineThread(FakeBatchRuntime(vocab_size=64, on_step=lambda batch: (gate.wait(), None)[1]))
    thread.start()
    text = submitted(thread, (1, 2, 3), 12)
    gate.set()
    thread.stop(drain_s=60.0)
    assert text.end is not None and text.tokens == plain([1, 2, 3], SAMPLED, 12)
    with refused("shutting_down"):
        submitted(thread, (1,), 1)


def test_a_step_that_raises_ends_its_requests_and_not_the_thread() -> None:
    """After a bug in the engine's code clients get an error at once, blocks are free, the next request is served."""
    thread = EngineThread(FakeBatchRuntime(vocab_size=64))

    def broken(event: Event) -> None:
        raise ValueError("a sink that raises")

    thread.submit(flat_request((1, 2, 3), SAMPLED, 12), broken)
    beside = submitted(thread, (4, 5), 4000)
    thread.start()
    beside.wait()
    assert beside.code == "internal_error"
    assert thread.stats().free_blocks == thread.stats().num_blocks
    assert thread.stats().totals.faults == 1
    after = submitted(thread, (1, 2, 3), 12)
    after.wait()
    assert after.tokens == plain([1, 2, 3], SAMPLED, 12)
    thread.stop()


class ShortRuntime(FakeBatchRuntime):
    """Forgets the last row of every batch."""

    def forward(self, batch: Sequence[SequenceSlice]) -> NDArray[np.float32]:
        """One row too few."""
        return super().forward(batch)[:-1]


def test_a_runtime_that_gives_too_few_rows_is_a_model_fault() -> None:
    """Rows are never matched to the wrong sequence."""
    harness = Harness(runtime=ShortRuntime(vocab_size=64))
    _, text = harness.submit((1, 2, 3), 12)
    harness.work_off()
    assert text.code == "model_fault" and text.tokens == []


def test_stopping_without_a_drain_ends_running_requests() -> None:
    """Every sink gets "shutdown", and the thread ends."""
    started, gate = threading.Event(), threading.Event()

    def on_step(batch: object) -> None:
        started.set()
        gate.wait()

    thread = EngineThread(FakeBatchRuntime(vocab_size=64, on_step=on_step))
    thread.start()
    text = submitted(thread, (1, 2, 3), 4000)
    started.wait()
    stopper = threading.Thread(target=thread.stop)
    stopper.start()
    gate.set()
    stopper.join()
    assert text.ended.reason == "shutdown"
    assert thread.stats().free_blocks == thread.stats().num_blocks
