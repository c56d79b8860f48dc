"""Times a tree drafted by several nodes a call against the same tree drafted one node a call.

    python -m bench.branches [--calls 60] [--beside memory] [--json PATH]

The tree grows best first: a node's three candidates have random chances, and the nodes likeliest to be reached are
expanded next, 1, 2, 4 or 8 a call, until 48 are. `rollback` runs the nodes of eight one after the other, in the order
that shares most, by cutting back to the fork. All contestants of a model run in turns, each in its own runtime. Models:
the reference draft in INT8, and the same widened to 160 MB in FP32, whose steps take a few ms.

With --beside another process works on the other core all the while: `compute` adds numbers that stay in its cache,
`memory` reads 700 MB again and again, as a target's step does, and `target` runs steps of the reference target widened
to 700 MB. The difference says what a target beside the draft costs it by sharing memory alone.
"""

from __future__ import annotations

import heapq
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from enum import StrEnum
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Final

import numpy as np
import typer
from bench.report import write_json
from rich.console import Console
from rich.table import Table

from outrider.edge.lab.child_process import child_process
from outrider.edge.lab.cores import Cores, plan_cores, running_on
from outrider.export.make.pipeline import export_model
from outrider.export.make.reference_pair import export_reference_pair
from outrider.export.recipes import ExportOptions, RuntimeName
from outrider.export.source.widen import widen
from outrider.models.bundle.bundle import Bundle
from outrider.models.runtimes import open_sequence_runtime
from outrider.models.runtimes.base import BranchingRuntime, RuntimeOptions, SequenceRuntime
from outrider.reference import draft_dir

CONTEXTS: Final = (100, 800)
WIDTHS: Final = (1, 2, 4, 8)
NUM_NODES: Final = 48
NUM_CANDIDATES: Final = 3
WIDENED_MB: Final = 160
LOAD_MB: Final = 700.0
READY: Final = "ready"
RUNTIMES: Final[tuple[RuntimeName, ...]] = ("openvino", "onnxruntime")


class Load(StrEnum):
    """What runs on the other core."""

    NOTHING = "nothing"
    COMPUTE = "compute"
    MEMORY = "memory"
    TARGET = "target"


def work(load: Load) -> None:
    """Does it, for ever."""
    step: Callable[[], object]
    if load is Load.TARGET:
        bundle = Bundle.open(export_reference_pair(widen_mb=LOAD_MB).target)
        runtime = open_sequence_runtime("openvino", bundle.model_file, RuntimeOptions(num_threads=1))
        step = partial(_one_step, runtime)
    else:
        step = np.ones(int((LOAD_MB if load is Load.MEMORY else LOAD_MB / 1e5) * 1e6 / 4), np.float32).sum
    step()
    print(READY, flush=True)
    while True:
        step()


def _one_step(runtime: SequenceRuntime) -> None:
    runtime.truncate(0)
    runtime.extend([2])


def grow(rng: random.Random, width: int, vocab_size: int) -> Iterator[list[tuple[int, ...]]]:
    """The calls of one tree: `width` nodes each, as the tokens that lead to them."""
    waiting: list[tuple[float, tuple[int, ...]]] = [(-1.0, (rng.randrange(vocab_size),))]
    num_expanded = 0
    while num_expanded < NUM_NODES:
        nodes = [heapq.heappop(waiting) for _ in range(min(width, len(waiting), NUM_NODES - num_expanded))]
        yield [path for _, path in nodes]
        num_expanded += len(nodes)
        for survival, path in nodes:
            first = rng.betavariate(4.0, 1.2)
            for rank in range(NUM_CANDIDATES):
                chance = first if rank == 0 else (1.0 - first) * 0.5**rank
                heapq.heappush(waiting, (survival * chance, (*path, rng.randrange(vocab_size))))


def roll_back(runtime: SequenceRuntime, base: int, last: Sequence[int], path: Sequence[int]) -> None:
    """Runs `path` behind the first `base` tokens; the sequence ends in `last` now."""
    shared = 0
    while shared < min(len(last), len(path) - 1) and last[shared] == path[shared]:
        shared += 1
    runtime.truncate(base + shared)
    runtime.extend(path[shared:])


