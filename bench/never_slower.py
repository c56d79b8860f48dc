"""Compares drafts by path and by tree with cloud-only streaming and with the draft beside the target, by round trip.

Cloud and agent have a core and a thread each; the target is widened so that a step takes 40 ms or more. A run is every
mode back to back on the same prompts with the same seeds; tables show medians of the runs' ratios:

  stop-and-wait  a block, its answer, the next block
  path           stream mode with --width 1
  tree           stream mode as it is
  always wrong   a tree of width 4 with no right node
  beside         the same draft beside the target in turn, one process, one thread, no network: at its best fixed depth
                 and with depth by gaps, each the best of a search on the same texts (`bench.beside`)
  computed       `outrider.export.report.simulation` with the ranks of these very texts and the times of this run;
                 share: measured over computed

Nobody guesses by prompt lookup, which the simulation does not know; `bench.one_machine --served` has the device's.

Exits 1 when a bound is missed: 0.97 of cloud-only everywhere; tree 1.5 at 10 ms and 1.2 at 50 ms; tree over path 1.10
at 25 ms, 1.15 at 50 ms, 1.10 at 100 ms; tree and path 0.9 of computed; every text the same.

    python -m bench.never_slower [--widen 1450] [--runs 5] [--rtt-ms 0 10 25 50 100 200] [--json PATH]

On a busy machine, `--emulate STEP_MS EXTRA_MS DRAFT_MS` measures the protocol alone: steps and drafts that take exactly
these times without using the processor, with ranks and gaps like the reference pair's (`bench.emulated`).
`--nodes-per-call N --node-extra MS` emulates a draft that expands several nodes in one call. `--form tree` has steps
verify any part of a tree, here and in the simulation; the default is the likeliest path.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Final

from bench.pairs import PAIR_OPTIONS, make_requests, open_pair
from bench.report import TO_JSON, figures_table, option, parser, verdict
from bench.round_trips import (
    BESIDE,
    OPTIONAL,
    PATH,
    TREE,
    WRONG,
    Cell,
    Measured,
    Place,
    Yardstick,
    measure,
    measured_extra_ms,
)
from rich.console import Console

from outrider.edge.drafting.price import BYTES_PER_TOKEN
from outrider.edge.lab.laboratory import CLOUD_ONLY, STOP_AND_WAIT
from outrider.export.report.simulation.ranks import Ranks
from outrider.export.report.simulation.trees import Outcome, path, simulate
from outrider.export.report.simulation.world import Form, Plan, Times

FLOOR, OF_COMPUTED = 0.97, 0.9
TREE_BOUNDS: Final = {10.0: 1.5, 50.0: 1.2}
OVER_PATH_BOUNDS: Final = {25.0: 1.10, 50.0: 1.15, 100.0: 1.10}
SHORT: Final = {STOP_AND_WAIT: "stop-and-wait", WRONG: "always wrong"}


@dataclass(frozen=True, slots=True)
class Computed:
    """What the simulation reaches with the measured ranks and times."""

    times: Times
    path: Outcome
    tree: Outcome


@dataclass(frozen=True, slots=True)
class Comparison:
    """One round trip: the measurements, and the simulation's figures where there are ranks."""

    place: Place
    yardstick: Yardstick | None
    computed: Computed | None

    @property
    def over_path(self) -> float:
        """Tree over path."""
        return self.place.over(TREE, PATH)

    @property
    def over_beside(self) -> Mapping[str, float]:
        """Tree over each stop of the draft beside the target; empty where that was left out."""
        return self.place.over_beside(TREE, self.yardstick) if self.yardstick is not None else {}

    def share(self, name: str) -> float | None:
        """Measured over computed."""
        if self.computed is None:
            return None
        outcome = {PATH: self.computed.path, TREE: self.computed.tree}[name]
        return self.place.cells[name].ratio / outcome.speed_up

    @property
    def num_different(self) -> int:
        """Number of texts, of any mode, that differ from cloud-only's."""
        return sum(cell.num_different for cell in self.place.cells.values())


