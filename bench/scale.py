"""Computes on paper what drafts are worth by the number of devices, and checks the simulation behind it.

    python -m bench.scale                     # the tables below, in under 3 minutes of one core; deterministic
    python -m bench.scale --check [--runs 3]  # against bench.load --emulate and bench.capacity; some 15 minutes

One simulation (`bench.virtual_time`) plays devices, links and verifiers; targets and GPUs are assumptions
(`bench.gpu_on_paper`, and the constants here). Every device writes a text all the time. Three ways: no drafts; a draft
beside the target, on its GPUs; the same draft on the devices, by the default policy. A replica is simulated with at
most `MOST_SIMULATED` sessions, each of which stands for as many of the replica's as needed; more devices are more
replicas. Prompts are read elsewhere; only decoding counts.

  clients   most sessions of a replica, as its memory has places for, of which half have --client-rate tokens/s
  GPUs      for all devices, evenly loaded; $ per million tokens at what these devices then receive
  the map   by round trip and draft time over step time: which way has the most tokens/s

`--check` compares tokens/s and p95 at 1, 4, 16 and 64 sessions, and both ways of `bench.capacity` (`bench.scale_check`
says which constants of the machine are measured). Exits 1 where one differs by more than 10 %.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Final

from bench.gpu_on_paper import Replica, replicas
from bench.load import Figures
from bench.load_devices import Device
from bench.report import TO_JSON, figures_table, option, parser, verdict
from bench.scale_check import compare_capacity, compare_load
from bench.virtual_time import RIGHT, Drafting, Link, Peer, RankedDraft, StepTime, Text, Verifier
from rich.console import Console
from rich.table import Table
from tests.ranks import read_ranks

from outrider.models.bundle.speed_up import tokens_per_pass

NONE, BESIDE, DEVICES = "none", "beside", "devices"
WAYS: Final = (NONE, BESIDE, DEVICES)
COUNTS: Final = (100, 1_000, 10_000, 100_000)
MOST_SIMULATED: Final = 48
NUM_TOKENS: Final = 96
FLOOR: Final = 0.05
"""Chance of being reached below which a device drafts no further."""
MOST_GAMMA: Final = 8
WIDTH: Final = 4
"""Guesses of a call. A step verifies paths; an alternative that is picked keeps a device in sync."""
RANKS: Final = read_ranks("reference_ranks_0.8")
"""Of the reference pair's picks among its draft's guesses, at temperature 0.8."""
MAP_STEP_S: Final = 0.05
DRAFTS, ROUND_TRIPS = (0.02, 0.1, 0.25, 0.5, 1.0), (0.0, 0.5, 1.0, 2.0, 4.0)
"""Of the map, over a step."""
MAPS: Final = ((1, 0.01, 0.1), (1, 0.01, 0.25), (16, 0.01, 0.1), (16, 0.01, 0.25), (16, 0.5, 0.25))
"""Sessions, and times over a step: of a further token, of a token of the draft beside."""
NEAR: Final = 1.03
"""Ratio of two numbers of clients between which the search ends."""
# Of our server's processor, per pass, without drafts and with: bench.server_overhead at 256 sessions found 0.037 ms
# without, and 0.069 more in the engine with drafts (docs/log.md, 2026-11-26). What drafts take in the event loop
# overlaps with the GPU's work and is left out.
PLAIN_HOST_S, DRAFTS_HOST_S = 0.037e-3, 0.106e-3


@dataclass(frozen=True, slots=True)
class Field:
    """The devices. lost: share of the target's picks that no guess of the draft is, beyond those of the reference pair,
    wherever the draft runs. draft_ms: of a token on a device; 12 ms is a 1B draft in INT8 on a laptop that reads 100
    GB/s. jitter_ms: of a message, on average.
    """

    lost: float = 0.0
    draft_ms: float = 12.0
    rtt_ms: float = 50.0
    jitter_ms: float = 2.0

    @property
    def acceptance(self) -> float:
        """Of first guesses."""
        return (1.0 - self.lost) * RANKS.hits(1)


@dataclass(frozen=True, slots=True)
class Outcome:
    """client_rate: tokens/s that half of the sessions have. rate: of all. passes: per token."""

    client_rate: float
    rate: float
    passes: float


@dataclass(frozen=True, slots=True)
class Machine:
    """What steps take, drafts of one token for so many sequences, and the processor's part of a step."""

    step_s: StepTime
    draft_s: Callable[[int], float]
    plain_host_s: float = 0.0
    drafts_host_s: float = 0.0

    def gamma(self, count: int, alpha: float) -> int:
        """The depth of a draft beside that gives the most tokens/s, at least 1."""

        def rate(gamma: int) -> float:
            took_s = gamma * self.draft_s(count) + self.step_s(count, count * (1 + gamma))
            return tokens_per_pass(alpha, gamma) / took_s

        return max(range(1, MOST_GAMMA + 1), key=rate)


