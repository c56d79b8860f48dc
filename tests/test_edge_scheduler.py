"""Tests the thread that drafts for several texts: no text's end waits for it, and what it shares changes no guess."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Sequence

import pytest
from tests.fake_runtime import FakeSequenceRuntime
from tests.serving import StepGate, fake_tokenizer, serve_fake

from outrider.cloud.engine import EngineConfig, Policy
from outrider.edge.drafting.calibration import Guess
from outrider.edge.drafting.depth import FixedDepth
from outrider.edge.drafting.drafter import Drafter, ModelDrafter, NgramDrafter, guess_together
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.drafting.scheduler import DraftCall, DraftScheduler
from outrider.edge.drafting.tree import GuessNode
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.stop_and_wait import StopAndWaitAgent
from outrider.edge.modes.stream import StreamAgent
from outrider.edge.results import GenerationRequest, GenerationResult
from outrider.models.client.client import VerifierClient
from outrider.models.errors import ModelFault
from outrider.models.picks.sampling import SamplingParams, pick

VOCAB = fake_tokenizer().size
SAMPLED = SamplingParams(0.8, seed=4)
LIMIT_S = 30.0
LONG = tuple(1 + index % (VOCAB - 1) for index in range(700))
SURE = EngineConfig(policy=Policy.VERIFY, looks_up=False)


def truth(prompt: Sequence[int], count: int) -> tuple[int, ...]:
    runtime, tokens = FakeSequenceRuntime(vocab_size=VOCAB), list(prompt)
    row = runtime.extend(tokens)
    for _ in range(count):
        tokens.append(pick(row, SAMPLED, len(tokens)))
        row = runtime.extend(tokens[-1:])
    return tuple(tokens[len(prompt) :])


def asking(max_tokens: int = 24, prompt: Sequence[int] = LONG) -> GenerationRequest:
    return GenerationRequest(tuple(prompt), SAMPLED, max_tokens, stop_ids=frozenset(), ignore_eos=True)


class Held:
    """For `on_step`: holds a draft's calls until `go` is set; records the length of each."""

    def __init__(self, num_free: int = 0) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.calls: list[int] = []
        self._num_free = num_free

    def __call__(self, tokens: Sequence[int]) -> None:
        self.calls.append(len(tokens))
        if len(self.calls) > self._num_free:
            self.begun.set()
            assert self.go.wait(LIMIT_S)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not is_so():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["the text ends", "Ctrl-C"])
def test_a_texts_end_waits_for_no_call_of_the_draft(is_cancelled: bool) -> None:
    """However long the draft's prompt pass takes. Closing the draft does wait: the model is in use."""
    held = Held()
    drafter = ModelDrafter(FakeSequenceRuntime(vocab_size=VOCAB, on_step=held))
    scheduler = DraftScheduler()

    async def scenario(url: str) -> GenerationResult | None:
        async with VerifierClient(url) as client:
            agent = StreamAgent(Endpoints([client]), drafter, FixedDepth(4), scheduler=scheduler)
            task = asyncio.create_task(agent.generate(asking(3000 if is_cancelled else 24)))
            await asyncio.to_thread(held.begun.wait, LIMIT_S)
            if is_cancelled:
                task.cancel()
            async with asyncio.timeout(LIMIT_S):
                (found,) = await asyncio.gather(task, return_exceptions=True)
            assert not held.go.is_set() and len(held.calls) == 1
            return None if isinstance(found, asyncio.CancelledError) else task.result()

    with serve_fake() as server:
        result = asyncio.run(scenario(server.url))
        assert (result is None) == is_cancelled
        assert result is None or result.tokens == truth(LONG, 24)
        closing = threading.Thread(target=drafter.close)
        closing.start()
        held.go.set()
        closing.join(LIMIT_S)
        scheduler.join()
    assert held.calls == [64]  # of 700: nothing was read after the piece in progress


