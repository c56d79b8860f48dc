"""Tests what an engine shows while its runtime fails or hangs, when it is given up, and its thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.engine_faults import BAD, PROMPTS, TIMEOUT_S, Breaking, raises_on_bad
from tests.engine_harness import SAMPLED, VOCAB, Clock, Collector, Harness, plain, refused, submitted
from tests.fake_runtime import FakeBatchRuntime
from tests.requests import flat_request
from tests.serving import fake_tokenizer, run_session, serve_fake, target_tokens
from tests.waiting import run

from outrider.cloud.engine import EngineThread
from outrider.models.client.client import VerifierClient
from outrider.models.client.errors import EndpointLost
from outrider.models.runtimes.base import SequenceSlice
from outrider.models.wire.protocol import ReadyAnswer


def test_a_bad_request_does_not_make_the_engine_unfit() -> None:
    """Alone in the engine it fails every step of its own; a probe shows that the runtime works."""
    harness = Harness(on_step=raises_on_bad)
    for _ in range(5):
        code = harness.finished([5, 6, BAD], 12).code
        assert (code, harness.engine.health.fault, harness.engine.stats().failed) == ("model_fault", None, 0)


@pytest.mark.parametrize("fault", ["raises", "not finite"])
def test_a_runtime_that_fails_every_step_is_seen_and_so_is_its_recovery(fault: str) -> None:
    """The engine is unfit from the first step in which nothing works until a probe works, without any request."""
    harness = Harness(runtime=FakeBatchRuntime(vocab_size=VOCAB, num_blocks=8, block_size=4))
    engine, runtime, forward = harness.engine, harness.runtime, harness.runtime.forward

    def broken(batch: Sequence[SequenceSlice]) -> NDArray[np.float32]:
        rows = forward(batch)
        if fault == "raises":
            raise RuntimeError("the device is gone")
        return np.full_like(rows, np.nan)

    runtime.forward = broken  # type: ignore[method-assign]
    for _ in range(3):
        _, collector = harness.submit(PROMPTS[1], 6)
        harness.work_off()
        assert collector.code == "model_fault" and engine.health.fault is not None and engine.stats().failed == 1
    num_steps = runtime.num_steps
    for _ in range(4):
        delay = engine.step()
        assert delay is not None and delay > 0 and engine.health.fault is not None
        harness.clock.now += delay
    assert runtime.num_steps == num_steps + 3  # one probe a second
    runtime.forward = forward  # type: ignore[method-assign]
    assert engine.step() is None and engine.health.fault is None
    assert harness.finished(PROMPTS[1], 6).tokens == plain(PROMPTS[1], SAMPLED, 6)


def test_a_cache_full_of_parked_prefixes_does_not_keep_the_engine_unfit() -> None:
    """The probe takes a block of a parked prefix where no other is free."""
    harness = Harness(num_blocks=4, block_size=4)
    harness.finished([1] * 12, 1, once=True)
    assert (harness.engine.stats().free_blocks, harness.engine.stats().parked) == (0, 1)
    harness.engine.health.failed(RuntimeError("the device is gone"))
    harness.run()
    assert harness.engine.health.fault is None


def test_steps_that_raise_outside_the_runtime_make_the_engine_unfit() -> None:
    """Three in a row; one alone may be a request's doing."""
    harness = Harness()
    for _ in range(3):
        assert harness.engine.health.fault is None
        harness.engine.reset(ValueError("a bug"))
    assert harness.engine.health.fault is not None
    harness.clock.now += 2.0
    harness.run()
    assert harness.engine.health.fault is None


def test_a_dead_thread_refuses_work_and_has_ended_what_was_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """When even starting afresh fails, every open request gets its end, a new one 503 at once, and `stop` returns."""
    thread = EngineThread(FakeBatchRuntime(vocab_size=VOCAB))
    monkeypatch.setattr(thread, "_start_afresh", Mock(side_effect=MemoryError))
    collectors = [Breaking(), Collector(), Collector()]
    for collector in collectors:
        thread.submit(flat_request((1, 2, 3), SAMPLED, 4000), collector)
    assert thread.fault() is None
    told: list[str] = []
    thread.on_death(told.append)
    thread.start()
    for collector in collectors:
        collector.wait()
    assert [collector.code for collector in collectors] == ["internal_error"] * 3
    thread._thread.join(TIMEOUT_S)
    thread.on_death(told.append)
    assert told == [thread.fault()] * 2 == ["the engine's thread has ended: MemoryError"] * 2
    assert thread.stats().failed == 1
    with refused("engine_failed", 503):
        submitted(thread, (1,), 1)
    thread.stop(drain_s=TIMEOUT_S)


