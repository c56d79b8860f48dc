"""Measures 1, 4, 16 and 64 sessions at once on one verifier: cloud-only, drafts by each policy.

The verifiers are real processes on one core and take turns; all devices are one process on another core, with bare
sockets and with drafts that the real draft made beforehand (`bench.load_devices`), so that 64 devices cost no more
than they would cost the verifier's machine: nothing. Figures are taken while all sessions run: from the last session's
first commit to the first session's end.

  tokens/s       of all sessions
  p50, p95, p99  ms between two arrivals of text at one device, both in that time; tokens that arrive together are one
  passes/token   a pass is one session's part of a step; over the whole texts, the pass of the prompt left out

    python -m bench.load [--widen 1200] [--sessions 1 4 16 64] [--runs 3] [--json PATH]
    python -m bench.load --emulate 40 0.3

Each further token of a step costs some 2 ms of the widened target's 70 on one core: with many sessions it is bound by
arithmetic, and drafts stop paying; the output says where. `--emulate STEP_MS EXTRA_MS` has steps that sleep, for a
target bound by memory, as a large one on a GPU is. Exits 1 where a text differs from cloud-only's, or where, with an
extra of at most a fiftieth of the step, `auto` at 16 sessions takes more than half of cloud-only's passes, or has less
than 1.5 times its tokens/s.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Final

import numpy as np
from bench.emulated import VOCAB_SIZE, Emulation, emulated_cloud, emulated_draft, open_draft
from bench.load_devices import Device, Recorded, Session, run_sessions
from bench.pairs import BUNDLE_OPTIONS, make_requests, pair_of
from bench.report import TO_JSON, figures_table, option, parser, verdict
from rich.console import Console
from rich.table import Table

from outrider.edge.drafting.drafter import ModelDrafter
from outrider.edge.lab.cores import plan_cores, running_on
from outrider.edge.lab.laboratory import cloud_process
from outrider.edge.results import GenerationRequest

CLOUD_ONLY, STREAM, VERIFY, AUTO = "cloud-only", "stream", "verify", "auto"
MODES: Final = (CLOUD_ONLY, STREAM, VERIFY, AUTO)
SERVER_OF: Final = {CLOUD_ONLY: "auto", STREAM: "stream", VERIFY: "verify", AUTO: "auto"}
"""The policy of each mode's verifier; cloud-only sends no drafts, so the policy decides nothing."""
CONTEXT: Final = 96
BOUND_AT: Final = 16
MOST_PASSES, LEAST_SPEED_UP = 0.5, 1.5
MEMORY_BOUND: Final = 1 / 50
"""An extra token's share of a step, up to which the target counts as bound by memory."""
QUANTILES: Final = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Figures:
    """One run of one mode. passes: per token. gaps_ms: quantiles of the time between two arrivals at a device."""

    tokens_per_s: float
    passes: float
    gaps_ms: tuple[float, ...]

    @classmethod
    def of(cls, sessions: Sequence[Session]) -> Figures:
        """Raises ValueError where none waited for a token from one to the next while all sessions ran."""
        begin = max(session.commits[0][0] for session in sessions)
        end = min(session.commits[-1][0] for session in sessions)
        num_tokens = 0
        gaps: list[float] = []
        for session in sessions:
            before = session.commits[0][0]
            for at, tokens in session.commits[1:]:
                if begin < at <= end:
                    num_tokens += len(tokens)
                    if before >= begin:  # otherwise it has another session's prompt in it
                        gaps.append(1e3 * (at - before))
                before = at
        if not gaps:
            raise ValueError("no time in which all sessions run; raise --max-tokens")
        later = [tokens for session in sessions for _, tokens in session.commits[1:]]
        passes = len(later) / sum(map(len, later))
        # Values that were measured: the smallest that at least such a share of them does not exceed.
        quantiles = np.quantile(gaps, QUANTILES, method="inverted_cdf").tolist()
        return cls(num_tokens / (end - begin), passes, tuple(quantiles))


@dataclass(slots=True)
class Cell:
    """One mode at one number of sessions."""

    runs: list[Figures] = field(default_factory=list)
    num_different: int = 0

    @property
    def middle(self) -> Figures:
        """Medians of the runs."""
        gaps = zip(*(run.gaps_ms for run in self.runs), strict=True)
        return Figures(
            median(run.tokens_per_s for run in self.runs),
            median(run.passes for run in self.runs),
            tuple(map(median, gaps)),
        )


