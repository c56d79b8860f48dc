"""Tests the thread that drafts for several texts: no text's end waits for it, and what it shares changes no guess."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.agents import MODES, SAMPLED, SURE, VOCAB, Clock, drafter, generate, truth, whole
from tests.fake_runtime import FakeBatchRuntime, FakeSequenceRuntime
from tests.serving import FakeServer, StepGate, serve_fake
from tests.waiting import TIMEOUT_S, run

from outrider.edge.drafting.calibration import Guess
from outrider.edge.drafting.depth import FixedDepth
from outrider.edge.drafting.drafter import Drafter, ModelDrafter, NgramDrafter, guess_together
from outrider.edge.drafting.scheduler import DraftCall, DraftScheduler
from outrider.edge.drafting.tree import GuessNode
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.stream import StreamAgent
from outrider.edge.results import GenerationResult, Mode, TokenBatch
from outrider.models.client.client import VerifierClient
from outrider.models.errors import ModelFault

LONG = tuple(1 + index % (VOCAB - 1) for index in range(700))


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
            assert self.go.wait(TIMEOUT_S)


@asynccontextmanager
async def streaming(
    drafter: ModelDrafter, max_tokens: int, on_tokens: Callable[[TokenBatch], None] | None = None, **server: Any
) -> AsyncIterator[tuple[StreamAgent, asyncio.Task[GenerationResult]]]:
    """A text of a long prompt in work, its agent and its task."""
    with serve_fake(**server) as running:
        async with VerifierClient(running.url) as client:
            agent = StreamAgent(Endpoints([client]), drafter, FixedDepth(4))
            yield agent, asyncio.create_task(agent.generate(whole(LONG, SAMPLED, max_tokens), on_tokens))


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["the text ends", "Ctrl-C"])
async def test_a_texts_end_waits_for_no_call_of_the_draft(is_cancelled: bool) -> None:
    """However long the draft's prompt pass takes. Closing the draft does wait: the model is in use."""
    held = Held()
    draft = drafter(1.0, held)
    async with streaming(draft, 3000 if is_cancelled else 24) as (agent, task):
        await asyncio.to_thread(held.begun.wait, TIMEOUT_S)
        if is_cancelled:
            task.cancel()
        await asyncio.wait({task}, timeout=TIMEOUT_S)
        assert not held.go.is_set() and task.cancelled() == is_cancelled
        assert is_cancelled or task.result().tokens == truth(whole(LONG, SAMPLED, 24))
    closing = asyncio.create_task(asyncio.to_thread(draft.close))
    await asyncio.sleep(0)  # its thread has begun
    held.go.set()
    await closing
    agent.scheduler.join()
    assert held.calls == [64]  # of 700: nothing was read after the piece in progress


@pytest.mark.parametrize("mode", MODES)
async def test_drafting_stops_between_two_pieces_of_a_prompt(server: FakeServer, mode: Mode) -> None:
    """A long prompt is read in pieces; a text that has ended reads no further."""
    held = Held(num_free=2)
    draft = ModelDrafter(FakeSequenceRuntime(vocab_size=VOCAB, on_step=held), clock=lambda: 0.0)
    text = generate([server.url], whole(LONG, SAMPLED, 24), draft, mode=mode, depth=FixedDepth(4))
    task = asyncio.create_task(text)
    await asyncio.to_thread(held.begun.wait, TIMEOUT_S)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    held.go.set()
    draft.close()
    assert held.calls == [64, 128, 256]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_prompt", [15, 16, 17, 40])
async def test_a_prompt_that_the_draft_cannot_hold_is_continued_by_the_cloud_alone(
    server: FakeServer, mode: Mode, num_prompt: int
) -> None:
    """An NPU's positions are fixed at export: beyond them nothing is drafted, and the text is the same."""
    request = whole(LONG[:num_prompt], max_tokens=12)
    draft = ModelDrafter(FakeSequenceRuntime(vocab_size=VOCAB, max_positions=16))
    result = await generate([server.url], request, draft, mode=mode, depth=FixedDepth(4))
    assert result.tokens == truth(request) and result.draft_error is None
    assert result.num_drafted <= max(0, 16 - num_prompt) * 12  # a rejected one may be drafted again
    assert (result.num_drafted > 0) == (num_prompt < 16)


@pytest.mark.parametrize("mode", MODES)
async def test_the_server_ends_where_it_said_that_it_would(mode: Mode) -> None:
    """max_positions counts the prompt and every token of the text, in both modes."""
    with serve_fake(runtime=FakeBatchRuntime(vocab_size=VOCAB, max_positions=20)) as server:
        result = await generate([server.url], whole((1, 2, 3), max_tokens=100), mode=mode, depth=FixedDepth(0))
    assert result.finish_reason == "context" and len(result.tokens) == 20 - 3


