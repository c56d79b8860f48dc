"""Tests the engine on a runtime that fails: what one fault ends, what it leaves behind, what readiness shows."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Sequence

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.engine_harness import SAMPLED, VOCAB, Clock, Collector, Harness, plain
from tests.fake_runtime import FakeBatchRuntime
from tests.picking_runtime import PickingRuntime
from tests.requests import flat_request
from tests.serving import fake_tokenizer, run_session, serve_fake, target_tokens

from outrider.cloud.engine import Engine, EngineConfig, EngineThread, Policy
from outrider.cloud.engine.cache import ParkedPrefix
from outrider.cloud.seam import EndEvent, Event, GenerateRequest
from outrider.models.client.client import VerifierClient
from outrider.models.client.errors import EndpointLost
from outrider.models.errors import RequestError
from outrider.models.processors.chooser import PickedRow
from outrider.models.processors.text_rows import AskedRows
from outrider.models.runtimes.base import SequenceSlice
from outrider.models.wire.protocol import ReadyAnswer

TIMEOUT_S = 60.0
BAD = 63
"""A prompt that ends in this token makes `forward` raise in the tests that say so."""
PROMPTS = [[(7 * i + j * j) % (VOCAB - 1) for j in range(3 + 5 * i)] for i in range(8)]


class Panic(BaseException):
    """As a Rust panic reaches Python: no Exception."""


def code_of(collector: Collector) -> str | None:
    """The code of the error that ended a request; None if it ended well."""
    assert collector.end is not None
    return collector.end.error.code if collector.end.error is not None else None


# -- one bad sequence ---------------------------------------------------------------------------------------------


def raises_on_bad(batch: Sequence[SequenceSlice]) -> None:
    """Raises for a batch with a slice that ends in BAD."""
    if any(item.tokens[-1] == BAD for item in batch):
        raise Panic("cannot run this token")


def test_a_sequence_that_makes_forward_raise_is_left_out_of_its_batch() -> None:
    """The seven others get their exact texts, in a few more calls: the batch is halved until it stands alone."""
    harness = Harness(on_step=raises_on_bad, config=EngineConfig(step_tokens=1024))
    goods = [harness.submit(prompt, 12, stop_ids=frozenset({BAD}))[1] for prompt in PROMPTS[:7]]
    _, bad = harness.submit([5, 6, BAD], 12)
    harness.engine.step()
    assert code_of(bad) == "model_fault" and bad.tokens == []
    # 8, then halves of 8, of 4 and of 2, then the probe is not needed: others committed.
    assert [len(batch) for batch in harness.batches] == [8, 4, 4, 2, 2, 1, 1]
    harness.run()
    for collector, prompt in zip(goods, PROMPTS[:7], strict=True):
        assert collector.tokens == plain(prompt, SAMPLED, 12, stop_ids=frozenset({BAD}))
    assert harness.engine.health.fault is None
    harness.assert_all_returned()


def test_a_batch_that_fails_once_loses_nothing() -> None:
    """A passing fault costs a run again without drafts; every text is exact, drafts go on later."""
    failures = [3, 5, 9]  # the fifth call runs a half of the step that failed in the third
    num_calls = 0

    def on_step(batch: Sequence[SequenceSlice]) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls in failures:
            raise MemoryError

    harness = Harness(on_step=on_step, config=EngineConfig(policy=Policy.VERIFY))
    truths = [plain(prompt, SAMPLED, 30) for prompt in PROMPTS[:3]]
    sequences = [harness.submit(prompt, 30) for prompt in PROMPTS[:3]]
    while harness.engine.has_work:
        for (sequence_id, collector), truth in zip(sequences, truths, strict=True):
            base = len(collector.tokens)
            if collector.end is None and 0 < base < 26:
                harness.engine.draft(sequence_id, base, [truth[base : base + 4]])
        delay = harness.engine.step()
        harness.clock.now += delay or 0.0
    assert [collector.tokens for _, collector in sequences] == truths
    assert all(c.end is not None and c.end.usage.accepted_tokens > 5 for _, c in sequences)
    assert harness.engine.stats().totals.faults == 2
    harness.assert_all_returned()


def test_a_draft_that_makes_forward_raise_costs_only_itself() -> None:
    """Without the draft the same step succeeds, also for a sequence that runs alone."""
    harness = Harness(on_step=raises_on_bad, config=EngineConfig(policy=Policy.VERIFY))
    stops = frozenset({BAD})
    truth = plain(PROMPTS[1], SAMPLED, 10, stop_ids=stops)
    sequence_id, collector = harness.submit(PROMPTS[1], 10, stop_ids=stops)
    harness.engine.step()
    harness.engine.draft(sequence_id, 1, [[truth[1], BAD]])
    harness.run()
    assert collector.tokens == truth and code_of(collector) is None


def test_when_every_sequence_fails_alone_all_get_a_model_fault() -> None:
    """The runtime's fault: one error each, one log entry, all blocks back."""

    def on_step(batch: Sequence[SequenceSlice]) -> None:
        raise SystemExit("the device is gone")

    harness = Harness(on_step=on_step)
    collectors = [harness.submit(prompt, 5)[1] for prompt in PROMPTS]
    while harness.engine.has_work:
        harness.engine.step()
    assert [code_of(collector) for collector in collectors] == ["model_fault"] * 8
    assert harness.engine.stats().totals.faults == 1
    harness.assert_all_returned()


