"""Runs the modes by round trip and keeps their results: the measuring part of `bench.never_slower`.

A run is every mode back to back on the same prompts with the same seeds, at every round trip in turn, and the draft
beside the target.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from itertools import chain
from statistics import fmean, median
from typing import Final, TypeVar

from bench.beside import Stop, Written
from bench.processes import Remote, engine_counts
from tests.always_wrong import AlwaysWrongDrafter

from outrider.edge.drafting.depth import CostModelDepth
from outrider.edge.drafting.drafter import Drafter
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.drafting.worker import TreeLimits
from outrider.edge.lab.cores import CorePlan
from outrider.edge.lab.laboratory import CLOUD_ONLY, STOP_AND_WAIT, STREAM, connected, three_modes
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.assemble import Agent
from outrider.edge.modes.stream import AgentOptions, StreamAgent
from outrider.edge.results import GenerationRequest, GenerationResult
from outrider.export.check.acceptance import Continuation
from outrider.export.report.simulation.ranks import Ranks
from outrider.export.report.simulation.world import Times

_R = TypeVar("_R")
TIMES: Final = ("model_seconds", "overhead_seconds", "steps", "proposed")
"""Of the engine: seconds in the model, and in the rest of its steps; steps; drafted tokens that were verified."""
PATH: Final = "path"
TREE: Final = "tree"
WRONG: Final = "tree_always_wrong"
BESIDE: Final = "beside"
OPTIONAL: Final = (STOP_AND_WAIT, BESIDE)
"""What a measurement may leave out."""

WRONG_WIDTH: Final = 4
DEPTHS: Final = (1, 2, 3, 4, 5, 6, 8, 10, 12)
FLOORS: Final = (0.05, 0.1, 0.2, 0.3, 0.4, 0.55)
"""Among these the best stop of the draft beside the target is looked for."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The measured pair: a verifier, the draft, and where they run. beside: both in one process."""

    url: str
    cores: CorePlan
    drafter: Drafter
    vocab_size: int
    beside: Remote | None = None


@dataclass(slots=True)
class Cell:
    """One mode at one round trip. times: what the engine counted, by the names in `TIMES`. rates: tokens/s per run;
    ratios: over cloud-only's of the same run.
    """

    texts: list[GenerationResult] = field(default_factory=list)
    times: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    rates: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    num_different: int = 0

    @property
    def ratio(self) -> float:
        """Median of the runs."""
        return median(self.ratios)

    @property
    def ms_per_token(self) -> float:
        """Time per token after the first commit, over all texts."""
        spans = [span_of(text.arrival_s) for text in self.texts]
        return 1e3 * sum(took_s for took_s, _ in spans) / sum(count for _, count in spans)

    @property
    def acceptance(self) -> float:
        """Accepted / tested drafted tokens."""
        return sum(text.num_accepted for text in self.texts) / max(1, sum(text.num_tested for text in self.texts))

    @property
    def traffic(self) -> dict[str, float]:
        """What the mode sent and drafted, per token. bytes: of bodies, prompt included. drafted: positions at which the
        draft guessed. sent, verified: guesses.
        """
        texts, num_tokens = self.texts, sum(len(text.tokens) for text in self.texts)
        totals = {
            "bytes_up": sum(text.wire.body_up for text in texts),
            "bytes_down": sum(text.wire.body_down for text in texts),
            "posts": sum(text.num_posts for text in texts),
            "drafted": sum(text.num_drafted for text in texts),
            "sent": sum(text.num_sent for text in texts),
            "verified": self.times["proposed"],
            "passes": sum(text.num_passes for text in texts),
        }
        return {name: total / num_tokens for name, total in totals.items()}


@dataclass(slots=True)
class Yardstick:
    """The draft beside the target. best: the stops that were best on these texts: a fixed depth, and by gaps.

    rates: tokens/s of each, per run; ratios: over the mean cloud-only of the same run.
    """

    beside: Remote
    best: dict[str, Stop] = field(default_factory=dict)
    searched: dict[str, float] = field(default_factory=dict)  # tokens/s by stop
    rates: dict[str, list[float]] = field(default_factory=dict)
    ratios: dict[str, list[float]] = field(default_factory=dict)
    num_different: int = 0

    def search(self, requests: Sequence[GenerationRequest]) -> None:
        """Looks for the best fixed depth and the best floor, with all the texts."""
        self._rate(requests, Stop(depth=1))  # warms up
        for name, stops in (
            ("depth", [Stop(depth=depth) for depth in DEPTHS]),
            ("gaps", [Stop(floor=floor) for floor in FLOORS]),
        ):
            found = {stop: self._rate(requests, stop)[0] for stop in stops}
            self.searched |= {str(stop): rate for stop, rate in found.items()}
            self.best[name] = max(found, key=lambda stop: found[stop])

    def run(self, requests: Sequence[GenerationRequest]) -> list[list[Written]]:
        """One run of each stop; returns the texts."""
        written = []
        for name, stop in self.best.items():
            rate, texts = self._rate(requests, stop)
            self.rates.setdefault(name, []).append(rate)
            written.append(texts)
        return written

    def compare(self, cloud_only: float) -> None:
        """Takes cloud-only's tokens/s of the run that `run` belongs to."""
        for name, rates in self.rates.items():
            self.ratios.setdefault(name, []).append(rates[-1] / cloud_only)

    def _rate(self, requests: Sequence[GenerationRequest], stop: Stop) -> tuple[float, list[Written]]:
        texts = [self.beside.generate(each.prompt, each.params, each.max_tokens, stop) for each in requests]
        return rate_of([text.arrival_s for text in texts]), texts