class Hanging:
    """An engine's thread with a request of `count` tokens, whose runtime hangs in step `at` until the gate is open.

    step_s: what the clock shows for each step before that. is_watched: whether the thread that looks runs too.
    """

    def __init__(self, *, at: int = 1, step_s: float = 0.0, is_watched: bool = True, count: int = 6) -> None:
        self.clock, self.gate, self._entered = Clock(), threading.Event(), threading.Event()
        self._at, self._step_s, self._num_steps = at, step_s, 0
        self.thread = EngineThread(FakeBatchRuntime(vocab_size=VOCAB, on_step=self._step), clock=self.clock)
        self.told: list[str] = []
        self.thread.on_death(self.told.append)
        (self.thread if is_watched else self.thread._thread).start()
        self.text = submitted(self.thread, PROMPTS[1], count)
        assert self._entered.wait(TIMEOUT_S)

    def _step(self, batch: Sequence[SequenceSlice]) -> None:
        self._num_steps += 1
        if self._num_steps < self._at:
            self.clock.now += self._step_s
        elif self._num_steps == self._at:
            self._entered.set()
            assert self.gate.wait(TIMEOUT_S)


def test_a_hung_step_makes_the_engine_unfit_until_it_returns() -> None:
    """After 60 s without an answer of the runtime, new work is refused; what was open goes on if it returns."""
    hanging = Hanging()
    thread = hanging.thread
    hanging.clock.now += 59.0
    assert thread.fault() is None
    hanging.clock.now += 2.0
    assert thread.fault() == "a step hangs in the model's runtime" and thread.stats().failed == 1
    with refused("engine_failed"):
        submitted(thread, (1,), 1)
    thread.stop()  # returns, though the step does not
    hanging.gate.set()
    hanging.text.wait()
    thread._thread.join(TIMEOUT_S)
    assert thread.fault() is None


def test_a_step_that_hangs_for_two_minutes_is_the_engines_death() -> None:
    """Looked at 60 times more; what is open gets its error, and nothing of the step if it returns after all."""
    hanging = Hanging(is_watched=False)  # the test looks
    thread, told, text = hanging.thread, hanging.told, hanging.text
    hanging.clock.now += 61.0
    for _ in range(59):
        thread._look()
    assert not told and text.end is None
    thread._look()
    assert told == ["a step hangs in the model's runtime"] == [thread.fault()] and text.code == "internal_error"
    thread.stop()
    hanging.gate.set()
    thread._thread.join(TIMEOUT_S)
    assert not thread._thread.is_alive() and not text.tokens and told == [thread.fault()]


@pytest.mark.parametrize("faults_last", [True, False])
def test_a_runtime_whose_faults_last_is_given_up(faults_last: bool) -> None:
    """As on CUDA, after ten probes that failed. Another runtime may work again, so its engine goes on with probes."""

    broken: Any = FakeBatchRuntime(vocab_size=VOCAB, on_step=Mock(side_effect=RuntimeError("an illegal access")))
    broken.faults_last = faults_last
    clock, told = Clock(), list[str]()
    engine = EngineThread(broken, clock=clock)
    collector = submitted(engine, PROMPTS[1], 6)
    for _ in range(9):
        clock.now += engine.step() or 0.0
    assert collector.code == "model_fault" and not engine.health.is_lost
    for _ in range(9):
        clock.now += engine.step() or 0.0
    assert engine.health.is_lost == faults_last
    engine.on_death(told.append)
    engine.start()
    if faults_last:
        engine._thread.join(TIMEOUT_S)
    engine.stop()
    engine._watch.join(TIMEOUT_S)
    assert told == (["no step succeeds: RuntimeError, again and again"] if faults_last else [])