# -- prefixes that nobody has seen to be finite -------------------------------------------------------------------


class Poisonable(FakeBatchRuntime):
    """Cache slots may hold NaN, which reaches every row that attends to them, as in a real model.

    poison_next: the next forward writes NaN into the slots of all its tokens.
    """

    def __init__(self, *, num_blocks: int = 64, block_size: int = 4) -> None:
        super().__init__(vocab_size=VOCAB, num_blocks=num_blocks, block_size=block_size)
        self.bad_slots: set[int] = set()
        self.poison_next = False

    def forward(self, batch: Sequence[SequenceSlice]) -> NDArray[np.float32]:
        """As FakeBatchRuntime's, with the faults."""
        rows = super().forward(batch).copy()
        first = 0
        for item in batch:
            slots = [block * self.block_size + i for block in item.blocks for i in range(self.block_size)]
            new = slots[item.past : item.past + len(item.tokens)]
            self.bad_slots.difference_update(new)
            if self.poison_next:
                self.bad_slots.update(new)
            if self.bad_slots & set(slots[: item.past + len(item.tokens)]):
                rows[first : first + item.num_rows] = np.nan
            first += item.num_rows
        self.poison_next = False
        return rows


LONG = [(3 * j * j + j) % VOCAB for j in range(40)]


def poisonable(config: EngineConfig | None = None) -> tuple[Poisonable, Engine]:
    runtime = Poisonable()
    return runtime, Engine(runtime, config or EngineConfig(step_tokens=8))


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def ask(engine: Engine, prompt: Sequence[int], max_tokens: int = 6) -> Collector:
    collector = Collector()
    engine.submit(flat_request(tuple(prompt), SAMPLED, max_tokens), collector)
    return collector


def test_a_passing_nan_in_a_prompt_ends_one_request() -> None:
    """A poisoned chunk is not shared: neither with a request in flight nor with a later one."""
    runtime, engine = poisonable()
    runtime.poison_next = True
    first = ask(engine, LONG)
    for _ in range(3):
        engine.step()
    second = ask(engine, LONG)
    finish(engine)
    assert code_of(first) == "model_fault"
    third = ask(engine, LONG)
    finish(engine)
    assert second.tokens == third.tokens == plain(LONG, SAMPLED, 6)
    assert third.end is not None and third.end.usage.cached_prompt_tokens == 36
    assert engine.stats().free_blocks == engine.stats().num_blocks


def test_a_passing_nan_while_decoding_leaves_nothing_behind() -> None:
    """Text that a failed sequence generated is computed again by the one that goes on with it."""
    runtime, engine = poisonable()
    collector = ask(engine, LONG[:6], 30)
    while len(collector.tokens) < 10:
        engine.step()
    runtime.poison_next = True
    finish(engine)
    assert code_of(collector) == "model_fault"
    again = ask(engine, LONG[:6] + collector.tokens, 30 - len(collector.tokens))
    finish(engine)
    assert collector.tokens + again.tokens == plain(LONG[:6], SAMPLED, 30)
    assert again.end is not None and again.end.usage.cached_prompt_tokens == 0


def test_a_known_block_that_goes_bad_costs_one_request() -> None:
    """The sequence that fails on it takes it out of the books; the next computes it again."""
    runtime, engine = poisonable()
    assert not ask(engine, LONG).tokens
    finish(engine)
    held = engine._cache.pool._block_of.values()
    runtime.bad_slots.update(block * runtime.block_size for block in held)
    unlucky = ask(engine, LONG)
    finish(engine)
    lucky = ask(engine, LONG)
    finish(engine)
    assert code_of(unlucky) == "model_fault"
    assert lucky.tokens == plain(LONG, SAMPLED, 6)