def simulate(machine: Machine, way: str, count: int, devices: Field, num_tokens: int = NUM_TOKENS) -> Outcome:
    """So many sessions on one verifier."""
    num_played = min(count, MOST_SIMULATED)
    each = count / num_played
    gamma = machine.gamma(count, devices.acceptance)
    host_s = machine.plain_host_s if way == NONE else machine.drafts_host_s
    verifier = Verifier(
        lambda sequences, tokens: machine.step_s(round(each * sequences), round(each * tokens)),
        num_played,
        host_s=lambda passes, tokens: each * passes * host_s,
        beside_s=(lambda some: gamma * machine.draft_s(round(each * some))) if way == BESIDE else None,
    )
    peers = list[Peer]()
    for number in range(num_played):
        text, device = Text([RIGHT] * num_tokens), None
        if way != NONE:
            draft = RankedDraft(RANKS, WIDTH, number, devices.lost)
            device = Device(draft, gamma if way == BESIDE else 1, WIDTH, FLOOR if way == DEVICES else 0.0)
        half_s, jitter_s = devices.rtt_ms / 2e3, devices.jitter_ms / 1e3
        links = Link.of(half_s, jitter_s, 2 * number), Link.of(half_s, jitter_s, 2 * number + 1)
        drafting = Drafting.BESIDE if way == BESIDE else Drafting.ON
        peers.append(Peer(verifier.timeline, text, device, drafting, call_s=devices.draft_ms / 1e3, links=links))
    sessions = verifier.run(peers)
    figures = Figures.of(sessions)
    rates = [
        (len(session.text) - len(session.commits[0][1])) / (session.commits[-1][0] - session.commits[0][0])
        for session in sessions
    ]
    return Outcome(median(rates), each * figures.tokens_per_s, figures.passes)


class OnPaper:
    """One target, and what it does for the devices."""

    def __init__(self, replica: Replica, devices: Field) -> None:
        self.replica, self.devices = replica, devices
        machine = Machine(replica.step_s, replica.draft_s, PLAIN_HOST_S, DRAFTS_HOST_S)
        self.outcome = cache(lambda way, count: simulate(machine, way, count, devices))

    def places(self, way: str) -> int:
        """Sessions that fit."""
        return self.replica.places(way == BESIDE)

    def clients(self, way: str, client_rate: float) -> int:
        """Most of a replica; 0 where even one is slower."""
        low, high = 1.0, float(self.places(way))
        if self.outcome(way, int(high)).client_rate >= client_rate:
            return int(high)
        if self.outcome(way, 1).client_rate < client_rate:
            return 0
        while high / low > NEAR and high - low > 1.0:
            middle = math.sqrt(low * high)
            is_enough = self.outcome(way, int(middle)).client_rate >= client_rate
            low, high = (middle, high) if is_enough else (low, middle)
        return int(low)

    def load(self, way: str, num_devices: int, client_rate: float) -> tuple[int, float] | None:
        """GPUs for so many devices, and dollars per million tokens; None where no number of them is enough."""
        most = self.clients(way, client_rate)
        if not most:
            return None
        num_replicas = math.ceil(num_devices / most)
        rate = self.outcome(way, math.ceil(num_devices / num_replicas)).rate
        return num_replicas * self.replica.num_gpus, 1e6 * self.replica.dollars_per_s / rate


# -- tables ------------------------------------------------------------------------------------------------------------