async def test_a_late_draft_joins_when_it_is_ready() -> None:
    """It has missed the first commits; the later tokens are drafted, and the text is the target's."""
    held, gate, seen = Held(), StepGate(), list[TokenBatch]()
    async with streaming(drafter(1.0, held), 64, seen.append, config=SURE, gate=gate) as (agent, task):
        while sum(len(batch.tokens) for batch in seen) < 5:
            gate.allow(1)
            await asyncio.sleep(0.002)
        assert held.begun.is_set() and len(held.calls) == 1
        held.go.set()
        while not task.done():
            if not agent.scheduler._runs:
                gate.allow(1)
            await asyncio.sleep(0.002)
    result = task.result()
    assert result.tokens == truth(whole(LONG, SAMPLED, 64)) and result.num_sent > 0 and sum(result.hits.values()) > 0


def test_pieces_follow_the_time_that_they_take() -> None:
    """Slow ones become smaller, so that a text can be left soon; fast ones larger."""
    clock, sizes, s_per_token = Clock(), list[int](), 0.01

    def step(tokens: Sequence[int]) -> None:
        sizes.append(len(tokens))
        clock.now += s_per_token * len(tokens)

    draft = ModelDrafter(FakeSequenceRuntime(vocab_size=VOCAB, on_step=step), clock=clock)
    draft.begin(LONG, SAMPLED)
    while len(sizes) < 6:
        draft.read_on()
    assert sizes == [64, 32, 16, 16, 16, 16]
    s_per_token = 0.0
    while draft.is_behind:
        draft.read_on()
    assert sizes[6:] == [16, 32, 64, 128, 256] and sum(sizes) < len(LONG)
    draft.guess([[]], 2)
    assert sum(sizes) == len(LONG)


@pytest.mark.parametrize("seed", range(4))
def test_a_shared_call_gives_the_guesses_of_calls_alone(seed: int) -> None:
    """For any texts, commits and branches, with lookup and without."""
    chance = random.Random(seed)

    def tokens(least: int, most: int) -> list[int]:
        return [chance.randrange(6) for _ in range(chance.randint(least, most))]

    def drafters(runtimes: Sequence[FakeSequenceRuntime]) -> list[Drafter]:
        first, second, third = map(ModelDrafter, runtimes)
        return [first, second.with_lookup(), third]

    model, *others = (FakeSequenceRuntime(vocab_size=VOCAB, max_positions=90, agreement=0.7) for _ in range(4))
    together, alone = drafters([model, model.open_sequence(), model.open_sequence()]), drafters(others)
    texts: list[list[int]] = [[] for _ in range(3)]
    for _ in range(12):
        for text, *pair in zip(texts, together, alone, strict=True):
            if not text or chance.random() < 0.1 or len(text) > 86:
                text[:] = tokens(1, 60)
                for each in pair:
                    each.begin(text, SAMPLED)
            elif chance.random() < 0.7:
                text += (new := tokens(1, 3))
                for each in pair:
                    each.extend(new)
        branches = [[tokens(0, 3) for _ in range(chance.randint(1, 2))] for _ in range(3)]
        expected = [each.guess(own, 3) for each, own in zip(alone, branches, strict=True)]
        assert guess_together(list(zip(together, branches, strict=True)), 3) == expected


class Job:
    """Asks for `num_calls` calls of the root, and records whose turn it was."""

    width = 2

    def __init__(self, name: str, drafter: ModelDrafter | NgramDrafter, num_calls: int, turns: list[str]) -> None:
        self.name, self.drafter, self._left, self._turns = name, drafter, num_calls, turns

    def is_wanted(self) -> bool:
        return self._left > 0

    def next_call(self, most: int) -> DraftCall:
        assert most >= 1
        return DraftCall([GuessNode(-1, 0, None, None, 1.0)], [[]])

    def take(self, call: DraftCall, found: list[list[Guess]], before: float, now: float) -> None:
        assert before <= now
        self._left -= 1
        self._turns.append(self.name)


def run_jobs(jobs: Sequence[Job]) -> tuple[DraftScheduler, list[BaseException | None]]:
    async def all_of_them() -> list[BaseException | None]:
        for _ in jobs:
            scheduler.enter()
        go = threading.Event()
        scheduler.do(lambda: arrived.append(go.wait(TIMEOUT_S)))  # so that all are there at the first turn
        runs = [scheduler.run(job) for job in jobs]
        go.set()
        found = await asyncio.gather(*runs, return_exceptions=True)
        for _ in jobs:
            scheduler.leave()
        return found

    scheduler, arrived = DraftScheduler(), list[bool]()
    found = run(all_of_them())
    scheduler.join()
    assert arrived == [True]
    assert not [thread for thread in threading.enumerate() if thread.name == "outrider-draft"]
    return scheduler, found


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
    turns.clear()  # a text that begins with a long prompt does not hold up those that run
    reading = FakeSequenceRuntime(vocab_size=VOCAB, max_branches=1, on_step=lambda _: turns.append("A"))
    slow = ModelDrafter(reading, clock=lambda: 0.0)
    slow.begin(LONG, SAMPLED)
    run_jobs([Job("a", slow, 1, turns), Job("b", opened(models[0]), 5, turns)])
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
    assert [type(error) for error in found] == [type(None), ModelFault, type(None)] and sorted(turns) == [*"aaaccc"]
