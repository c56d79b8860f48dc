"""Counts what a step of the torch runtime would launch on a GPU, without one: on torch's meta device.

A launch is an operation or a copy of torch's, or a kernel of Triton's; a recorded pass is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
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

NUM_IDS, SEQUENCES, CONTEXT, BLOCK = 152_000, 32, 1024, 32
_META = torch.device("meta")


class _Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations inside that launch something: neither views nor allocations. Stands for a Triton kernel, too:
    counts its launches.
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


def _layout(parents: Sequence[int]) -> Callable[[], Any]:
    """Lays out a step and brings it to the device. The recorded pass is none."""
    each = -(-(CONTEXT + 32) // BLOCK)
    num_blocks = SEQUENCES * each
    logits = torch.empty((256, NUM_IDS), device=_META)
    steps = KernelSteps(
        lambda inputs: logits,
        _META,
        block_size=BLOCK,
        num_blocks=num_blocks,
        max_blocks=8192 // BLOCK,
        heads=[(32, 8)],
        record=lambda run: (lambda: None, run()),
    )
    mask = tree_mask(parents, 1) if parents else None
    positions = [CONTEXT, *(CONTEXT + depth for depth in depths(parents))] if parents else None
    tokens = [1] * (1 + len(parents))
    tables = [list(range(number * each, (number + 1) * each)) for number in range(SEQUENCES)]
    batch = [SequenceSlice(tokens, CONTEXT, table, len(tokens), positions, mask) for table in tables]

    def run() -> None:
        steps.logits(lay_out(batch, vocab_size=NUM_IDS, max_positions=8192, block_size=BLOCK, num_blocks=num_blocks))

    return run


def num_launches(parents: Sequence[int]) -> int:
    """Of a step of 32 sequences at temperature 0.8, each with this tree of drafted tokens, with the copies back."""
    step = _layout(parents)
    step()
    positions = [CONTEXT, *(CONTEXT + depth for depth in depths(parents))]
    asked = [AskedRows(SamplingParams(temperature=0.8), positions, None, None, None)] * SEQUENCES
    logits = torch.empty((SEQUENCES * (1 + len(parents)), NUM_IDS), device=_META)
    counter = _Launches()  # type: ignore[no-untyped-call]
    with ExitStack() as stack:
        for module in (narrowing_torch, sampling_torch):  # with the kernels that a GPU has
            stack.enter_context(patch.object(module, "kernels", lambda device: sampling_triton))
        for name in ("_best_of_block", "_reach_of_row"):
            stack.enter_context(patch.object(sampling_triton, name, counter))
        stack.enter_context(patch.object(step_choices, "HostCopy", lambda tensor: None))
        stack.enter_context(counter)
        step()
        StepChoices(asked, NUM_IDS, _META).choose(logits)
    return counter.count + 2