def clients_table(targets: Sequence[OnPaper], client_rates: Sequence[float]) -> Table:
    """Clients of a replica and of a GPU."""
    names = ("target", "tokens/s each", "drafts", "places", "clients", "per GPU", "p50 tokens/s", "passes/token", "$/M")
    table = figures_table("Clients", *names, left=("target", "drafts"))
    for target in targets:
        replica = target.replica
        for asked in client_rates:
            for way in WAYS:
                head = (f"{replica.model.name}, {replica.num_gpus} {replica.gpu.name}", f"{asked:g}", way)
                count = target.clients(way, asked)
                if not count:
                    table.add_row(*head, str(target.places(way)), "0", "0", "", "", "")
                    continue
                found = target.outcome(way, count)
                per_gpu, price = count / replica.num_gpus, 1e6 * replica.dollars_per_s / found.rate
                figures = (f"{per_gpu:.0f}", f"{found.client_rate:.1f}", f"{found.passes:.2f}", f"{price:.2f}")
                table.add_row(*head, str(target.places(way)), str(count), *figures)
    return table


def devices_table(targets: Sequence[OnPaper], client_rate: float) -> Table:
    """GPUs and dollars by the number of devices."""
    names = [f"{what}: {way}" for what in ("GPUs", "$/M") for way in WAYS]
    table = figures_table(f"{client_rate:g} tokens/s each", "target", "devices", *names, left=("target",))
    for target in targets:
        for num_devices in COUNTS:
            loads = [target.load(way, num_devices, client_rate) for way in WAYS]
            gpus = ("" if each is None else f"{each[0]:,}" for each in loads)
            prices = ("" if each is None else f"{each[1]:.2f}" for each in loads)
            table.add_row(target.replica.model.name, f"{num_devices:,}", *gpus, *prices)
    return table


def changes_table(targets: Sequence[OnPaper], client_rate: float) -> Table:
    """What drafts from devices gain where one thing is otherwise: tokens/s over no drafts, as many clients."""
    changed: dict[str, dict[str, float]] = {"assumed": {}} | {
        f"{name.removesuffix('_ms')} {value:g}": {name: value}
        for name, value in (("lost", 0.5), ("draft_ms", 4.0), ("draft_ms", 40.0), ("rtt_ms", 10.0), ("rtt_ms", 200.0))
    }
    table = figures_table("Devices' drafts over no drafts, tokens/s", "target", "clients", *changed, left=("target",))
    for target in targets:
        count = target.clients(NONE, client_rate)
        if count:
            plain = target.outcome(NONE, count).rate
            others = (OnPaper(target.replica, replace(target.devices, **change)) for change in changed.values())
            ratios = (f"{other.outcome(DEVICES, count).rate / plain:.2f}x" for other in others)
            table.add_row(target.replica.model.name, str(count), *ratios)
    return table


def map_table(title: str, count: int, extra: float, share: float, lost: float) -> Table:
    """The best way by ratios. extra: of a step, for each further token."""
    table = figures_table(title, "draft/step", *(f"RTT/step {ratio:g}" for ratio in ROUND_TRIPS))
    machine = Machine(
        lambda sequences, tokens: MAP_STEP_S * (1.0 + extra * (tokens - 1)),
        lambda some: MAP_STEP_S * share * (1.0 + extra * (some - 1)),
    )
    # Neither depends on the devices.
    here = {way: simulate(machine, way, count, Field(lost)).rate for way in (NONE, BESIDE)}
    for draft in DRAFTS:
        cells: list[str] = []
        for ratio in ROUND_TRIPS:
            field = Field(lost, 1e3 * MAP_STEP_S * draft, 1e3 * MAP_STEP_S * ratio, 0.0)
            rates = here | {DEVICES: simulate(machine, DEVICES, count, field).rate}
            gains = {way: rate / rates[NONE] for way, rate in rates.items()}
            best = max(gains, key=lambda way: round(gains[way], 2))  # of equals the simplest
            cells.append(f"{best} {gains[BESIDE]:.2f} {gains[DEVICES]:.2f}")
        table.add_row(f"{draft:g}", *cells)
    return table


