"""Runs every family of models that the torch runtime serves through its kernels, beside SDPA on the CPU.

    python -m bench.gpu.families [--family NAME ...] [--device cuda]

Tiny models with random weights, loaded as for `--exact bitwise`, which tries rows in company (`bitwise_check`). On the
CPU the kernels run on Triton's interpreter, which takes some seconds a family. Exits 1 where a logit of rows of
standard deviation 1 is off by more than 1e-3, or where a row's bits depend on its company. Families with attention of
their own are refused, and counted as right.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Annotated, Final
from unittest.mock import patch

import numpy as np
import typer
from numpy.typing import NDArray

if not any("cuda" in argument for argument in sys.argv):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported: the kernels run on the CPU
os.environ["ATEN_CPU_CAPABILITY"] = "default"  # else the last numbers of a tensor go another way than the others

from tests.interpreted import products_row_by_row
from tools.tiny_sources import make_tiny_model

from outrider.export.check.advice import load_measured
from outrider.models.errors import OutriderError
from outrider.models.runtimes import torch_paged, triton_attention
from outrider.models.runtimes.base import RuntimeOptions, SequenceSlice
from outrider.models.runtimes.torch_paged import TorchPagedRuntime

MOST: Final = 1e-3
VOCAB: Final = 96


def rows_of(runtime: TorchPagedRuntime) -> NDArray[np.float32]:
    """The rows of a text's last eight tokens, beside another text."""
    text = [int(token) for token in np.random.default_rng(0).integers(1, VOCAB, 24)]
    runtime.forward([SequenceSlice(text[:16], 0, [0], 1)])
    other = SequenceSlice([5, 6, 7], 0, [1], 1)
    return runtime.forward([other, SequenceSlice(text[16:], 16, [0], 8)])[1:].copy()


def outcome(family: str, directory: Path, device: str) -> tuple[str, bool]:
    """What came of it in words, and whether it is as it should be."""
    try:
        path = make_tiny_model(family, directory, vocab_size=VOCAB)
        with closing(TorchPagedRuntime(path, _options("cpu", is_bitwise=False))) as runtime:
            twin = rows_of(runtime)
    except OutriderError as error:
        return f"not served: {' '.join(str(error).split())[:90]}", False
    try:
        with (
            patch.object(torch_paged, "has_kernels", lambda device: True),
            products_row_by_row() if device == "cpu" else nullcontext(),
            patch.object(triton_attention, "TILE", 8) if device == "cpu" else nullcontext(),
            closing(TorchPagedRuntime(path, _options(device, is_bitwise=True))) as runtime,
        ):
            rows = rows_of(runtime)
    except OutriderError as error:
        words = str(error).removeprefix(f"the model in {path} ")
        return f"bitwise refused: it {words}", "attention of its own" in words
    off = float(np.abs(rows - twin).max() / max(1.0, float(twin.std())))
    return f"{off:.1e}", off < MOST


def _options(device: str, *, is_bitwise: bool) -> RuntimeOptions:
    return RuntimeOptions(
        device=device,
        kv_cache_bytes=1 << 26 if device.startswith("cuda") else 1 << 22,
        max_positions=4096,  # some configurations do not say
        is_batch_invariant=is_bitwise,
        properties={"dtype": "f32"},
    )


def main(
    family: Annotated[list[str] | None, typer.Option(help="repeat for several; default: all that torch serves")] = None,
    device: Annotated[str, typer.Option(help="of the kernels: cpu (interpreted) or cuda")] = "cpu",
) -> None:
    """Prints a line for each."""
    if device == "cpu":
        logging.getLogger("outrider").setLevel(logging.ERROR)  # that there are no CUDA graphs
    missed: list[str] = []
    with tempfile.TemporaryDirectory() as place:
        for name in family or _served():
            words, is_right = outcome(name, Path(place) / name, device)
            print(f"{name:24} {words}", flush=True)
            missed += [] if is_right else [name]
    print(f"missed: {', '.join(missed)}" if missed else "all as they should be")
    sys.exit(bool(missed))


def _served() -> list[str]:
    served = (each for each in load_measured().cells if (each.runtime, each.role) == ("torch", "target"))
    return list(dict.fromkeys(each.family for each in served if each.outcome == "works"))


if __name__ == "__main__":
    typer.run(main)
