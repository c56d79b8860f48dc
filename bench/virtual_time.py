"""Plays devices, links and verifiers event by event, for `bench.scale`: minutes of theirs in seconds of ours.

Only time is simulated. The verifier is the real engine on a clock of events: its scheduler, its choice of drafts, its
waits and what it learns. The devices are those of `bench.load`, with their real belief and calibration. In place of a
model stands a text that is known and a formula for the time of a step; in place of HTTP, a link.

A draft beside the target guesses before each step, for all texts together, and the target waits for it.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Final, NamedTuple

from bench.load_devices import Device, Session
from numpy.typing import NDArray

from outrider.cloud.engine import Engine, EngineConfig, Policy
from outrider.cloud.engine.config import TreeForm
from outrider.cloud.pending.estimators import SIZES, StepSize
from outrider.cloud.seam import CommitEvent, DraftHints, EndEvent, Event, GenerateRequest, PickOptions
from outrider.edge.drafting.worker import TreeLimits
from outrider.models.errors import RequestError
from outrider.models.picks.sampling import SamplingParams
from outrider.models.runtimes.base import Ask, Beside, ModelLimits, SequenceSlice
from outrider.models.wire.tree_draft import decode_tree

StepTime = Callable[[int, int], float]
"""Seconds of a step of so many sequences with so many tokens in all."""
HostTime = Callable[[int, float], float]
"""Seconds of the server after a step of so many passes, which itself took so many seconds."""

VOCAB_SIZE: Final = 4096
_BLOCK_SIZE: Final = 16
_MAX_POSITIONS: Final = 4096
_LIMITS: Final = TreeLimits()
_SWITCH_S: Final = sys.getswitchinterval()
_KNOWN_BY: Final = 5
"""Times of a size, more than its calibration has."""
RIGHT, WRONG = 1, 2
"""The tokens of a text that is not recorded: all of them are `RIGHT`; wrong guesses count up from `WRONG`."""


class Timeline:
    """What will happen, by seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Has something happen; at the same time in the order of the calls."""
        heapq.heappush(self._events, (when, next(self._order), act))

    def run_until(self, when: float) -> None:
        """Lets happen what comes before, and at that time."""
        while self._events and self._events[0][0] <= when:
            self.now, _, act = heapq.heappop(self._events)
            act()
        self.now = max(self.now, when)

    def drain(self) -> None:
        """Lets all of it happen."""
        while self._events:
            self.run_until(self.next_at)

    @property
    def next_at(self) -> float:
        """When something happens next; infinite where nothing does."""
        return self._events[0][0] if self._events else math.inf


@dataclass(frozen=True, slots=True)
class Text:
    """What one session's target writes after so many tokens of prompt."""

    tokens: Sequence[int]
    num_prompt: int = 1


class KnownTexts:
    """A `PickingRuntime` whose picks are known, and whose steps take their time on a timeline.

    Every token of a sequence's prompt is the sequence's number, so the prompt says whose text it is.
    """

    block_size = _BLOCK_SIZE
    num_blocks = 4096
    limits = ModelLimits(VOCAB_SIZE, _MAX_POSITIONS)

    def __init__(self, timeline: Timeline, step_s: StepTime) -> None:
        self.texts: Sequence[Text] = (Text(()),)
        self._timeline, self.step_s = timeline, step_s
        self._number_of: dict[int, int] = {}  # by its first block
        self.num_steps = 0

    def forward_picks(self, batch: Sequence[SequenceSlice], ask: Ask, beside: Beside) -> list[int]:
        """What the target picks, after the step's time."""
        self.num_steps += 1
        picks: list[int] = []
        for item in batch:
            if item.past == 0:
                self._number_of[item.blocks[0]] = item.tokens[0]
            text = self.texts[self._number_of[item.blocks[0]]]
            end = item.past + len(item.tokens) + 1 - text.num_prompt
            picked = text.tokens[max(0, end - item.num_rows) : max(0, end)] if item.num_rows else ()
            picks += picked
            picks += [0] * (item.num_rows - len(picked))  # past the end, or of the calibration
        self._timeline.run_until(self._timeline.now + self.step_s(len(batch), sum(len(item.tokens) for item in batch)))
        return picks

    def forward(self, batch: Sequence[SequenceSlice]) -> NDArray:  # type: ignore[type-arg]
        """Never called: it picks."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to release."""


@dataclass(slots=True)
class Link:
    """Messages one way: each takes half a round trip and, on average, the jitter; none overtakes another.

    chance: of its own jitter.
    """

    half_s: float = 0.0
    jitter_s: float = 0.0
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    _last: float = 0.0

    def arrival(self, now: float) -> float:
        """When a message arrives that leaves now."""
        extra_s = self.chance.expovariate(1.0 / self.jitter_s) if self.jitter_s else 0.0
        self._last = max(self._last, now + self.half_s + extra_s)
        return self._last


