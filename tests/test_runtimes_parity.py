"""Compares every runtime with transformers' FP32 logits, for any batch, cache layout and rollback."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.conftest import TINY_VOCAB
from tests.npu_path import Truth, truth_of
from tests.tiny_models import FAMILIES

from outrider.models.errors import BundleError
from outrider.models.picks.sampling import SamplingParams, pick
from outrider.models.processors.text_rows import AskedRows
from outrider.models.runtimes import open_batch_runtime, open_sequence_runtime
from outrider.models.runtimes.base import (
    BatchRuntime,
    BlockRuntime,
    PickingRuntime,
    RuntimeOptions,
    SequenceSlice,
    TreeRuntime,
)
from outrider.models.runtimes.openvino_sequence import OpenVinoSequenceRuntime

# Logits of the tiny models span about +-4.
TOLERANCE = 1e-4
OPTIONS = RuntimeOptions(num_threads=1, kv_cache_bytes=1 << 20)
RNG = np.random.default_rng(7)
FIRST = RNG.integers(0, TINY_VOCAB, 100).tolist()
SECOND = RNG.integers(0, TINY_VOCAB, 70).tolist()

# OpenVINO's other families are exported and checked in test_export_families.
CASES = [("openvino", family) for family in FAMILIES]
CASES += [("torch", family) for family in (*FAMILIES, "gemma2", "gemma3_text", "gpt_neox", "mistral", "phi3")]
# Sinks; keys and values of different sizes; a family that does not pass arguments on; attention of its own.
CASES += [("torch", family) for family in ("gpt_oss", "deepseek_v3", "stablelm", "falcon")]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> Any:
    """A runtime and the family that it runs."""
    return request.param


@pytest.fixture(scope="module")
def runtime(
    case: tuple[str, str], tiny_model: Callable[[str], Path], tiny_ir: Callable[..., Path]
) -> Iterator[BatchRuntime]:
    kind, family = case
    opened = open_batch_runtime(kind, tiny_ir(family) if kind == "openvino" else tiny_model(family), OPTIONS)
    yield opened
    opened.close()
    opened.close()


@pytest.fixture(scope="module")
def truths(tiny_model: Callable[[str], Path]) -> Callable[[str], Truth]:
    """`truths("llama")` gives the source's logits of a sequence."""
    # Plain attention: transformers' fused attention silently skips some steps, such as Gemma 2's soft-capping.
    of = functools.cache(lambda family: truth_of(tiny_model(family), "eager"))
    logits = functools.cache(lambda family, tokens: of(family)(list(tokens)))
    return lambda family: lambda tokens: logits(family, tuple(tokens))


@pytest.fixture(scope="module")
def truth(case: tuple[str, str], truths: Callable[[str], Truth]) -> Truth:
    return truths(case[1])


