"""What a step of 32 sequences costs beside its recorded pass: milliseconds on the host, and launches on the device.

    python -m bench.gpu.host [--runs N]

Needs no GPU: layouts and what picks need, but for grammars' masks, are made here as for one, and what would be
launched is counted on torch's meta device. A launch is an operation or a copy of torch's, or a kernel of Triton's; a
recorded pass is one. The engine's own time is `bench.server_overhead`'s. Exits 1 over 1 ms of processor time, or where
plain picks, or those with top-p, need 40 launches.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Annotated, Any, Final
from unittest.mock import patch

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.cloud.engine.runner import depths, tree_mask
from outrider.models.picks import narrowing_torch, sampling_torch, sampling_triton
from outrider.models.picks.sampling import SamplingParams
from outrider.models.processors import step_choices
from outrider.models.processors.options import ProcessorOptions
from outrider.models.processors.processor_plan import ProcessorPlan
from outrider.models.processors.step_choices import StepChoices
from outrider.models.processors.text_rows import AskedRows, TextRows
from outrider.models.runtimes.base import SequenceSlice
from outrider.models.runtimes.ragged import lay_out
from outrider.models.runtimes.torch_graphs import KernelSteps

NUM_IDS: Final = 152_000
SEQUENCES: Final = 32
CONTEXT: Final = 1024
BLOCK: Final = 32
MOST_MS: Final = 1.0
MOST_LAUNCHES: Final = 40
PLAIN, TOP_P = "plain", "top-p 0.9"
_PENALTIES: Final = ProcessorOptions(repetition_penalty=1.1, frequency_penalty=0.3, logit_bias=((7, 1.0),))
KINDS: Final = {
    PLAIN: (SamplingParams(temperature=0.8), None, None),
    TOP_P: (SamplingParams(temperature=0.8, top_p=0.9), None, None),
    "penalties": (SamplingParams(temperature=0.8), _PENALTIES, None),
    "20 logprobs": (SamplingParams(temperature=0.8), None, 20),
}
TREES: Final[tuple[tuple[int, ...], ...]] = ((), (-1, 0, 1, 2), (-1, -1, 0, 0, 1, 2, 2))


class _Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations inside that launch something: neither views nor allocations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns)
        self.count += not is_view and "empty" not in func._schema.name
        return func(*args, **(kwargs or {}))


class _Kernel:
    """Stands for a kernel of Triton's: counts its launches."""

    def __init__(self, counter: _Launches) -> None:
        self._counter = counter

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*_: Any, **__: Any) -> None:
            self._counter.count += 1

        return launch


def texts_of(kind: str) -> list[TextRows | None]:
    """What follows each sequence's text, where rules change its rows; it is made once."""
    _, options, _ = KINDS[kind]
    if options is None:
        return [None] * SEQUENCES
    return [TextRows(ProcessorPlan(options), range(number, number + 200), NUM_IDS) for number in range(SEQUENCES)]


def asked_for(kind: str, texts: Sequence[TextRows | None], parents: Sequence[int]) -> list[AskedRows]:
    """The rows of a step, each sequence with the same tree of drafted tokens."""
    params, _, num_logprobs = KINDS[kind]
    positions = [CONTEXT, *(CONTEXT + depth for depth in depths(parents))]
    paths = [None if text is None else text.walk(range(len(parents)), parents) for text in texts]
    return [AskedRows(params, positions, None, path, num_logprobs) for path in paths]


def layout(device: torch.device, parents: Sequence[int]) -> Callable[[], Any]:
    """Lays out a step and brings it to the device. The recorded pass is none."""
    each = -(-(CONTEXT + 32) // BLOCK)
    num_blocks = SEQUENCES * each
    logits = torch.empty((256, NUM_IDS), device="meta")
    steps = KernelSteps(
        lambda inputs: logits,
        device,
        block_size=BLOCK,
        num_blocks=num_blocks,
        max_blocks=8192 // BLOCK,
        heads=[(32, 8)],
        record=lambda run: (lambda: None, run()),
    )
    mask = tree_mask(parents, 1) if parents else None
    positions = [CONTEXT, *(CONTEXT + depth for depth in depths(parents))] if parents else None
    tokens = [1] * (1 + len(parents))
    tables = [range(number * each, (number + 1) * each) for number in range(SEQUENCES)]
    batch = [SequenceSlice(tokens, CONTEXT, list(table), len(tokens), positions, mask) for table in tables]

    def run() -> None:
        steps.logits(lay_out(batch, vocab_size=NUM_IDS, max_positions=8192, block_size=BLOCK, num_blocks=num_blocks))

    run()
    return run


@contextmanager
def _counting() -> Iterator[_Launches]:
    """With the kernels that a GPU has."""
    counter = _Launches()  # type: ignore[no-untyped-call]
    kernel = _Kernel(counter)
    with (
        patch.object(narrowing_torch, "kernels", lambda device: sampling_triton),
        patch.object(sampling_torch, "kernels", lambda device: sampling_triton),
        patch.object(sampling_triton, "_best_of_block", kernel),
        patch.object(sampling_triton, "_truncated_row", kernel),
        patch.object(step_choices, "HostCopy", lambda tensor: None),
        counter,
    ):
        yield counter


def launches(kind: str, parents: Sequence[int]) -> int:
    """Of a step, outside its graph, which counts as one, with the copies back."""
    device = torch.device("meta")
    step, asked = layout(device, parents), asked_for(kind, texts_of(kind), parents)
    logits = torch.empty((SEQUENCES * (1 + len(parents)), NUM_IDS), device=device)
    with _counting() as counter:
        step()
        StepChoices(asked, NUM_IDS, device).choose(logits)
    return counter.count + 2 + (KINDS[kind][2] is not None)


def host_ms(call: Callable[[], Any], runs: int) -> float:
    """Median milliseconds of processor time."""
    took = []
    for _ in range(runs):
        began_s = time.thread_time()
        call()
        took.append(1e3 * (time.thread_time() - began_s))
    return median(took)


def main(runs: Annotated[int, typer.Option(min=1, help="steps to time")] = 300) -> None:
    """Prints both of each kind of step."""
    torch.set_num_threads(1)
    host = torch.device("cpu")
    table = Table("drafted", "rows", "layout, ms", "picks prepared, ms", "launches")
    missed = False
    for parents in TREES:
        layout_ms = host_ms(layout(host, parents), runs)
        for kind in KINDS:
            texts = texts_of(kind)

            prepared = partial(lambda *given: StepChoices(asked_for(*given), NUM_IDS, host), kind, texts, parents)
            picks_ms = host_ms(prepared, runs)
            count = launches(kind, parents)
            missed |= layout_ms + picks_ms > MOST_MS or (kind in (PLAIN, TOP_P) and count >= MOST_LAUNCHES)
            table.add_row(str(len(parents)), kind, f"{layout_ms:.2f}", f"{picks_ms:.2f}", str(count))
    Console().print(table)
    sys.exit(missed)


if __name__ == "__main__":
    typer.run(main)
