"""Counts what a step of 32 sequences launches beside its recorded pass, and times what the host does for it.

    python -m bench.gpu.host

Needs no GPU: layouts and what picks need are made here as for one, and what would be launched is counted on torch's
meta device. A launch is an operation or a copy of torch's, or a kernel of Triton's; a recorded pass is one. The
engine's own time is `bench.server_overhead`'s. Exits 1 over 1 ms of processor time, or at 40 launches.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from statistics import median
from timeit import repeat
from typing import Any, Final
from unittest.mock import patch

import torch
from bench.report import figures_table, parser
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.cloud.engine.runner import depths, tree_mask
from outrider.models.picks import narrowing_torch, sampling_torch, sampling_triton
from outrider.models.picks.sampling import SamplingParams
from outrider.models.processors import step_choices
from outrider.models.processors.step_choices import StepChoices
from outrider.models.processors.text_rows import AskedRows
from outrider.models.runtimes.base import SequenceSlice
from outrider.models.runtimes.ragged import lay_out
from outrider.models.runtimes.torch_graphs import KernelSteps

NUM_IDS: Final = 152_000
SEQUENCES: Final = 32
CONTEXT: Final = 1024
BLOCK: Final = 32
RUNS: Final = 300
MOST_MS: Final = 1.0
MOST_LAUNCHES: Final = 40
KINDS: Final = {
    "plain": SamplingParams(temperature=0.8),
    "top-p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
}
TREES: Final[tuple[tuple[int, ...], ...]] = ((), (-1, 0, 1, 2), (-1, -1, 0, 0, 1, 2, 2))


class _Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations inside that launch something, neither views nor allocations; and stands for Triton's kernels,
    to count those.
    """

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns)
        self.count += not is_view and "empty" not in func._schema.name
        return func(*args, **(kwargs or {}))

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*_: Any, **__: Any) -> None:
            self.count += 1

        return launch


def positions_of(parents: Sequence[int]) -> list[int]:
    """Of a sequence's next token and its drafted ones."""
    return [CONTEXT, *(CONTEXT + depth for depth in depths(parents))]


def prepared(kind: str, parents: Sequence[int], device: torch.device) -> StepChoices:
    """What the picks of a step need, each sequence with the same tree of drafted tokens."""
    return StepChoices([AskedRows(KINDS[kind], positions_of(parents))] * SEQUENCES, NUM_IDS, device)


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
    positions = positions_of(parents) if parents else None
    tokens = [1] * (1 + len(parents))
    tables = [range(number * each, (number + 1) * each) for number in range(SEQUENCES)]
    batch = [SequenceSlice(tokens, CONTEXT, list(table), len(tokens), positions, mask) for table in tables]

    def run() -> None:
        steps.logits(lay_out(batch, vocab_size=NUM_IDS, max_positions=8192, block_size=BLOCK, num_blocks=num_blocks))

    run()
    return run


def launches(kind: str, parents: Sequence[int]) -> int:
    """Of a step on a GPU, outside its graph, which counts as one, with the copies back."""
    device, counter = torch.device("meta"), _Launches()  # type: ignore[no-untyped-call]
    step = layout(device, parents)
    logits = torch.empty((SEQUENCES * (1 + len(parents)), NUM_IDS), device=device)
    with (
        patch.object(narrowing_torch, "kernels", lambda device: sampling_triton),
        patch.object(sampling_torch, "kernels", lambda device: sampling_triton),
        patch.object(sampling_triton, "_best_of_block", counter),
        patch.object(sampling_triton, "_truncated_row", counter),
        patch.object(step_choices, "HostCopy", lambda tensor: None),
        counter,
    ):
        step()
        prepared(kind, parents, device).choose(logits)
    return counter.count + 2


def host_ms(call: Callable[[], Any]) -> float:
    """Median milliseconds of processor time."""
    return 1e3 * median(repeat(call, number=1, repeat=RUNS, timer=time.thread_time))


def main() -> int:
    """Prints both of each kind of step."""
    parser(__doc__, {}).parse_args()
    torch.set_num_threads(1)
    host, missed = torch.device("cpu"), False
    table = figures_table(f"{SEQUENCES} sequences", "drafted", "picks", "layout, ms", "picks prepared, ms", "launches")
    for parents, kind in product(TREES, KINDS):
        layout_ms, picks_ms = host_ms(layout(host, parents)), host_ms(partial(prepared, kind, parents, host))
        count = launches(kind, parents)
        missed |= layout_ms + picks_ms > MOST_MS or count >= MOST_LAUNCHES
        table.add_row(str(len(parents)), kind, f"{layout_ms:.2f}", f"{picks_ms:.2f}", str(count))
    Console().print(table)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
