"""Computes on paper what drafts are worth by the number of devices, and checks the simulation behind it.

    python -m bench.scale                     # the tables below, in under 4 minutes of one core; deterministic
    python -m bench.scale --check [--runs 3]  # against three benches; some 20 minutes, on a quiet machine

One simulation (`bench.virtual_time`, `bench.virtual_replica`) plays devices, links and verifiers; targets, GPUs and
prices are assumptions (`bench.gpu_on_paper`, and the constants of these modules). Every device writes all the time.
Three ways: no drafts; a draft beside the target, on its GPUs; the same draft on the devices. More devices are more
replicas. Prompts are read elsewhere; only decoding counts.

  clients     most sessions of a replica, as its memory has places for, with --client-rate tokens/s on average
  GPUs alone  the same with a server whose processor takes no time: the difference is what bounds ours
  GPUs        for all devices, evenly loaded; $ per million tokens at what these devices then receive
  the map     by round trip and draft time over step time, with no server: which way has the most tokens/s

`--check` compares tokens/s and p95 at 1, 4, 16 and 64 sessions, both ways of `bench.capacity`, and devices that draft
on with `bench.never_slower` (`bench.scale_check` says what is measured, and which figures agree by construction). Exits
1 where one differs by more than 10 %.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Final

from bench.gpu_on_paper import Replica, replicas
from bench.report import TO_JSON, figures_table, option, parser, verdict
from bench.scale_check import compare_capacity, compare_devices, compare_load
from bench.virtual_replica import BESIDE, DEVICES, HOST, NO_HOST, NONE, WAYS, Field, Host, Machine, simulate
from rich.console import Console
from rich.table import Table

COUNTS: Final = (100, 1_000, 10_000, 100_000)
MAP_STEP_S: Final = 0.05
DRAFTS, ROUND_TRIPS = (0.02, 0.1, 0.25, 1.0), (0.0, 0.5, 1.0, 2.0, 4.0)
"""Of the map, over a step."""
MAPS: Final = ((1, 0.01, 0.1), (1, 0.01, 0.25), (16, 0.01, 0.1), (16, 0.01, 0.25), (16, 0.5, 0.25))
"""Sessions, and times over a step: of a further token, of a token of the draft beside."""
CLEAR: Final = 1.02
"""Ratio up to which two ways of the map are alike; of these the simplest is named."""
NEAR: Final = 1.005
"""Of the rate that is asked for: below it the search for the most clients ends."""


class OnPaper:
    """One target, and what it does for the devices."""

    def __init__(self, replica: Replica, devices: Field, host: Host = HOST) -> None:
        self.replica, self.devices = replica, devices
        machine = Machine(replica.step_s, replica.draft_s, host)
        self.outcome = cache(lambda way, count: simulate(machine, way, count, devices))
        self.clients = cache(self._clients)

    @cached_property
    def alone(self) -> OnPaper:
        """The same with a server that keeps up with any GPU."""
        return OnPaper(self.replica, self.devices, NO_HOST)

    def places(self, way: str) -> int:
        """Sessions that fit."""
        return self.replica.places(way == BESIDE)

    def _clients(self, way: str, client_rate: float) -> int:
        """Most of a replica; 0 where even one is slower."""
        low, high = 1, self.places(way)

        def over(count: int) -> float:
            return math.log(self.outcome(way, count).client_rate / client_rate)

        if over(high) >= 0.0:
            return high
        if over(low) < 0.0:
            return 0
        # By the line through both ends, which aims at the middle of what ends the search.
        while high - low > 1 and over(low) > math.log(NEAR):
            share = (over(low) - math.log(NEAR) / 2) / (over(low) - over(high))
            middle = round(low * (high / low) ** min(0.95, max(0.05, share)))
            middle = min(high - 1, max(low + 1, middle))
            low, high = (middle, high) if over(middle) >= 0.0 else (low, middle)
        return low

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
    """Clients of a replica and of a GPU; at last those of a replica whose server takes no time."""
    names = ("target", "tokens/s each", "drafts", "places", "clients", "per GPU", "tokens/s", "passes/token", "$/M")
    table = figures_table("Clients", *names, "GPUs alone", left=("target", "drafts"))
    for target in targets:
        replica = target.replica
        for asked in client_rates:
            for way in WAYS:
                head = (f"{replica.model.name}, {replica.num_gpus} {replica.gpu.name}", f"{asked:g}", way)
                count, alone = target.clients(way, asked), str(target.alone.clients(way, asked))
                if not count:
                    table.add_row(*head, str(target.places(way)), "0", "0", "", "", "", alone)
                    continue
                found = target.outcome(way, count)
                per_gpu, price = count / replica.num_gpus, 1e6 * replica.dollars_per_s / found.rate
                figures = (f"{per_gpu:.0f}", f"{found.client_rate:.1f}", f"{found.passes:.2f}", f"{price:.2f}")
                table.add_row(*head, str(target.places(way)), str(count), *figures, alone)
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
    devices = targets[0].devices
    changed = {
        "assumed": devices,
        "lost 0.5": replace(devices, lost=0.5),
        "draft 4": replace(devices, draft_ms=4.0),
        "draft 40": replace(devices, draft_ms=40.0),
        "rtt 10": replace(devices, rtt_ms=10.0),
        "rtt 200": replace(devices, rtt_ms=200.0),
    }
    table = figures_table("Devices' drafts over no drafts, tokens/s", "target", "clients", *changed, left=("target",))
    for target in targets:
        count = target.clients(NONE, client_rate)
        if count:
            plain = target.outcome(NONE, count).rate
            others = (OnPaper(target.replica, field) for field in changed.values())
            ratios = (f"{other.outcome(DEVICES, count).rate / plain:.2f}x" for other in others)
            table.add_row(target.replica.model.name, str(count), *ratios)
    return table


@cache
def map_rate(way: str, count: int, extra: float, share: float, field: Field) -> float:
    """Tokens/s with times over a step, as in `MAPS`."""
    machine = Machine(
        lambda sequences, tokens: MAP_STEP_S * (1.0 + extra * (tokens - 1)),
        lambda some: MAP_STEP_S * share * (1.0 + extra * (some - 1)),
    )
    return simulate(machine, way, count, field).rate


def map_table(title: str, count: int, extra: float, share: float, devices: Field) -> Table:
    """The best way by ratios."""
    table = figures_table(title, "draft/step", *(f"RTT/step {ratio:g}" for ratio in ROUND_TRIPS))
    near = replace(devices, draft_ms=0.0, rtt_ms=0.0, jitter_ms=0.0)  # of no matter to no drafts and the draft beside
    plain, beside = (map_rate(way, count, extra, share, near) for way in (NONE, BESIDE))
    for draft in DRAFTS:
        cells: list[str] = []
        for ratio in ROUND_TRIPS:
            field = replace(near, draft_ms=1e3 * MAP_STEP_S * draft, rtt_ms=1e3 * MAP_STEP_S * ratio)
            rates = {NONE: plain, BESIDE: beside, DEVICES: map_rate(DEVICES, count, extra, 0.0, field)}
            gains = {way: round(rate / plain, 2) for way, rate in rates.items()}
            best = next(way for way in WAYS if CLEAR * gains[way] >= max(gains.values()))
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
    change = 1.0 - rates[NONE] / rates[DEVICES]  # of the price
    said.append(f"a token costs {abs(change):.0%} {'less' if change > 0 else 'more'} than without drafts")
    alone = {way: target.alone.clients(way, client_rate) for way in WAYS}
    if any(alone[way] > 1.02 * clients[way] for way in WAYS):
        counts = ", ".join(f"{alone[way]} ({way})" for way in WAYS)
        said.append(f"our server's processor bounds them: the GPUs alone would serve {counts}")
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
        console.print(map_table(title, count, extra, share, targets[0].devices))
    for rate in client_rates:
        for target in targets:
            console.print(in_words(target, rate), highlight=False)


def check(console: Console, num_runs: int, path: Path | None) -> int:
    """The simulation beside what it simulates."""
    pairs = compare_load(("--emulate", "40", "0.3", "--max-tokens", "128", "--runs", str(num_runs)), console)
    pairs += compare_capacity(("--runs", str(num_runs)))
    pairs += compare_devices((40.0, 1.0, 1.0), (0.0, 10.0, 50.0, 100.0), num_runs)
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
            "--seed": option(devices.seed, "of all chance"),
            **TO_JSON,
        },
    ).parse_args(given)
    console = Console(width=120)
    if options.check:
        return check(console, options.runs, options.json)
    devices = Field(options.lost, options.draft_ms, options.rtt_ms, options.jitter_ms, options.seed)
    on_paper(console, [OnPaper(replica, devices) for replica in replicas(options.context)], options.client_rate)
    return 0


if __name__ == "__main__":
    sys.exit(main())