@dataclass(slots=True)
class Core:
    """A processor that does one thing after the other. call_s: of each of them."""

    call_s: float = 0.0
    free_at: float = 0.0

    def done_at(self, now: float) -> float:
        """When what is asked for now is done."""
        self.free_at = max(now, self.free_at) + self.call_s
        return self.free_at


class Drafting(StrEnum):
    """When a device drafts: one answer to each commit, as `bench.load` has it; on and on, while a guess is worth it; or
    beside the target, which waits for it before each step.
    """

    ANSWERS = "answers"
    ON = "on"
    BESIDE = "beside"


class Peer:
    """One session, and its device if it has one."""

    def __init__(
        self,
        timeline: Timeline,
        text: Text,
        device: Device | None = None,
        drafting: Drafting = Drafting.ON,
        core: Core | None = None,
        links: tuple[Link, Link] | None = None,
        stands_for: float = 1.0,
    ) -> None:
        """core: runs its answers, or each call of a device that drafts on. Several peers may share one.

        links: down and up. stands_for: how many sessions it stands for. The engine measures a drafted token of
        all of them; its device gets the time of one.
        """
        self._timeline, self.text, self._device, self._drafting = timeline, text, device, drafting
        self._core = core or Core()
        self._down, self._up = links or (Link(), Link())
        self._stands_for = stands_for
        self._engine: Engine | None = None
        self._loop = Core()
        self._is_drafting, self._epoch = False, 0
        self._unsent_since: float | None = None
        self._leaving = list[CommitEvent]()
        self._id = 0
        self.is_over = False
        self.session = Session()

    def begin(self, engine: Engine, loop: Core, number: int, patience_ms: float | None) -> None:
        """Asks for its text. loop: the server's event loop."""
        self._engine, self._loop = engine, loop
        lag_ms = self._device.estimates.lag_ms if self._device is not None else None
        request = GenerateRequest(
            (number,) * self.text.num_prompt,
            PickOptions(SamplingParams(0.0)),
            len(self.text.tokens),
            hints=DraftHints(patience_ms=patience_ms, lag_ms=lag_ms),
        )
        self._id = engine.submit(request, self._on_event)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, EndEvent):
            if event.reason != "length":
                raise RuntimeError(f"a session ended with {event}; expected its full length")
            self.is_over = True
        elif isinstance(event, CommitEvent):
            if self._drafting is Drafting.BESIDE and self._device is not None:
                self._device.on_commit(event.base, event.tokens)
                self._is_drafting = True
            self._leaving.append(event)

    def send_commits(self) -> None:
        """Lets leave what was committed: the server has come to its messages."""
        for event in self._leaving:
            self._timeline.at(self._down.arrival(self._timeline.now), partial(self._arrived, event))
        self._leaving.clear()

    def _arrived(self, event: CommitEvent) -> None:
        if self._device is not None and self._drafting is Drafting.ANSWERS:
            done_at = self._core.done_at(self._timeline.now)
            self._timeline.at(done_at, lambda: self._answer(event))
            return
        self.session.commits.append((self._timeline.now, event.tokens))
        if self._device is not None and self._drafting is Drafting.ON:
            assert self._engine is not None
            stats = self._engine.stats()
            token_ms = None if stats.draft_token_ms is None else stats.draft_token_ms / self._stands_for
            self._device.estimates.on_times(stats.step_ms, token_ms)
            if self._device.on_commit(event.base, event.tokens):  # what it drafts now is of no use
                self._epoch += 1
                self._is_drafting = False
            self._flush()
            self._draft()

    def _answer(self, event: CommitEvent) -> None:
        """Takes a commit and answers it."""
        assert self._device is not None
        self.session.commits.append((self._timeline.now, event.tokens))
        self._device.on_commit(event.base, event.tokens)
        self._send(self._device.answer())

    def _draft(self) -> None:
        """Begins a call, unless one is running."""
        if not self._is_drafting and not self.is_over:
            self._is_drafting, epoch, began = True, self._epoch, self._timeline.now
            self._timeline.at(began + self._core.call_s, lambda: self._drafted(epoch, began))

    def _drafted(self, epoch: int, began: float) -> None:
        if epoch != self._epoch:
            return
        assert self._device is not None
        self._is_drafting = False
        if not self._device.expand():  # nothing is worth it before the next commit
            return self._flush()
        self._device.estimates.on_drafted(1e3 * self._core.call_s, 1)
        if self._unsent_since is None:
            self._unsent_since = began
        # As an agent, which waits for a few nodes more.
        wait_s = _LIMITS.calm_s if self._device.has_sent else _LIMITS.flush_s
        if self._timeline.now - self._unsent_since >= wait_s:
            self._flush()
        self._draft()

    def _flush(self) -> None:
        assert self._device is not None
        self._unsent_since = None
        self._send(self._device.message())

    def _send(self, body: bytes | None) -> None:
        if body is not None:
            began = self._timeline.now
            self._timeline.at(self._up.arrival(began), lambda: self._posted(body, began))

    def _posted(self, body: bytes, began: float) -> None:
        """At the verifier, whose answer tells the device the round trip."""
        assert self._device is not None
        self._timeline.at(self._loop.done_at(self._timeline.now), partial(self._post, body))
        estimates = self._device.estimates
        answered = self._down.arrival(self._timeline.now)
        self._timeline.at(answered, lambda: estimates.on_posted(1e3 * (answered - began)))

    def _post(self, body: bytes) -> None:
        assert self._engine is not None
        try:
            self._engine.draft_tree(self._id, decode_tree(body))
        except RequestError:
            pass  # the session is over: a device leaves such an answer alone

    def guess_beside(self) -> bool:
        """Drafts for the next step. Returns whether it did: once after each commit, until the text is over."""
        if self._device is None or not self._is_drafting or self.is_over:
            return False
        self._is_drafting = False
        if (body := self._device.answer()) is not None:
            self._post(body)
        return True