# -- submit against reset -----------------------------------------------------------------------------------------


def test_a_held_prefix_never_enters_the_pool_of_after_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset that comes in the middle of `submit` waits for it, and then ends the request."""
    harness = Harness()
    _, first = harness.submit(PROMPTS[3], 1, once=True)
    harness.run()
    assert first.end is not None
    resetting = threading.Thread(target=lambda: harness.engine.reset(ValueError("a bug")))
    take = harness.engine._cache.parked.take

    def take_and_reset(owner: bytes, name: str) -> ParkedPrefix | None:
        held = take(owner, name)
        resetting.start()
        resetting.join(0.1)  # long enough to be through, were it not made to wait
        return held

    monkeypatch.setattr(harness.engine._cache.parked, "take", take_and_reset)
    _, second = harness.submit([], 1, once=True, prefix_hash=first.end.prefix_hash)
    resetting.join(TIMEOUT_S)
    harness.run()
    assert code_of(second) == "internal_error"
    harness.assert_all_returned()


# -- health -------------------------------------------------------------------------------------------------------


def test_a_bad_request_does_not_make_the_engine_unfit() -> None:
    """Alone in the engine it fails every step of its own; a probe shows that the runtime works."""
    harness = Harness(on_step=raises_on_bad)
    for _ in range(5):
        _, bad = harness.submit([5, 6, BAD], 12)
        harness.run()
        assert code_of(bad) == "model_fault"
        assert harness.engine.health.fault is None and harness.engine.stats().failed == 0
    harness.assert_all_returned()


@pytest.mark.parametrize("fault", ["raises", "not finite"])
def test_a_runtime_that_fails_every_step_is_seen_and_so_is_its_recovery(fault: str) -> None:
    """The engine is unfit from the first step in which nothing works until a probe works, without any request."""
    is_broken = True

    class Broken(FakeBatchRuntime):
        def forward(self, batch: Sequence[SequenceSlice]) -> NDArray[np.float32]:
            rows = super().forward(batch)
            if is_broken and fault == "raises":
                raise RuntimeError("the device is gone")
            return np.full_like(rows, np.nan) if is_broken else rows

    clock = Clock()
    runtime = Broken(vocab_size=VOCAB, num_blocks=8, block_size=4)
    engine = Engine(runtime, clock=clock)
    for _ in range(3):
        collector = ask(engine, PROMPTS[1])
        finish(engine)
        assert code_of(collector) == "model_fault"
        assert engine.health.fault is not None and engine.stats().failed == 1
    num_steps = runtime.num_steps
    for _ in range(4):
        delay = engine.step()
        assert delay is not None and delay > 0 and engine.health.fault is not None
        clock.now += delay
    assert runtime.num_steps == num_steps + 3  # one probe a second
    is_broken = False
    assert engine.step() is None and engine.health.fault is None
    collector = ask(engine, PROMPTS[1])
    finish(engine)
    assert collector.tokens == plain(PROMPTS[1], SAMPLED, 6)
    assert engine.stats().free_blocks == engine.stats().num_blocks


def test_a_cache_full_of_parked_prefixes_does_not_keep_the_engine_unfit() -> None:
    """The probe takes a block of a parked prefix where no other is free."""
    harness = Harness(num_blocks=4, block_size=4)
    harness.submit([1] * 12, 1, once=True)
    harness.run()
    assert (harness.engine.stats().free_blocks, harness.engine.stats().parked) == (0, 1)
    harness.engine.health.failed(RuntimeError("the device is gone"))
    harness.run()
    assert harness.engine.health.fault is None
    harness.assert_all_returned()


def test_steps_that_raise_outside_the_runtime_make_the_engine_unfit() -> None:
    """Three in a row; one alone may be a request's doing."""
    harness = Harness()
    for i in range(3):
        assert harness.engine.health.fault is None, i
        harness.engine.reset(ValueError("a bug"))
    assert harness.engine.health.fault is not None
    harness.clock.now += 2.0
    harness.run()
    assert harness.engine.health.fault is None


class Waiting(Collector):
    """A collector that other threads can wait for, and that may raise at its first commit."""

    def __init__(self, *, is_broken: bool = False) -> None:
        super().__init__()
        self.ended = threading.Event()
        self._is_broken = is_broken

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        if self.end is not None:
            self.ended.set()
        elif self._is_broken:
            raise Panic("a sink that raises")