def time_tree(runtime: SequenceRuntime, context: int, width: int, seed: int, *, rolls_back: bool) -> list[float]:
    """Milliseconds of each full call of `width` nodes of one tree."""
    runtime.truncate(context - 1)
    runtime.extend([2])
    spent = []
    last: Sequence[int] = ()
    for paths in grow(random.Random(seed), width, runtime.limits.vocab_size):
        began = time.perf_counter()
        if rolls_back:
            for path in sorted(paths):
                roll_back(runtime, context, last, path)
                last = path
        else:
            assert isinstance(runtime, BranchingRuntime)
            runtime.extend_branches(paths)
        if len(paths) == width:
            spent.append((time.perf_counter() - began) * 1e3)
    return spent


def measure(bundle: Bundle, kind: RuntimeName, context: int, calls: int, threads: int) -> dict[str, float]:
    """Median milliseconds per call, by contestant."""
    options = RuntimeOptions(num_threads=threads)
    found: dict[str, list[float]] = {}
    order = random.Random(0)
    with (
        closing(open_sequence_runtime(kind, bundle.model_file, options)) as rolled,
        closing(open_sequence_runtime(kind, bundle.model_file, options)) as branched,
    ):
        prompt = [(7 * i) % 250 + 2 for i in range(context)]
        for runtime in (rolled, branched):
            runtime.extend(prompt)
        contestants = [("rollback, 8 nodes", 8)]
        if isinstance(branched, BranchingRuntime):
            contestants += [(f"branches, {width}", width) for width in WIDTHS]
        seed = 0
        while min((len(times) for times in found.values()), default=0) < calls + 2:
            for name, width in order.sample(contestants, len(contestants)):
                rolls_back = name.startswith("rollback")
                runtime = rolled if rolls_back else branched
                found.setdefault(name, []).extend(time_tree(runtime, context, width, seed, rolls_back=rolls_back))
            seed += 1
    return {name: median(times[2:]) for name, times in found.items()}


def main(
    calls: Annotated[int, typer.Option(min=5, help="calls of each kind, at least")] = 60,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    beside: Annotated[
        list[Load] | None, typer.Option(help="runs on the other core; repeat for several, in turn")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="write the figures here")] = None,
    load: Annotated[Load | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measures and prints."""
    if load is not None:
        return work(load)
    loads, cores = beside or [Load.NOTHING], plan_cores()
    if beside and threads > 1:
        raise typer.BadParameter("--beside leaves the draft one core; add --threads 1")
    console = Console(width=None if sys.stdout.isatty() else 140)
    heads = (
        "draft",
        "runtime",
        "context",
        "beside",
        "ms: 8 by rollback",
        *(f"{n} a call" for n in WIDTHS),
        "gain of 8",
    )
    table = Table(*heads)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as root, running_on(cores.agent if beside else None):
        widen(draft_dir(), Path(root) / "widened", WIDENED_MB)
        for name, source in (("reference", draft_dir()), ("widened", Path(root) / "widened")):
            for kind in RUNTIMES:
                bundle = export_model(source, Path(root) / f"{name}-{kind}", ExportOptions("draft", "int8", kind))
                for context, other in product(CONTEXTS, loads):
                    with _running(other, cores.cloud):
                        ms = measure(bundle, kind, context, calls, threads)
                    rolled, branches = ms["rollback, 8 nodes"], [ms.get(f"branches, {n}") for n in WIDTHS]
                    gain = f"{rolled / branches[-1]:.2f}" if branches[-1] else "-"
                    shown = ["-" if each is None else f"{each:.2f}" for each in branches]
                    table.add_row(name, kind, str(context), other, f"{rolled:.2f}", *shown, gain)
                    rows.append({"draft": name, "runtime": kind, "context": context, "beside": other, "ms": ms})
    console.print(table)
    write_json(json_path, {"threads": threads, "nodes": NUM_NODES, "found": rows})


@contextmanager
def _running(load: Load, cores: Cores) -> Iterator[None]:
    if load is Load.NOTHING:
        yield
        return
    with child_process(["-m", "bench.branches", "--load", load], ready_prefix=READY, cores=cores):
        yield


if __name__ == "__main__":
    typer.run(main)