class Progress(NamedTuple):
    """Tokens and passes of all runs, at a time."""

    at: float
    tokens: int
    passes: int


class Verifier:
    """The engine, on a timeline. What it has learned stays from run to run, as a server's does.

    progress: after each step and wait. host_s: of the server around a step. beside_s: of all calls before a step of a
    draft beside the target, by the sequences that it drafts for. message_s: of the event loop, for a draft.
    """

    def __init__(
        self,
        step_s: StepTime,
        max_running: int,
        *,
        host_s: HostTime = lambda passes, step_s: 0.0,
        policy: Policy = Policy.AUTO,
        beside_s: Callable[[int], float] | None = None,
        message_s: float = 0.0,
    ) -> None:
        self.timeline = Timeline()
        self.progress = list[Progress]()
        self._host_s, self._beside_s, self._max_running = host_s, beside_s, max_running
        self._loop = Core(message_s)
        self._runtime = KnownTexts(self.timeline, step_s)
        config = EngineConfig(max_running=max_running, policy=policy, form=TreeForm.LINE)
        self._engine = Engine(self._runtime, config, clock=lambda: self.timeline.now)
        self._engine.calibrate()

    def knows_steps(self, most: int) -> None:
        """Tells the engine what steps take with all places taken and up to so many tokens each, as it finds in minutes.

        Its calibration has one sequence, and it forgets that only in hundreds of steps.
        """
        few, many = self._max_running, most * self._max_running
        for size in [size for size in SIZES if few <= size <= many] * _KNOWN_BY:
            self._engine._drafting.stepped(StepSize.of(size, 1), self._runtime.step_s(few, size), False)

    def run(self, peers: Sequence[Peer], most_tokens: float = math.inf) -> list[Session]:
        """All sessions at once, to their end, or until they have so many tokens in all."""
        self._runtime.texts = [peer.text for peer in peers]
        for number, peer in enumerate(peers):
            peer.begin(self._engine, self._loop, number, patience_ms=None if self._beside_s is None else 0.0)
        totals = self._engine.stats().totals
        num_before = totals.committed
        while totals.committed - num_before < most_tokens and not all(peer.is_over for peer in peers):
            if self._beside_s is not None and (num_drafting := sum(peer.guess_beside() for peer in peers)):
                self.timeline.run_until(self.timeline.now + self._beside_s(num_drafting))
            self._step(peers)
            totals = self._engine.stats().totals
            self.progress.append(Progress(self.timeline.now, totals.committed, totals.passes))
        if most_tokens == math.inf:
            self.timeline.drain()
        return [peer.session for peer in peers]

    def _step(self, peers: Sequence[Peer]) -> None:
        """A step and the server's part of it, then its messages; or what happens until one may begin.

        One interpreter runs the engine's thread and the event loop, so commits leave when the engine has done its part
        and waits for the model, or for drafts: too late for answers to the next step, unless it waits for them.
        """
        num_steps, num_passes, began = self._runtime.num_steps, self._engine.stats().totals.passes, self.timeline.now
        wait_s, now = self._engine.step(), self.timeline.now
        if self._runtime.num_steps > num_steps:
            num_passes = self._engine.stats().totals.passes - num_passes
            self.timeline.run_until(now + self._host_s(num_passes, now - began))
            for peer in peers:
                peer.send_commits()
            return
        until = min(self.timeline.next_at, math.inf if wait_s is None else now + wait_s)
        if until == math.inf:
            raise RuntimeError("the engine waits for nothing that will happen")
        self.timeline.run_until(until)
        # The event loop keeps the interpreter while drafts queue, until it has to give way.
        latest = self.timeline.now + _SWITCH_S
        while (begins := min(self._loop.free_at, latest)) > self.timeline.now:
            self.timeline.run_until(begins)