def span_of(arrival_s: Sequence[float]) -> tuple[float, int]:
    """Seconds from the first commit to the last, and the tokens in that time."""
    first, last = arrival_s[0], arrival_s[-1]
    return last - first, sum(at > first for at in arrival_s)


def rate_of(texts: Sequence[Sequence[float]]) -> float:
    """Tokens/s after the first commit, over texts given by their tokens' arrivals."""
    spans = [span_of(arrival_s) for arrival_s in texts]
    return sum(count for _, count in spans) / sum(took_s for took_s, _ in spans)


@dataclass(slots=True)
class Place:
    """One round trip: its modes and their results. estimates: of the agents that draft, by mode."""

    rtt_ms: float
    modes: dict[str, Agent]
    estimates: dict[str, Estimates]
    cells: dict[str, Cell]

    def over(self, name: str, base: str) -> float:
        """Median of the runs' ratios of two modes' tokens/s."""
        return median(a / b for a, b in zip(self.cells[name].rates, self.cells[base].rates, strict=True))

    def over_beside(self, name: str, yardstick: Yardstick) -> dict[str, float]:
        """The same over each stop of the draft beside the target."""
        mine = self.cells[name].rates
        return {
            stop: median(a / b for a, b in zip(mine, rates, strict=True)) for stop, rates in yardstick.rates.items()
        }

    def times(self, extra_ms: float, name: str = TREE) -> Times:
        """The measured times, for the simulation. The step is cloud-only's time per token, overheads included.

        extra_ms: see `measured_extra_ms`. The draft's times are the agent's estimates.
        """
        estimates, most = self.estimates[name], self.modes[name].drafter.max_branches  # type: ignore[attr-defined]
        one_ms, most_ms = estimates.calls.ms(1), estimates.calls.ms(most)
        return Times(
            step_ms=self.cells[CLOUD_ONLY].ms_per_token,
            extra_ms=extra_ms,
            draft_ms=one_ms,
            nodes_per_call=most,
            call_extra=max(0.0, (most_ms / one_ms - 1.0) / (most - 1)) if most > 1 else 0.0,
        )


def measured_extra_ms(places: Sequence[Place]) -> float:
    """The time that a drafted token adds to a step, in ms; a ratio of sums over all round trips, path and tree.

    Cloud-only gives the time and steps of the prompts' prefill (all but one step per token), and the time of a plain
    step; the rest of a mode's step time is that of its drafted tokens. Measured under load: the server's own estimate,
    made when it starts, may differ.
    """
    extra_s = num_drafted = 0.0
    for place in places:
        plain = place.cells[CLOUD_ONLY]
        plain_s = plain.ms_per_token / 1e3 - plain.times["overhead_seconds"] / plain.times["steps"]
        num_plain = sum(len(text.tokens) - 1 for text in plain.texts)
        prefill_s = plain.times["model_seconds"] - num_plain * plain_s
        for cell in (place.cells[PATH], place.cells[TREE]):
            num_steps = cell.times["steps"] - (plain.times["steps"] - num_plain)
            extra_s += cell.times["model_seconds"] - prefill_s - num_steps * plain_s
            num_drafted += cell.times["proposed"]
    return max(0.0, 1e3 * extra_s / num_drafted) if num_drafted else 0.0


@dataclass(slots=True)
class Measured:
    """All round trips, the yardstick where it was measured, and the ranks of the texts' tokens among the guesses."""

    places: list[Place]
    yardstick: Yardstick | None
    ranks: Ranks | None


def stream_agent(
    endpoints: Endpoints, drafter: Drafter, options: AgentOptions | None = None
) -> tuple[StreamAgent, Estimates]:
    """Stream mode with estimates of its own."""
    estimates = Estimates()
    return StreamAgent(endpoints, drafter, CostModelDepth(estimates), estimates, options), estimates