def test_a_dead_thread_refuses_work_and_has_ended_what_was_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """When even starting afresh fails, every open request gets its end, a new one 503 at once, and `stop` returns."""
    thread = EngineThread(FakeBatchRuntime(vocab_size=VOCAB))

    def no_memory() -> None:
        raise MemoryError

    monkeypatch.setattr(thread, "_start_afresh", no_memory)
    collectors = [Waiting(is_broken=True), Waiting(), Waiting()]
    for collector in collectors:
        thread.submit(flat_request((1, 2, 3), SAMPLED, 4000), collector)
    assert thread.fault() is None
    told: list[str] = []
    thread.on_death(told.append)
    thread.start()
    for collector in collectors:
        assert collector.ended.wait(TIMEOUT_S)
        assert code_of(collector) == "internal_error"
    thread._thread.join(TIMEOUT_S)
    thread.on_death(told.append)
    assert told == [thread.fault()] * 2
    assert thread.fault() == "the engine's thread has ended: MemoryError" and thread.stats().failed == 1
    with pytest.raises(RequestError) as refused:
        thread.submit(flat_request((1,), SAMPLED, 1), Collector())
    assert (refused.value.code, refused.value.status) == ("engine_failed", 503)
    thread.stop(drain_s=TIMEOUT_S)


def test_a_hung_step_makes_the_engine_unfit_until_it_returns() -> None:
    """After 60 s without an answer of the runtime, new work is refused; what was open goes on if it returns."""
    entered, gate = threading.Event(), threading.Event()

    def on_step(batch: Sequence[SequenceSlice]) -> None:
        entered.set()
        assert gate.wait(TIMEOUT_S)

    clock = Clock()
    thread = EngineThread(FakeBatchRuntime(vocab_size=VOCAB, on_step=on_step), clock=clock)
    thread.start()
    collector = Waiting()
    thread.submit(flat_request(tuple(PROMPTS[1]), SAMPLED, 6), collector)
    assert entered.wait(TIMEOUT_S)
    clock.now += 59.0
    assert thread.fault() is None
    clock.now += 2.0
    assert thread.fault() == "a step hangs in the model's runtime" and thread.stats().failed == 1
    with pytest.raises(RequestError) as refused:
        thread.submit(flat_request((1,), SAMPLED, 1), Collector())
    assert refused.value.code == "engine_failed"
    thread.stop()  # returns, though the step does not
    gate.set()
    assert collector.ended.wait(TIMEOUT_S)
    thread._thread.join(TIMEOUT_S)
    assert thread.fault() is None


def test_a_step_that_hangs_for_two_minutes_is_the_engines_death() -> None:
    """Looked at 60 times more; what is open gets its error, and nothing of the step if it returns after all."""
    entered, gate = threading.Event(), threading.Event()

    def on_step(batch: Sequence[SequenceSlice]) -> None:
        entered.set()
        assert gate.wait(TIMEOUT_S)

    clock, told = Clock(), list[str]()
    thread = EngineThread(FakeBatchRuntime(vocab_size=VOCAB, on_step=on_step), clock=clock)
    thread.on_death(told.append)
    thread._thread.start()  # not the one that looks: the test does
    collector = Waiting()
    thread.submit(flat_request(tuple(PROMPTS[1]), SAMPLED, 6), collector)
    assert entered.wait(TIMEOUT_S)
    clock.now += 61.0
    for _ in range(59):
        thread._look()
    assert not told and collector.end is None
    thread._look()
    assert told == ["a step hangs in the model's runtime"] == [thread.fault()]
    assert code_of(collector) == "internal_error"
    thread.stop()
    gate.set()
    thread._thread.join(TIMEOUT_S)
    assert not thread._thread.is_alive() and not collector.tokens and told == [thread.fault()]


