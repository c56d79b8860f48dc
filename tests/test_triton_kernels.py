"""The torch runtime's kernels on Triton's interpreter: their error, and that a row does not depend on its company."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.interpreted import products_row_by_row
from tests.test_torch_graphs import in_tree, steps

from outrider.models.errors import ConfigError
from outrider.models.runtimes import torch_graphs, torch_paged, triton_attention, triton_rows
from outrider.models.runtimes.base import RuntimeOptions, SequenceSlice
from outrider.models.runtimes.ragged import lay_out
from outrider.models.runtimes.torch_paged import TorchPagedRuntime

BLOCK, NUM_BLOCKS = 8, 64
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def interpreted() -> Iterator[None]:
    """Short contexts have several tiles and parts."""
    with products_row_by_row(), patch.multiple(triton_attention, TILE=8, SPLIT=16):
        yield


# -- attention ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heads:
    """A layer's shapes, and what its attention has beside."""

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    def tensors(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Queries, keys, values, sinks."""
        made = torch.Generator().manual_seed(num_tokens)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=made)

        slots = BLOCK * NUM_BLOCKS
        return (
            normal(num_tokens, self.heads, self.key_size),
            normal(slots, self.kv_heads, self.key_size),
            normal(slots, self.kv_heads, self.value_size),
            normal(self.heads) if self.has_sinks else None,
        )


KINDS = [
    Heads(6, 2, 20, 24),
    Heads(4, 4, 16, 16, window=10),
    Heads(17, 1, 16, 16, softcap=3.0),
    Heads(4, 2, 32, 16, has_sinks=True, window=20),
]


def slots_of(slice_: SequenceSlice) -> list[int]:
    """Of the sequence's tokens, new ones included."""
    return [slice_.blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(slice_.past + len(slice_.tokens))]


def attend(step: Sequence[SequenceSlice], kind: Heads, query: torch.Tensor, *rest: Any) -> torch.Tensor:
    """[T, heads, value size], by the kernels."""
    keys, values, sinks = rest
    laid = lay_out(step, vocab_size=1, max_positions=1000, block_size=BLOCK, num_blocks=NUM_BLOCKS)
    new_slots = np.array([slot for each in step for slot in slots_of(each)[each.past :]])
    tokens = triton_attention.tokens_of_a_tile(kind.heads, kind.kv_heads)
    pages = triton_attention.StepPages(triton_attention.layout_of(laid, new_slots, [tokens]), BLOCK, CPU)
    scale = kind.key_size**-0.5
    return pages.attend(query, keys, values, scale=scale, window=kind.window, softcap=kind.softcap, sinks=sinks)


def by_hand(step: Sequence[SequenceSlice], kind: Heads, query: torch.Tensor, *rest: Any) -> torch.Tensor:
    """The same one token after the other, in the operands' own precision, as SDPA and the torch twin have it."""
    keys, values, sinks = rest
    found: list[torch.Tensor] = []
    for each in step:
        slots, past = slots_of(each), each.past
        new = each.positions or range(past, past + len(each.tokens))
        positions = np.array([*range(past), *new])
        mask = np.tri(len(each.tokens), dtype=np.uint8) if each.mask is None else each.mask
        for index, position in enumerate(positions[past:]):
            seen = np.concatenate([np.ones(past, np.bool_), mask[index].astype(np.bool_)])
            if kind.window is not None:
                seen &= position - positions < kind.window
            own = np.array(slots)[seen]
            repeats = kind.heads // kind.kv_heads
            own_keys = keys[own].repeat_interleave(repeats, 1).transpose(0, 1)
            own_values = values[own].repeat_interleave(repeats, 1).transpose(0, 1)
            row = query[len(found)][:, None]
            if kind.softcap is None and sinks is None:
                out = torch.nn.functional.scaled_dot_product_attention(row[None], own_keys[None], own_values[None])[0]
            else:
                scores = row @ own_keys.transpose(1, 2) * kind.key_size**-0.5
                if kind.softcap is not None:
                    scores = kind.softcap * torch.tanh(scores / kind.softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[:, None, None]], dim=2)
                out = scores.softmax(2)[..., : len(own)] @ own_values
            found.append(out[:, 0])
    return torch.stack(found)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square."""
    return float((found.double() - exact).square().mean().sqrt())


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=4)
@given(step=steps(3, BLOCK, NUM_BLOCKS))
def test_attention_is_as_near_to_the_exact_result_as_torch(kind: Heads, step: list[SequenceSlice]) -> None:
    query, keys, values, sinks = kind.tensors(sum(len(each.tokens) for each in step))
    doubles = [None if each is None else each.double() for each in (keys, values, sinks)]
    exact = by_hand(step, kind, query.double(), *doubles)
    own = error(by_hand(step, kind, query, keys, values, sinks), exact)
    assert error(attend(step, kind, query, keys, values, sinks), exact) <= 2 * own + 1e-9


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=2)
@given(data=st.data())
def test_a_token_attends_the_same_bits_in_any_company(kind: Heads, data: st.DataObject) -> None:
    """A text of 40 tokens: in chunks, as paths of a tree, beside others, with programs that join parts; alone, with a
    program for each part of its context.
    """
    length, free = 40, list(range(NUM_BLOCKS))
    blocks = [free.pop(data.draw(st.integers(0, len(free) - 1))) for _ in range(-(-(length + 8) // BLOCK))]
    query, keys, values, sinks = kind.tensors(length)
    whole = SequenceSlice([0] * length, 0, blocks, 0)
    alone = attend([whole], kind, query, keys, values, sinks)
    with patch.object(triton_attention, "_MANY", 1):
        cut = data.draw(st.integers(1, length - 1))
        parts = [SequenceSlice([0] * cut, 0, blocks, 0), SequenceSlice([0] * (length - cut), cut, blocks, 0)]
        pieces = zip(parts, (query[:cut], query[cut:]), strict=True)
        assert torch.equal(torch.cat([attend([part], kind, own, keys, values, sinks) for part, own in pieces]), alone)

        # Beside another sequence, in either order.
        other = SequenceSlice([0] * 3, data.draw(st.integers(0, 30)), free[:5], 0)
        others = torch.randn(3, *query.shape[1:])
        first = attend([other, parts[1]], kind, torch.cat([others, query[cut:]]), keys, values, sinks)
        last = attend([parts[1], other], kind, torch.cat([query[cut:], others]), keys, values, sinks)
        assert torch.equal(first[3:], alone[cut:]) and torch.equal(last[: length - cut], alone[cut:])

        # The last six tokens as one path of a tree, whose other nodes lie between them.
        past, num_path = length - 6, 5
        parents, path = list[int](), list[int]()
        for _ in range(num_path):
            parents += [path[-1] if path else -1] * data.draw(st.integers(1, 2))  # the first of two is a wrong guess
            path.append(len(parents) - 1)
        tree = in_tree(past, 1, parents, bool(parents), blocks)
        own_slots, all_slots = slots_of(whole), slots_of(tree)
        moved_keys, moved_values = keys.clone(), values.clone()
        rows = query[past:][[0] + [1] * len(parents)].clone()
        for at, node in enumerate(path):
            rows[1 + node] = query[past + 1 + at]
            moved_keys[all_slots[past + 1 + node]] = keys[own_slots[past + 1 + at]]
            moved_values[all_slots[past + 1 + node]] = values[own_slots[past + 1 + at]]
        in_it = attend([tree], kind, rows, moved_keys, moved_values, sinks)
        assert torch.equal(in_it[[0, *(1 + node for node in path)]], alone[past:])


def test_the_comparison_notices_a_split_by_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of another size, as a split by the load of a GPU has them, change bits: the test above would see it."""
    kind = KINDS[0]
    query, keys, values, sinks = kind.tensors(38)
    whole = [SequenceSlice([0] * 38, 0, list(range(5)), 0)]
    before = attend(whole, kind, query, keys, values, sinks)
    monkeypatch.setattr(triton_attention, "SPLIT", 8)
    assert not torch.equal(attend(whole, kind, query, keys, values, sinks), before)


