"""Tests what a fault in the torch runtime's KV cache reaches: every sequence that attends to it, and no other."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import TINY_VOCAB

from outrider.models.errors import BundleError
from outrider.models.runtimes import torch_loading, torch_paged
from outrider.models.runtimes.base import RuntimeOptions, SequenceSlice
from outrider.models.runtimes.torch_cache import BLOCK_SIZE
from outrider.models.runtimes.torch_paged import TorchPagedRuntime

OPTIONS = RuntimeOptions(num_threads=1, kv_cache_bytes=1 << 20)
RNG = np.random.default_rng(3)
LONG = RNG.integers(0, TINY_VOCAB, 80).tolist()
SHORT = RNG.integers(0, TINY_VOCAB, 9).tolist()


@pytest.fixture(params=["llama", "gemma2"])
def runtime(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path]) -> Iterator[TorchPagedRuntime]:
    """One family with torch's fused attention, one with capped logits and sliding windows."""
    opened = TorchPagedRuntime(tiny_model(request.param), OPTIONS)
    yield opened
    opened.close()


def test_the_second_way_to_load_begins_without_the_first_copy(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the attention interface does not reach each layer, a model is loaded again; two copies may not fit."""
    copies: list[weakref.ref[Any]] = []
    load = torch_loading.load_causal_lm

    def loads(*given: Any) -> Any:
        assert not any(copy() is not None for copy in copies), "the first copy is still held"
        model = load(*given)
        copies.append(weakref.ref(model))
        return model

    monkeypatch.setattr(torch_paged, "load_causal_lm", loads)
    with pytest.raises(BundleError, match="with its own attention"):
        TorchPagedRuntime(tiny_model("bloom"), OPTIONS)
    assert len(copies) == 2


@pytest.mark.parametrize("num_new", [1, 4])
def test_padding_reads_no_slot_of_another_sequence(runtime: TorchPagedRuntime, num_new: int) -> None:
    """NaN in every slot that the short sequence does not own leaves its logits as they are, padded or not."""
    long_blocks, short_blocks = [0, 1, 2], [5]
    runtime.forward([SequenceSlice(LONG[:-num_new], 0, long_blocks, 1)])
    runtime.forward([SequenceSlice(SHORT[:-num_new], 0, short_blocks, 1)])
    batch = [
        SequenceSlice(LONG[-num_new:], len(LONG) - num_new, long_blocks, 1),
        SequenceSlice(SHORT[-num_new:], len(SHORT) - num_new, short_blocks, 1),
    ]
    clean = runtime.forward(batch)
    own = range(short_blocks[0] * BLOCK_SIZE, short_blocks[0] * BLOCK_SIZE + len(SHORT))
    others = [slot for slot in range(runtime.num_blocks * BLOCK_SIZE) if slot not in own]
    assert runtime._layers is not None
    for layer in runtime._layers.values():
        layer.keys[others] = layer.values[others] = torch.nan
    found = runtime.forward(batch)
    assert np.isnan(found[0]).all()
    np.testing.assert_array_equal(found[1], clean[1])


def test_one_row_of_logits_vouches_for_every_token_before_it(
    tiny_model: Callable[[str], Path],
) -> None:
    """NaN in any key or value of any layer reaches the next row, as does an infinite value.

    The engine registers blocks by hash on this ground.
    """
    runtime = TorchPagedRuntime(tiny_model("llama"), OPTIONS)
    blocks = [0, 1, 2]
    runtime.forward([SequenceSlice(LONG[:-1], 0, blocks, 0)])
    row = SequenceSlice(LONG[-1:], len(LONG) - 1, blocks, 1)
    assert np.isfinite(runtime.forward([row])).all()
    assert runtime._layers is not None
    for number, layer in runtime._layers.items():
        for tensor, bad in [(layer.keys, torch.nan), (layer.values, torch.nan), (layer.values, torch.inf)]:
            for slot in (0, BLOCK_SIZE, len(LONG) - 2):
                entry = tensor[slot, 0]
                good = entry.clone()
                entry[1] = bad
                assert not np.isfinite(runtime.forward([row]).max()), (number, bad, slot)
                entry.copy_(good)
    assert np.isfinite(runtime.forward([row])).all()
    runtime.close()
