"""Compares `bench.virtual_time` with what three benches measure, for `bench.scale --check`.

`bench.load` runs with steps that sleep. The simulation plays the same texts with the same recorded drafts, and takes
from the machine constants, none of which depends on the number of sessions or on the mode:

  late           ms that a step takes longer than it sleeps for, for a step and for a token of it
  around, merge  ms of the server between two steps, for a step and for a pass of it; and for a pass with drafts beyond
                 that. Its own clock (/metrics), cloud-only at the fewest and at the most sessions, stream at the most:
                 tokens/s of cloud-only at these two agree by construction
  answer         ms of the core that all devices of `bench.load` share, for a commit and its answer: this process's
                 processor time over the passes of a run of stream at the most sessions
  message        ms of a message: half of a draft's lag as /metrics has it at the fewest sessions, less the other parts
  handle         ms of the server's event loop for a draft: by how much the lag grows with each session that commits in
                 the same step, where that is more than the answer, else 0: stream, the fewest and the most sessions

Medians of as many runs as the bench has. Whether an answer comes before the next step begins or after it decides much,
so on a busy machine they mislead: run it on a quiet one. Its devices answer each commit once.

`bench.capacity` gives the times t_d and t_v, gamma, the texts and the recorded drafts. What is compared is what the
engine makes of them: how many tokens of each draft it verifies and accepts. The draft beside, replayed with its own
times, can differ in little else. `batched` is left out: the times of its steps are not measured apart.

`bench.never_slower --emulate` has one real agent that drafts on, by tree, at some round trips. The simulation plays the
ranks of these texts (`RankedDraft`) with exactly the times that are emulated, and with nothing for server, HTTP or
agent. Compared with nothing are jitter, many devices that draft on at once, the processor's time with drafts, and all
that is assumed of GPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import bench.capacity as capacity
import bench.load as load
import bench.pairs as pairs
import bench.round_trips as round_trips
from bench.capacity import Costs
from bench.load_devices import Device, Session
from bench.processes import metrics_of
from bench.report import parser
from bench.virtual_replica import RankedDraft
from bench.virtual_time import RIGHT, Core, Drafting, Link, Peer, Text, Verifier
from rich.console import Console

from outrider.cloud.engine import Policy
from outrider.edge.drafting.depth import CostModelDepth
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.drafting.worker import TreeLimits
from outrider.export.report.simulation.ranks import Ranks

WITHIN: Final = 0.1
"""By how much tokens/s and p95 may differ."""
P95: Final = load.QUANTILES.index(0.95)


@dataclass(frozen=True, slots=True)
class Pair:
    """One figure, measured and simulated."""

    name: str
    measured: float
    simulated: float

    @property
    def ratio(self) -> float:
        """Simulated over measured."""
        return self.simulated / self.measured

    @property
    def miss(self) -> str | None:
        """The bound that it misses, in words."""
        if abs(self.ratio - 1.0) <= WITHIN:
            return None
        return (
            f"{self.name}: simulated {self.simulated:.1f}, measured {self.measured:.1f}; expected within {WITHIN:.0%}"
        )


@dataclass(frozen=True, slots=True)
class Constants:
    """Of this machine, in ms, as the module says. late: of a step, and of each of its tokens. around: of a step, and of
    each of its passes.
    """

    late: tuple[float, float]
    around: tuple[float, float]
    merge: float
    answer: float
    message: float
    handle: float


COUNTED: Final = (
    "engine_steps_total",
    "engine_step_tokens_total",
    "engine_model_seconds_total",
    "engine_overhead_seconds_total",
    "draft_lag_seconds_count",
    "draft_lag_seconds_sum",
    "target_passes_total",
)


def served(subject: load.Subject, mode: str, count: int) -> list[float]:
    """What the server counts of one run, as `COUNTED`."""
    before = metrics_of(url := subject.urls[load.SERVER_OF[mode]])
    subject.run(mode, count)
    after = metrics_of(url)
    return [after[f"outrider_{name}"] - before[f"outrider_{name}"] for name in COUNTED]


def constants(subject: load.Subject, options: argparse.Namespace) -> Constants:
    """As the module says."""
    few, many = min(options.sessions), max(options.sessions)
    step_ms, extra_ms = options.emulate

    def once() -> tuple[float, ...]:
        tokens, late, around = list[float](), list[float](), list[float]()
        for count in (few, many):
            num_steps, num_tokens, model_s, around_s, *_ = served(subject, load.CLOUD_ONLY, count)
            tokens.append(num_tokens / num_steps)
            late.append(1e3 * model_s / num_steps - step_ms - extra_ms * (tokens[-1] - 1.0))
            around.append(1e3 * around_s / num_steps)
        line = line_through(tokens, around)
        *_, num_lags, lag_s, _ = served(subject, load.STREAM, few)
        lag = 1e3 * lag_s / num_lags
        began_s = time.process_time()
        num_steps, _, _, around_s, num_lags, lag_s, num_passes = served(subject, load.STREAM, many)
        answer = 1e3 * (time.process_time() - began_s) / num_passes
        together = num_passes / num_steps
        merge = (1e3 * around_s / num_steps - at(line, together)) / together
        # A lag begins at the commit, so the server's part of the step is in it.
        one, all_at_once = lag - at(line, few) - few * merge, 1e3 * lag_s / num_lags - at(line, together)
        found = messages(one, all_at_once - together * merge, together, answer)
        return *line_through(tokens, late), *line, merge, answer, *found

    found = [max(0.0, median(values)) for values in zip(*(once() for _ in range(options.runs)), strict=True)]
    return Constants((found[0], found[1]), (found[2], found[3]), *found[4:])


def messages(one: float, many: float, together: float, answer: float) -> tuple[float, float]:
    """ms of a message, and of the event loop for a draft, from how long drafts are under way: alone, and on average of
    so many that leave together.

    They pass two queues, the devices' core and the event loop: each one that is before a draft adds what the slower
    queue takes. An event loop that is the faster one does not show, and counts as 0.
    """
    queued = (many - one) / ((together - 1.0) / 2.0)
    handle = queued if queued > answer else 0.0
    return max(0.0, one - answer - handle) / 2.0, handle


def line_through(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Its value at 0, and its slope, from two points; neither below 0."""
    slope = max(0.0, (y[1] - y[0]) / (x[1] - x[0]))
    return max(0.0, y[0] - slope * x[0]), slope


