"""Measures the engine on the widened target, in process, on one core: what batching gives, and what verify mode saves.

    python bench/engine_throughput.py [--widen 1200]

First table: tokens per second of 1, 4 and 16 concurrent target-only sequences, over those of one; the engine beside
the bare runtime running the same batches. Second: 16 sequences with the reference draft answering every commit at once
with a path, as `bench.many_sessions` has it, in each policy: target passes per token, tokens per pass.
"""

from __future__ import annotations

import os
import time
from statistics import median
from typing import Annotated

import typer
from bench.load import CONTEXT, make_orders
from bench.many_sessions import run
from rich.console import Console
from rich.table import Table
from tests.requests import flat_request

from outrider.cloud.engine import Engine, EngineConfig, Policy
from outrider.cloud.seam import CommitEvent, Event
from outrider.edge.drafting.drafter import ModelDrafter
from outrider.export.make.reference_pair import export_reference_pair
from outrider.models.bundle.bundle import Bundle
from outrider.models.picks.sampling import SamplingParams
from outrider.models.runtimes import open_batch_runtime, open_sequence_runtime
from outrider.models.runtimes.base import BatchRuntime, RuntimeOptions, SequenceSlice

console = Console()


def bare_step_ms(runtime: BatchRuntime, num_sequences: int, repeats: int) -> float:
    """Median ms of a one-token step of `num_sequences` sequences at CONTEXT tokens, no engine around it."""
    per = -(-(CONTEXT + repeats + 1) // runtime.block_size)
    tables = [list(range(i * per, (i + 1) * per)) for i in range(num_sequences)]
    for table in tables:
        runtime.forward([SequenceSlice([1] * CONTEXT, 0, table, 1)])
    took = []
    for step in range(repeats):
        started = time.perf_counter()
        runtime.forward([SequenceSlice([1], CONTEXT + step, table, 1) for table in tables])
        took.append((time.perf_counter() - started) * 1e3)
    return median(took)


def decode_rate(runtime: BatchRuntime, prompts: list[tuple[int, ...]], count: int) -> float:
    """Tokens per second of the engine once all sequences decode; without shared prefixes and drafts."""
    engine = Engine(runtime, EngineConfig(share_prefixes=False))
    committed = [0] * len(prompts)

    for seed, prompt in enumerate(prompts):

        def sink(event: Event, seed: int = seed) -> None:
            committed[seed] += len(event.tokens) if isinstance(event, CommitEvent) else 0

        params = SamplingParams(temperature=0.8, seed=seed)
        engine.submit(flat_request(prompt, params, count), sink)
    while not all(committed):  # prefill
        engine.step()
    # Until the first is done: sequences prefilled first have more tokens, and afterwards the batch shrinks.
    before, started = sum(committed), time.perf_counter()
    while max(committed) < count:
        engine.step()
    return (sum(committed) - before) / (time.perf_counter() - started)


def main(
    widen: Annotated[int, typer.Option(help="MB of the widened FP32 target; 0: as trained")] = 1200,
    tokens: Annotated[int, typer.Option(help="tokens per sequence")] = 40,
    repeats: Annotated[int, typer.Option(help="interleaved repetitions of the first table")] = 3,
    core: Annotated[int, typer.Option(help="the core to run on")] = 0,
    temperature: Annotated[float, typer.Option(help="of the second table")] = 0.8,
) -> None:
    """Measures and prints; exits 1 when 16 sequences reach under 6x, or verify mode 0.45 passes per token or more."""
    pair = export_reference_pair(widen_mb=widen or None)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    target, draft = Bundle.open(pair.target), Bundle.open(pair.draft)
    runtime = open_batch_runtime("openvino", target.model_file, RuntimeOptions(num_threads=1))
    drafter = ModelDrafter(open_sequence_runtime("openvino", draft.model_file, RuntimeOptions(num_threads=1)))
    orders = make_orders(16, tokens, temperature)
    prompts = [order.prompt for order in orders]
    sizes = (1, 4, 16)
    rates: dict[int, list[float]] = {n: [] for n in sizes}
    bare: dict[int, list[float]] = {n: [] for n in sizes}
    for _ in range(repeats):
        for n in sizes:
            bare[n].append(n / bare_step_ms(runtime, n, 12) * 1e3)
            rates[n].append(decode_rate(runtime, prompts[:n], tokens))
    table = Table(
        "sequences",
        "bare runtime tokens/s",
        "x",
        "engine tokens/s",
        "x",
        title=f"target-only, {widen} MB FP32, one core",
    )
    for n in sizes:
        a, b = median(bare[n]), median(rates[n])
        ratios = (
            median(x / y for x, y in zip(bare[n], bare[1], strict=True)),
            median(x / y for x, y in zip(rates[n], rates[1], strict=True)),
        )
        table.add_row(str(n), f"{a:.1f}", f"{ratios[0]:.2f}", f"{b:.1f}", f"{ratios[1]:.2f}")
    console.print(table)

    table = Table(
        "policy", "passes per token", "tokens per pass", title=f"16 sequences with drafts, temperature {temperature}"
    )
    passes = {}
    for policy in (Policy.STREAM, Policy.VERIFY):
        figures, _ = run(runtime, drafter, orders, 8, 1, policy)
        passes[policy] = figures.passes
        table.add_row(policy.value, f"{figures.passes:.3f}", f"{1.0 / figures.passes:.2f}")
    console.print(table)
    if ratios[1] < 6.0 or passes[Policy.VERIFY] >= 0.45:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
