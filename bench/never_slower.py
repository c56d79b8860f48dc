"""Never slower: stream mode against cloud-only streaming by round trip, also with a draft that is always wrong.

Cloud and agent on a core and a thread each, the target widened until a step takes --widen MB of memory traffic. A run
is every mode back to back on the same prompts with the same seeds; the table shows medians of the runs' ratios. Beside
them stands what `bench.simulate` computes in its `patient` column from the acceptance, the draft's time, the step's
time and the extra time a drafted token that were measured here. Exits 1 when a bound is missed: 0.97 everywhere, 1.5 at
10 ms, 1.2 at 50 ms, 0.9 of what was computed.

    python -m bench.never_slower [--widen 1000] [--runs 5] [--rtt-ms 0 10 25 50 100 200] [--trace] [--json PATH]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import AsyncExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median

from bench.report import write_json
from bench.server_clock import ServerClock, ServerTimes
from bench.simulate import Reach, Setting, patient
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from outrider.edge.agent import StreamAgent
from outrider.edge.depth import CostModelDepth
from outrider.edge.drafter import AlwaysWrongDrafter
from outrider.edge.endpoints import Endpoints
from outrider.edge.estimates import Estimates
from outrider.edge.lab import CLOUD_ONLY, STOP_AND_WAIT, STREAM, Lab, connected, open_lab, three_modes
from outrider.edge.results import GenerationRequest, GenerationResult
from outrider.edge.setup import Agent
from outrider.export.cache import export_reference_pair
from outrider.models.reference import load_prompts
from outrider.models.sampling import SamplingParams

WRONG = "stream_always_wrong"
FLOOR, OF_COMPUTED = 0.97, 0.9
WANTED = {10.0: 1.5, 50.0: 1.2}


@dataclass(slots=True)
class Cell:
    """One mode at one round trip. ratios: of each run, tokens/s over cloud-only's."""

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
        """Of what follows the first commit, over all texts."""
        return 1e3 * sum(_spans(text)[0] for text in self.texts) / sum(_spans(text)[1] for text in self.texts)

    @property
    def acceptance(self) -> float:
        """Accepted over judged drafted tokens."""
        return sum(text.num_accepted for text in self.texts) / max(1, sum(text.num_tested for text in self.texts))

    @property
    def passes_per_token(self) -> float:
        """Of the target."""
        return sum(text.num_passes for text in self.texts) / sum(len(text.tokens) for text in self.texts)


def _spans(text: GenerationResult) -> tuple[float, int]:
    """Seconds from the first commit to the last, and the tokens that came in them."""
    first, last = text.arrival_s[0], text.arrival_s[-1]
    return last - first, sum(at > first for at in text.arrival_s)


@dataclass(slots=True)
class Place:
    """One round trip: its modes, and what they did. estimates: of the stream agent."""

    rtt_ms: float
    modes: dict[str, Agent]
    estimates: Estimates
    cells: dict[str, Cell]

    def setting(self) -> Setting:
        """What was measured here, for the simulation. The step is what cloud-only pays a token, overheads included."""
        return Setting(
            alpha=self.cells[STREAM].acceptance,
            draft_ms=self.estimates.draft_ms,
            step_ms=self.cells[CLOUD_ONLY].ms_per_token,
            extra_ms=self.estimates.extra_ms,
            rtt_ms=self.rtt_ms,
        )


async def open_place(lab: Lab, rtt_ms: float, endpoints: Endpoints) -> Place:
    """The three modes, and stream mode once more with a draft that is always wrong."""
    modes = await three_modes(endpoints, lab.drafter)
    estimates, wrong = Estimates(), Estimates()
    modes[STREAM] = StreamAgent(endpoints, lab.drafter, CostModelDepth(estimates), estimates)
    drafter = AlwaysWrongDrafter(lab.drafter, lab.target.manifest.architecture.vocab_size)
    modes[WRONG] = StreamAgent(endpoints, drafter, CostModelDepth(wrong), wrong)
    return Place(rtt_ms, modes, estimates, {name: Cell() for name in modes})


