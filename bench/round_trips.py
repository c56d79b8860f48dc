"""Runs the modes by round trip and keeps their results: the measuring part of `bench.never_slower`.

A run is every mode back to back on the same prompts with the same seeds, at every round trip in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from statistics import median

from bench.server_clock import ServerClock, ServerTimes

from outrider.edge.drafting.depth import CostModelDepth
from outrider.edge.drafting.drafter import Drafter
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.lab.always_wrong import AlwaysWrongDrafter
from outrider.edge.lab.cores import CorePlan
from outrider.edge.lab.laboratory import CLOUD_ONLY, STREAM, connected, three_modes
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.assemble import Agent
from outrider.edge.modes.stream import StreamAgent
from outrider.edge.results import GenerationRequest, GenerationResult
from outrider.models.prediction import Setting

WRONG = "stream_always_wrong"


@dataclass(frozen=True, slots=True)
class Subject:
    """The measured pair: a verifier, the draft, and where they run."""

    url: str
    cores: CorePlan
    drafter: Drafter
    vocab_size: int


@dataclass(slots=True)
class Cell:
    """One mode at one round trip. ratios: tokens/s over cloud-only's, per run."""

    texts: list[GenerationResult] = field(default_factory=list)
    times: ServerTimes = field(default_factory=ServerTimes)
    ratios: list[float] = field(default_factory=list)
    num_different: int = 0

    @property
    def ratio(self) -> float:
        """Median of the runs."""
        return median(self.ratios)

    @property
    def ms_per_token(self) -> float:
        """Time per token after the first commit, over all texts."""
        return 1e3 * sum(_spans(text)[0] for text in self.texts) / sum(_spans(text)[1] for text in self.texts)

    @property
    def acceptance(self) -> float:
        """Accepted / tested drafted tokens."""
        return sum(text.num_accepted for text in self.texts) / max(1, sum(text.num_tested for text in self.texts))

    @property
    def passes_per_token(self) -> float:
        """Target passes per token."""
        return sum(text.num_passes for text in self.texts) / sum(len(text.tokens) for text in self.texts)


def _spans(text: GenerationResult) -> tuple[float, int]:
    """Seconds from the first commit to the last, and the tokens in that time."""
    first, last = text.arrival_s[0], text.arrival_s[-1]
    return last - first, sum(at > first for at in text.arrival_s)


@dataclass(slots=True)
class Place:
    """One round trip: its modes and their results. estimates: of the stream agent."""

    rtt_ms: float
    modes: dict[str, Agent]
    estimates: Estimates
    cells: dict[str, Cell]

    def setting(self, extra_ms: float, acceptance: str = STREAM) -> Setting:
        """The measured values, for the simulation. The step is cloud-only's time per token, overheads included.

        acceptance: of the mode named; see `bench.never_slower`. extra_ms: see `measured_extra_ms`.
        """
        return Setting(
            alpha=self.cells[acceptance].acceptance,
            draft_ms=self.estimates.draft_ms,
            step_ms=self.cells[CLOUD_ONLY].ms_per_token,
            extra_ms=extra_ms,
            rtt_ms=self.rtt_ms,
        )


def measured_extra_ms(places: Sequence[Place]) -> float:
    """The time that a drafted token adds to a step of stream mode, in ms; a ratio of sums over all round trips.

    Cloud-only gives the time and steps of the prompts' prefill (all but one step per token), and the time of a plain
    step; the rest of stream mode's step time is that of its drafted tokens. Measured under load: the server's own
    estimate, made when it starts, may differ.
    """
    extra_s = num_drafted = 0.0
    for place in places:
        plain, stream = place.cells[CLOUD_ONLY], place.cells[STREAM]
        plain_s = plain.ms_per_token / 1e3 - plain.times.overhead_seconds / plain.times.steps
        num_plain = sum(len(text.tokens) - 1 for text in plain.texts)
        prefill_s = plain.times.model_seconds - num_plain * plain_s
        num_steps = stream.times.steps - (plain.times.steps - num_plain)
        extra_s += stream.times.model_seconds - prefill_s - num_steps * plain_s
        num_drafted += stream.times.proposed
    return max(0.0, 1e3 * extra_s / num_drafted) if num_drafted else 0.0


async def open_place(subject: Subject, rtt_ms: float, endpoints: Endpoints) -> Place:
    """The three modes, and stream mode again with a draft that is always rejected."""
    modes = await three_modes(endpoints, subject.drafter)
    estimates, wrong = Estimates(), Estimates()
    modes[STREAM] = StreamAgent(endpoints, subject.drafter, CostModelDepth(estimates), estimates)
    drafter = AlwaysWrongDrafter(subject.drafter, subject.vocab_size)
    modes[WRONG] = StreamAgent(endpoints, drafter, CostModelDepth(wrong), wrong)
    return Place(rtt_ms, modes, estimates, {name: Cell() for name in modes})


async def measure(
    subject: Subject,
    rtts_ms: Sequence[float],
    requests: Sequence[GenerationRequest],
    num_runs: int,
    on_run: Callable[[], None] = lambda: None,
) -> list[Place]:
    """The same texts in every run, all modes interleaved; a run visits every round trip.

    So changes on the machine affect all modes and round trips alike, and runs differ in nothing else.
    """
    async with AsyncExitStack() as stack:
        clock = stack.enter_context(ServerClock(subject.url))
        places = []
        for rtt_ms in rtts_ms:
            endpoints = await stack.enter_async_context(connected(subject.url, subject.cores, rtt_ms))
            places.append(await open_place(subject, rtt_ms, endpoints))
        for place in places:  # warms up connections, and the estimates that agents keep between texts
            for mode in place.modes.values():
                await mode.generate(replace(requests[-1], max_tokens=32))
        for index in range(num_runs):
            for place in places:
                await _run(place, requests, clock, index)
                on_run()
    return places


async def _run(place: Place, requests: Sequence[GenerationRequest], clock: ServerClock, index: int) -> None:
    rates: dict[str, float] = {}
    texts: dict[str, list[GenerationResult]] = {name: [] for name in place.modes}
    names = list(place.modes)
    for shift, request in enumerate(requests, start=index):
        # Another order each time, so that no mode always follows the same one.
        for i in range(len(names)):
            name = names[(i + shift) % len(names)]
            before = clock.read()
            texts[name].append(await place.modes[name].generate(request))
            place.cells[name].times += clock.read() - before
    for name, found in texts.items():
        cell = place.cells[name]
        cell.texts += found
        cell.num_different += sum(a.tokens != b.tokens for a, b in zip(found, texts[CLOUD_ONLY], strict=True))
        rates[name] = sum(_spans(text)[1] for text in found) / sum(_spans(text)[0] for text in found)
        cell.ratios.append(rates[name] / rates[CLOUD_ONLY])