@pytest.mark.parametrize("faults_last", [True, False])
def test_a_runtime_whose_faults_last_is_given_up(faults_last: bool) -> None:
    """As on CUDA, after ten probes that failed. Another runtime may work again, so its engine goes on with probes."""

    class Broken(FakeBatchRuntime):
        def forward(self, batch: Sequence[SequenceSlice]) -> NDArray[np.float32]:
            raise RuntimeError("an illegal memory access was encountered")

    Broken.faults_last = faults_last  # type: ignore[attr-defined]
    clock, told = Clock(), list[str]()
    engine = EngineThread(Broken(vocab_size=VOCAB), clock=clock)
    collector = ask(engine, PROMPTS[1])
    for _ in range(9):
        clock.now += engine.step() or 0.0
    assert code_of(collector) == "model_fault" and not engine.health.is_lost
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
    entered, gate = threading.Event(), threading.Event()
    clock = Clock()
    num_calls = 0

    def on_step(batch: Sequence[SequenceSlice]) -> None:
        nonlocal num_calls
        num_calls += 1
        clock.now += 10.0 if num_calls < 3 else 0.0
        if num_calls == 3:
            entered.set()
            assert gate.wait(TIMEOUT_S)

    thread = EngineThread(FakeBatchRuntime(vocab_size=VOCAB, on_step=on_step), clock=clock)
    thread.start()
    collector = Waiting()
    thread.submit(flat_request(tuple(PROMPTS[1]), SAMPLED, 6), collector)
    assert entered.wait(TIMEOUT_S)
    clock.now += 100.0
    assert thread.fault() is None
    clock.now += 101.0
    assert thread.fault() is not None
    gate.set()
    assert collector.ended.wait(TIMEOUT_S)
    assert collector.tokens == plain(PROMPTS[1], SAMPLED, 6)
    thread.stop()


def test_readiness_and_metrics_show_a_failed_engine_and_agents_move_on() -> None:
    """503 "failed" while no step succeeds, for load balancers and agents; 200 again once a probe succeeds."""
    is_broken = threading.Event()

    def on_step(batch: Sequence[SequenceSlice]) -> None:
        if is_broken.is_set():
            raise RuntimeError("the device is gone")

    async def ready(url: str) -> ReadyAnswer:
        async with VerifierClient(url) as agent:
            return await agent.ready()

    runtime = FakeBatchRuntime(vocab_size=fake_tokenizer().size, on_step=on_step)
    with serve_fake(runtime=runtime) as server, httpx.Client(base_url=server.url) as client:
        body: dict[str, object] = {"prompt": [5, 17, 99], "max_tokens": 8, "ignore_eos": True}
        assert client.get("/health/ready").status_code == 200
        is_broken.set()
        assert run_session(client, body).end.reason == "error"
        answer = client.get("/health/ready")
        assert (answer.status_code, ReadyAnswer.model_validate_json(answer.content).status) == (503, "failed")
        assert client.get("/health/live").status_code == 200
        assert "outrider_engine_failed 1.0" in client.get("/metrics").text
        with pytest.raises(EndpointLost):
            asyncio.run(ready(server.url))
        is_broken.clear()
        server.wait_until(lambda: client.get("/health/ready").status_code == 200)
        assert asyncio.run(ready(server.url)).status == "ready"
        assert "outrider_engine_failed 0.0" in client.get("/metrics").text
        assert run_session(client, body).tokens == target_tokens([5, 17, 99], 8)


# -- calibration --------------------------------------------------------------------------------------------------


def test_calibration_times_the_picks_of_a_runtime_that_picks() -> None:
    """What will be run is what is measured: 40 ms for the logits and 5 ms for the picks."""
    clock = Clock()

    class Picking(PickingRuntime):
        def forward(self, batch: Sequence[SequenceSlice]) -> NDArray[np.float32]:
            clock.now += 0.040
            return super().forward(batch)

        def forward_picks(
            self, batch: Sequence[SequenceSlice], ask: Callable[[], Sequence[AskedRows]]
        ) -> list[PickedRow]:
            found = super().forward_picks(batch, ask)
            clock.now += 0.005
            return found

    engine = Engine(Picking(vocab_size=VOCAB), clock=clock)
    engine.calibrate(max_tokens=4)
    assert engine.stats().step_ms == pytest.approx(45.0)


# -- everything at once -------------------------------------------------------------------------------------------


CHAOTIC = [*PROMPTS, [*PROMPTS[5], BAD]]


class Chaos(FakeBatchRuntime):
    """Raises at random, before or after it has written; keeps its own assertions, which must not fail."""

    def __init__(self, seed: int) -> None:
        super().__init__(vocab_size=VOCAB, num_blocks=48, block_size=4, max_positions=160)
        self._rng = random.Random(seed)
        self.is_calm = False
        self.violations: list[AssertionError] = []

    def forward(self, batch: Sequence[SequenceSlice]) -> NDArray[np.float32]:
        """As FakeBatchRuntime's, one call in eight a fault; always where a prompt ends in BAD."""
        fault = self._rng.choice([RuntimeError, MemoryError, SystemExit, Panic, ValueError])("chaos")
        luck = 1.0 if self.is_calm else self._rng.random()
        if luck < 0.06:
            raise fault
        try:
            rows = super().forward(batch)
        except AssertionError as error:
            self.violations.append(error)
            raise
        if luck < 0.12 or any(item.past <= 28 and item.tokens[-1] == BAD for item in batch):
            raise fault
        if luck < 0.14:
            rows[self._rng.randrange(len(rows)) :] = np.nan if len(rows) else 0
        return rows


