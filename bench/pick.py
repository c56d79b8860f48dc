"""Measures one pick at a large vocabulary, in ms, by kind of truncation, on one core.

    python bench/pick.py

Rows of logits follow a Zipf-like law, peaked like a language model's; `--flat` takes the hardest case instead, a
standard normal times 3, in which thousands of tokens survive.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from outrider.models.sampling import SamplingParams, pick

KINDS = {
    "greedy": SamplingParams(),
    "temperature 0.8": SamplingParams(temperature=0.8),
    "top-k 50": SamplingParams(temperature=0.8, top_k=50),
    "top-p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "min-p 0.05": SamplingParams(temperature=0.8, min_p=0.05),
    "top-k 50, top-p 0.9": SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
}


def main(
    vocab: Annotated[int, typer.Option(help="columns of a row")] = 152_000,
    repeats: Annotated[int, typer.Option(help="picks measured of each kind")] = 200,
    flat: Annotated[bool, typer.Option(help="the hardest rows instead of peaked ones")] = False,
) -> None:
    """Measures and prints medians; exits 1 when a truncated pick takes 1 ms or more."""
    rng = np.random.default_rng(0)
    if flat:
        rows = rng.standard_normal((8, vocab), dtype=np.float32) * 3
    else:
        ranks = np.log(np.arange(1, vocab + 1, dtype=np.float32))
        rows = np.stack(
            [rng.permutation(-1.6 * ranks + rng.standard_normal(vocab, dtype=np.float32)) for _ in range(8)]
        )
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
    if slowest >= 1.0:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