def assert_close(found: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    assert found.dtype == np.float32 and found.shape == expected.shape
    assert np.abs(found - expected).max() < TOLERANCE


def test_limits_are_those_of_the_config(runtime: BatchRuntime) -> None:
    """Vocabulary and longest sequence come from the model; the cache has as many blocks as fit its bytes."""
    assert isinstance(runtime, BatchRuntime)
    assert (runtime.limits.vocab_size, runtime.limits.max_positions) == (TINY_VOCAB, 512)
    assert runtime.block_size == 32 and 16 <= runtime.num_blocks <= 128


def test_ragged_prefill(runtime: BatchRuntime, truth: Truth) -> None:
    """Prompts of different lengths in one step, blocks scattered and interleaved; all rows are requested, or each
    slice's last ones, none included.
    """
    for first, second, third in ((100, 70, 10), (3, 0, 1)):
        logits = runtime.forward(
            [
                SequenceSlice(FIRST, 0, [9, 2, 14, 5], first),
                SequenceSlice(SECOND, 0, [1, 8, 3], second),
                SequenceSlice(SECOND[:10], 0, [4], third),
            ]
        )
        expected = [truth(FIRST)[100 - first :], truth(SECOND)[70 - second :], truth(SECOND[:10])[10 - third :]]
        assert_close(logits, np.concatenate(expected))


def test_two_threads_of_torch_compute_the_same(
    tiny_model: Callable[[str], Path], truths: Callable[[str], Truth]
) -> None:
    """All other tests have one."""
    before = torch.get_num_threads()
    try:
        with closing(open_batch_runtime("torch", tiny_model("llama"), replace(OPTIONS, num_threads=2))) as opened:
            assert torch.get_num_threads() == 2
            found = opened.forward([SequenceSlice(FIRST, 0, [9, 2, 14, 5], 100)])
            assert_close(found, truths("llama")(FIRST))
    finally:
        torch.set_num_threads(before)


def test_chunked_prefill_beside_decoding(runtime: BatchRuntime, truth: Truth) -> None:
    """A prompt that arrives in chunks, while another sequence decodes, ends with the logits of one pass."""
    blocks, other = [7, 0, 11, 6], [4, 13, 10]
    none = runtime.forward([SequenceSlice(FIRST[:33], 0, blocks, 0), SequenceSlice(SECOND[:60], 0, other, 0)])
    assert none.shape == (0, TINY_VOCAB)
    step = runtime.forward([SequenceSlice(FIRST[33:80], 33, blocks, 0), SequenceSlice(SECOND[60:61], 60, other, 1)])
    assert_close(step, truth(SECOND[:61])[-1:])
    step = runtime.forward([SequenceSlice(SECOND[61:62], 61, other, 1), SequenceSlice(FIRST[80:], 80, blocks, 1)])
    assert_close(step, np.stack([truth(SECOND[:62])[-1], truth(FIRST)[-1]]))


def test_multi_token_steps_after_a_rollback(runtime: BatchRuntime, truth: Truth) -> None:
    """Rejected tokens leave no trace after the past is shortened."""
    blocks = [3, 1, 2]
    runtime.forward([SequenceSlice(FIRST[:40], 0, blocks, 0)])
    wrong = [(token + 1) % TINY_VOCAB for token in FIRST[40:46]]
    rejected = runtime.forward([SequenceSlice(wrong, 40, blocks, 6)]).copy()
    assert_close(rejected, truth(FIRST[:40] + wrong)[-6:])
    mended = runtime.forward([SequenceSlice([wrong[0], *FIRST[41:46]], 40, blocks, 6)])
    assert_close(mended, truth([*FIRST[:40], wrong[0], *FIRST[41:46]])[-6:])


def test_picks_made_by_the_runtime_are_those_of_its_logits(runtime: BatchRuntime) -> None:
    """A runtime that picks where its logits are picks the same as `sampling.pick`, greedy or sampled."""
    if not isinstance(runtime, PickingRuntime):
        return  # OpenVINO's logits are in host memory anyway
    batch = [SequenceSlice(FIRST[:40], 0, [0, 1, 2], 3), SequenceSlice(SECOND[:20], 0, [4, 3], 2)]
    params = [SamplingParams(), *[SamplingParams(temperature=0.8, top_p=0.9, seed=s) for s in range(4)]]
    positions = [38, 39, 40, 19, 20]
    expected = [pick(row, p, i) for row, p, i in zip(runtime.forward(batch), params, positions, strict=True)]
    asked = [AskedRows(p, [position]) for p, position in zip(params, positions, strict=True)]
    assert runtime.forward_picks(batch, lambda: asked, lambda is_over: None) == expected


def test_shared_prefix_blocks(runtime: BatchRuntime, truth: Truth) -> None:
    """Two sequences that share the block of a common prefix, each with a tail of its own."""
    runtime.forward([SequenceSlice(FIRST[:32], 0, [12], 0)])
    logits = runtime.forward([SequenceSlice(FIRST[32:40], 32, [12, 5], 1), SequenceSlice(SECOND[:6], 32, [12, 0], 2)])
    assert_close(logits, np.stack([truth(FIRST[:40])[-1], *truth(FIRST[:32] + SECOND[:6])[-2:]]))


@pytest.mark.parametrize("kind", ["openvino", "openvino u8", "torch", "torch bf16"])
def test_blocks_are_bit_equal_in_another_runtime(
    kind: str, tiny_model: Callable[[str], Path], tiny_ir: Callable[..., Path]
) -> None:
    """The logits after tokens whose keys and values another runtime computed, in other blocks: not one bit differs."""
    name = kind.partition(" ")[0]
    path = tiny_ir("llama") if name == "openvino" else tiny_model("llama")
    properties = {"openvino u8": {"KV_CACHE_PRECISION": "u8"}, "torch bf16": {"dtype": "bf16"}}
    options = replace(OPTIONS, properties=properties.get(kind, {}))
    first, second = (open_batch_runtime(name, path, options) for _ in range(2))
    with closing(first), closing(second):
        assert isinstance(first, BlockRuntime) and isinstance(second, BlockRuntime)
        assert first.why_no_blocks is None and first.block_layout == second.block_layout
        table, other, num_full = [3, 1, 2, 0], [5, 7, 4, 6], 70 // first.block_size
        assert num_full >= 2
        first.forward([SequenceSlice(FIRST[:70], 0, table, 0)])
        data = first.read_blocks(table[:num_full])
        assert data.shape == (num_full, first.block_bytes) and data.any()
        second.write_blocks(other[:num_full], data)
        assert np.array_equal(second.read_blocks(other[:num_full]), data)
        past = num_full * first.block_size
        one, another = (
            runtime.forward([SequenceSlice(FIRST[past:70], past, blocks, 1)]).copy()
            for runtime, blocks in ((first, table), (second, other))
        )
        assert np.array_equal(one, another)


def test_tree_mask_beside_a_causal_sequence(runtime: BatchRuntime, truth: Truth) -> None:
    """Two branches verified in one step have the logits of their linear sequences; the neighbour is not disturbed."""
    blocks = [6, 4]
    runtime.forward([SequenceSlice(FIRST[:50], 0, blocks, 0), SequenceSlice(SECOND[:20], 0, [15], 0)])
    #    a          root a, then b -> d and c -> e
    #   / \
    #  b   c
    #  |   |
    #  d   e
    a, b, c, d, e = 5, 17, 40, 61, 83
    mask = np.array(
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]], dtype=np.uint8
    )
    tree = SequenceSlice([a, b, c, d, e], 50, blocks, 5, [50, 51, 51, 52, 52], mask)
    logits = runtime.forward([SequenceSlice(SECOND[20:24], 20, [15], 4), tree])
    assert_close(logits[:4], truth(SECOND[:24])[-4:])
    assert_close(logits[[4, 5, 7]], truth([*FIRST[:50], a, b, d])[-3:])
    assert_close(logits[[4, 6, 8]], truth([*FIRST[:50], a, c, e])[-3:])
    assert isinstance(runtime, TreeRuntime)
    if runtime.why_no_trees is not None:
        assert "batch-invariant" in runtime.why_no_trees or "attention of its own" in runtime.why_no_trees
        return
    slots = [blocks[i // 32] * 32 + i % 32 for i in range(50, 55)]
    runtime.move([slots[2], slots[4]], [slots[1], slots[2]])  # the second branch, behind its root
    assert_close(runtime.forward([SequenceSlice([9], 53, blocks, 1)]), truth([*FIRST[:50], a, c, e, 9])[-1:])


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("bloom", "0 of 2 layers attend through it; with its own attention: "),
        ("gpt_neo", "own table of attention functions; with its own attention: it may slide"),
        ("ctrl", "0 of 2 layers attend through it; with its own attention: RuntimeError"),
        ("cpmant", "with its own attention: it adds tokens of its own"),
        ("doge", "it makes attention masks of its own"),
        ("qwen3_next", "1 of 2 layers attend through it; with its own attention: "),
    ],
)
def test_what_torch_cannot_run_is_refused_when_it_is_loaded(
    family: str, reason: str, tiny_model: Callable[[str], Path]
) -> None:
    """Before a step, with the reason of each of the two ways of attending."""
    with pytest.raises(BundleError, match=reason):
        open_batch_runtime("torch", tiny_model(family), OPTIONS)