Cells = Mapping[int, Mapping[str, Cell]]


def speed_up(cells: Mapping[str, Cell], mode: str) -> float:
    """Median of the runs' ratios over cloud-only."""
    pairs = zip(cells[mode].runs, cells[CLOUD_ONLY].runs, strict=True)
    return median(mine.tokens_per_s / plain.tokens_per_s for mine, plain in pairs)


def misses(cells: Cells, is_memory_bound: bool) -> list[str]:
    """The bounds that are missed, in words."""
    told = [
        f"{count} sessions, {mode}: {cell.num_different} texts differ from cloud-only's; run bench.invariant"
        for count, modes in cells.items()
        for mode, cell in modes.items()
        if cell.num_different
    ]
    at = cells.get(BOUND_AT, {})
    if is_memory_bound and AUTO in at and CLOUD_ONLY in at:
        passes = at[AUTO].middle.passes / at[CLOUD_ONLY].middle.passes
        if passes > MOST_PASSES:
            told.append(f"{BOUND_AT} sessions: auto takes {passes:.2f} of cloud-only's passes, expected {MOST_PASSES}")
        faster = speed_up(at, AUTO)
        if faster < LEAST_SPEED_UP:
            told.append(f"{BOUND_AT} sessions: auto is {faster:.2f}x cloud-only, expected {LEAST_SPEED_UP}x")
    return told


# -- running -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Subject:
    """Verifiers by policy, the draft, and what was recorded of it by the number of an order."""

    urls: Mapping[str, str]
    drafter: ModelDrafter
    orders: Sequence[GenerationRequest]
    num_calls: int
    width: int
    texts: list[tuple[int, ...]] = field(default_factory=list)
    recorded: list[Recorded] = field(default_factory=list)

    def run(self, mode: str, count: int) -> list[Session]:
        """The first `count` orders at once."""
        devices: list[Device | None] = [None] * count
        if mode != CLOUD_ONLY:
            devices = [Device(each, self.num_calls, self.width) for each in self.recorded[:count]]
        return asyncio.run(run_sessions(self.urls[SERVER_OF[mode]], self.orders[:count], devices))

    def record(self) -> None:
        """Takes the target's texts from a run without drafts, and drafts along them."""
        self.texts = [session.text for session in self.run(CLOUD_ONLY, len(self.orders))]
        for order, text in zip(self.orders, self.texts, strict=True):
            self.recorded.append(Recorded(self.drafter, order, text, self.width))
            self.recorded[-1].record(self.num_calls)

    @property
    def num_drafted(self) -> int:
        """Guesses that the draft had to make so far."""
        return sum(each.num_drafted for each in self.recorded)


def measure(subject: Subject, counts: Sequence[int], modes: Sequence[str], num_runs: int) -> tuple[Cells, int]:
    """All modes in turn at each number of sessions, after a run of each that warms up (and drafts what was not
    recorded). Also returns how many guesses were drafted while the clock ran.
    """
    subject.record()
    cells = {count: {mode: Cell() for mode in modes} for count in counts}
    num_late = 0
    for index in range(num_runs + 1):
        for count in counts:
            for mode in modes if index % 2 else reversed(modes):
                before = subject.num_drafted
                sessions = subject.run(mode, count)
                if not index:
                    continue
                num_late += subject.num_drafted - before
                cell = cells[count][mode]
                cell.runs.append(Figures.of(sessions))
                cell.num_different += sum(a.text != b for a, b in zip(sessions, subject.texts, strict=False))
    return cells, num_late


def make_orders(options: argparse.Namespace, count: int) -> list[GenerationRequest]:
    """Held-out prompts, each with its own seed."""
    return [replace(each, prompt=each.prompt[:CONTEXT]) for each in make_requests(options, count)]


