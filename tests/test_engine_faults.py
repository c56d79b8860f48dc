"""Tests the engine on a runtime that fails: what one fault ends, what it leaves behind, what readiness shows."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.engine_faults import BAD, PROMPTS, TIMEOUT_S, Breaking, Panic, raises_on_bad
from tests.engine_harness import SAMPLED, VOCAB, Clock, Collector, Harness, plain, submitted
from tests.fake_runtime import FakeBatchRuntime
from tests.picking_runtime import PickingRuntime
from tests.requests import flat_request

from outrider.cloud.engine import Engine, EngineConfig, EngineThread, Policy
from outrider.cloud.engine.cache import ParkedPrefix
from outrider.cloud.seam import EndEvent, GenerateRequest
from outrider.models.errors import RequestError
from outrider.models.processors.chooser import PickedRow
from outrider.models.runtimes.base import Ask, Beside, SequenceSlice

# -- one bad sequence ---------------------------------------------------------------------------------------------


def test_a_sequence_that_makes_forward_raise_is_left_out_of_its_batch() -> None:
    """The seven others get their exact texts, in a few more calls: the batch is halved until it stands alone."""
    harness = Harness(on_step=raises_on_bad, config=EngineConfig(step_tokens=1024))
    goods = [harness.submit(prompt, 12, stop_ids=frozenset({BAD}))[1] for prompt in PROMPTS[:7]]
    _, bad = harness.submit([5, 6, BAD], 12)
    harness.engine.step()
    assert (bad.code, bad.tokens) == ("model_fault", []) and "cannot run this token" in str(bad.ended.error)
    # 8, then halves of 8, of 4 and of 2, then the probe is not needed: others committed.
    assert [len(batch) for batch in harness.batches] == [8, 4, 4, 2, 2, 1, 1]
    harness.run()
    truths = [plain(prompt, SAMPLED, 12, stop_ids=frozenset({BAD})) for prompt in PROMPTS[:7]]
    assert [collector.tokens for collector in goods] == truths and harness.engine.health.fault is None


def test_a_batch_that_fails_once_loses_nothing() -> None:
    """A passing fault costs a run again without drafts; every text is exact, drafts go on later."""
    # The fifth call runs a half of the step that failed in the third.
    on_step = Mock(side_effect=[MemoryError if number in (3, 5, 9) else None for number in range(1, 500)])
    harness = Harness(on_step=on_step, config=EngineConfig(policy=Policy.VERIFY))
    truths = [plain(prompt, SAMPLED, 30) for prompt in PROMPTS[:3]]
    sequences = [harness.submit(prompt, 30) for prompt in PROMPTS[:3]]
    while harness.engine.has_work:
        harness.draft_all(sequences, truths, 4)
        harness.step()
    assert [collector.tokens for _, collector in sequences] == truths
    assert all(c.ended.usage.accepted_tokens > 5 for _, c in sequences) and harness.engine.stats().totals.faults == 2


def test_a_draft_that_makes_forward_raise_costs_only_itself() -> None:
    """Without the draft the same step succeeds, also for a sequence that runs alone."""
    harness = Harness(on_step=raises_on_bad, config=EngineConfig(policy=Policy.VERIFY))
    truth = plain(PROMPTS[1], SAMPLED, 10, stop_ids=frozenset({BAD}))
    sequence_id, collector = harness.submit(PROMPTS[1], 10, stop_ids=frozenset({BAD}))
    harness.engine.step()
    harness.engine.draft(sequence_id, 1, [[truth[1], BAD]])
    harness.run()
    assert collector.tokens == truth and collector.code is None


def test_when_every_sequence_fails_alone_all_get_a_model_fault() -> None:
    """The runtime's fault: one error each, one log entry, all blocks back."""
    harness = Harness(on_step=Mock(side_effect=SystemExit("the device is gone")))
    collectors = [harness.submit(prompt, 5)[1] for prompt in PROMPTS]
    harness.work_off()
    assert [collector.code for collector in collectors] == [
        "model_fault"
    ] * 8 and harness.engine.stats().totals.faults == 1


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