async def measure(lab: Lab, options: argparse.Namespace, clock: ServerClock, console: Console) -> list[Place]:
    """All runs. Round trips change inside a run, so that what changes on the machine hits all of them."""
    prompts = load_prompts((options.runs + 1) * options.prompts)
    requests = [
        GenerationRequest(
            prompt=lab.encode(prompt.text),
            params=SamplingParams(temperature=options.temperature, seed=seed),
            max_tokens=options.max_tokens,
            ignore_eos=True,
            stop_ids=frozenset(),
            tokenizer=lab.tokenizer.fingerprint,
        )
        for seed, prompt in enumerate(prompts)
    ]
    async with AsyncExitStack() as stack:
        places = [
            await open_place(lab, rtt_ms, await stack.enter_async_context(connected(lab, rtt_ms)))
            for rtt_ms in options.rtt_ms
        ]
        for place in places:  # connections, and the estimates that agents keep from text to text
            for mode in place.modes.values():
                await mode.generate(replace(requests[-1], max_tokens=min(32, options.max_tokens)))
        with Progress(console=console, transient=True, refresh_per_second=1) as progress:
            task = progress.add_task("runs", total=options.runs * len(places))
            for run in range(options.runs):
                mine = requests[run * options.prompts : (run + 1) * options.prompts]
                for place in places:
                    await _run(place, mine, clock)
                    progress.advance(task)
    return places


async def _run(place: Place, requests: list[GenerationRequest], clock: ServerClock) -> None:
    rates: dict[str, float] = {}
    texts: dict[str, list[GenerationResult]] = {name: [] for name in place.modes}
    for request in requests:
        for name, mode in place.modes.items():
            before = clock.read()
            texts[name].append(await mode.generate(request))
            place.cells[name].times += clock.read() - before
    for name, found in texts.items():
        cell = place.cells[name]
        cell.texts += found
        cell.num_different += sum(a.tokens != b.tokens for a, b in zip(found, texts[CLOUD_ONLY], strict=True))
        rates[name] = sum(_spans(text)[1] for text in found) / sum(_spans(text)[0] for text in found)
        cell.ratios.append(rates[name] / rates[CLOUD_ONLY])


def misses(place: Place, computed: Reach) -> list[str]:
    """The bounds that this round trip misses, in words."""
    stream, wrong = place.cells[STREAM].ratio, place.cells[WRONG].ratio
    found = []
    for name, value, bound in (
        ("stream", stream, max(FLOOR, WANTED.get(place.rtt_ms, 0.0))),
        ("stream with an always-wrong draft", wrong, FLOOR),
        ("stream over computed", stream / computed.speed_up, OF_COMPUTED),
    ):
        if value < bound:
            found.append(f"RTT {place.rtt_ms:g} ms: {name} is {value:.3f}, wanted {bound:g}")
    return found


def show(console: Console, places: list[Place], computed: list[Reach]) -> None:
    """The table, and below it what the simulation was given."""
    table = Table(title="tokens/s over cloud-only's, medians of the runs", title_justify="left", box=None)
    columns = ("RTT ms", "stop-and-wait", "stream", "lowest", "always wrong", "lowest", "computed", "share", "passes")
    for name in columns:
        table.add_column(name, justify="right")
    for place, reach in zip(places, computed, strict=True):
        wait, stream, wrong = (place.cells[name] for name in (STOP_AND_WAIT, STREAM, WRONG))
        table.add_row(
            f"{place.rtt_ms:g}",
            f"{wait.ratio:.2f}x",
            f"[bold]{stream.ratio:.2f}x[/bold]",
            f"{min(stream.ratios):.2f}",
            f"{wrong.ratio:.2f}x",
            f"{min(wrong.ratios):.2f}",
            f"{reach.speed_up:.2f}x",
            f"{stream.ratio / reach.speed_up:.2f}",
            f"{stream.passes_per_token:.2f}",
        )
    console.print(table)
    for place, reach in zip(places, computed, strict=True):
        s = place.setting()
        console.print(
            f"RTT {s.rtt_ms:g}: acceptance {s.alpha:.3f}, draft {s.draft_ms:.2f} ms a token, step {s.step_ms:.1f} ms, "
            f"{s.extra_ms:.2f} ms more a drafted token; computed with patience {reach.choice[0]} ms for "
            f"{reach.choice[1]}: {reach.passes_per_token:.2f} passes a token; "
            f"{sum(cell.num_different for cell in place.cells.values())} texts differ",
            style="dim",
            highlight=False,
        )


