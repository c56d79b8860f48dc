"""Measures picks at a large vocabulary, by kind of truncation: one row in numpy, a batch of rows in torch.

    python bench/pick.py

Rows of logits follow a Zipf-like law, peaked like a language model's; `--flat` takes the hardest case instead, a
standard normal times 3, in which thousands of tokens survive. A batch is measured once per kind, on one thread in a
process of its own: its CPU time, and how far the process's peak memory rises above the logits.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from importlib.util import find_spec
from multiprocessing.connection import Connection
from statistics import median
from typing import Annotated

import numpy as np
import psutil
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from outrider.models.picks.sampling import SamplingParams, pick

KINDS = {
    "greedy": SamplingParams(),
    "temperature 0.8": SamplingParams(temperature=0.8),
    "top-k 50": SamplingParams(temperature=0.8, top_k=50),
    "top-p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "min-p 0.05": SamplingParams(temperature=0.8, min_p=0.05),
    "top-k 50, top-p 0.9": SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
}

BATCHES = {
    **{name: [params] for name, params in KINDS.items()},
    "half greedy, half top-p 0.9": [KINDS["greedy"], KINDS["top-p 0.9"]],
}
MAX_BATCH_MIB = 256.0


def make_rows(count: int, vocab: int, *, flat: bool) -> NDArray[np.float32]:
    """Rows of logits, float32 [count, vocab]."""
    rng = np.random.default_rng(0)
    if flat:
        return rng.standard_normal((count, vocab), dtype=np.float32) * 3
    ranks = np.log(np.arange(1, vocab + 1, dtype=np.float32))
    rows = np.empty((count, vocab), np.float32)
    for row in rows:
        row[:] = rng.permutation(-1.6 * ranks + rng.standard_normal(vocab, dtype=np.float32))
    return rows


def measure_batch(name: str, count: int, vocab: int, flat: bool, answers: Connection) -> None:
    """In a process of its own: sends the CPU seconds and the MiB of one batch."""
    import resource

    import torch

    from outrider.models.picks.sampling_torch import pick_rows

    torch.set_num_threads(1)
    logits = torch.from_numpy(make_rows(count, vocab, flat=flat))
    kinds = BATCHES[name]
    params = [kinds[i % len(kinds)] for i in range(count)]
    positions = list(range(count))
    pick_rows(logits[:2, :100], params[:2], positions[:2])  # loads what torch loads on first use
    before = psutil.Process().memory_info().rss
    started = time.process_time()
    pick_rows(logits, params, positions)
    took_s = time.process_time() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    answers.send((took_s, (peak - before) / 2**20))


def measure_batches(count: int, vocab: int, *, flat: bool) -> tuple[Table, float]:
    """The table of all kinds of batches, and the most MiB of any."""
    table = Table("kind", "CPU ms per batch", "peak MiB above the logits", title=f"{count} rows of {vocab:,} in torch")
    most = 0.0
    context = multiprocessing.get_context("spawn")
    for name in BATCHES:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=measure_batch, args=(name, count, vocab, flat, sender))
        process.start()
        sender.close()
        took_s, mib = receiver.recv()
        process.join()
        most = max(most, mib)
        table.add_row(name, f"{took_s * 1e3:,.0f}", f"{mib:,.0f}")
    return table, most


def main(
    vocab: Annotated[int, typer.Option(help="columns of a row")] = 152_000,
    repeats: Annotated[int, typer.Option(help="picks measured of each kind")] = 200,
    flat: Annotated[bool, typer.Option(help="the hardest rows instead of peaked ones")] = False,
    batch: Annotated[int, typer.Option(help="rows of a batch in torch; 0 leaves batches out")] = 256,
) -> None:
    """Measures and prints; exits 1 when a truncated pick takes 1 ms or more, or a batch more than 256 MiB."""
    rows = make_rows(8, vocab, flat=flat)
    table = Table(
        "kind", "ms per row (median)", title=f"one pick of {vocab:,} tokens, {'flat' if flat else 'peaked'} rows"
    )
    slowest = 0.0
    for name, params in KINDS.items():
        took = []
        for i in range(repeats):
            started = time.perf_counter()
            pick(rows[i % len(rows)], params, i)
            took.append((time.perf_counter() - started) * 1e3)
        table.add_row(name, f"{median(took):.3f}")
        if params.top_k or params.top_p < 1.0:
            slowest = max(slowest, median(took))
    Console().print(table)
    most_mib = 0.0
    if batch and sys.platform != "win32" and find_spec("torch") is not None:
        table, most_mib = measure_batches(batch, vocab, flat=flat)
        Console().print(table)
    if slowest >= 1.0 or most_mib > MAX_BATCH_MIB:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