async def open_place(subject: Subject, rtt_ms: float, stack: AsyncExitStack, left_out: Collection[str]) -> Place:
    """The modes at one round trip."""
    endpoints = await stack.enter_async_context(connected(subject.url, subject.cores, rtt_ms, is_far=True))
    modes = three_modes(endpoints, subject.drafter)
    del modes[STREAM]
    wrong = AlwaysWrongDrafter(subject.drafter, subject.vocab_size)
    streams: dict[str, tuple[StreamAgent, Estimates]] = {
        PATH: stream_agent(endpoints, subject.drafter, AgentOptions(tree=TreeLimits(width=1))),
        TREE: stream_agent(endpoints, subject.drafter),
        WRONG: stream_agent(endpoints, wrong, AgentOptions(tree=TreeLimits(width=WRONG_WIDTH))),
    }
    modes |= {name: agent for name, (agent, _) in streams.items()}
    modes = {name: agent for name, agent in modes.items() if name not in left_out}
    estimates = {name: found for name, (_, found) in streams.items()}
    return Place(rtt_ms, modes, estimates, {name: Cell() for name in modes})


async def measure(
    subject: Subject,
    rtts_ms: Sequence[float],
    requests: Sequence[GenerationRequest],
    num_runs: int,
    left_out: Collection[str] = (),
) -> Measured:
    """The same texts in every run, all modes interleaved; a run visits every round trip.

    So changes on the machine affect all modes and round trips alike, and runs differ in nothing else. left_out: of
    OPTIONAL.
    """
    async with AsyncExitStack() as stack:
        places = [await open_place(subject, rtt_ms, stack, left_out) for rtt_ms in rtts_ms]
        for place in places:  # warms up connections, and the estimates that agents keep between texts
            for mode in place.modes.values():
                await mode.generate(replace(requests[-1], max_tokens=min(32, requests[-1].max_tokens)))
        yardstick = Yardstick(subject.beside) if subject.beside is not None and BESIDE not in left_out else None
        if yardstick is not None:
            await asyncio.to_thread(yardstick.search, requests)
        for index in range(num_runs):
            written = await asyncio.to_thread(yardstick.run, requests) if yardstick is not None else []
            plain = []
            for place in places:
                plain = await run_once(place, requests, subject, index)
            if yardstick is not None:
                yardstick.compare(fmean(place.cells[CLOUD_ONLY].rates[-1] for place in places))
                pairs = chain.from_iterable(zip(texts, plain, strict=True) for texts in written)
                yardstick.num_different += sum(a.tokens != b.tokens for a, b in pairs)
        ranks = await asyncio.to_thread(_ranks, subject.beside, requests, places[0]) if subject.beside else None
    return Measured(places, yardstick, ranks)


def _ranks(beside: Remote, requests: Sequence[GenerationRequest], place: Place) -> Ranks:
    """Ranks along the texts that were measured."""
    texts = place.cells[CLOUD_ONLY].texts[: len(requests)]
    found = beside.ranks([Continuation(r.prompt, t.tokens, r.params) for r, t in zip(requests, texts, strict=True)])
    return Ranks(tuple(map(tuple, found)))


async def run_once(
    place: Place, requests: Sequence[GenerationRequest], subject: Subject, index: int
) -> list[GenerationResult]:
    """One run at one round trip; returns cloud-only's texts."""
    texts: dict[str, list[GenerationResult]] = {name: [] for name in place.modes}
    for name, request in in_turn(list(place.modes), requests, index):
        before = engine_counts(subject.url, *TIMES)
        texts[name].append(await place.modes[name].generate(request))
        for key, value in engine_counts(subject.url, *TIMES).items():
            place.cells[name].times[key] += value - before[key]
    for name, found in texts.items():
        cell = place.cells[name]
        cell.texts += found
        cell.num_different += sum(a.tokens != b.tokens for a, b in zip(found, texts[CLOUD_ONLY], strict=True))
        cell.rates.append(rate_of([text.arrival_s for text in found]))
    for name in texts:
        cell = place.cells[name]
        cell.ratios.append(cell.rates[-1] / place.cells[CLOUD_ONLY].rates[-1])
    return texts[CLOUD_ONLY]


def in_turn(names: Sequence[str], requests: Sequence[_R], index: int) -> Iterator[tuple[str, _R]]:
    """Every mode on each request, in another order each time, so that no mode always follows the same one."""
    for shift, request in enumerate(requests, start=index):
        for i in range(len(names)):
            yield names[(i + shift) % len(names)], request