def at(line: tuple[float, float], x: float) -> float:
    """The value of a line."""
    return line[0] + line[1] * x


class Simulated:
    """The verifiers of `bench.load`, simulated."""

    def __init__(self, subject: load.Subject, found: Constants, step_ms: float, extra_ms: float) -> None:
        self._subject, self._found, self._is_drafted = subject, found, False
        self._verifiers = {
            policy: Verifier(
                lambda sequences, tokens: (step_ms + extra_ms * (tokens - 1) + at(found.late, tokens)) / 1e3,
                len(subject.orders),
                host_s=self._host_s,
                policy=Policy(policy),
                message_s=found.handle / 1e3,
            )
            for policy in set(load.SERVER_OF.values())
        }

    def _host_s(self, passes: int, step_s: float) -> float:
        merging = self._found.merge * passes if self._is_drafted else 0.0
        return (at(self._found.around, passes) + merging) / 1e3

    def run(self, mode: str, count: int) -> load.Figures:
        """As `Subject.run`."""
        self._is_drafted = mode != load.CLOUD_ONLY
        subject, half_s = self._subject, self._found.message / 1e3
        verifier, core = self._verifiers[load.SERVER_OF[mode]], Core(self._found.answer / 1e3)
        peers: list[Peer] = []
        for index, order in enumerate(subject.orders[:count]):
            device = None
            if mode != load.CLOUD_ONLY:
                device = Device(subject.recorded[index], subject.num_calls, subject.width)
            text = Text(subject.texts[index], len(order.prompt))
            links = Link(half_s), Link(half_s)
            peers.append(Peer(verifier.timeline, text, device, Drafting.ANSWERS, core, links))
        return load.Figures.of(verifier.run(peers))

    def measure(self, cells: load.Cells) -> dict[tuple[int, str], load.Figures]:
        """Each mode at each number of sessions, after a run that warms up, in the order of `bench.load`."""
        return {
            (count, mode): self.run(mode, count)
            for is_warm in (False, True)
            for count, modes in cells.items()
            for mode in (modes if is_warm else reversed(list(modes)))
        }