@contextmanager
def open_subject(options: argparse.Namespace) -> Iterator[Subject]:
    """Starts a verifier per policy, all on one core; this process stays on another."""
    cores, most = plan_cores(options.cores), max(options.sessions)
    policies = sorted({SERVER_OF[mode] for mode in (*options.modes, CLOUD_ONLY)})
    orders = make_orders(options, most)
    urls: dict[str, str] = {}
    with ExitStack() as stack:
        if options.emulate:
            step_ms, extra_ms = options.emulate
            emulation = Emulation(step_ms, extra_ms, 0.0, temperature=options.temperature)
            for policy in policies:
                given = ["--policy", policy, "--max-running", str(most), "--form", "line"]
                urls[policy] = stack.enter_context(emulated_cloud(emulation, cores.cloud, given))
            drafter = ModelDrafter(emulated_draft(emulation), VOCAB_SIZE)
        else:
            pair = pair_of(options)
            for policy in policies:
                given = ["--policy", policy, "--max-running", str(most), "--no-lookup"]
                urls[policy] = stack.enter_context(cloud_process(pair.target, cores.cloud, given))
            runtime, num_ids = open_draft(pair.draft)
            stack.callback(runtime.close)
            drafter = ModelDrafter(runtime, num_ids)
        stack.enter_context(running_on(cores.agent))
        yield Subject(urls, drafter, orders, options.calls, options.width)


def as_table(cells: Cells, title: str) -> Table:
    """Medians of the runs."""
    names = ("sessions", "mode", "tokens/s", "over cloud-only", "passes/token", "p50 ms", "p95 ms", "p99 ms")
    table = figures_table(title, *names, left=("mode",))
    for count, modes in cells.items():
        for mode, cell in modes.items():
            m = cell.middle
            over = f"{speed_up(modes, mode):.2f}x"
            gaps = (f"{gap:.0f}" for gap in m.gaps_ms)
            table.add_row(str(count), mode, f"{m.tokens_per_s:.1f}", over, f"{m.passes:.3f}", *gaps)
    return table


def options_of(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command's options."""
    cli = parser(
        __doc__,
        {
            "--widen": option(1200.0, "MB of the widened FP32 target; 0: as it is"),
            "--emulate": option(
                type=float, nargs=2, metavar=("STEP_MS", "EXTRA_MS"), help="no real target: sleeps for these times"
            ),
            **BUNDLE_OPTIONS,
            "--sessions": option([1, 4, 16, 64]),
            "--modes": option(list(MODES), choices=MODES),
            "--runs": option(3),
            "--max-tokens": option(64),
            "--calls": option(8, "nodes that a device expands after each commit"),
            "--width": option(4, "guesses per node; 1: a path"),
            "--temperature": option(0.8),
            **TO_JSON,
        },
    )
    options = cli.parse_args(given)
    if CLOUD_ONLY not in options.modes:
        cli.error(f"--modes needs {CLOUD_ONLY}: the others are compared with it")
    return options


def main(given: Sequence[str] | None = None) -> int:
    """The command."""
    options = options_of(given)
    console = Console(width=120)
    with open_subject(options) as subject:
        cells, num_late = measure(subject, options.sessions, options.modes, options.runs)
    step = f"{options.emulate[0]:g} ms a step, {options.emulate[1]:g} ms a token more" if options.emulate else ""
    target = f"target: {options.target}" if options.target else f"target of {options.widen:g} MB, FP32, one core"
    console.print(as_table(cells, step or target))
    found: dict[str, int | None] = {}
    for mode in options.modes:
        if mode != CLOUD_ONLY:
            pays = [count for count, modes in cells.items() if speed_up(modes, mode) >= 1.0]
            found[mode] = None if len(pays) == len(cells) else max(pays, default=0)
            console.print(f"{mode}: pays up to {max(pays, default=0)} of {max(cells)} sessions", highlight=False)
    console.print(f"{num_late} guesses were drafted while the clock ran", style="dim", highlight=False)
    is_memory_bound = bool(options.emulate) and options.emulate[1] <= MEMORY_BOUND * options.emulate[0]
    return verdict(
        console,
        misses(cells, is_memory_bound),
        options.json,
        {
            "widen_mb": None if options.emulate or options.target else options.widen,
            "target": str(options.target) if options.target else None,
            "emulated": options.emulate,
            "temperature": options.temperature,
            "crossover_sessions": found,
            "sessions": {
                count: {
                    mode: {
                        "speed_up": speed_up(modes, mode),
                        "runs": [asdict(run) for run in cell.runs],
                        "num_different": cell.num_different,
                    }
                    for mode, cell in modes.items()
                }
                for count, modes in cells.items()
            },
        },
    )


if __name__ == "__main__":
    sys.exit(main())
