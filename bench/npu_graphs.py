"""Measures the graphs of an NPU's draft by the nodes of a pass, on the path's emulation on the CPU.

    python -m bench.npu_graphs families [FAMILY ...]      # 12 minutes: does every family run, with 1, 4, 8, 16 nodes?
    python -m bench.npu_graphs cost [--bundle DIR]        # a minute: time to compile, memory, blobs, a pass

`families`: the exporter's own check of tiny INT8 models, with trees where a pass has several nodes. Default: all
families that docs/families.md has a draft for an NPU of. Exits 1 where one is refused, or wrong, at some size.

`cost`: of a random INT8 model of 100M parameters, or of a bundle's. Each size has a process of its own. Memory is that
of the process with its graphs less that before them, once it has run; the CPU keeps copies of the weights that an NPU
does not. Passes are a CPU's: they show what the emulation takes, and nothing of an NPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
from bench.report import TO_JSON, add_options, figures_table, option, parser, verdict
from rich.console import Console
from tools.families import measure_one, ways
from tools.tiny_sources import make_tiny_source

from outrider.export.check.advice import load_measured
from outrider.export.make.pipeline import export_model
from outrider.export.make.stage_store import StageStore
from outrider.export.recipes import ExportOptions
from outrider.models.bundle.manifest import StaticShapes
from outrider.models.runtimes.base import RuntimeOptions
from outrider.models.runtimes.openvino_npu import OpenVinoNpuRuntime

NODES: Final = (1, 4, 8, 16)
SIZES: Final[dict[str, Any]] = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
    "initializer_range": 0.03,  # a larger one makes weights that INT8 cannot hold
}
"""A Llama of 100M parameters, with 16,000 ids."""


def families(names: Sequence[str], console: Console, json_path: Path | None) -> int:
    """The table of families by nodes."""
    way = next(each for each in ways() if (each.role, each.device, each.resolved_precision) == ("draft", "npu", "int8"))
    stored = [cell for cell in load_measured().cells if cell.way == _way(way) and cell.outcome == "works"]
    table = figures_table("largest logit error, relative to FP32", "family", *map(str, NODES), left=("family",))
    missed: list[str] = []
    rows: dict[str, dict[int, str]] = {}
    with tempfile.TemporaryDirectory(prefix="outrider-npu-") as work:
        for family in names or [cell.family for cell in stored]:
            source = make_tiny_source(family, Path(work) / family)
            store = StageStore(Path(work) / "stages")
            row: dict[int, str] = {}
            for nodes in NODES:
                assert way.static_shapes is not None
                shapes = way.static_shapes.model_copy(update={"step_len": nodes})
                cell = measure_one(family, source, replace(way, static_shapes=shapes), Path(work), store)
                row[nodes] = f"{cell.error:.1g}" if cell.outcome == "works" else cell.outcome
                if cell.outcome != "works":
                    missed.append(f"{family} with {nodes} nodes: {cell.words}")
            store.release()
            rows[family] = row
            table.add_row(family, *row.values())
            print(family, *row.values(), file=sys.stderr, flush=True)
    console.print(table)
    return verdict(console, missed, json_path, {"families": rows})


def _way(options: ExportOptions) -> str:
    return f"{options.role} {options.device} {options.resolved_runtime} {options.resolved_precision}"


def cost(bundle: Path | None, threads: int, console: Console, json_path: Path | None) -> int:
    """The table of costs by nodes."""
    table = figures_table(
        "by nodes of a pass",
        "nodes",
        "compile, s",
        "from cache, s",
        "blobs, MB",
        "memory, MB",
        "pass, ms",
        "prompt, ms",
    )
    rows: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="outrider-npu-") as work:
        if bundle is None:
            source = make_tiny_source("llama", Path(work) / "llama", vocab_size=16_000, max_parameters=1 << 28, **SIZES)
            options = ExportOptions("draft", device="npu", static_shapes=StaticShapes())
            bundle = export_model(source, Path(work) / "bundle", options).path
        for nodes in NODES:
            cache = Path(work) / f"cache-{nodes}"
            told = [_child(bundle, nodes, threads, cache) for _ in range(2)]
            row = told[0] | {"cached_s": told[1]["compile_s"]}
            rows[nodes] = row
            names = ("compile_s", "cached_s", "blobs_mb", "memory_mb", "pass_ms", "prompt_ms")
            table.add_row(str(nodes), *(f"{row[name]:.1f}" for name in names))
    console.print(table)
    return verdict(console, [], json_path, {"nodes": rows, "threads": threads})


def _child(bundle: Path, nodes: int, threads: int, cache: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.npu_graphs", "one", str(bundle), str(nodes), str(threads), str(cache)]
    found: dict[str, float] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)
    return found


def one(bundle: Path, nodes: int, threads: int, cache: Path) -> None:
    """Measures one size, in this process; prints JSON."""
    shapes = StaticShapes(step_len=nodes)
    options = RuntimeOptions(
        device="NPU", num_threads=threads, static_shapes=shapes, emulate_npu=True, cache_dir=str(cache)
    )
    before, began = psutil.Process().memory_info().rss, time.perf_counter()
    runtime = OpenVinoNpuRuntime(bundle, options)
    compile_s = time.perf_counter() - began
    rng = np.random.default_rng(0)
    text = rng.integers(0, runtime.limits.vocab_size, 600).tolist()
    runtime.extend(text[:512])
    prompt = runtime._prompt or runtime._step
    times = {"prompt": list[float](), "pass": list[float]()}
    for repeat in range(12):
        runtime.truncate(256)
        began = time.perf_counter()
        runtime.extend(text[256 : 256 + prompt.num_new])
        times["prompt"].append(time.perf_counter() - began)
        nodes_ = [[(repeat * nodes + node) % runtime.limits.vocab_size] for node in range(nodes)]
        began = time.perf_counter()
        if nodes > 1:
            runtime.extend_branches(nodes_)
        else:
            runtime.extend(nodes_[0])
        times["pass"].append(time.perf_counter() - began)
    memory = psutil.Process().memory_info().rss - before
    figures = {
        "compile_s": compile_s,
        "memory_mb": memory / 1e6,
        "blobs_mb": sum(path.stat().st_size for path in cache.iterdir()) / 1e6,
        "pass_ms": float(np.median(times["pass"][2:])) * 1e3,
        "prompt_ms": float(np.median(times["prompt"][2:])) * 1e3,
    }
    print(json.dumps(figures))


def main(given: Sequence[str] | None = None) -> int:
    """The command."""
    arguments = list(sys.argv[1:] if given is None else given)
    if arguments[:1] == ["one"]:
        one(Path(arguments[1]), int(arguments[2]), int(arguments[3]), Path(arguments[4]))
        return 0
    cli = parser(__doc__, {})
    kinds = cli.add_subparsers(dest="kind", required=True)
    of_families, of_cost = kinds.add_parser("families"), kinds.add_parser("cost")
    of_families.add_argument("families", nargs="*", metavar="FAMILY")
    of_cost.add_argument("--bundle", type=Path)
    add_options(of_cost, {"--threads": option(2)})
    for each in (of_families, of_cost):
        add_options(each, TO_JSON)
    options = cli.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 120)
    if options.kind == "families":
        return families(options.families, console, options.json)
    return cost(options.bundle, options.threads, console, options.json)


if __name__ == "__main__":
    sys.exit(main())