def compare_load(given: Sequence[str], console: Console) -> list[Pair]:
    """Runs `bench.load` with these arguments, and the simulation."""
    options = load.options_of(given)
    step_ms, extra_ms = options.emulate
    with load.open_subject(options) as subject:
        cells, _ = load.measure(subject, options.sessions, options.modes, options.runs)
        found = constants(subject, options)
        compared: list[Pair] = []
        for (count, mode), played in Simulated(subject, found, step_ms, extra_ms).measure(cells).items():
            measured, name = cells[count][mode].middle, f"{count} sessions, {mode}"
            compared.append(Pair(f"{name}, tokens/s", measured.tokens_per_s, played.tokens_per_s))
            compared.append(Pair(f"{name}, p95 ms", measured.gaps_ms[P95], played.gaps_ms[P95]))
    console.print(f"measured: {found}", highlight=False)
    return compared


def compare_capacity(given: Sequence[str]) -> list[Pair]:
    """Runs `bench.capacity` with these arguments, and the simulation."""
    options = capacity.options_of(given)
    orders = load.make_orders(options, options.clients)
    with capacity.open_subject(options) as subject:
        found = capacity.measure(subject, orders, options.gamma, options.runs)
        costs = Costs(
            *(median(getattr(each, name) for each in found.costs) for name in ("draft_s", "verify_s", "gamma"))
        )
        alone = [turns(found, [number], options.gamma, costs.draft_s, costs.verify_s) for number in range(len(orders))]
        together = turns(found, range(len(orders)), options.gamma, 0.0, costs.verify_s)
    beside = rate_after_first([session for (session,) in alone])
    devices = load.Figures.of(together).tokens_per_s
    measured = {name: median(rates) for name, rates in found.rates.items()}
    return [
        Pair("capacity, beside, tokens/s", measured[capacity.BESIDE], beside),
        Pair("capacity, devices, tokens/s", measured[capacity.DEVICES], devices),
        Pair("capacity, devices over beside", found.over_beside(capacity.DEVICES), devices / beside),
    ]


def turns(found: capacity.Found, numbers: Sequence[int], gamma: int, draft_s: float, verify_s: float) -> list[Session]:
    """Texts that take turns, one a step. A client that always has its next block is one whose drafts cost no time."""
    verifier = Verifier(lambda sequences, tokens: verify_s, 1, beside_s=lambda count: gamma * draft_s)
    # One token of prompt: the first pass is not counted.
    return verifier.run(
        [
            Peer(
                verifier.timeline,
                Text(found.texts[number]),
                Device(found.recorded[number], gamma, 1),
                Drafting.BESIDE,
            )
            for number in numbers
        ]
    )


def compare_devices(emulate: Sequence[float], rtts_ms: Sequence[float], num_runs: int) -> list[Pair]:
    """Runs tree and cloud-only of `bench.never_slower` with these times of step, further token and draft in ms."""
    options = parser(None, pairs.PAIR_OPTIONS).parse_args(["--emulate", *map(str, emulate)])
    with pairs.open_pair(options) as subject:
        requests = pairs.make_requests(options)
        found = asyncio.run(round_trips.measure(subject, rtts_ms, requests, num_runs, left_out=round_trips.OPTIONAL))
    assert found.ranks is not None, "ranks of a draft that is also beside the target"
    return [
        Pair(
            f"drafting on, round trip {place.rtt_ms:g} ms, tokens/s",
            median(place.cells[round_trips.TREE].rates),
            drafting_on(found.ranks, emulate, place.rtt_ms, num_runs),
        )
        for place in found.places
    ]


def drafting_on(ranks: Ranks, emulate: Sequence[float], rtt_ms: float, num_runs: int) -> float:
    """Tokens/s of one device and its texts, one after the other; the first run teaches, as the bench's warm-up does."""
    step_s, extra_s, draft_s = (each / 1e3 for each in emulate)
    verifier, estimates = Verifier(lambda sequences, tokens: step_s + extra_s * (tokens - 1), 1), Estimates()
    depth, limits = CostModelDepth(estimates), TreeLimits()
    sessions = list[Session]()
    for _ in range(1 + num_runs):
        first = 0
        for text in ranks.texts:
            device = Device(RankedDraft(ranks, limits.width, first), 1, limits.width, depth, estimates)
            links = Link(rtt_ms / 2e3), Link(rtt_ms / 2e3)
            peer = Peer(verifier.timeline, Text([RIGHT] * len(text)), device, core=Core(draft_s), links=links)
            sessions += verifier.run([peer])
            first += len(text)
    return rate_after_first(sessions[len(ranks.texts) :])


def rate_after_first(sessions: Sequence[Session]) -> float:
    """Tokens/s of texts one after the other, from the first commit of each."""
    return round_trips.rate_of([[at for at, tokens in each.commits for _ in tokens] for each in sessions])