def poisonable() -> tuple[Poisonable, Harness]:
    """An engine of small steps, and its runtime."""
    runtime = Poisonable()
    return runtime, Harness(runtime=runtime, config=EngineConfig(step_tokens=8))


def test_a_passing_nan_in_a_prompt_ends_one_request() -> None:
    """A poisoned chunk is not shared: neither with a request in flight nor with a later one."""
    runtime, harness = poisonable()
    runtime.poison_next = True
    _, first = harness.submit(LONG, 6)
    harness.run_steps(3)
    second, third = (harness.finished(LONG, 6) for _ in range(2))
    assert first.code == "model_fault" and second.tokens == third.tokens == plain(LONG, SAMPLED, 6)
    assert third.ended.usage.cached_prompt_tokens == 36


def test_a_passing_nan_while_decoding_leaves_nothing_behind() -> None:
    """Text that a failed sequence generated is computed again by the one that goes on with it."""
    runtime, harness = poisonable()
    _, collector = harness.submit(LONG[:6], 30)
    while len(collector.tokens) < 10:
        harness.step()
    runtime.poison_next = True
    harness.run()
    assert collector.code == "model_fault"
    again = harness.finished(LONG[:6] + collector.tokens, 30 - len(collector.tokens))
    assert collector.tokens + again.tokens == plain(LONG[:6], SAMPLED, 30)
    assert again.ended.usage.cached_prompt_tokens == 0


def test_a_known_block_that_goes_bad_costs_one_request() -> None:
    """The sequence that fails on it takes it out of the books; the next computes it again."""
    runtime, harness = poisonable()
    harness.finished(LONG, 6)
    runtime.bad_slots.update(block * runtime.block_size for block in harness.engine._cache.pool._block_of.values())
    assert harness.finished(LONG, 6).code == "model_fault"
    assert harness.finished(LONG, 6).tokens == plain(LONG, SAMPLED, 6)


# -- submit against reset -----------------------------------------------------------------------------------------


def test_a_held_prefix_never_enters_the_pool_of_after_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset that comes in the middle of `submit` waits for it, and then ends the request."""
    harness = Harness()
    first = harness.finished(PROMPTS[3], 1, once=True)
    resetting = threading.Thread(target=lambda: harness.engine.reset(ValueError("a bug")))
    take = harness.engine._cache.parked.take

    def take_and_reset(owner: bytes, name: str) -> ParkedPrefix | None:
        held = take(owner, name)
        resetting.start()
        resetting.join(0.1)  # long enough to be through, were it not made to wait
        return held

    monkeypatch.setattr(harness.engine._cache.parked, "take", take_and_reset)
    _, second = harness.submit([], 1, once=True, prefix_hash=first.ended.prefix_hash)
    resetting.join(TIMEOUT_S)
    harness.run()
    assert second.code == "internal_error"


# -- calibration --------------------------------------------------------------------------------------------------


def test_calibration_times_the_picks_of_a_runtime_that_picks() -> None:
    """What will be run is what is measured."""
    clock = Clock()

    class Picking(PickingRuntime):
        def forward_picks(self, batch: Sequence[SequenceSlice], ask: Ask, beside: Beside) -> list[PickedRow]:
            clock.now += 0.045
            return super().forward_picks(batch, ask, beside)

    engine = Engine(Picking(vocab_size=VOCAB), clock=clock)
    engine.calibrate(max_tokens=4)
    assert engine.stats().step_ms == pytest.approx(45.0)


# -- everything at once -------------------------------------------------------------------------------------------


CHAOTIC = [*PROMPTS, [*PROMPTS[5], BAD]]


class Chaos(FakeBatchRuntime):
    """Raises at random, before or after it has written; keeps its own assertions, which must not fail."""

    def __init__(self, seed: int) -> None:
        super().__init__(vocab_size=VOCAB, num_blocks=48, block_size=4, max_positions=160)
        self._rng, self.is_calm = random.Random(seed), False
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


class PickingChaos(Chaos, PickingRuntime):
    """The same beside the engine's work: its device is done at any time."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.is_over = lambda: self._rng.random() < 0.3