def show_trace(console: Console, places: list[Place]) -> None:
    """Where a token's time goes in each mode: all in ms a token, prefill included."""
    table = Table(title="ms a token: where they go", title_justify="left", box=None)
    for name in (
        *("RTT ms", "mode", "total", "model", "engine", "waiting", "other", "passes", "drafted", "ms/step"),
        *("verified/pass", "posts"),
    ):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for place in places:
        for name, cell in place.cells.items():
            t, num_tokens = cell.times, sum(len(text.tokens) for text in cell.texts)
            total_s = sum(text.arrival_s[-1] for text in cell.texts)
            parts_s = (t.model_seconds, t.overhead_seconds, t.waited_seconds)
            table.add_row(
                f"{place.rtt_ms:g}",
                name,
                *(f"{1e3 * s / num_tokens:.1f}" for s in (total_s, *parts_s, total_s - sum(parts_s))),
                f"{cell.passes_per_token:.2f}",
                f"{sum(text.num_drafted for text in cell.texts) / num_tokens:.2f}",
                f"{1e3 * t.model_seconds / max(1.0, t.steps):.1f}",
                f"{t.proposed / max(1.0, t.passes):.2f}",
                f"{sum(text.num_posts for text in cell.texts) / num_tokens:.2f}",
            )
    console.print(table)


def as_json(places: list[Place], computed: list[Reach]) -> list[dict[str, object]]:
    """The table as plain data."""
    return [
        {
            "rtt_ms": place.rtt_ms,
            "measured": asdict(place.setting()),
            "computed": asdict(reach),
            "modes": {
                name: {
                    "speed_up": cell.ratio,
                    "ratios": cell.ratios,
                    "ms_per_token": cell.ms_per_token,
                    "acceptance": cell.acceptance,
                    "passes_per_token": cell.passes_per_token,
                    "num_different": cell.num_different,
                    "server": asdict(cell.times),
                }
                for name, cell in place.cells.items()
            },
        }
        for place, reach in zip(places, computed, strict=True)
    ]


def main() -> int:
    """The command."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--widen", type=float, default=1000.0, help="MB of the widened FP32 target; 0: as it is")
    cli.add_argument("--rtt-ms", type=float, nargs="+", default=[0.0, 10.0, 25.0, 50.0, 100.0, 200.0])
    cli.add_argument("--runs", type=int, default=5)
    cli.add_argument("--prompts", type=int, default=2, help="prompts of a run")
    cli.add_argument("--max-tokens", type=int, default=96)
    cli.add_argument("--temperature", type=float, default=0.8)
    cli.add_argument("--trace", action="store_true", help="tell where each mode's time goes")
    cli.add_argument("--json", type=Path)
    options = cli.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 130)
    pair = export_reference_pair(widen_mb=options.widen or None)
    with open_lab(pair.target, pair.draft) as lab, closing(ServerClock(lab.url)) as clock:
        console.print(lab.cores.note, highlight=False)
        places = asyncio.run(measure(lab, options, clock, console))
    computed = [patient(place.setting()) for place in places]
    show(console, places, computed)
    if options.trace:
        show_trace(console, places)
    found = [miss for place, reach in zip(places, computed, strict=True) for miss in misses(place, reach)]
    for miss in found:
        console.print(miss, style="red", highlight=False)
    write_json(options.json, {"widen_mb": options.widen, "misses": found, "round_trips": as_json(places, computed)})
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
