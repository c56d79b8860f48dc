"""Computes what drafts that branch can reach over a network, from measured ranks and given times.

    python -m bench.simulate_trees --temp 0.8 --step-ms 40 --extra-ms 1 --draft-ms 1
    python -m bench.simulate_trees --bytes 50 100 150 250 none --variants

Speed-ups over cloud-only streaming, by round trip. `path`: one guess per position, today's drafts. `line`: alternatives
are pending, one path is verified. `tree`: any part of the tree is verified (tree attention). Beside them the same draft
beside the target, with no network. --bytes adds the curve of bytes sent per token against speed-up, --variants what
single changes of the plan do. Seeds are fixed: equal options give equal tables. bench.ranks makes the data.

Beside the target, draft and target take turns: with `k` drafted tokens a round takes
step_ms + (extra_ms + draft_ms) * k.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from bench.rank_files import read_ranks
from bench.report import option, parser

from outrider.export.report.simulation.ranks import Ranks
from outrider.export.report.simulation.trees import BYTES_PER_TOKEN, Outcome, path, simulate
from outrider.export.report.simulation.world import Form, Plan, Times

DATA: Final = Path(__file__).parent / "data"
ROUND_TRIPS_MS: Final = (0.0, 10.0, 25.0, 50.0, 100.0, 200.0)

MOST_DRAFTED: Final = 24
FLOORS: Final = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4)
"""How likely a path must be for the draft to go on: the best of these is taken."""

_REPEATS: Final = 20  # how often the texts are played, so that rounds begin at every place of them

Play = Callable[[float, Plan], Outcome]
"""Simulates a plan at a round trip in ms."""


@dataclass(frozen=True, slots=True)
class Beside:
    """Speed-ups over plain steps. fixed: at the best fixed depth, `depth`, for independent tokens. by_gap: a round
    drafts while its path is likely to be accepted.
    """

    fixed: float
    depth: int
    by_gap: float


def beside(ranks: Ranks, times: Times) -> Beside:
    """What the draft of these ranks gains beside a target of these times; one node per draft call."""
    alpha = ranks.hits(1)

    def fixed(depth: int) -> float:
        tokens = sum(alpha**accepted for accepted in range(depth + 1))
        return tokens * times.step_ms / (times.step_ms + (times.extra_ms + times.draft_ms) * depth)

    depth = max(range(1, MOST_DRAFTED + 1), key=fixed)
    return Beside(fixed(depth), depth, max(_by_gap(ranks, times, floor) for floor in FLOORS))


def _by_gap(ranks: Ranks, times: Times, floor: float) -> float:
    """Speed-up where a round drafts at least once, and verifies what is likelier than `floor` to be reached.

    The gap of a guess is known after its draft call, so the call that ends a round is paid for too.
    """
    now_ms, place, num_tokens = 0.0, 0, _REPEATS * len(ranks.picked)
    while place < num_tokens:
        reached, num_drafted, num_kept = 1.0, 0, 0
        while num_drafted < MOST_DRAFTED and (not num_kept or reached >= floor):
            reached *= ranks.chances[(place + num_drafted) % len(ranks.picked)][0]
            num_drafted += 1
            if num_drafted == 1 or reached >= floor:
                num_kept = num_drafted
        accepted = 0
        while accepted < num_kept and ranks.picked[(place + accepted) % len(ranks.picked)].rank == 0:
            accepted += 1
        now_ms += times.step_ms + times.extra_ms * num_kept + times.draft_ms * num_drafted
        place += accepted + 1
    return place * times.step_ms / now_ms


def plans(plan: Plan) -> dict[str, Plan]:
    """The forms of one plan, by name."""
    return {"path": path(plan), "line": replace(plan, form=Form.LINE), "tree": replace(plan, form=Form.TREE)}


def variants(plan: Plan) -> dict[str, Plan]:
    """The plan with one change each, by name."""
    changes: dict[str, dict[str, object]] = {
        "no budget of bytes": {"bytes_per_token": None},
    }
    changes |= {f"width {width}": {"width": width} for width in (2, 3, 4, 6, 8)}
    changes |= {f"floor {floor:g}": {"floor": floor} for floor in (0.002, 0.004, 0.01, 0.02, 0.05)}
    return {name: replace(plan, **change) for name, change in changes.items()}  # type: ignore[arg-type]


def print_forms(play: Play, round_trips_ms: Sequence[float], plan: Plan) -> None:
    """The table of the three forms."""
    print(" RTT    path    line    tree | tree: passes verified drafted   sent bytes up messages, per token")
    for rtt_ms in round_trips_ms:
        cells = [play(rtt_ms, one) for one in plans(plan).values()]
        tree = cells[-1]
        print(
            f"{rtt_ms:4g} "
            + " ".join(f"{cell.speed_up:6.2f}x" for cell in cells)
            + f" |       {tree.passes:6.2f} {tree.verified:8.1f} {tree.drafted:7.1f} {tree.sent:6.1f} "
            f"{tree.bytes_up:8.0f} {tree.messages:8.1f}"
        )


def print_bytes(play: Play, round_trips_ms: Sequence[float], plan: Plan, budgets: Sequence[float | None]) -> None:
    """Speed-up and bytes per token under each budget, for line and tree."""
    for form in Form:
        print(f"{form}: speed-up (bytes up per token) by budget of bytes per token")
        print(" RTT " + " ".join(f"{'none' if budget is None else f'{budget:g}':>12}" for budget in budgets))
        for rtt_ms in round_trips_ms:
            cells = [play(rtt_ms, replace(plan, form=form, bytes_per_token=budget)) for budget in budgets]
            print(f"{rtt_ms:4g} " + " ".join(f"{cell.speed_up:6.2f}x ({cell.bytes_up:3.0f})" for cell in cells))


def print_variants(play: Play, round_trips_ms: Sequence[float], plan: Plan) -> None:
    """What each change does to the speed-up, in per cent, and the bytes up per token, under the default budget."""
    for form in Form:
        base = replace(plan, form=form, bytes_per_token=BYTES_PER_TOKEN)
        found = [play(rtt_ms, base) for rtt_ms in round_trips_ms]
        print(f"{form}: change of speed-up (bytes up per token), budget {BYTES_PER_TOKEN:g}")
        print(f"{'RTT':>28} " + " ".join(f"{rtt_ms:12g}" for rtt_ms in round_trips_ms))
        print(f"{'as it is':>28} " + " ".join(f"{one.speed_up:6.2f}x ({one.bytes_up:3.0f})" for one in found))
        for name, changed in variants(base).items():
            cells = [play(rtt_ms, changed) for rtt_ms in round_trips_ms]
            print(f"{name:>28} " + " ".join(map(_changed, found, cells)), flush=True)


def _changed(before: Outcome, after: Outcome) -> str:
    return f"{100 * (after.speed_up / before.speed_up - 1):+6.1f}% ({after.bytes_up:3.0f})"


def _budget(text: str) -> float | None:
    return None if text == "none" else float(text)


def main() -> None:
    """Prints the tables."""
    plan = Plan()
    o = parser(
        __doc__,
        {
            "--temp": option("0.8", choices=("0.8", "0.0")),
            "--data": option(DATA, "directory of ranks_0.8.json and ranks_0.0.json", type=Path),
            "--step-ms": option(40.0),
            "--extra-ms": option(1.0),
            "--draft-ms": option(1.0),
            "--nodes-per-call": option(1, "nodes that one draft call expands"),
            "--call-extra": option(0.1, "what a further node of a call costs, of a call"),
            "--rtt-ms": option(list(ROUND_TRIPS_MS)),
            "--tokens": option(400),
            "--seeds": option(3),
            "--width": option(plan.width, "guesses per position"),
            "--budget": option(plan.budget, "nodes of a tree at most"),
            "--floor": option(plan.floor, "no node is expanded that is less likely"),
            "--bytes": option(type=_budget, nargs="+", help="budgets of bytes per token, or none: prints the curve"),
            "--variants": option(False, "prints what single changes do"),
        },
    ).parse_args()
    ranks = read_ranks(o.data / f"ranks_{o.temp}.json")
    times = Times(o.step_ms, o.extra_ms, o.draft_ms, o.nodes_per_call, o.call_extra)
    plan = Plan(width=o.width, budget=o.budget, floor=o.floor)
    near = beside(ranks, times)
    print(
        f"T {o.temp}, step {o.step_ms:g} + {o.extra_ms:g} ms per verified token, draft {o.draft_ms:g} ms for up to "
        f"{o.nodes_per_call} nodes; acceptance {ranks.hits(1):.3f}; draft beside the target {near.fixed:.2f}x "
        f"(depth {near.depth}), depth by gaps {near.by_gap:.2f}x"
    )
    play = partial(simulate, ranks, times, num_tokens=o.tokens, seeds=range(o.seeds))
    print_forms(play, o.rtt_ms, plan)
    if o.bytes:
        print_bytes(play, o.rtt_ms, plan, o.bytes)
    if o.variants:
        print_variants(play, o.rtt_ms, plan)


if __name__ == "__main__":
    main()