# -- products, means, norms --------------------------------------------------------------------------------------------

Rows = Callable[[torch.Tensor], torch.Tensor]
GENERATOR = torch.Generator().manual_seed(0)
WEIGHT, BIAS = torch.randn(70, 150, generator=GENERATOR), torch.randn(70, generator=GENERATOR)


def linear(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(rows, WEIGHT.to(rows.dtype), BIAS.to(rows.dtype))


def layer_norm(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(rows, rows.shape[-1:], BIAS[:1].to(rows.dtype).expand(rows.shape[-1]))


def one_by_one(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    begins = [0, *ends.tolist()]
    return torch.cat([left[a:b] @ each for a, b, each in zip(begins, begins[1:], right, strict=False)])


def grouped(rows: torch.Tensor, multiply: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Each row times one of four matrices, by its sign here and there, as a mixture of experts has it."""
    group = (rows[:, 0] > 0).int() + 2 * (rows[:, 1] > 0.5).int()
    order = group.argsort(stable=True)
    ends = torch.bincount(group, minlength=4).cumsum(0).int()
    found = torch.empty((len(rows), WEIGHT.shape[0]), dtype=rows.dtype)
    found[order] = multiply(rows[order], torch.stack([WEIGHT.t() * each for each in (1, 2, 3, 4)]).to(rows.dtype), ends)
    return found


SCALE = WEIGHT.abs().amax(dim=1) / 127
INTEGERS = (WEIGHT / SCALE[:, None]).round().to(torch.int8)

OPERATIONS: dict[str, tuple[Rows, Rows]] = {
    "product": (lambda rows: triton_rows.matmul(rows, WEIGHT.t(), BIAS), linear),
    "product of integers": (
        lambda rows: triton_rows.matmul(rows, INTEGERS.t(), scale=SCALE),
        lambda rows: rows @ (INTEGERS.to(rows.dtype) * SCALE.to(rows.dtype)[:, None]).t(),
    ),
    "grouped product": (
        lambda rows: grouped(rows, triton_rows.grouped_matmul),
        lambda rows: grouped(rows, one_by_one),
    ),
    "mean": (
        lambda rows: triton_rows.sum_of(rows, [-1], False, None, is_mean=True),
        lambda rows: rows.mean(-1),
    ),
    "sum of others": (
        lambda rows: triton_rows.sum_of(rows.view(-1, 10, 15), [1], True, None, is_mean=False),
        lambda rows: rows.view(-1, 10, 15).sum(1, keepdim=True),
    ),
    "norm": (
        lambda rows: triton_rows.layer_norm(rows, BIAS[:1].expand(rows.shape[-1]), None, 1e-5)[0],
        layer_norm,
    ),
    "softmax": (triton_rows.softmax, lambda rows: rows.softmax(-1)),
}


@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=5)
@given(seed=st.integers(0, 99), data=st.data())
def test_a_row_is_near_the_exact_one_and_the_same_in_any_batch(name: str, seed: int, data: st.DataObject) -> None:
    (ours, torchs), count = OPERATIONS[name], 90  # the errors of a few sums say little
    rows = torch.randn(count, 150, generator=torch.Generator().manual_seed(seed))
    found, exact = ours(rows), torchs(rows.double())
    assert error(found, exact) <= 2 * error(torchs(rows), exact) + 1e-8
    begin = data.draw(st.integers(0, count - 1))
    end = data.draw(st.integers(begin + 1, count))
    assert torch.equal(ours(rows[begin:end]), found[begin:end])
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(ours(rows[order]), found[order])


def test_the_comparison_notices_a_split_sum() -> None:
    """A product in two halves that are added, as split-K makes it for few rows, is not the one in one piece."""
    rows = torch.randn(40, 150, generator=torch.Generator().manual_seed(1))
    halves = [triton_rows.matmul(rows[:, half], WEIGHT[:, half].t()) for half in (slice(75), slice(75, None))]
    assert not torch.equal(halves[0] + halves[1], triton_rows.matmul(rows, WEIGHT.t()))


def test_torchs_own_calls_go_row_by_row() -> None:
    """What a model's code calls, in the place of torch's kernels and as long as the library is kept."""
    rows = torch.randn(2, 5, 150, generator=torch.Generator().manual_seed(2))
    calls: list[Rows] = [linear, layer_norm, lambda x: x.softmax(-1), lambda x: x.pow(2).mean(-1, keepdim=True)]
    calls += [lambda x: x.view(*x.shape[:-1], 10, 15).sum(-2), lambda x: (x > 0).sum(-1)]
    calls += [lambda x: x @ WEIGHT.t(), lambda x: torch.bmm(x, WEIGHT.t().expand(len(x), -1, -1))]
    before = [call(rows) for call in calls]
    with torch.inference_mode(), triton_rows.row_by_row("CPU"):
        for call, own in zip(calls, before, strict=True):
            whole, each = call(rows), [call(rows[:, at : at + 1]) for at in range(5)]
            assert torch.allclose(whole, own, atol=1e-5) and torch.equal(torch.cat(each, dim=1), whole)
    assert all(torch.equal(call(rows), own) for call, own in zip(calls, before, strict=True))


# -- a model -----------------------------------------------------------------------------------------------------------


def played_back(run: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
    """As CUDA graphs do it, but for the launches: runs again on the tensors that were there, into the same result."""
    out = run()
    return lambda: out.copy_(run()), out


not_recorded = Mock(side_effect=RuntimeError("it reads a tensor on the host"))


@pytest.mark.parametrize(("family", "has_graphs"), [("gemma2", True), ("mixtral", False)])
def test_a_models_rows_are_the_same_bits_in_any_company(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, family: str, has_graphs: bool
) -> None:
    """Tried when it is loaded. Gemma 2 has sliding windows and soft caps; products of experts are grouped. A text may
    begin behind position 0.
    """
    monkeypatch.setattr(torch_paged, "has_kernels", lambda device: True)
    record = played_back if has_graphs else not_recorded
    monkeypatch.setattr(torch_graphs.KernelSteps.__init__, "__kwdefaults__", {"record": record})
    options = RuntimeOptions(kv_cache_bytes=1 << 20, is_batch_invariant=True)
    tokens = [int(token) for token in np.random.default_rng(0).integers(0, 96, 12)]
    text = SequenceSlice(tokens, 0, [3], 12, range(40, 52))
    with closing(TorchPagedRuntime(tiny_model(family), options)) as runtime:
        assert ("as CUDA graphs" in runtime.description) is has_graphs
        assert "attention in Triton" in runtime.description and "in one order; 1 MB for" in runtime.description
        rows = runtime.forward([text]).copy()
    monkeypatch.undo()
    with closing(TorchPagedRuntime(tiny_model(family), options)) as twin:
        assert twin.description == "torch on cpu, attention through SDPA; 1 MB for keys and values"
        assert np.allclose(twin.forward([text]), rows, atol=1e-4)


def test_a_model_whose_rows_depend_on_their_company_is_refused(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product in two halves where a step has more than eight tokens, as split-K makes it for few."""
    monkeypatch.setattr(torch_paged, "has_kernels", lambda device: True)
    whole = triton_rows.matmul

    def in_halves(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if len(left) <= 8:
            return whole(left, right, bias)
        half = left.shape[1] // 2
        return whole(left[:, :half], right[:half], bias) + whole(left[:, half:], right[half:])

    monkeypatch.setattr(triton_rows, "matmul", in_halves)
    before = torch.nn.functional.linear(torch.ones(9, 4), torch.ones(2, 4))
    options = RuntimeOptions(kv_cache_bytes=1 << 20, is_batch_invariant=True)
    with pytest.raises(ConfigError, match="other logits in one step with all before than token by token"):
        TorchPagedRuntime(tiny_model("llama"), options)
    assert torch.equal(torch.nn.functional.linear(torch.ones(9, 4), torch.ones(2, 4)), before)
