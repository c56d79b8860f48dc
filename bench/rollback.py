"""Measures the cost of rolling back drafted tokens, in every draft runtime.

    python -m bench.rollback

At a context of 1,024 tokens and a few more, in turns: a step of one token, and a rollback of eight tokens followed by
such a step. The median of the differences is what the rollback costs, whether the runtime pays it at once or in the
next step; the call to `truncate` alone is shown too. Exits 1 if either is 0.2 ms or more.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from bench.draft_loop import SIZES, THREADS
from bench.report import write_json
from rich.console import Console
from rich.table import Table
from tools.tiny_sources import make_tiny_model, make_tiny_tokenizer

from outrider.export.check.runner import open_draft
from outrider.export.make.pipeline import export_model
from outrider.export.recipes import ExportOptions
from outrider.models.bundle.manifest import StaticShapes
from outrider.models.runtimes.base import SequenceRuntime

CONTEXT = 1024
NUM_ROLLED = 8
MOST_MS = 0.2
console = Console()

KINDS = {
    "openvino int8": ("qwen2", ExportOptions("draft", "int8", num_threads=THREADS)),
    "openvino on an emulated NPU": (
        "qwen2",
        ExportOptions(
            "draft", num_threads=THREADS, device="npu", static_shapes=StaticShapes(prompt_len=1024, response_len=512)
        ),
    ),
    "onnxruntime int8, shared buffer": ("qwen2", ExportOptions("draft", "int8", "onnxruntime", num_threads=THREADS)),
    "onnxruntime int8, torch's exporter": (
        "gpt_neox",
        ExportOptions("draft", "int8", "onnxruntime", num_threads=THREADS),
    ),
}
_SMALLER = ("num_key_value_heads", "tie_word_embeddings")
"""What only some families know."""


def measure(runtime: SequenceRuntime, runs: int) -> tuple[float, float, float, float]:
    """Medians in ms: a step, a rollback with the same step, the difference of two neighbours, `truncate` alone."""
    runtime.extend([(7 * i) % 250 + 2 for i in range(CONTEXT)])
    plain, rolled, alone = [], [], []
    for _ in range(runs + 5):
        runtime.extend([300])  # pays what the last rollback deferred
        began = time.perf_counter()
        runtime.extend([301])
        plain.append((time.perf_counter() - began) * 1e3)
        length = runtime.length
        for token in range(NUM_ROLLED):  # one by one, as in drafting
            runtime.extend([310 + token])
        began = time.perf_counter()
        runtime.truncate(length)
        cut = time.perf_counter()
        runtime.extend([302])
        rolled.append((time.perf_counter() - began) * 1e3)
        alone.append((cut - began) * 1e3)
    costs = [more - less for more, less in zip(rolled, plain, strict=True)]
    return median(plain[5:]), median(rolled[5:]), median(costs[5:]), median(alone[5:])


def main(
    runs: Annotated[int, typer.Option(min=5)] = 60,
    json_path: Annotated[Path | None, typer.Option("--json", help="write the figures here")] = None,
) -> None:
    """Measures; exits 1 if a rollback costs 0.2 ms or more."""
    table = Table("runtime", "step ms", "rollback and step ms", "rollback costs ms", "truncate alone ms")
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as root:
        for name, (family, options) in KINDS.items():
            source = Path(root) / family
            if not source.is_dir():
                make_tiny_tokenizer(source)
                known = {key: size for key, size in SIZES.items() if family == "qwen2" or key not in _SMALLER}
                make_tiny_model(family, source, max_parameters=1 << 30, **known)
            bundle = export_model(source, Path(root) / name, options)
            with closing(open_draft(bundle.model_file, options)) as runtime:
                step, rolled, cost, alone = measure(runtime, runs)
            found[name] = {"step_ms": step, "rolled_ms": rolled, "cost_ms": cost, "truncate_ms": alone}
            table.add_row(name, f"{step:.3f}", f"{rolled:.3f}", f"{cost:+.3f}", f"{alone:.4f}")
    console.print(table)
    write_json(json_path, {"context": CONTEXT, "rolled_back": NUM_ROLLED, "runtimes": found})
    is_fine = all(max(row["cost_ms"], row["truncate_ms"]) < MOST_MS for row in found.values())
    raise typer.Exit(0 if is_fine else 1)


if __name__ == "__main__":
    typer.run(main)
