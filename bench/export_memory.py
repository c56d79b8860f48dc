"""Measures the peak memory of an export, as a multiple of the model in FP32.

    python -m bench.export_memory

Each path exports a random Qwen2-type model in its own process, then a tiny one of the same type: the tiny one's peak is
that of imports, compilers and buffers, so the difference is the model's. Counts the resident set with its file mappings
(Linux' VmHWM), so a mapped weight file counts although the system could drop its pages. Exits 1 if any path holds the
model three times or more: at present that of an NPU emulated for the check, whose plugin compiles the model twice and
keeps more than three copies of its weights.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from bench.report import write_json
from rich.console import Console
from rich.table import Table
from tests.tiny_models import make_tiny_model, make_tiny_tokenizer

BOUND: Final = 3.0
PATHS: Final[tuple[tuple[str, ...], ...]] = (
    ("draft", "cpu", "openvino", "int8"),
    ("draft", "cpu", "openvino", "int4"),
    ("draft", "cpu", "openvino", "fp32"),
    ("draft", "gpu", "openvino", "fp16"),
    ("draft", "npu", "openvino", "int8"),
    ("draft", "cpu", "onnxruntime", "fp32"),
    ("draft", "cpu", "onnxruntime", "int8"),
    ("draft", "cpu", "onnxruntime", "int4"),
    ("target", "cpu", "openvino", "int8"),
    ("target", "gpu", "torch", "bf16"),
)
"""Role, device, runtime and precision, as `outrider.export.recipes` has them."""

_CHILD: Final = """
import json, pathlib, resource, sys
from outrider.export.make.pipeline import export_model
from outrider.export.recipes import ExportOptions

def resident(field):
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

def peak():
    return resident("VmHWM") + resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024

def tell(event):
    peaks.append(peak())
    stages.append(event.stage)

source, out, role, device, runtime, precision, threads = sys.argv[1:]
stages, peaks = [], []
options = ExportOptions(role, precision, runtime, device=device, num_threads=int(threads))
export_model(source, out, options, tell)
print(json.dumps(dict(zip(stages, [*peaks[1:], peak()]))))
"""


def main(
    megabytes: Annotated[float, typer.Option(help="size of the model in FP32")] = 400.0,
    only: Annotated[str | None, typer.Option(help="one path, such as draft/cpu/openvino/int8")] = None,
    threads: Annotated[int, typer.Option(help="for the check")] = 2,
    json_path: Annotated[Path | None, typer.Option("--json", help="also write the figures here")] = None,
) -> None:
    """Exports by each path and prints peaks."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as root:
        large, tiny = make_source(Path(root) / "large", megabytes), make_source(Path(root) / "tiny", 0.0)
        size = sum(path.stat().st_size for path in large.glob("*.safetensors"))
        table = Table(
            "path", "peak MB", "of these the model", "times its FP32", "reached in", title="memory of an export"
        )
        for path in PATHS:
            if only not in (None, "/".join(path)):
                continue
            peaks, base = peaks_of(large, path, threads), peaks_of(tiny, path, threads)
            held = {stage: peaks[stage] - base[stage] for stage in peaks}
            worst = max(held, key=lambda stage: held[stage])
            times = held[worst] / size
            rows.append({"path": path, "fp32_bytes": size, "peaks": peaks, "tiny_peaks": base, "times": times})
            colour = "red" if times >= BOUND else "green"
            figures = (f"{max(peaks.values()) / 1e6:,.0f}", f"{held[worst] / 1e6:,.0f}")
            table.add_row("/".join(path), *figures, f"[{colour}]{times:.2f}[/{colour}]", worst)
    Console().print(table, f"the model in FP32: {size / 1e6:,.0f} MB; bound: {BOUND:g}")
    write_json(json_path, {"bound": BOUND, "paths": rows})
    if not rows or any(row["times"] >= BOUND for row in rows):
        raise typer.Exit(1)


def make_source(directory: Path, megabytes: float) -> Path:
    """A random Qwen2-type model of about this many megabytes in FP32; a tiny one for 0."""
    vocab_size = 16_384 if megabytes else 320
    hidden = 768 if megabytes else 32
    layers = max(1, round((megabytes * 1e6 / 4 - 2 * vocab_size * hidden) / (12 * hidden * hidden))) if megabytes else 1
    make_tiny_tokenizer(directory)
    return make_tiny_model(
        "qwen2",
        directory,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=hidden * 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 16 if hidden < 64 else hidden // 64,
        num_key_value_heads=hidden // 16 if hidden < 64 else hidden // 64,
        initializer_range=0.15 if hidden < 64 else 0.03,
        max_parameters=1 << 30,
    )


def peaks_of(source: Path, path: tuple[str, ...], threads: int) -> dict[str, int]:
    """Peak bytes by the end of each stage of exporting `source` by `path`, in its own process and cache."""
    with tempfile.TemporaryDirectory() as place:
        environment = os.environ | {"OUTRIDER_CACHE": f"{place}/cache", "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-W", "ignore", "-c", _CHILD, str(source), f"{place}/out", *path, str(threads)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{'/'.join(path)} failed:\n{done.stderr[-3000:]}")
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    typer.run(main)
