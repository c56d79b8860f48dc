"""Drives an engine step by step in tests: plain target-only text, collected events, a clock that tests move."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import pytest
from tests.fake_runtime import FakeBatchRuntime, plain_text
from tests.requests import flat_request
from tests.waiting import HANG_S

from outrider.cloud.engine import Engine, EngineConfig
from outrider.cloud.engine.thread import EngineThread
from outrider.cloud.seam import CommitEvent, EndEvent, Event
from outrider.models.errors import RequestError
from outrider.models.picks.sampling import SamplingParams
from outrider.models.runtimes.base import SequenceSlice

VOCAB = 64
SAMPLED = SamplingParams(temperature=0.8, seed=7)


def prompt_of(index: int, length: int = 6) -> list[int]:
    """A prompt that no other index has."""
    return [(index // VOCAB) % VOCAB, index % VOCAB, *((index * 5 + i * i) % VOCAB for i in range(length - 2))]


def refused(code: str, status: int | None = None, match: str | None = None) -> pytest.RaisesExc[RequestError]:
    """A context that a request leaves as one refused with this code, and with this status and message if given."""
    return pytest.raises(
        RequestError, match=match, check=lambda error: error.code == code and status in (None, error.status)
    )


def plain(
    prompt: Sequence[int], params: SamplingParams, count: int, *, stop_ids: frozenset[int] = frozenset()
) -> list[int]:
    """Target-only text, without an engine."""
    return plain_text(prompt, count, params, vocab_size=VOCAB, stop_ids=stop_ids)


class Clock:
    """Seconds that pass only on request."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Collector:
    """A sink that keeps its events and checks that commits are contiguous. Other threads may wait for its end.

    tokens: the text before the first commit, where a sequence was rewound.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = list(tokens)
        self.commits: list[CommitEvent] = []
        self.end: EndEvent | None = None
        self._has_ended = threading.Event()

    def __call__(self, event: Event) -> None:
        assert self.end is None, "an event after the end"
        if isinstance(event, CommitEvent):
            assert event.base == len(self.tokens)
            self.commits.append(event)
            self.tokens += event.tokens
        elif isinstance(event, EndEvent):
            self.end = event
            self._has_ended.set()

    @property
    def ended(self) -> EndEvent:
        """The end, which has come."""
        assert self.end is not None, "no end yet"
        return self.end

    @property
    def code(self) -> str | None:
        """The code of the error that ended the request; None if it ended well."""
        return self.ended.error.code if self.ended.error is not None else None

    def wait(self) -> EndEvent:
        """Waits for the end, where the engine runs in another thread."""
        assert self._has_ended.wait(HANG_S), "a request without an end"
        return self.ended


def submitted(thread: EngineThread, prompt: Sequence[int], count: int) -> Collector:
    """A request to the thread."""
    collector = Collector()
    thread.submit(flat_request(tuple(prompt), SAMPLED, count), collector)
    return collector


class Harness:
    """An engine over the fake language; each step moves its clock by `step_s`.

    runtime: in the place of one of `kind`; then the clock moves only on request. At the end of the test every
    block must be free, see `assert_all_returned`.
    """

    made: ClassVar[list[Harness]] = []
    """Those of the running test."""

    def __init__(
        self,
        *,
        kind: type[FakeBatchRuntime] = FakeBatchRuntime,
        config: EngineConfig | None = None,
        num_blocks: int = 256,
        block_size: int = 4,
        max_positions: int = 512,
        step_s: Callable[[int], float] = lambda num_tokens: 0.040 + 0.001 * num_tokens,
        fail_on_token: int | None = None,
        on_step: Callable[[Sequence[SequenceSlice]], None] | None = None,
        runtime: FakeBatchRuntime | None = None,
    ) -> None:
        self.clock = Clock()
        self.batches: list[list[int]] = []  # new tokens of each sequence, one list per step

        def stepped(batch: Sequence[SequenceSlice]) -> None:
            self.batches.append([len(item.tokens) for item in batch])
            self.clock.now += step_s(sum(self.batches[-1]))
            if on_step is not None:
                on_step(batch)

        self.runtime = runtime or kind(
            vocab_size=VOCAB,
            max_positions=max_positions,
            block_size=block_size,
            num_blocks=num_blocks,
            fail_on_token=fail_on_token,
            on_step=stepped,
        )
        self.engine = Engine(self.runtime, config, clock=self.clock)
        self.made.append(self)

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

    def texts(self, indices: Iterable[int], max_tokens: int, length: int = 6, **values: Any) -> list[Collector]:
        """Submits the prompts of these numbers. values: as `submit` takes them."""
        return [self.submit(prompt_of(i, length), max_tokens, **values)[1] for i in indices]

    def finished(self, prompt: Sequence[int], max_tokens: int = 20, **values: Any) -> Collector:
        """Submits a request and runs until nothing is left. values: as `submit` takes them."""
        _, collector = self.submit(prompt, max_tokens, **values)
        self.run()
        return collector

    def parked(self, prompt: Sequence[int], owner: bytes) -> str:
        """The name under which a verify pass of one token left its cache."""
        name = self.finished(prompt, 1, once=True, owner=owner).ended.prefix_hash
        assert name is not None
        return name

    def draft_all(
        self, sequences: Iterable[tuple[int, Collector]], truths: Iterable[Sequence[int]], depth: int
    ) -> None:
        """Drafts for each of these that goes on its next tokens, all right."""
        for (number, collector), truth in zip(sequences, truths, strict=True):
            base = len(collector.tokens)
            if collector.end is None and truth[base:]:
                self.engine.draft(number, base, [truth[base : base + depth]])

    def draft_along(
        self, sequence: tuple[int, Collector], paths_after: Callable[[int], Sequence[Sequence[int]]]
    ) -> Collector:
        """Runs a submitted sequence to its end. paths_after: what to draft before each step, given the number of its
        tokens; nothing if empty.
        """
        number, collector = sequence
        while collector.end is None:
            base = len(collector.tokens)
            if paths := paths_after(base):
                self.engine.draft(number, base, paths)
            self.step()
        return collector

    def step(self) -> None:
        """Runs one step; a wait for a draft passes on the clock."""
        delay = self.engine.step()  # first: `now += step()` would lose the time that the step itself takes
        self.clock.now += delay or 0.0

    def run_steps(self, count: int) -> None:
        """Runs `count` steps; waits for drafts pass on the clock."""
        for _ in range(count):
            self.step()

    def run(self, *, max_steps: int = 5_000) -> None:
        """Runs steps until nothing is left; waits for drafts pass on the clock."""
        for _ in range(max_steps):
            delay = self.engine.step()
            if delay is None:
                return
            self.clock.now += delay
        raise AssertionError("the engine never came to rest")

    def work_off(self) -> None:
        """Runs steps while there are requests, also where the engine then goes on with probes of its runtime."""
        while self.engine.has_work:
            self.step()

    @classmethod
    def check_made(cls) -> None:
        """Asserts that all of the running test returned their blocks; but for those that spill, which it has closed."""
        made, cls.made[:] = cls.made[:], []
        for each in made:
            if each.engine._swap.store is None:
                each.assert_all_returned()

    def assert_all_returned(self) -> None:
        """Asserts that every block is free, except those of parked prefixes."""
        self.engine.shut_down()
        stats = self.engine.stats()
        assert (stats.free_blocks, stats.running, stats.queued) == (stats.num_blocks, 0, 0)


def calibrated(**given: Any) -> Harness:
    """An engine that has measured its steps. given: as `Harness` takes them."""
    harness = Harness(**given)
    harness.engine.calibrate()
    return harness
