"""Compares stream mode with cloud-only streaming by round trip, also with a draft that is always rejected.

Cloud and agent have a core and a thread each; the target is widened so that a step takes 40 ms or more. A run is every
mode back to back on the same prompts with the same seeds; the table shows medians of the runs' ratios, and beside them
what `bench.simulate` computes in its `patient` column from the acceptance, the draft's time, the step's time and the
extra time per drafted token measured here. Exits 1 when a bound is missed: 0.97 everywhere, 1.5 at 10 ms, 1.2 at 50 ms,
0.9 of the computed value, and every text the same.

    python -m bench.never_slower [--widen 1450] [--runs 5] [--rtt-ms 0 10 25 50 100 200] [--trace] [--json PATH]

On a busy machine, `--emulate STEP_MS EXTRA_MS ACCEPTANCE DRAFT_MS` measures the protocol alone: the fake language, with
steps and drafts that take exactly these times without using the processor.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.emulated import open_emulated
from bench.report import write_json
from bench.round_trips import WRONG, Place, Subject, measure, measured_extra_ms
from bench.simulate import patient
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from outrider.edge.lab.laboratory import STOP_AND_WAIT, STREAM, open_lab
from outrider.edge.results import GenerationRequest
from outrider.export.make.reference_pair import export_reference_pair
from outrider.models.prediction import Reach, Setting
from outrider.models.sampling import SamplingParams
from outrider.models.tokenizer import Tokenizer
from outrider.reference import load_prompts, target_dir

FLOOR, OF_COMPUTED = 0.97, 0.9
WANTED = {10.0: 1.5, 50.0: 1.2}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One round trip: the measurements, the simulation's input, and its result.

    reach, which has a bound, is computed from stream mode's own acceptance. elsewhere: from stop-and-wait's on the same
    texts, for comparison: over a long round trip stream mode tests only after long accepted runs.
    """

    place: Place
    setting: Setting
    reach: Reach
    elsewhere: Reach

    @property
    def share(self) -> float:
        """Stream mode's share of the simulated speed-up."""
        return self.place.cells[STREAM].ratio / self.reach.speed_up

    @property
    def num_different(self) -> int:
        """Number of texts, of any mode, that differ from cloud-only's."""
        return sum(cell.num_different for cell in self.place.cells.values())


def compare(places: list[Place]) -> list[Comparison]:
    """Runs the simulation with the measured values."""
    extra_ms = measured_extra_ms(places)
    settings = [place.setting(extra_ms) for place in places]
    return [
        Comparison(place, setting, patient(setting), patient(place.setting(extra_ms, STOP_AND_WAIT)))
        for place, setting in zip(places, settings, strict=True)
    ]


def misses(found: Comparison) -> list[str]:
    """The bounds that this round trip misses, in words."""
    place = found.place
    stream, wrong = place.cells[STREAM].ratio, place.cells[WRONG].ratio
    told = []
    for name, value, bound in (
        ("stream", stream, max(FLOOR, WANTED.get(place.rtt_ms, 0.0))),
        ("stream with an always-wrong draft", wrong, FLOOR),
        ("stream over computed", found.share, OF_COMPUTED),
    ):
        if value < bound:
            told.append(f"RTT {place.rtt_ms:g} ms: {name} is {value:.3f}, expected at least {bound:g}")
    if found.num_different:
        told.append(
            f"RTT {place.rtt_ms:g} ms: {found.num_different} texts differ from cloud-only's; run bench.invariant"
        )
    return told