class Client:
    """One thread's requests, each followed to its end and checked. truths: one per prompt of CHAOTIC."""

    def __init__(self, thread: EngineThread, truths: Sequence[list[int]], seed: int, failures: list[object]) -> None:
        self._thread, self._rng, self._failures = thread, random.Random(seed), failures
        self._texts = [*zip(CHAOTIC, truths, strict=True)]
        self.num_well = 0

    def run(self) -> None:
        try:
            for _ in range(12):
                self._rng.choice([self._generate, self._generate, self._verify])()
        except BaseException as error:  # the test shows it
            self._failures.append(error)

    def _follow(self, request: GenerateRequest, truth: Sequence[int], act: Callable[[int], None]) -> EndEvent:
        collector = Breaking() if self._rng.random() < 0.04 else Collector()
        act(self._thread.submit(request, collector))
        collector.wait()
        assert collector.tokens == list(truth[: len(collector.tokens)]), "another text"
        if collector.ended.reason == "length":
            assert len(collector.tokens) == request.max_tokens
            self.num_well += 1
        return collector.ended

    def _generate(self) -> None:
        (prompt, truth), way = self._rng.choice(self._texts), self._rng.random()

        def act(sequence_id: int) -> None:
            if way < 0.2:
                self._thread.cancel(sequence_id)
            elif way < 0.7 and truth:
                for base in range(3):
                    wrong = [(token + 1) % VOCAB for token in truth[base : base + 4]]
                    try:
                        self._thread.draft(sequence_id, base, [truth[base : base + 5], wrong])
                    except RequestError as error:
                        assert error.code in ("unknown_session", "draft_ahead")

        self._follow(flat_request(tuple(prompt), SAMPLED, 20), truth, act)

    def _verify(self) -> None:
        prompt, truth = self._rng.choice(self._texts)
        name, done = None, 0
        while done < 16:
            sent, collector = () if name else (*prompt, *truth[:done]), Collector()
            request = flat_request(sent, SAMPLED, 4, draft=tuple(truth[done : done + 3]), once=True, prefix_hash=name)
            try:
                self._thread.submit(request, collector)
            except RequestError as error:
                assert error.code == "prefix_not_held"
                name = None
                continue
            collector.wait()
            assert collector.tokens == truth[done : done + len(collector.tokens)], "another text"
            done += len(collector.tokens)
            name = collector.ended.prefix_hash
            if collector.ended.reason == "error" and self._rng.random() < 0.5:
                return


@pytest.mark.parametrize(("kind", "seed"), [(Chaos, 0), (Chaos, 1), (PickingChaos, 2), (PickingChaos, 4)])
def test_under_random_faults_every_request_ends_once_and_no_block_is_lost(kind: type[Chaos], seed: int) -> None:
    """Six threads generate, draft, cancel and verify; texts that end well are right, and all blocks come back."""
    truths = [plain(prompt, SAMPLED, 24) for prompt in CHAOTIC]
    runtime = kind(seed)
    thread = EngineThread(runtime, EngineConfig(max_running=6, step_tokens=32, max_parked=4))
    thread.start()
    failures: list[object] = []
    clients = [Client(thread, truths, 100 * seed + i, failures) for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(Client.run, clients))
    assert failures == [] and runtime.violations == []
    assert sum(client.num_well for client in clients) > 5 and thread.stats().totals.faults > 5
    runtime.is_calm = True
    calm = submitted(thread, PROMPTS[2], 20)
    calm.wait()
    assert calm.tokens == truths[2][:20]
    thread.stop()
    stats = thread.stats()
    assert (stats.free_blocks, stats.running, stats.queued, stats.failed) == (stats.num_blocks, 0, 0, 0)