def test_a_slow_runtime_is_given_twenty_of_its_steps() -> None:
    """Where a step takes 10 s, 100 s are no reason to give up; 201 s are."""
    hanging = Hanging(at=3, step_s=10.0)
    hanging.clock.now += 100.0
    assert hanging.thread.fault() is None
    hanging.clock.now += 101.0
    assert hanging.thread.fault() is not None
    hanging.gate.set()
    hanging.text.wait()
    assert hanging.text.tokens == plain(PROMPTS[1], SAMPLED, 6)
    hanging.thread.stop()


def test_readiness_and_metrics_show_a_failed_engine_and_agents_move_on() -> None:
    """503 "failed" while no step succeeds, for load balancers and agents; 200 again once a probe succeeds."""
    on_step = Mock()
    runtime = FakeBatchRuntime(vocab_size=fake_tokenizer().size, on_step=on_step)
    with serve_fake(runtime=runtime) as server, httpx.Client(base_url=server.url) as client:

        async def ready() -> ReadyAnswer:
            async with VerifierClient(server.url) as agent:
                return await agent.ready()

        body: dict[str, object] = {"prompt": [5, 17, 99], "max_tokens": 8, "ignore_eos": True}
        assert client.get("/health/ready").status_code == 200
        on_step.side_effect = RuntimeError("the device is gone")
        assert run_session(client, body).end.reason == "error"
        server.wait_until(lambda: client.get("/health/ready").status_code == 503)  # a session ends before it is judged
        assert client.get("/health/ready").json()["status"] == "failed"
        assert client.get("/health/live").is_success and "outrider_engine_failed 1.0" in client.get("/metrics").text
        with pytest.raises(EndpointLost):
            run(ready())
        on_step.side_effect = None
        server.wait_until(lambda: client.get("/health/ready").status_code == 200)
        assert run(ready()).status == "ready" and "outrider_engine_failed 0.0" in client.get("/metrics").text
        assert run_session(client, body).tokens == target_tokens([5, 17, 99], 8)


# -- the thread --------------------------------------------------------------------------------------------------------


def test_a_step_that_raises_ends_its_requests_and_not_the_thread() -> None:
    """After a bug in the engine's code clients get an error at once, blocks are free, the next request is served."""
    thread = EngineThread(FakeBatchRuntime(vocab_size=64))
    thread.submit(flat_request((1, 2, 3), SAMPLED, 12), Mock(side_effect=ValueError("a sink that raises")))
    beside = submitted(thread, (4, 5), 4000)
    thread.start()
    beside.wait()
    stats = thread.stats()
    assert (beside.code, stats.totals.faults, stats.free_blocks) == ("internal_error", 1, stats.num_blocks)
    after = submitted(thread, (1, 2, 3), 12)
    after.wait()
    assert after.tokens == plain([1, 2, 3], SAMPLED, 12)
    thread.stop()


def test_a_runtime_that_gives_too_few_rows_is_a_model_fault() -> None:
    """Rows are never matched to the wrong sequence."""
    harness = Harness()
    forward = harness.runtime.forward
    harness.runtime.forward = lambda batch: forward(batch)[:-1]  # type: ignore[method-assign]
    _, text = harness.submit((1, 2, 3), 12)
    harness.work_off()
    assert (text.code, text.tokens) == ("model_fault", [])


@pytest.mark.parametrize(("drain_s", "reason"), [(TIMEOUT_S, "length"), (0.0, "shutdown")])
def test_an_engine_thread_that_is_stopped_drains_or_ends_what_runs(drain_s: float, reason: str) -> None:
    """Requests from another thread end exactly, or at once; none is accepted afterwards, and every block is free."""
    hanging = Hanging(count=12 if drain_s else 4000)
    stopper = threading.Thread(target=hanging.thread.stop, kwargs={"drain_s": drain_s})
    stopper.start()
    hanging.gate.set()
    stopper.join()
    assert hanging.text.ended.reason == reason
    assert not drain_s or hanging.text.tokens == plain(PROMPTS[1], SAMPLED, 12)
    assert hanging.thread.stats().free_blocks == hanging.thread.stats().num_blocks
    with refused("shutting_down"):
        submitted(hanging.thread, (1,), 1)