@pytest.mark.parametrize("mode", ["stream", "stop-and-wait"])
def test_drafting_stops_between_two_pieces_of_a_prompt(mode: str) -> None:
    """A long prompt is read in pieces; a text that has ended reads no further."""
    held = Held(num_free=2)
    drafter = ModelDrafter(FakeSequenceRuntime(vocab_size=VOCAB, on_step=held), clock=lambda: 0.0)

    async def scenario(url: str) -> None:
        async with VerifierClient(url) as client:
            endpoints = Endpoints([client])
            agent: StreamAgent | StopAndWaitAgent = (
                StreamAgent(endpoints, drafter, FixedDepth(4))
                if mode == "stream"
                else StopAndWaitAgent(endpoints, drafter, FixedDepth(4), Estimates())
            )
            task = asyncio.create_task(agent.generate(asking()))
            await asyncio.to_thread(held.begun.wait, LIMIT_S)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            held.go.set()

    with serve_fake() as server:
        asyncio.run(scenario(server.url))
        drafter.close()
    assert held.calls == [64, 128, 256]


def test_a_late_draft_joins_when_it_is_ready() -> None:
    """It has missed the first commits; the later tokens are drafted, and the text is the target's."""
    held, gate = Held(), StepGate()
    drafter = ModelDrafter(FakeSequenceRuntime(vocab_size=VOCAB, on_step=held))
    batches: list[int] = []

    async def scenario(url: str) -> GenerationResult:
        async with VerifierClient(url) as client:
            agent = StreamAgent(Endpoints([client]), drafter, FixedDepth(4))
            request = asking(64)
            task = asyncio.create_task(agent.generate(request, lambda batch: batches.append(len(batch.tokens))))
            while sum(batches) < 5:
                gate.allow(1)
                await asyncio.sleep(0.002)
            assert held.begun.is_set() and len(held.calls) == 1
            held.go.set()
            while not task.done():
                await until(lambda: not agent.scheduler._runs or task.done())
                gate.allow(1)
                await asyncio.sleep(0)
            return task.result()

    with serve_fake(config=SURE, gate=gate) as server:
        result = asyncio.run(scenario(server.url))
    assert result.tokens == truth(LONG, 64)
    assert result.num_sent > 0 and sum(result.hits.values()) > 0


def test_pieces_follow_the_time_that_they_take() -> None:
    """Slow ones become smaller, so that a text can be left soon; fast ones larger."""
    now, sizes, s_per_token = [0.0], list[int](), [0.01]

    def step(tokens: Sequence[int]) -> None:
        sizes.append(len(tokens))
        now[0] += s_per_token[0] * len(tokens)

    drafter = ModelDrafter(FakeSequenceRuntime(vocab_size=VOCAB, on_step=step), clock=lambda: now[0])
    drafter.begin(LONG, SAMPLED)
    while len(sizes) < 6:
        drafter.read_on()
    assert sizes == [64, 32, 16, 16, 16, 16]
    s_per_token[0] = 0.0
    while drafter.is_behind:
        drafter.read_on()
    assert sizes[6:] == [16, 32, 64, 128, 256] and sum(sizes) < len(LONG)
    drafter.guess([[]], 2)
    assert sum(sizes) == len(LONG)


@pytest.mark.parametrize("seed", range(4))
def test_a_shared_call_gives_the_guesses_of_calls_alone(seed: int) -> None:
    """For any texts, commits and branches, with lookup and without."""
    chance = random.Random(seed)
    model = FakeSequenceRuntime(vocab_size=VOCAB, max_positions=90, agreement=0.7)
    sequences = [model, model.open_sequence(), model.open_sequence()]
    together: list[Drafter] = [ModelDrafter(sequences[0]), ModelDrafter(sequences[1]).with_lookup()]
    together.append(ModelDrafter(sequences[2]))

    def plain(index: int) -> ModelDrafter:
        drafter = ModelDrafter(FakeSequenceRuntime(vocab_size=VOCAB, max_positions=90, agreement=0.7))
        return drafter.with_lookup() if index == 1 else drafter

    alone = [plain(index) for index in range(3)]
    texts: list[list[int]] = [[] for _ in range(3)]
    for _ in range(12):
        for index, text in enumerate(texts):
            pair = (together[index], alone[index])
            if not text or chance.random() < 0.1 or len(text) > 86:
                text[:] = [chance.randrange(6) for _ in range(chance.randint(1, 60))]
                for each in pair:
                    each.begin(text, SAMPLED)
            elif chance.random() < 0.7:
                new = [chance.randrange(6) for _ in range(chance.randint(1, 3))]
                text += new
                for each in pair:
                    each.extend(new)
        asked: list[tuple[Drafter, list[list[int]]]] = []
        expected = []
        for index in range(3):
            branches = [[chance.randrange(6) for _ in range(chance.randint(0, 3))] for _ in range(chance.randint(1, 2))]
            asked.append((together[index], branches))
            expected.append(alone[index].guess(branches, 3))
        assert guess_together(asked, 3) == expected