def show(console: Console, comparisons: list[Comparison]) -> None:
    """Prints the table, and below it the simulation's input."""
    table = Table(title="tokens/s over cloud-only's, medians of the runs", title_justify="left", box=None)
    columns = ("RTT ms", "stop-and-wait", "stream", "lowest", "always wrong", "lowest", "computed", "share", "passes")
    for name in columns:
        table.add_column(name, justify="right")
    for found in comparisons:
        wait, stream, wrong = (found.place.cells[name] for name in (STOP_AND_WAIT, STREAM, WRONG))
        table.add_row(
            f"{found.place.rtt_ms:g}",
            f"{wait.ratio:.2f}x",
            f"[bold]{stream.ratio:.2f}x[/bold]",
            f"{min(stream.ratios):.2f}",
            f"{wrong.ratio:.2f}x",
            f"{min(wrong.ratios):.2f}",
            f"{found.reach.speed_up:.2f}x",
            f"{found.share:.2f}",
            f"{stream.passes_per_token:.2f}",
        )
    console.print(table)
    for found in comparisons:
        s, reach = found.setting, found.reach
        console.print(
            f"RTT {s.rtt_ms:g}: acceptance {s.alpha:.3f} (stop-and-wait's "
            f"{found.place.cells[STOP_AND_WAIT].acceptance:.3f}: computed {found.elsewhere.speed_up:.2f}x), "
            f"draft {s.draft_ms:.2f} ms per token, step {s.step_ms:.1f} ms, "
            f"{s.extra_ms:.2f} ms more per drafted token; computed with patience {reach.choice[0]} ms for "
            f"{reach.choice[1]}: {reach.passes_per_token:.2f} passes per token; "
            f"{found.num_different} texts differ",
            style="dim",
            highlight=False,
        )


def show_trace(console: Console, places: list[Place]) -> None:
    """Where a token's time goes in each mode: all in ms per token, prefill included."""
    table = Table(title="Time per token, ms", title_justify="left", box=None)
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


def as_json(comparisons: list[Comparison]) -> list[dict[str, object]]:
    """The table as plain data."""
    return [
        {
            "rtt_ms": found.place.rtt_ms,
            "measured": asdict(found.setting),
            "computed": asdict(found.reach),
            "share": found.share,
            "computed_elsewhere": asdict(found.elsewhere),
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
                for name, cell in found.place.cells.items()
            },
        }
        for found in comparisons
    ]


@contextmanager
def open_subject(options: argparse.Namespace) -> Iterator[Subject]:
    """The widened reference pair, or the emulated one."""
    if options.emulate:
        with open_emulated(*options.emulate) as subject:
            yield subject
        return
    pair = export_reference_pair(widen_mb=options.widen or None)
    with open_lab(pair.target, pair.draft) as lab:
        yield Subject(lab.url, lab.cores, lab.drafter, lab.target.manifest.architecture.vocab_size)


def make_requests(options: argparse.Namespace) -> list[GenerationRequest]:
    """Held-out prompts, each with its own seed."""
    tokenizer = Tokenizer.from_dir(target_dir())
    return [
        GenerationRequest(
            prompt=tuple(tokenizer.encode(prompt.text)),
            params=SamplingParams(temperature=options.temperature, seed=seed),
            max_tokens=options.max_tokens,
            stop_ids=frozenset(),
            ignore_eos=True,
        )
        for seed, prompt in enumerate(load_prompts(options.prompts))
    ]


def main() -> int:
    """The command."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--widen", type=float, default=1450.0, help="MB of the widened FP32 target; 0: as it is")
    names = ("STEP_MS", "EXTRA_MS", "ACCEPTANCE", "DRAFT_MS")
    cli.add_argument("--emulate", type=float, nargs=4, metavar=names, help="no real pair; see above")
    cli.add_argument("--rtt-ms", type=float, nargs="+", default=[0.0, 10.0, 25.0, 50.0, 100.0, 200.0])
    cli.add_argument("--runs", type=int, default=5)
    cli.add_argument("--prompts", type=int, default=3, help="texts of a run, the same in every run")
    cli.add_argument("--max-tokens", type=int, default=100)
    cli.add_argument("--temperature", type=float, default=0.8)
    cli.add_argument("--trace", action="store_true", help="show where each mode's time goes")
    cli.add_argument("--json", type=Path)
    options = cli.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 130)
    requests = make_requests(options)
    with open_subject(options) as subject, Progress(console=console, transient=True, refresh_per_second=1) as progress:
        console.print(subject.cores.note, highlight=False)
        task = progress.add_task("runs", total=options.runs * len(options.rtt_ms))
        places = asyncio.run(measure(subject, options.rtt_ms, requests, options.runs, lambda: progress.advance(task)))
    comparisons = compare(places)
    show(console, comparisons)
    if options.trace:
        show_trace(console, places)
    missed = [miss for found in comparisons for miss in misses(found)]
    for miss in missed:
        console.print(miss, style="red", highlight=False)
    told = {"widen_mb": options.widen, "emulated": options.emulate, "temperature": options.temperature}
    write_json(options.json, {**told, "misses": missed, "round_trips": as_json(comparisons)})
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
