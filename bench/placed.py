"""Compares placement's score with the simulation of trees: an NPU whose graph takes several nodes, and other drafts.

    python -m bench.placed [--temp 0.8] [--step-ms 40 100] [--rtt-ms 0 10 25 50 100]

Each cell: tokens/s by `outrider.edge.devices.profiles.forecast` / by the simulation over measured ranks (lines; the
drafts have the same acceptance in both), and their ratio. An NPU's pass takes 18.2 ms and 0.29 ms for each node that
its graph has room for, as published; not run on hardware. The last row: the NPU's graph of 8 over the CPU's 8 ms per
node, by score / by simulation.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from bench.rank_files import read_ranks
from bench.report import figures_table, option, parser
from bench.simulate_trees import DATA, ROUND_TRIPS_MS
from rich.console import Console

from outrider.edge.devices.profiles import CALL_SIZES, Link, Profile, forecast
from outrider.export.report.simulation.ranks import Ranks
from outrider.export.report.simulation.trees import simulate
from outrider.export.report.simulation.world import Form, Plan, Times

NPU, CPU = "NPU, graph of 8", "CPU, 8 ms a node"
DRAFTS: Final = {
    "NPU, graph of 16": (18.2 + 16 * 0.29, 0.0, 16),
    NPU: (18.2 + 8 * 0.29, 0.0, 8),
    "NPU, graph of 4": (18.2 + 4 * 0.29, 0.0, 4),
    "NPU, graph of 1": (18.2 + 0.29, 0.0, 1),
    CPU: (8.0, 0.0, 1),
    "CPU, 8 nodes in 13.6 ms": (7.2, 0.8, 8),
}
"""ms of a call and of each of its nodes, and nodes of a call."""
EXTRA: Final = 0.03
"""What a verified token adds to a step, of a step: in both."""


def rates(ranks: Ranks, draft: tuple[float, float, int], step_ms: float, rtt_ms: float) -> tuple[float, float]:
    """Tokens/s by the score and by the simulation. draft: as in DRAFTS."""
    call_ms, node_ms, most = draft
    profile = Profile(calls_ms={size: call_ms + node_ms * size for size in CALL_SIZES if size <= most})
    one_ms = profile.token_ms
    times = Times(step_ms, EXTRA * step_ms, one_ms, most, node_ms / one_ms)
    simulated = simulate(ranks, times, rtt_ms, replace(Plan(), form=Form.LINE))
    scored = forecast(profile, ranks.hits(1), link=Link(rtt_ms, step_ms))
    return scored.tokens_per_s, 1e3 * simulated.speed_up / step_ms


def main() -> None:
    """Prints a table for each step."""
    o = parser(
        __doc__,
        {
            "--temp": option("0.8", choices=("0.8", "0.0")),
            "--data": option(DATA, "directory of ranks_0.8.json and ranks_0.0.json", type=Path),
            "--step-ms": option([40.0, 100.0]),
            "--rtt-ms": option(list(ROUND_TRIPS_MS[:-1])),
        },
    ).parse_args()
    ranks, console, ratios = read_ranks(o.data / f"ranks_{o.temp}.json"), Console(), list[float]()
    for step_ms in o.step_ms:
        title = f"T {o.temp}, step {step_ms:g} ms: tokens/s, score / simulated (ratio), by round trip"
        table = figures_table(title, "draft", *(f"{rtt_ms:g} ms" for rtt_ms in o.rtt_ms), left=["draft"])
        found = {name: [rates(ranks, draft, step_ms, rtt_ms) for rtt_ms in o.rtt_ms] for name, draft in DRAFTS.items()}
        for name, row in found.items():
            table.add_row(name, *(f"{scored:.1f} / {played:.1f} ({scored / played:.2f})" for scored, played in row))
            ratios += [scored / played for scored, played in row]
        pairs = [
            [npu / cpu for npu, cpu in zip(*both, strict=True)] for both in zip(found[NPU], found[CPU], strict=True)
        ]
        table.add_row("NPU over CPU", *(f"{scored:.2f} / {played:.2f}" for scored, played in pairs), style="bold")
        console.print(table)
    console.print(f"ratios from {min(ratios):.2f} to {max(ratios):.2f}", highlight=False)


if __name__ == "__main__":
    main()