def compare(measured: Measured, form: Form) -> list[Comparison]:
    """Runs the simulation with the measured values. form: what the verifier's steps verify."""
    extra_ms = measured_extra_ms(measured.places)
    return [
        Comparison(place, measured.yardstick, _computed(place, measured.ranks, extra_ms, form))
        for place in measured.places
    ]


def _computed(place: Place, ranks: Ranks | None, extra_ms: float, form: Form) -> Computed | None:
    if ranks is None:
        return None
    times = place.times(extra_ms)
    plan = Plan(form=form, bytes_per_token=BYTES_PER_TOKEN)
    alone = replace(place.times(extra_ms, PATH), nodes_per_call=1)  # a path's nodes come one after the other
    return Computed(
        times,
        simulate(ranks, alone, place.rtt_ms, path(plan)),
        simulate(ranks, times, place.rtt_ms, plan),
    )


def misses(found: Comparison) -> list[str]:
    """The bounds that this round trip misses, in words."""
    place = found.place
    tree_bound = max(FLOOR, TREE_BOUNDS.get(place.rtt_ms, 0.0))
    checks: list[tuple[str, float | None, float]] = [
        ("path over cloud-only", place.cells[PATH].ratio, FLOOR),
        ("tree over cloud-only", place.cells[TREE].ratio, tree_bound),
        ("an always-wrong tree over cloud-only", place.cells[WRONG].ratio, FLOOR),
        ("tree over path", found.over_path, OVER_PATH_BOUNDS.get(place.rtt_ms, 0.0)),
        ("path over computed", found.share(PATH), OF_COMPUTED),
        ("tree over computed", found.share(TREE), OF_COMPUTED),
    ]
    told = [
        f"RTT {place.rtt_ms:g} ms: {name} is {value:.3f}, expected at least {bound:g}"
        for name, value, bound in checks
        if value is not None and value < bound
    ]
    if found.num_different:
        told.append(
            f"RTT {place.rtt_ms:g} ms: {found.num_different} texts differ from cloud-only's; run bench.invariant"
        )
    return told