def in_words(target: OnPaper, client_rate: float) -> str:
    """Where drafts from devices pay for a target, and where they do not."""
    name, clients = target.replica.model.name, {way: target.clients(way, client_rate) for way in WAYS}
    head = f"{name}, {client_rate:g} tokens/s each: "
    if not clients[DEVICES]:
        return head + "drafts from devices do not reach that, even for one client."
    if not clients[NONE]:
        return head + f"only drafts reach it: {clients[DEVICES]} clients from devices, {clients[BESIDE]} beside."
    said: list[str] = []
    if clients[NONE] == target.places(NONE):
        said.append(f"memory, not time, bounds the clients ({clients[NONE]}), so drafts add none")
    else:
        said.append(f"devices serve {clients[DEVICES] / clients[NONE]:.2f} times the clients of no drafts")
    if clients[BESIDE]:
        said.append(f"{clients[DEVICES] / clients[BESIDE]:.2f} times those of a draft beside")
    rates = {way: target.outcome(way, count).rate for way, count in clients.items() if count}
    gain = rates[DEVICES] / rates[NONE] - 1.0
    said.append(
        f"a token costs {-gain / (1.0 + gain):+.0%} of no drafts' price" if gain > 0.02 else "they do not pay in money"
    )
    return head + "; ".join(said) + "."


def on_paper(console: Console, targets: Sequence[OnPaper], client_rates: Sequence[float]) -> None:
    """Prints it all."""
    for target in targets:
        replica = target.replica
        sizes = [1, *(int(replica.places(False) * share) for share in (0.1, 1.0))]
        steps = ", ".join(f"{1e3 * replica.step_s(n, n):.1f}, {1e3 * replica.step_s(n, 4 * n):.1f}" for n in sizes)
        drafts = ", ".join(f"{1e3 * replica.draft_s(n):.1f}" for n in sizes)
        words = (
            f"{replica.model.name}: step at {sizes} sequences with 1 and 4 tokens each {steps} ms; draft {drafts} ms"
        )
        console.print(words, highlight=False)
    console.print(clients_table(targets, client_rates))
    console.print(devices_table(targets, client_rates[0]))
    console.print(changes_table(targets, client_rates[0]))
    for count, extra, share in MAPS:
        title = f"{count} sessions; of a step, {extra:g} a further token, {share:g} a token of the draft beside"
        console.print(map_table(title, count, extra, share, targets[0].devices.lost))
    for rate in client_rates:
        for target in targets:
            console.print(in_words(target, rate), highlight=False)


def check(console: Console, num_runs: int, path: Path | None) -> int:
    """The simulation beside what it simulates."""
    pairs = compare_load(("--emulate", "40", "0.3", "--runs", str(num_runs)), console)
    pairs += compare_capacity(("--runs", str(num_runs)))
    table = figures_table("The simulation, checked", "figure", "measured", "simulated", "ratio", left=("figure",))
    for pair in pairs:
        table.add_row(pair.name, f"{pair.measured:.1f}", f"{pair.simulated:.1f}", f"{pair.ratio:.2f}")
    console.print(table)
    misses = [miss for pair in pairs if (miss := pair.miss) is not None]
    return verdict(console, misses, path, {"pairs": [asdict(pair) for pair in pairs]})


def main(given: Sequence[str] | None = None) -> int:
    """The command."""
    devices = Field()
    options = parser(
        __doc__,
        {
            "--check": option(False, "measure, and compare the simulation with it"),
            "--runs": option(3, "of the benches, for --check"),
            "--context": option(2048, "positions of a text, on average"),
            "--client-rate": option([15.0, 40.0], "tokens/s of a client; the first for all tables"),
            "--lost": option(devices.lost, "share of the target's picks that no guess is, beyond the reference pair's"),
            "--draft-ms": option(devices.draft_ms, "of a token on a device"),
            "--rtt-ms": option(devices.rtt_ms),
            "--jitter-ms": option(devices.jitter_ms, "added to a message, on average"),
            **TO_JSON,
        },
    ).parse_args(given)
    console = Console(width=120)
    if options.check:
        return check(console, options.runs, options.json)
    devices = Field(options.lost, options.draft_ms, options.rtt_ms, options.jitter_ms)
    on_paper(console, [OnPaper(replica, devices) for replica in replicas(options.context)], options.client_rate)
    return 0


if __name__ == "__main__":
    sys.exit(main())