@pytest.mark.parametrize("family", FAMILIES)
def test_sequence_extends_and_truncates(
    family: str, tiny_ir: Callable[..., Path], truths: Callable[[str], Truth]
) -> None:
    """Prompt, single tokens, a rollback, several tokens at once: always the last logits of one pass. `extend_rows`
    gives a row for each new token, and mixes with `extend`.
    """
    truth, sequence = truths(family), open_sequence_runtime("openvino", tiny_ir(family), OPTIONS)
    assert isinstance(sequence, OpenVinoSequenceRuntime)
    assert_close(sequence.extend(FIRST[:45]), truth(FIRST[:45])[-1])
    for length in (46, 47, 48):
        assert_close(sequence.extend(FIRST[length - 1 : length]), truth(FIRST[:length])[-1])
    sequence.truncate(44)
    assert sequence.length == 44
    assert_close(sequence.extend(SECOND[:5]), truth(FIRST[:44] + SECOND[:5])[-1])
    assert_close(sequence.extend(SECOND[5:6]), truth(FIRST[:44] + SECOND[:6])[-1])
    assert sequence.length == 50
    sequence.truncate(0)
    assert_close(sequence.extend_rows(FIRST[:40]), truth(FIRST[:40]))
    assert_close(sequence.extend(FIRST[40:44]), truth(FIRST[:44])[-1])
    assert_close(sequence.extend_rows(FIRST[44:48]), truth(FIRST[:48])[-4:])
    for _ in range(2):
        sequence.close()