class Job:
    """Asks for `num_calls` calls of the root, and records whose turn it was."""

    width = 2

    def __init__(self, name: str, drafter: ModelDrafter | NgramDrafter, num_calls: int, turns: list[str]) -> None:
        self.name, self.drafter, self._left, self._turns = name, drafter, num_calls, turns
        self.found: list[list[list[Guess]]] = []

    def is_wanted(self) -> bool:
        return self._left > 0

    def next_call(self, most: int) -> DraftCall:
        assert most >= 1
        return DraftCall([GuessNode(-1, 0, None, None, 1.0)], [[]])

    def take(self, call: DraftCall, found: list[list[Guess]], before: float, now: float) -> None:
        assert before <= now
        self._left -= 1
        self._turns.append(self.name)
        self.found.append(found)


def run_jobs(jobs: Sequence[Job]) -> tuple[DraftScheduler, list[BaseException | None]]:
    async def scenario() -> list[BaseException | None]:
        for _ in jobs:
            scheduler.enter()
        go = threading.Event()
        scheduler.do(lambda: assert_set(go))  # so that all are there at the first turn
        runs = [scheduler.run(job) for job in jobs]
        go.set()
        found = await asyncio.gather(*runs, return_exceptions=True)
        for _ in jobs:
            scheduler.leave()
        return found

    scheduler = DraftScheduler()
    found = asyncio.run(scenario())
    scheduler.join()
    assert not [thread for thread in threading.enumerate() if thread.name == "outrider-draft"]
    return scheduler, found


def assert_set(event: threading.Event) -> None:
    assert event.wait(LIMIT_S)


def opened(runtime: FakeSequenceRuntime) -> ModelDrafter:
    drafter = ModelDrafter(runtime)
    drafter.begin([1, 2, 3], SAMPLED)
    return drafter


def test_texts_take_turns() -> None:
    """Those that cannot share a call; a text with much to draft does not hold up one with little."""
    turns: list[str] = []
    models = [FakeSequenceRuntime(vocab_size=VOCAB, max_branches=1) for _ in range(3)]
    _, found = run_jobs([Job(name, opened(model), 4, turns) for name, model in zip("abc", models, strict=True)])
    assert found == [None] * 3 and turns == [*"abc"] * 4


def test_a_long_prompt_is_read_in_turn_with_the_calls_of_others() -> None:
    """A text that begins does not hold up those that run."""
    turns: list[str] = []
    slow = ModelDrafter(
        FakeSequenceRuntime(vocab_size=VOCAB, max_branches=1, on_step=lambda _: turns.append("A")), clock=lambda: 0.0
    )
    slow.begin(LONG, SAMPLED)
    quick = opened(FakeSequenceRuntime(vocab_size=VOCAB, max_branches=1))
    run_jobs([Job("a", slow, 1, turns), Job("b", quick, 5, turns)])
    assert turns == ["A", "b", "A", "b", "A", "b", "A", "a", "b", "b"]


def test_texts_of_one_model_share_calls_and_a_fault_is_one_texts_own() -> None:
    """One call serves all; where it fails, each runs alone, and only the text whose fault it is stops drafting."""
    turns: list[str] = []
    model = FakeSequenceRuntime(vocab_size=VOCAB)
    jobs = [Job(name, opened(model.open_sequence()), 5, turns) for name in "abc"]
    scheduler, found = run_jobs(jobs)
    assert found == [None] * 3 and (scheduler.num_calls, scheduler.num_shared) == (5, 5)

    def fail(branches: Sequence[Sequence[int]]) -> None:
        if [9, 9] in [list(branch)[-2:] for branch in branches]:
            raise ModelFault("not finite")

    turns.clear()
    model = FakeSequenceRuntime(vocab_size=VOCAB, on_branches=fail, on_step=lambda tokens: fail([tokens]))
    jobs = [Job(name, opened(model.open_sequence()), 3, turns) for name in "abc"]
    jobs[1].drafter.begin([9, 9], SAMPLED)
    _, found = run_jobs(jobs)
    assert [type(error) for error in found] == [type(None), ModelFault, type(None)]
    assert sorted(turns) == [*"aaaccc"]