class Client:
    """One thread's requests, each followed to its end and checked. truths: one per prompt of CHAOTIC."""

    def __init__(self, thread: EngineThread, truths: Sequence[list[int]], seed: int, failures: list[object]) -> None:
        self._thread = thread
        self._truths = truths
        self._rng = random.Random(seed)
        self._failures = failures
        self.num_well = 0

    def run(self) -> None:
        try:
            for _ in range(12):
                self._rng.choice([self._generate, self._generate, self._verify])()
        except BaseException as error:  # the test shows it
            self._failures.append(error)

    def _follow(self, request: GenerateRequest, truth: Sequence[int], act: Callable[[int], None]) -> EndEvent:
        collector = Waiting(is_broken=self._rng.random() < 0.04)
        act(self._thread.submit(request, collector))
        assert collector.ended.wait(TIMEOUT_S), "a request without an end"
        assert collector.end is not None
        assert collector.tokens == list(truth[: len(collector.tokens)]), "another text"
        if collector.end.reason == "length":
            assert len(collector.tokens) == request.max_tokens
            self.num_well += 1
        return collector.end

    def _generate(self) -> None:
        index = self._rng.randrange(len(CHAOTIC))
        prompt, truth = CHAOTIC[index], self._truths[index]
        way = self._rng.random()

        def act(sequence_id: int) -> None:
            if way < 0.2:
                self._thread.cancel(sequence_id)
            elif way < 0.7 and truth:
                for base in range(3):
                    wrong = [(token + 1) % VOCAB for token in truth[base : base + 4]]
                    try:
                        self._thread.draft(sequence_id, base, [truth[base : base + 5], wrong])
                    except RequestError as error:
                        assert error.code in ("unknown_session", "draft_ahead", "stale_draft")

        self._follow(flat_request(tuple(prompt), SAMPLED, 20), truth, act)

    def _verify(self) -> None:
        index = self._rng.randrange(len(CHAOTIC))
        prompt, truth = CHAOTIC[index], self._truths[index]
        name, done = None, 0
        while done < 16:
            sent = () if name else (*prompt, *truth[:done])
            request = flat_request(
                tuple(sent), SAMPLED, 4, draft=tuple(truth[done : done + 3]), once=True, prefix_hash=name
            )
            collector = Waiting()
            try:
                self._thread.submit(request, collector)
            except RequestError as error:
                assert error.code == "prefix_not_held"
                name = None
                continue
            assert collector.ended.wait(TIMEOUT_S), "a request without an end"
            assert collector.end is not None
            assert collector.tokens == truth[done : done + len(collector.tokens)], "another text"
            done += len(collector.tokens)
            name = collector.end.prefix_hash
            if collector.end.reason == "error" and self._rng.random() < 0.5:
                return


@pytest.mark.parametrize("seed", range(3))
def test_under_random_faults_every_request_ends_once_and_no_block_is_lost(seed: int) -> None:
    """Six threads generate, draft, cancel and verify; texts that end well are right, and all blocks come back."""
    truths = [plain(prompt, SAMPLED, 24) for prompt in CHAOTIC]
    runtime = Chaos(seed)
    thread = EngineThread(runtime, EngineConfig(max_running=6, step_tokens=32, max_parked=4))
    thread.start()
    failures: list[object] = []
    clients = [Client(thread, truths, 100 * seed + i, failures) for i in range(6)]
    threads = [threading.Thread(target=client.run) for client in clients]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert failures == [] and runtime.violations == []
    assert sum(client.num_well for client in clients) > 5
    assert thread.stats().totals.faults > 5
    runtime.is_calm = True
    calm = Waiting()
    thread.submit(flat_request(tuple(PROMPTS[2]), SAMPLED, 20), calm)
    assert calm.ended.wait(TIMEOUT_S) and calm.tokens == truths[2][:20]
    thread.stop()
    stats = thread.stats()
    assert (stats.free_blocks, stats.running, stats.queued, stats.failed) == (stats.num_blocks, 0, 0, 0)
