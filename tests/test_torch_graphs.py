"""The torch runtime's recorded steps and their layouts, without a GPU: passes are played back by a recorder of ours."""

from __future__ import annotations

import tracemalloc
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.cloud.engine.runner import depths, tree_mask
from outrider.models.runtimes.base import SequenceSlice
from outrider.models.runtimes.page_layout import NO_TAIL, tails_of
from outrider.models.runtimes.ragged import RaggedStep, lay_out
from outrider.models.runtimes.torch_graphs import SIZES, KernelSteps, StepInputs
from outrider.models.runtimes.torch_joined import join

BLOCK, VOCAB, CONTEXT = 32, 5, 64


def in_tree(
    past: int, before: int, parents: Sequence[int], has_mask: bool = True, blocks: Sequence[int] | None = None
) -> SequenceSlice:
    """`before` tokens in a line, and a tree behind them. blocks: else the first ones."""
    count = before + len(parents)
    blocks = range(-(-(past + count) // BLOCK)) if blocks is None else blocks
    positions = [*range(past, past + before), *(past + before - 1 + depth for depth in depths(parents))]
    mask = tree_mask(parents, before) if has_mask else None
    return SequenceSlice([0] * count, past, blocks, count, positions, mask)


def laid_out(*batch: SequenceSlice, max_positions: int = CONTEXT) -> RaggedStep:
    return lay_out(batch, vocab_size=VOCAB, max_positions=max_positions, block_size=BLOCK, num_blocks=100)


# -- where trees find their ancestors ----------------------------------------------------------------------------------


@st.composite
def steps(
    draw: st.DrawFn, most: int = 4, block_size: int = BLOCK, num_blocks: int | None = None
) -> list[SequenceSlice]:
    """Lines with and without a mask, trees and single tokens. num_blocks: each is in blocks anywhere among so many."""
    free, found = [*draw(st.permutations(range(num_blocks)))] if num_blocks else None, []
    for _ in range(draw(st.integers(1, most))):
        past, before = draw(st.integers(0, 24)), draw(st.integers(1, 6))
        parents = [draw(st.integers(-1, index - 1)) for index in range(draw(st.integers(0, 5)))]
        has_mask = parents != list(range(-1, len(parents) - 1)) or draw(st.booleans())
        count = -(-(past + before + len(parents)) // block_size)
        found.append(in_tree(past, before, parents, has_mask, free and [free.pop() for _ in range(count)]))
    return found


@given(steps())
def test_a_trees_tokens_find_their_ancestors_behind_its_line(batch: list[SequenceSlice]) -> None:
    step, first = laid_out(*batch), 0
    slots = np.arange(len(step.input_ids)) + 1000
    begins, tails = tails_of(step, slots)
    for each, begin in zip(batch, begins, strict=True):
        count = len(each.tokens)
        mask = np.tri(count, dtype=np.uint8) if each.mask is None else each.mask
        # As many first tokens as all others follow.
        line = next((n for n in range(count) if mask[n].sum() != n + 1 or mask[:, n].sum() != count - n), count)
        assert begin == (NO_TAIL if line == count else each.past + line)
        for token in range(count):
            assert each.positions is not None
            attended = {each.positions[other]: slots[first + other] for other in range(count) if mask[token, other]}
            own = [slot for position, slot in sorted(attended.items()) if position >= begin]
            tail = tails[first + token].tolist()
            assert tail[: len(own)] == own and all(slot < 0 for slot in tail[len(own) :])
        first += count


def test_a_tree_beside_a_prompt_takes_no_more_room_than_the_prompt() -> None:
    batch = [in_tree(9, 1, [-1, -1])] * 20 + [in_tree(0, 1000, [])]
    step = laid_out(*batch, max_positions=1000)
    tracemalloc.start()
    try:
        tails_of(step, np.arange(len(step.input_ids)))
        assert tracemalloc.get_traced_memory()[1] < 4 * step.mask.nbytes
    finally:
        tracemalloc.stop()


# -- recorded steps ----------------------------------------------------------------------------------------------------


def played_back(run: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
    """As CUDA graphs do it: run once more to be recorded, and again for each step, into the same result."""
    run()
    return run, run()


def kernel_steps(record: Callable[..., object] = played_back) -> KernelSteps:
    """Each row's logits are its token's position."""

    def run(inputs: StepInputs) -> torch.Tensor:
        return inputs.position_ids[inputs.rows, None].expand(-1, VOCAB).float()

    return KernelSteps(
        run,
        torch.device("cpu"),
        block_size=BLOCK,
        num_blocks=100,
        max_blocks=CONTEXT // BLOCK,
        heads=[(4, 4)],
        record=record,  # type: ignore[arg-type]
    )


def logits_of(found: KernelSteps, *batch: SequenceSlice) -> torch.Tensor:
    """The step's, which are right."""
    step = laid_out(*batch)
    logits = found.logits(step)
    assert logits.tolist() == [[position] * VOCAB for position in step.position_ids]
    return logits


@pytest.mark.parametrize("past", [[CONTEXT - 2], [CONTEXT // 2, CONTEXT - 2]])
def test_a_tree_at_the_contexts_end_is_recorded(past: list[int]) -> None:
    """Its siblings' slots go further than positions."""
    found = kernel_steps()
    for each in past:
        logits_of(found, in_tree(each, 1, [-1] * 7))
    assert found.most_recorded == SIZES[-1]


def test_recorded_steps_share_the_memory_of_their_logits() -> None:
    found = kernel_steps()
    batches = [[in_tree(9, 1, parents)] * count for parents in ([], [-1, -1]) for count in (1, 3, 40)]
    storages = {logits_of(found, *batch).untyped_storage().data_ptr() for batch in [*batches, *batches]}
    assert len(storages) == 1


def test_graphs_that_are_given_up_leave_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = kernel_steps()
    logits_of(found, in_tree(9, 1, []))
    monkeypatch.setattr(found, "_record", lambda run: run.nothing)
    logits_of(found, in_tree(9, 1, [-1, -1]))
    assert (found.most_recorded, found._recorded, found._shared) == (0, {}, None)


# -- layers that read the same rows ------------------------------------------------------------------------------------


class Attention(torch.nn.Module):
    """Layers as transformers names them; `from_where` is what keys and values are made of, if not of `rows`."""

    def __init__(self, *, has_bias: bool, value_width: int = 6) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(6, 8, has_bias)
        self.k_proj = torch.nn.Linear(6, 4, has_bias)
        self.v_proj = torch.nn.Linear(value_width, 4, has_bias)

    def forward(self, rows: torch.Tensor, from_where: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.q_proj(rows), self.k_proj(from_where), self.v_proj(from_where)], dim=-1)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_cross", [False, True])
def test_layers_that_read_the_same_rows_are_one_product(
    has_bias: bool, is_cross: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one copy of the weights, which nothing else holds afterwards; other rows are a product of their own."""
    model: Any = Attention(has_bias=has_bias)
    product = Mock(wraps=torch.nn.functional.linear)
    with torch.inference_mode():
        rows = torch.randn(3, 6)
        others = torch.randn(3, 6) if is_cross else rows
        before = model(rows, others)
        join(model)
        monkeypatch.setattr(torch.nn.functional, "linear", product)
        for _ in range(2):
            assert torch.allclose(model(rows, others), before, atol=1e-6)
    assert [call.args[1].shape for call in product.call_args_list] == [(16, 6)] * (4 if is_cross else 2)
    assert len({each.weight.untyped_storage().data_ptr() for each in (model.q_proj, model.k_proj, model.v_proj)}) == 1
    assert model.v_proj._product._rows is None and model.v_proj._product._parts == ()


def test_joining_holds_the_old_weights_of_one_product_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that nearly fills a GPU could not be loaded else."""
    model: Any = torch.nn.ModuleList([Attention(has_bias=False) for _ in range(3)])
    old, alive, cat = weakref.WeakSet(each.q_proj for each in model), list[int](), torch.cat

    def counted(*args: Any) -> torch.Tensor:
        alive.append(len(old))
        return cat(*args)

    monkeypatch.setattr(torch, "cat", counted)
    join(model)
    assert alive == [3, 2, 1]


def test_layers_that_cannot_read_the_same_rows_stay() -> None:
    model = Attention(has_bias=False, value_width=7)
    join(model)
    assert type(model.q_proj) is torch.nn.Linear
