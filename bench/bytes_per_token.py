"""Measures speed-up by the budget of draft bytes per token: the real curve beside the one that the simulation computes.

At each round trip the same texts are generated cloud-only and with trees under each budget, interleaved. Exits 1 where
the bytes sent exceed a budget by more than a tenth, or the bytes down 60 per token under the default budget.

    python -m bench.bytes_per_token [--budgets 50 100 150 250 none] [--rtt-ms 10 50 200] [--runs 3] [--json PATH]

The pair, real or emulated, is chosen as in `bench.never_slower`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from bench.pairs import add_options, make_requests, open_pair
from bench.report import write_json
from bench.round_trips import Cell, Place, Subject, run_once, stream_agent
from bench.server_clock import ServerClock
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from outrider.edge.drafting.estimates import Estimates
from outrider.edge.drafting.price import BYTES_PER_TOKEN
from outrider.edge.lab.laboratory import CLOUD_ONLY, connected
from outrider.edge.modes.assemble import Agent, make_agent
from outrider.edge.modes.stream import AgentOptions
from outrider.edge.results import GenerationRequest, Mode

UNLIMITED: Final = 1e9
SLACK: Final = 1.1
"""The device steers towards its budget over some twenty commits, and a text of 100 tokens is not much more."""
MAX_DOWN: Final = 60.0


def name_of(budget: float) -> str:
    """A budget in words."""
    return "none" if budget == UNLIMITED else f"{budget:g}"


async def open_place(subject: Subject, rtt_ms: float, budgets: Sequence[float], stack: AsyncExitStack) -> Place:
    """Cloud-only, and a tree for each budget."""
    endpoints = await stack.enter_async_context(connected(subject.url, subject.cores, rtt_ms))
    modes: dict[str, Agent] = {CLOUD_ONLY: make_agent(Mode.CLOUD_ONLY, endpoints, None)}
    estimates: dict[str, Estimates] = {}
    for budget in budgets:
        name = name_of(budget)
        modes[name], estimates[name] = stream_agent(endpoints, subject.drafter, AgentOptions(bytes_per_token=budget))
    return Place(rtt_ms, modes, estimates, {name: Cell() for name in modes})


async def measure(
    subject: Subject,
    rtts_ms: Sequence[float],
    budgets: Sequence[float],
    requests: Sequence[GenerationRequest],
    num_runs: int,
    on_run: Callable[[], None],
) -> list[Place]:
    """All budgets on the same texts, interleaved; a run visits every round trip."""
    async with AsyncExitStack() as stack:
        clock = stack.enter_context(ServerClock(subject.url))
        places = [await open_place(subject, rtt_ms, budgets, stack) for rtt_ms in rtts_ms]
        for place in places:  # an agent's price and estimates settle on its first text
            for mode in place.modes.values():
                await mode.generate(replace(requests[-1], max_tokens=min(32, requests[-1].max_tokens)))
        for index in range(num_runs):
            for place in places:
                await run_once(place, requests, clock, {}, index)
                on_run()
    return places


def draft_bytes(place: Place, name: str) -> float:
    """Bytes of draft messages per token: what is sent beyond the opening of the session."""
    return place.cells[name].traffic.bytes_up - place.cells[CLOUD_ONLY].traffic.bytes_up


def misses(place: Place, budgets: Sequence[float]) -> list[str]:
    """The bounds that are missed, in words."""
    found = []
    for budget in budgets:
        name = name_of(budget)
        sent, down = draft_bytes(place, name), place.cells[name].traffic.bytes_down
        if sent > SLACK * budget:
            found.append(f"RTT {place.rtt_ms:g} ms: {sent:.0f} bytes of drafts per token, budget {name}")
        if budget == BYTES_PER_TOKEN and down > MAX_DOWN:
            found.append(f"RTT {place.rtt_ms:g} ms: {down:.0f} bytes down per token, at most {MAX_DOWN:g}")
        if place.cells[name].num_different:
            found.append(f"RTT {place.rtt_ms:g} ms, budget {name}: {place.cells[name].num_different} texts differ")
    return found


def show(console: Console, places: Sequence[Place], budgets: Sequence[float]) -> None:
    """Prints one row per round trip and budget."""
    table = Table(title="by budget of draft bytes per token", title_justify="left", box=None)
    names = (
        "RTT ms",
        "budget",
        "speed-up",
        "lowest",
        "of drafts up",
        "all up",
        "down",
        "nodes sent",
        "drafted",
        "passes",
    )
    for name in names:
        table.add_column(name, justify="right")
    for place in places:
        for budget in budgets:
            cell = place.cells[name_of(budget)]
            t = cell.traffic
            table.add_row(
                f"{place.rtt_ms:g}",
                name_of(budget),
                f"{cell.ratio:.2f}x",
                f"{min(cell.ratios):.2f}",
                f"{draft_bytes(place, name_of(budget)):.1f}",
                f"{t.bytes_up:.1f}",
                f"{t.bytes_down:.1f}",
                *(f"{count:.2f}" for count in (t.sent, t.drafted, t.passes)),
            )
    console.print(table)


def as_json(place: Place) -> dict[str, Any]:
    """One round trip as plain data."""
    modes = {name: {"ratios": cell.ratios, **asdict(cell.traffic)} for name, cell in place.cells.items()}
    return {"rtt_ms": place.rtt_ms, "modes": modes}


def _budget(text: str) -> float:
    return UNLIMITED if text == "none" else float(text)


def main() -> int:
    """The command."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(cli)
    cli.add_argument("--rtt-ms", type=float, nargs="+", default=[10.0, 50.0, 200.0])
    cli.add_argument("--budgets", type=_budget, nargs="+", default=[50.0, 100.0, 150.0, 250.0, UNLIMITED])
    cli.add_argument("--runs", type=int, default=3)
    cli.add_argument("--json", type=Path)
    o = cli.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    with open_pair(o, beside=False, lookup=False) as subject, Progress(console=console, transient=True) as progress:
        task = progress.add_task("runs", total=o.runs * len(o.rtt_ms))
        measuring = measure(subject, o.rtt_ms, o.budgets, make_requests(o), o.runs, lambda: progress.advance(task))
        places = asyncio.run(measuring)
    show(console, places, o.budgets)
    found = [miss for place in places for miss in misses(place, o.budgets)]
    for miss in found:
        console.print(miss, style="red", highlight=False)
    told = {"widen_mb": o.widen, "emulated": o.emulate, "temperature": o.temperature, "misses": found}
    write_json(o.json, {**told, "round_trips": [as_json(place) for place in places]})
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
