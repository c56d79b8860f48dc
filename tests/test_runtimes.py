"""Tests runtimes one by one: how they are opened, torch's faults, prompt lookup, and the fake that other tests run."""

from __future__ import annotations

import json
import shutil
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.conftest import TINY_VOCAB
from tests.fake_runtime import FakeBatchRuntime, FakeSequenceRuntime

from outrider.models import runtimes
from outrider.models.errors import BundleError, ConfigError, RuntimeUnavailable
from outrider.models.runtimes import open_batch_runtime, open_sequence_runtime, torch_loading, torch_paged
from outrider.models.runtimes.base import (
    PROMISED_POSITIONS,
    RuntimeOptions,
    SequenceSlice,
)
from outrider.models.runtimes.ngram import NgramLookup
from outrider.models.runtimes.torch_cache import BLOCK_SIZE
from outrider.models.runtimes.torch_paged import TorchPagedRuntime

OPTIONS = RuntimeOptions()


OPENERS = {"batch": open_batch_runtime, "sequence": open_sequence_runtime}


@pytest.mark.parametrize(
    ("opener", "name", "known"), [("batch", "vllm", "openvino, torch"), ("sequence", "torch", "openvino")]
)
def test_unknown_names_list_the_known_ones(opener: str, name: str, known: str, tmp_path: Path) -> None:
    """A misspelt runtime is a ConfigError that lists the runtimes."""
    with pytest.raises(ConfigError, match=f"no runtime named '{name}'; expected one of {known}"):
        OPENERS[opener](name, tmp_path, OPTIONS)


@pytest.mark.parametrize(
    ("opener", "package", "extra"),
    [("batch", "openvino", "cloud"), ("batch", "torch", "torch"), ("sequence", "openvino", "edge")],
)
def test_a_missing_package_prints_the_pip_command(
    opener: str, package: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error for a missing package names the extra that installs it."""
    for name in [name for name in sys.modules if name.startswith("outrider.models.runtimes.")]:
        if not name.endswith(".base"):
            # Put back in both places: a later test would patch the package's module, which no runtime uses.
            monkeypatch.setattr(runtimes, name.rpartition(".")[2], sys.modules[name], raising=False)
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        RuntimeUnavailable, match=rf'needs the package \'{package}\'.*pip install "outrider\[{extra}\]"'
    ):
        OPENERS[opener](package, tmp_path, OPTIONS)


@pytest.mark.parametrize(
    ("family", "options", "error", "message"),
    [
        ("llama", {"device": "abacus"}, ConfigError, "device is 'abacus'"),
        ("llama", {"device": "cuda:1"}, ConfigError, r"'cuda:1'.* the first GPU .* CUDA_VISIBLE_DEVICES"),
        (
            *("llama", {"properties": {"dtype": "int3"}}, ConfigError),
            "dtype is 'int3'; the torch runtime takes f32, bf16, f16",
        ),
        ("llama", {"kv_cache_bytes": 10}, ConfigError, "kv_cache_bytes is 10;"),
        ("", {}, BundleError, "transformers cannot load"),
        ("bloom", {}, BundleError, "bloom does not use transformers' attention interface"),
        ("gpt_neo", {}, BundleError, "gpt_neo does not use transformers' attention interface"),
    ],
)
def test_torch_refuses_what_it_cannot_do(
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    family: str,
    options: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    """Devices, types, sizes and directories that do not work each have an error that names them."""
    with pytest.raises(error, match=message):
        open_batch_runtime("torch", tiny_model(family) if family else tmp_path, RuntimeOptions(**options))


def test_torch_keeps_to_the_length_that_an_export_promises(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """The exporter writes it to config.json, beside the model's own length."""
    model = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps(config | {PROMISED_POSITIONS: 100}), encoding="utf-8")
    for options, expected in ((OPTIONS, 100), (RuntimeOptions(max_positions=64), 64)):
        runtime = open_batch_runtime("torch", model, options)
        assert runtime.limits.max_positions == expected
        runtime.close()


# -- faults of torch ---------------------------------------------------------------------------------------------------


SMALL = RuntimeOptions(num_threads=1, kv_cache_bytes=1 << 20)
RNG = np.random.default_rng(3)
LONG = RNG.integers(0, TINY_VOCAB, 80).tolist()
SHORT = RNG.integers(0, TINY_VOCAB, 9).tolist()


@pytest.fixture(params=["llama", "gemma2"])
def runtime(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path]) -> Iterator[TorchPagedRuntime]:
    """One family with torch's fused attention, one with capped logits and sliding windows."""
    opened = TorchPagedRuntime(tiny_model(request.param), SMALL)
    yield opened
    opened.close()


