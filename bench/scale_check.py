"""Compares `bench.virtual_time` with what `bench.load` and `bench.capacity` measure, for `bench.scale --check`.

`bench.load` runs with steps that sleep. The simulation plays the same texts with the same recorded drafts, and takes
from the machine constants, none of which depends on the number of sessions or on the mode:

  late, around  ms that a step takes longer than it sleeps for, and ms of the server between two steps, each for a step
                and for a token of it: its own clock (/metrics), cloud-only at the fewest and at the most sessions: two
                equations each
  answer        ms of the core that all devices of `bench.load` share, for a commit and its answer: this process's
                processor time over the commits of a run of stream at the most sessions
  message       ms of a message: half of a draft's lag as /metrics has it at the fewest sessions, less the answer

Medians of as many runs as the bench has. Whether an answer comes before the next step begins or after it decides much,
so on a busy machine they mislead: run it on a quiet one.

`bench.capacity` gives t_d, t_v and gamma; nothing is added to these. Its `batched` is left out: the times of its steps
are not measured apart.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import bench.capacity as capacity
import bench.load as load
import httpx
from bench.attacks.exchange import values_of
from bench.capacity import Costs
from bench.load_devices import Device, Session
from bench.virtual_time import Core, Drafting, Link, Peer, Text, Verifier
from rich.console import Console
from rich.progress import Progress

from outrider.cloud.engine import Policy

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
    """Of this machine, in ms; late and around: of a step, and of each of its tokens."""

    late: tuple[float, float]
    around: tuple[float, float]
    answer: float
    message: float


COUNTED: Final = (
    "engine_steps_total",
    "engine_step_tokens_total",
    "engine_model_seconds_total",
    "engine_overhead_seconds_total",
    "draft_lag_seconds_count",
    "draft_lag_seconds_sum",
)


def served(subject: load.Subject, mode: str, count: int) -> list[float]:
    """What the server counts of one run, as `COUNTED`."""
    url = f"{subject.urls[load.SERVER_OF[mode]]}/metrics"
    before = httpx.get(url).text
    subject.run(mode, count)
    after = httpx.get(url).text
    return [sum(values_of(after, f"outrider_{name}")) - sum(values_of(before, f"outrider_{name}")) for name in COUNTED]


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
        *_, num_lags, lag_s = served(subject, load.STREAM, few)
        began_s = time.process_time()
        num_commits = sum(len(session.commits) for session in subject.run(load.STREAM, many))
        answer = 1e3 * (time.process_time() - began_s) / num_commits
        message = max(0.0, 1e3 * lag_s / num_lags - answer) / 2.0
        return *line_through(tokens, late), *line_through(tokens, around), answer, message

    found = [median(values) for values in zip(*(once() for _ in range(options.runs)), strict=True)]
    return Constants((found[0], found[1]), (found[2], found[3]), found[4], found[5])


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
        self._subject, self._found = subject, found
        self._verifiers = {
            policy: Verifier(
                lambda sequences, tokens: (step_ms + extra_ms * (tokens - 1) + at(found.late, tokens)) / 1e3,
                len(subject.orders),
                host_s=lambda passes, tokens: at(found.around, tokens) / 1e3,
                policy=Policy(policy),
            )
            for policy in set(load.SERVER_OF.values())
        }

    def run(self, mode: str, count: int) -> load.Figures:
        """As `Subject.run`."""
        subject, half_s = self._subject, self._found.message / 1e3
        verifier, core = self._verifiers[load.SERVER_OF[mode]], Core()
        peers: list[Peer] = []
        for index, order in enumerate(subject.orders[:count]):
            device = None
            if mode != load.CLOUD_ONLY:
                device = Device(subject.recorded[False, index], subject.num_calls, subject.width)
            text = Text(subject.texts[False, index], len(order.prompt))
            links = Link(half_s), Link(half_s + subject.rtt_ms / 1e3)
            peers.append(
                Peer(verifier.timeline, text, device, Drafting.ANSWERS, self._found.answer / 1e3, core, *links)
            )
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
    with load.open_subject(options) as subject, Progress(console=console, transient=True) as progress:
        cells, _ = load.measure(subject, options.sessions, options.modes, options.runs, progress)
        found = constants(subject, options)
        pairs: list[Pair] = []
        for (count, mode), played in Simulated(subject, found, step_ms, extra_ms).measure(cells).items():
            measured, name = cells[count][mode].middle, f"{count} sessions, {mode}"
            pairs.append(Pair(f"{name}, tokens/s", measured.tokens_per_s, played.tokens_per_s))
            pairs.append(Pair(f"{name}, p95 ms", measured.gaps_ms[P95], played.gaps_ms[P95]))
    console.print(f"measured: {found}", highlight=False)
    return pairs


def compare_capacity(given: Sequence[str]) -> list[Pair]:
    """Runs `bench.capacity` with these arguments, and the simulation."""
    options = capacity.options_of(given)
    orders = load.make_orders(options.clients, options.max_tokens, options.temperature)
    with capacity.open_subject(options) as subject:
        found = capacity.measure(subject, orders, options.gamma, options.runs)
        costs = Costs(
            *(median(getattr(each, name) for each in found.costs) for name in ("draft_s", "verify_s", "gamma"))
        )
        alone = [turns(found, [number], options.gamma, costs.draft_s, costs.verify_s) for number in range(len(orders))]
        together = turns(found, range(len(orders)), options.gamma, 0.0, costs.verify_s)
    spans = [(session.commits[0][0], session.commits[-1][0], len(session.text)) for (session,) in alone]
    firsts = sum(len(session.commits[0][1]) for (session,) in alone)
    beside = (sum(count for *_, count in spans) - firsts) / sum(end - begin for begin, end, _ in spans)
    devices = capacity.saturated_rate(together)
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
