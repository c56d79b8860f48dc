"""Compares `bench.virtual_time` with what `bench.load` and `bench.capacity` measure, for `bench.scale --check`.

`bench.load` runs with steps that sleep. The simulation plays the same texts with the same recorded drafts, and takes
from the machine four constants, none of which depends on the number of sessions or on the mode:

  step, token   ms that the server adds to a step, and to each of its tokens: its own clock (/metrics), over what the
                emulated steps should take, cloud-only at the fewest and at the most sessions: two equations
  answer        ms in which a device takes a commit and answers it: the same code, timed here on the recorded texts. All
                devices of `bench.load` share one core
  message       ms of a message: half of a draft's lag as /metrics has it at the fewest sessions, less the answer

`bench.capacity` gives t_d, t_v and gamma; nothing is added to these. Its `batched` is left out: the times of its steps
are not measured apart.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

import bench.capacity as capacity
import bench.load as load
import httpx
from bench.attacks.exchange import values_of
from bench.capacity import Costs
from bench.load_devices import Device, Session
from bench.virtual_time import Core, Drafting, Link, Peer, Text, Timeline, play
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
    """Of this machine, in ms."""

    step: float
    token: float
    answer: float
    message: float


@dataclass(frozen=True, slots=True)
class Served:
    """What a server counted: steps, their tokens, their seconds; lags of drafts, and their seconds."""

    steps: float
    tokens: float
    seconds: float
    lags: float
    lag_s: float

    @classmethod
    def of(cls, url: str) -> Served:
        """So far."""
        text = httpx.get(f"{url}/metrics").text

        def total(name: str) -> float:
            return sum(values_of(text, f"outrider_{name}"))

        seconds = total("engine_model_seconds_total") + total("engine_overhead_seconds_total")
        lags = total("draft_lag_seconds_count"), total("draft_lag_seconds_sum")
        return cls(total("engine_steps_total"), total("engine_step_tokens_total"), seconds, *lags)


def served(subject: load.Subject, mode: str, count: int) -> Served:
    """What the server counts of one run."""
    url = subject.urls[load.SERVER_OF[mode]]
    before = Served.of(url)
    subject.run(mode, count)
    after = Served.of(url)
    return Served(
        after.steps - before.steps,
        after.tokens - before.tokens,
        after.seconds - before.seconds,
        after.lags - before.lags,
        after.lag_s - before.lag_s,
    )


def constants(subject: load.Subject, counts: Sequence[int], step_ms: float, extra_ms: float) -> Constants:
    """As the module says."""
    few, many = (served(subject, load.CLOUD_ONLY, count) for count in (min(counts), max(counts)))

    def added_ms(run: Served) -> float:
        return 1e3 * run.seconds / run.steps - step_ms - extra_ms * (run.tokens / run.steps - 1.0)

    few_tokens, many_tokens = few.tokens / few.steps, many.tokens / many.steps
    token = (added_ms(many) - added_ms(few)) / (many_tokens - few_tokens)
    answer = answer_ms(subject)
    drafted = served(subject, load.STREAM, min(counts))
    message = max(0.0, 1e3 * drafted.lag_s / drafted.lags - answer) / 2.0
    return Constants(added_ms(few) - token * few_tokens, token, answer, message)


def answer_ms(subject: load.Subject) -> float:
    """A commit of each token of each text, and its answer."""
    took_s: list[float] = []
    for index, text in ((index, text) for (_, index), text in subject.texts.items()):
        device = Device(subject.recorded[False, index], subject.num_calls, subject.width)
        for base, token in enumerate(text):
            began = time.perf_counter()
            device.on_commit(base, [token])
            device.answer()
            took_s.append(time.perf_counter() - began)
    return 1e3 * fmean(took_s)


def simulated(
    subject: load.Subject, mode: str, count: int, found: Constants, step_ms: float, extra_ms: float
) -> list[Session]:
    """One run of `bench.load`."""
    timeline, core = Timeline(), Core()
    half_s = found.message / 1e3
    peers: list[Peer] = []
    for index, order in enumerate(subject.orders[:count]):
        device = None
        if mode != load.CLOUD_ONLY:
            device = Device(subject.recorded[False, index], subject.num_calls, subject.width)
        text = Text(subject.texts[False, index], len(order.prompt))
        down, up = Link(half_s), Link(half_s + subject.rtt_ms / 1e3)
        call_s = found.answer / 1e3
        peers.append(Peer(timeline, text, device, Drafting.ANSWERS, call_s=call_s, core=core, down=down, up=up))
    return play(
        peers,
        timeline,
        lambda sequences, tokens: (step_ms + extra_ms * (tokens - 1)) / 1e3,
        host_s=lambda sequences, tokens: (found.step + found.token * tokens) / 1e3,
        policy=Policy(load.SERVER_OF[mode]),
        max_running=len(subject.orders),
    )


def compare_load(given: Sequence[str], console: Console) -> list[Pair]:
    """Runs `bench.load` with these arguments, and the simulation."""
    options = load.options_of(given)
    step_ms, extra_ms = options.emulate
    with load.open_subject(options) as subject, Progress(console=console, transient=True) as progress:
        cells, _ = load.measure(subject, options.sessions, options.modes, options.runs, progress)
        found = constants(subject, options.sessions, step_ms, extra_ms)
        pairs: list[Pair] = []
        for count, modes in cells.items():
            for mode, cell in modes.items():
                sessions = simulated(subject, mode, count, found, step_ms, extra_ms)
                measured, played = cell.middle, load.Figures.of(sessions)
                name = f"{count} sessions, {mode}"
                pairs.append(Pair(f"{name}, tokens/s", measured.tokens_per_s, played.tokens_per_s))
                pairs.append(Pair(f"{name}, p95 ms", measured.gaps_ms[P95], played.gaps_ms[P95]))
    console.print(
        f"measured, ms: {found.step:.2f} a step, {found.token:.3f} a token, {found.answer:.2f} an answer, "
        f"{found.message:.2f} a message",
        highlight=False,
    )
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
    timeline = Timeline()
    # One token of prompt: the first pass is not counted.
    peers = [
        Peer(timeline, Text(found.texts[number]), Device(found.recorded[number], gamma, 1), Drafting.BESIDE)
        for number in numbers
    ]
    return play(
        peers, timeline, lambda sequences, tokens: verify_s, max_running=1, beside_s=lambda count: gamma * draft_s
    )