def test_the_second_way_to_load_begins_without_the_first_copy(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the attention interface does not reach each layer, a model is loaded again; two copies may not fit."""
    copies: list[weakref.ref[Any]] = []

    def loads(*given: Any) -> Any:
        assert not any(copy() is not None for copy in copies), "the first copy is still held"
        copies.append(weakref.ref(model := torch_loading.load_causal_lm(*given)))
        return model

    monkeypatch.setattr(torch_paged, "load_causal_lm", loads)
    with pytest.raises(BundleError, match="with its own attention"):
        TorchPagedRuntime(tiny_model("bloom"), SMALL)
    assert len(copies) == 2


@pytest.mark.parametrize("num_new", [1, 4])
def test_padding_reads_no_slot_of_another_sequence(runtime: TorchPagedRuntime, num_new: int) -> None:
    """NaN in every slot that the short sequence does not own leaves its logits as they are, padded or not."""
    texts = ((LONG, [0, 1, 2]), (SHORT, [5]))
    for text, blocks in texts:
        runtime.forward([SequenceSlice(text[:-num_new], 0, blocks, 1)])
    batch = [SequenceSlice(text[-num_new:], len(text) - num_new, blocks, 1) for text, blocks in texts]
    clean = runtime.forward(batch)
    own = range(5 * BLOCK_SIZE, 5 * BLOCK_SIZE + len(SHORT))
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
    runtime = TorchPagedRuntime(tiny_model("llama"), SMALL)
    runtime.forward([SequenceSlice(LONG[:-1], 0, [0, 1, 2], 0)])
    row = SequenceSlice(LONG[-1:], len(LONG) - 1, [0, 1, 2], 1)
    assert np.isfinite(runtime.forward([row])).all() and runtime._layers is not None
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


# -- prompt lookup: a version that searches the whole sequence each time -----------------------------------------------


def searched(tokens: list[int], max_n: int, min_n: int, max_tokens: int) -> list[int]:
    """Longest suffix first, latest earlier occurrence first; copies what follows it, again and again."""
    for n in range(max_n, min_n - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[len(tokens) - n :]:
                period = tokens[end:]
                return [period[i % len(period)] for i in range(max_tokens)]
    return []


# Grow by these tokens, or (an int) cut to this share of the length in percent.
steps = st.lists(st.one_of(st.lists(st.integers(0, 3), max_size=8), st.integers(0, 100)), max_size=12)


@given(steps=steps, sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)), max_tokens=st.integers(0, 9))
def test_equals_a_search_whatever_was_appended_and_cut(
    steps: list[list[int] | int], sizes: tuple[int, int], max_tokens: int
) -> None:
    """After any series of extensions and truncations the index gives the same as a search of the text."""
    min_n, max_n = sorted(sizes)
    lookup, tokens = NgramLookup(max_n=max_n, min_n=min_n), list[int]()
    for step in steps:
        if isinstance(step, int):
            tokens = tokens[: len(tokens) * step // 100]
            lookup.truncate(len(tokens))
        else:
            tokens = tokens + step
            lookup.extend(step)
        assert lookup.length == len(tokens)
        assert lookup.match(max_tokens)[1] == searched(tokens, max_n, min_n, max_tokens)


@pytest.mark.parametrize(("max_n", "min_n"), [(2, 3), (2, 0), (0, 0)])
def test_sizes_are_checked(max_n: int, min_n: int) -> None:
    """Impossible suffix lengths are refused."""
    with pytest.raises(ConfigError, match=f"min_n is {min_n} and max_n {max_n}"):
        NgramLookup(max_n=max_n, min_n=min_n)


# -- the fake runtime: it shows an engine's cache errors, and is otherwise a well-behaved model ------------------------


VOCAB = 64


def linear(tokens: list[int], seed: int = 0) -> NDArray[np.float32]:
    """Logits after every token, from the linear twin."""
    twin = FakeSequenceRuntime(vocab_size=VOCAB, seed=seed)
    return np.stack([twin.extend([token]) for token in tokens])


def test_wrong_addresses_give_other_text() -> None:
    """A swapped block, a stale block and a missed rollback each change the logits."""
    text, is_right = list(range(20, 28)), list[bool]()
    for past, blocks in ((8, [3, 1, 2]), (8, [1, 3, 2]), (8, [3, 8, 2]), (7, [3, 1, 2])):
        runtime = FakeBatchRuntime(vocab_size=VOCAB, block_size=4)
        runtime.forward([SequenceSlice(text, 0, [3, 1], 0), SequenceSlice(text[::-1], 0, [6, 8], 0)])
        row = runtime.forward([SequenceSlice([9], past, blocks, 1)])
        is_right.append(np.array_equal(row, linear([*text, 9])[-1:]))
    assert is_right == [True, False, False, False]


def test_impossible_addresses_are_assertion_errors() -> None:
    """Too few blocks, slots never written, and slots that two sequences touch in one step."""
    runtime = FakeBatchRuntime(vocab_size=VOCAB, block_size=4, num_blocks=16)
    runtime.forward([SequenceSlice([1, 2, 3, 4], 0, [2], 1)])
    for message, batch in (
        ("1 blocks for 5 tokens", [SequenceSlice([1] * 5, 0, [0], 1)]),
        ("never written", [SequenceSlice([1], 4, [9, 10], 1)]),
        ("written twice", [SequenceSlice([1], 0, [3], 1), SequenceSlice([1], 0, [3], 1)]),
        ("overwritten in the same step", [SequenceSlice([5], 4, [2, 3], 1), SequenceSlice([4], 3, [2], 1)]),
        ("outside the vocabulary", [SequenceSlice([VOCAB], 0, [0], 1)]),
    ):
        with pytest.raises(AssertionError, match=message):
            runtime.forward(batch)


@pytest.mark.parametrize("wrong", [[], [[1]] * 9], ids=["none", "too many"])
def test_a_fake_draft_takes_one_branch_to_eight(wrong: list[list[int]]) -> None:
    with pytest.raises(AssertionError):
        FakeSequenceRuntime(vocab_size=VOCAB).extend_branches(wrong)


def test_logits_are_peaked_but_not_certain() -> None:
    """The likeliest token has most of the mass in most contexts and rarely all of it, so sampling matters. Another seed
    is another language.
    """
    assert not np.array_equal(linear([1, 2]), linear([1, 2], seed=1))
    rows = linear(list(np.random.default_rng(0).integers(0, VOCAB, 500)))
    top = 1 / np.exp(rows - rows.max(axis=1, keepdims=True)).sum(axis=1)
    assert 0.4 < np.median(top) < 0.95
