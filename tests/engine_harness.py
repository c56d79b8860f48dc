"""Drives an engine step by step in tests: plain target-only text, collected events, a clock that tests move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.fake_runtime import FakeBatchRuntime
from tests.requests import flat_request

from outrider.cloud.engine import Engine, EngineConfig
from outrider.cloud.seam import CommitEvent, EndEvent, Event
from outrider.models.picks.sampling import SamplingParams, pick
from outrider.models.runtimes.base import SequenceSlice

VOCAB = 64
SAMPLED = SamplingParams(temperature=0.8, seed=7)


def plain(
    prompt: Sequence[int], params: SamplingParams, count: int, *, stop_ids: frozenset[int] = frozenset()
) -> list[int]:
    """Target-only text by the plainest loop: one sequence, one token per step, no engine."""
    runtime, tokens = FakeBatchRuntime(vocab_size=VOCAB), list(prompt)
    blocks = range(runtime.num_blocks)
    past = 0
    for _ in range(count):
        row = runtime.forward([SequenceSlice(tokens[past:], past, blocks, 1)])[0]
        past = len(tokens)
        tokens.append(pick(row, params, past))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


class Clock:
    """Seconds that pass only on request."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Collector:
    """A sink that keeps its events and checks that commits are contiguous."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.commits: list[CommitEvent] = []
        self.end: EndEvent | None = None

    def __call__(self, event: Event) -> None:
        assert self.end is None, "an event after the end"
        if isinstance(event, CommitEvent):
            assert event.base == len(self.tokens)
            self.commits.append(event)
            self.tokens += event.tokens
        elif isinstance(event, EndEvent):
            self.end = event


class Harness:
    """An engine over the fake language; each step moves its clock by `step_s`."""

    def __init__(
        self,
        *,
        kind: type[FakeBatchRuntime] | None = None,
        config: EngineConfig | None = None,
        num_blocks: int = 256,
        block_size: int = 4,
        max_positions: int = 512,
        step_s: Callable[[int], float] = lambda num_tokens: 0.040 + 0.001 * num_tokens,
        fail_on_token: int | None = None,
        on_step: Callable[[Sequence[SequenceSlice]], None] | None = None,
    ) -> None:
        self.clock = Clock()
        self.batches: list[list[int]] = []  # new tokens of each sequence, one list per step

        def stepped(batch: Sequence[SequenceSlice]) -> None:
            self.batches.append([len(item.tokens) for item in batch])
            self.clock.now += step_s(sum(self.batches[-1]))
            if on_step is not None:
                on_step(batch)

        self.runtime = (kind or FakeBatchRuntime)(
            vocab_size=VOCAB,
            max_positions=max_positions,
            block_size=block_size,
            num_blocks=num_blocks,
            fail_on_token=fail_on_token,
            on_step=stepped,
        )
        self.engine = Engine(self.runtime, config, clock=self.clock)

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int = 20,
        *,
        params: SamplingParams = SAMPLED,
        stop_ids: frozenset[int] = frozenset(),
        **values: Any,
    ) -> tuple[int, Collector]:
        """Submits a request with a fresh collector. values: as `flat_request` takes them."""
        collector = Collector()
        request = flat_request(tuple(prompt), params, max_tokens, stop_ids, **values)
        return self.engine.submit(request, collector), collector

    def step(self) -> None:
        """Runs one step; a wait for a draft passes on the clock."""
        delay = self.engine.step()  # first: `now += step()` would lose the time that the step itself takes
        self.clock.now += delay or 0.0

    def run_steps(self, count: int) -> None:
        """Runs `count` steps; waits for drafts pass on the clock."""
        for _ in range(count):
            self.step()

    def run(self, *, until_idle: bool = True, max_steps: int = 5_000) -> None:
        """Runs steps until nothing is left; waits for drafts pass on the clock."""
        for _ in range(max_steps):
            delay = self.engine.step()
            if delay is None:
                return
            self.clock.now += delay
        raise AssertionError("the engine never came to rest")

    def assert_all_returned(self) -> None:
        """Asserts that every block is free, except those of parked prefixes."""
        self.engine.shut_down()
        stats = self.engine.stats()
        assert (stats.free_blocks, stats.running, stats.queued) == (stats.num_blocks, 0, 0)