def _x(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _with_lowest(cell: Cell | None) -> str:
    return "-" if cell is None else f"{cell.ratio:.2f}x ({min(cell.ratios):.2f})"


def show(console: Console, comparisons: Sequence[Comparison]) -> None:
    """Prints the tables."""
    names = ("RTT ms", "RTT/step", *SHORT.values(), "path", "tree", "tree/path", "tree/beside", "by gaps")
    names += ("computed path", "share", "computed tree", "share")
    table = figures_table("tokens/s over cloud-only's, medians of the runs (lowest run)", *names)
    for found in comparisons:
        place, computed = found.place, found.computed
        cells, over = place.cells, found.over_beside
        table.add_row(
            f"{place.rtt_ms:g}",
            f"{place.rtt_ms / cells[CLOUD_ONLY].ms_per_token:.2f}",
            *(_with_lowest(cells.get(name)) for name in SHORT),
            _with_lowest(cells[PATH]),
            f"[bold]{_with_lowest(cells[TREE])}[/bold]",
            _x(found.over_path),
            _share(over.get("depth")),
            _share(over.get("gaps")),
            _x(computed.path.speed_up if computed else None),
            _share(found.share(PATH)),
            _x(computed.tree.speed_up if computed else None),
            _share(found.share(TREE)),
        )
    console.print(table)


def show_yardstick(console: Console, measured: Measured, comparisons: Sequence[Comparison]) -> None:
    """The draft beside the target, and what the simulation played."""
    yardstick, ranks = measured.yardstick, measured.ranks
    if yardstick is not None:
        searched = ", ".join(f"{stop}: {rate:.1f}" for stop, rate in yardstick.searched.items())
        for name, ratios in yardstick.ratios.items():
            best = yardstick.best[name]
            console.print(f"beside, {name}: {median(ratios):.2f}x over cloud-only with {best}", highlight=False)
        console.print(f"searched, tokens/s: {searched}; {yardstick.num_different} texts differ", style="dim")
    if ranks is not None:
        within = ", ".join(f"{width}: {ranks.hits(width):.3f}" for width in (1, 2, 4, 8))
        console.print(f"the target's pick is among the draft's best {within}", highlight=False)
    for found in comparisons:
        if found.computed is not None:
            t, c = found.computed.times, found.computed
            console.print(
                f"RTT {found.place.rtt_ms:g}: step {t.step_ms:.1f} ms, {t.extra_ms:.2f} ms more per verified node, "
                f"draft {t.draft_ms:.2f} ms, at most {t.nodes_per_call} nodes a call ({t.call_extra:.2f} of one each); "
                f"path's acceptance {found.place.cells[PATH].acceptance:.3f}; "
                f"computed tree: {c.tree.passes:.2f} passes, {c.tree.sent:.0f} nodes sent, "
                f"{c.tree.bytes_up:.0f} B up per token; {found.num_different} texts differ",
                style="dim",
                highlight=False,
            )


def show_traffic(console: Console, places: Sequence[Place]) -> None:
    """What each mode sends, drafts and verifies, per token."""
    names = ("RTT ms", "mode", "bytes up", "of drafts", "bytes down", "posts", "drafted", "sent", "verified", "passes")
    table = figures_table("per token (bytes of bodies)", *names, left=("mode",))
    for place in places:
        opening = place.cells[CLOUD_ONLY].traffic["bytes_up"]
        for name, cell in place.cells.items():
            t = cell.traffic
            table.add_row(
                f"{place.rtt_ms:g}",
                name,
                *(f"{count:.1f}" for count in (t["bytes_up"], t["bytes_up"] - opening, t["bytes_down"])),
                *(f"{t[name]:.2f}" for name in ("posts", "drafted", "sent", "verified", "passes")),
            )
    console.print(table)


def as_json(measured: Measured, comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """The tables as plain data."""
    yardstick, ranks = measured.yardstick, measured.ranks
    return {
        "beside": None
        if yardstick is None
        else {
            "best": {name: asdict(stop) for name, stop in yardstick.best.items()},
            "searched_tokens_per_s": yardstick.searched,
            "speed_ups": yardstick.ratios,
            "num_different": yardstick.num_different,
        },
        "hits": None if ranks is None else {width: ranks.hits(width) for width in (1, 2, 4, 8)},
        "round_trips": [
            {
                "rtt_ms": found.place.rtt_ms,
                "tree_over_path": found.over_path,
                "tree_over_beside": found.over_beside,
                "computed": asdict(found.computed) if found.computed is not None else None,
                "shares": {name: found.share(name) for name in (PATH, TREE)},
                "modes": {
                    name: {
                        "speed_up": cell.ratio,
                        "ratios": cell.ratios,
                        "tokens_per_s": cell.rates,
                        "ms_per_token": cell.ms_per_token,
                        "acceptance": cell.acceptance,
                        "per_token": cell.traffic,
                        "num_different": cell.num_different,
                        "server": cell.times,
                    }
                    for name, cell in found.place.cells.items()
                },
            }
            for found in comparisons
        ],
    }


def main(given: Sequence[str] | None = None) -> int:
    """The command."""
    runs = {
        "--rtt-ms": option([0.0, 10.0, 25.0, 50.0, 100.0, 200.0]),
        "--runs": option(5),
        "--leave-out": {"nargs": "*", "choices": OPTIONAL, "default": [], "help": "is not measured, to save time"},
    }
    options = parser(__doc__, {**PAIR_OPTIONS, **runs, **TO_JSON}).parse_args(given)
    console = Console(width=None if sys.stdout.isatty() else 190)
    requests = make_requests(options)
    with open_pair(options, beside=BESIDE not in options.leave_out) as subject:
        console.print(subject.cores.note, highlight=False)
        measured = asyncio.run(measure(subject, options.rtt_ms, requests, options.runs, options.leave_out))
    comparisons = compare(measured, Form(options.form))
    show(console, comparisons)
    show_yardstick(console, measured, comparisons)
    show_traffic(console, measured.places)
    missed = [miss for found in comparisons for miss in misses(found)]
    told = {"widen_mb": None if options.target else options.widen, "emulated": options.emulate}
    told |= {"temperature": options.temperature, "form": options.form, **as_json(measured, comparisons)}
    return verdict(console, missed, options.json, told)


if __name__ == "__main__":
    sys.exit(main())
