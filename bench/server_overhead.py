"""Measures the server's CPU time per engine step: scheduling, picking, HTTP; reference pair, not widened.

    python bench/server_overhead.py

The server runs as its own process on one core with one inference thread. For each batch size, that many sessions
stream target-only text at once. From /metrics: the process's CPU seconds, the engine's steps, its seconds outside the
model. From the bare runtime on the same core: CPU seconds of the same step. overhead = CPU per step - bare CPU per
step; all of it outside the engine (picking, scheduling, cache) is HTTP: sockets, event streams, JSON, the event loop.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from statistics import median
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.table import Table

from outrider.edge.lab.cores import running_on
from outrider.edge.lab.laboratory import Lab, open_lab
from outrider.edge.link.client import CloudClient
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.assemble import make_agent
from outrider.edge.results import GenerationRequest, Mode
from outrider.export.make.reference_pair import export_reference_pair
from outrider.models.runtimes import open_batch_runtime
from outrider.models.runtimes.base import RuntimeOptions, SequenceSlice
from outrider.models.sampling import SamplingParams
from outrider.reference import load_prompts

BOUNDS_MS = {1: 2.0, 16: 5.0}


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals read from /metrics: seconds and counts since the server's start."""

    cpu_s: float
    engine_s: float
    steps: float

    @classmethod
    def read(cls, url: str) -> Counters:
        """Reads /metrics."""
        text = httpx.get(f"{url}/metrics").text

        def value(name: str) -> float:
            found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
            assert found, f"/metrics has no {name}"
            return float(found[1])

        return cls(
            value("process_cpu_seconds_total"),
            value("outrider_engine_overhead_seconds_total"),
            value("outrider_engine_steps_total"),
        )


def bare_cpu_ms(lab: Lab, num_sequences: int, context: int, repeats: int = 60) -> float:
    """Median CPU ms of a step of one token for each sequence, nothing around the runtime."""
    with running_on(lab.cores.cloud):
        runtime = open_batch_runtime("openvino", lab.target.model_file, RuntimeOptions(num_threads=1))
        per = -(-(context + 1) // runtime.block_size)
        batch = []
        for i in range(num_sequences):
            table = list(range(i * per, (i + 1) * per))
            runtime.forward([SequenceSlice([1] * context, 0, table, 1)])
            batch.append(SequenceSlice([1], context, table, 1))
        took = []
        for _ in range(repeats):
            before = time.process_time()
            runtime.forward(batch)
            took.append((time.process_time() - before) * 1e3)
        runtime.close()
    return median(took)


async def serve_texts(lab: Lab, num_sequences: int, tokens: int, temperature: float, run: int) -> None:
    """`num_sequences` target-only texts at once, each on its own connections."""

    async def one(index: int) -> None:
        async with CloudClient(lab.url) as client:
            prompt = lab.encode(load_prompts()[run * num_sequences + index].text)
            params = SamplingParams(temperature=temperature, seed=index)
            request = GenerationRequest(prompt=prompt, params=params, max_tokens=tokens, ignore_eos=True)
            await make_agent(Mode.CLOUD_ONLY, Endpoints([client]), None).generate(request)

    await asyncio.gather(*(one(index) for index in range(num_sequences)))


def main(
    tokens: Annotated[int, typer.Option(help="tokens of each text")] = 150,
    repeats: Annotated[int, typer.Option(help="runs; medians are shown")] = 5,
    temperature: Annotated[float, typer.Option()] = 0.8,
) -> None:
    """Measures and prints; exits 1 when a bound is missed."""
    pair = export_reference_pair()
    table = Table(
        "batch", "bare model", "engine", "HTTP and loop", "overhead", "bound", title="CPU ms per engine step, one core"
    )
    is_met = True
    with open_lab(pair.target, pair.draft) as lab:
        for size, bound in BOUNDS_MS.items():
            bare, engine, total = [], [], []
            for run in range(repeats):
                before = Counters.read(lab.url)
                asyncio.run(serve_texts(lab, size, tokens, temperature, run % 4))
                after = Counters.read(lab.url)
                steps = after.steps - before.steps
                bare.append(bare_cpu_ms(lab, size, context=64 + tokens // 2))
                engine.append((after.engine_s - before.engine_s) / steps * 1e3)
                total.append((after.cpu_s - before.cpu_s) / steps * 1e3 - bare[-1])
            overhead = median(total)
            is_met = is_met and overhead < bound
            cells = (median(bare), median(engine), overhead - median(engine), overhead, bound)
            table.add_row(str(size), *(f"{cell:.2f}" for cell in cells))
    Console().print(table)
    if not is_met:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
