"""Measures what our OpenVINO runtimes add to the bare infer: medians, per call, one thread.

    taskset -c 0 python bench/runtime_overhead.py DIRECTORY_WITH_THE_IR

Each call is followed by a bare `infer` of the same infer request, which repeats the same step on the same tensors; the
two alternate, so a busy machine slows both. The difference is the cost of laying out, checking and binding.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from outrider.models.runtimes.base import RuntimeOptions, SequenceSlice
from outrider.models.runtimes.openvino_paged import OpenVinoPagedRuntime
from outrider.models.runtimes.openvino_sequence import OpenVinoSequenceRuntime


def main(
    model: Annotated[Path, typer.Argument(help="directory of an OpenVINO export")],
    context: Annotated[int, typer.Option(help="tokens already in the cache")] = 128,
    repeats: Annotated[int, typer.Option(help="calls measured of each kind")] = 500,
) -> None:
    """Measures the sequence runtime (1 and 5 tokens) and the batch runtime (1, 4, 16 sequences of 1 and 5 tokens)."""
    options = RuntimeOptions(num_threads=1)
    table = Table("runtime", "sequences", "tokens each", "call ms", "bare infer ms", "overhead us", title=str(model))

    sequence = OpenVinoSequenceRuntime(model, options)
    sequence.extend([1] * context)
    for num_tokens in (1, 5):
        tokens = list(range(num_tokens))

        def extend(tokens: list[int] = tokens) -> None:
            sequence.truncate(context)
            sequence.extend(tokens)

        _add_row(table, "sequence", 1, num_tokens, extend, sequence._shared.request, repeats)

    batch_runtime = OpenVinoPagedRuntime(model, options)
    per_sequence = -(-(context + 5) // batch_runtime.block_size)
    tables = [list(range(b * per_sequence, (b + 1) * per_sequence)) for b in range(16)]
    batch_runtime.forward([SequenceSlice([1] * context, 0, blocks, 0) for blocks in tables])
    for num_sequences in (1, 4, 16):
        for num_tokens in (1, 5):
            tokens = list(range(num_tokens))
            batch = [SequenceSlice(tokens, context, blocks, num_tokens) for blocks in tables[:num_sequences]]

            def forward(batch: list[SequenceSlice] = batch) -> None:
                batch_runtime.forward(batch)

            _add_row(table, "batch", num_sequences, num_tokens, forward, batch_runtime._request, repeats)
    Console().print(table)


def _add_row(
    table: Table, name: str, sequences: int, tokens: int, call: Callable[[], None], request: Any, repeats: int
) -> None:
    calls, bare = [], []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        called = time.perf_counter()
        request.infer(share_outputs=True)
        calls.append((called - started) * 1e3)
        bare.append((time.perf_counter() - called) * 1e3)
    overhead = (median(calls) - median(bare)) * 1e3
    table.add_row(name, str(sequences), str(tokens), f"{median(calls):.3f}", f"{median(bare):.3f}", f"{overhead:.0f}")


if __name__ == "__main__":
    typer.run(main)
