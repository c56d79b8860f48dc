"""Tests what only OpenVINO has: the rewritten graph, its options, its errors, its threads."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops
from tests.conftest import TINY_VOCAB
from tests.tiny_models import copy_source
from tests.waiting import lets_other_threads_run

from outrider.export.make.pair import PairPaths
from outrider.models.bundle.bundle import Bundle
from outrider.models.errors import BundleError, ConfigError, RuntimeUnavailable
from outrider.models.runtimes.base import RuntimeOptions, SequenceSlice
from outrider.models.runtimes.openvino_graph import load_paged_model
from outrider.models.runtimes.openvino_paged import OpenVinoPagedRuntime
from outrider.models.runtimes.openvino_sequence import OpenVinoSequenceRuntime

OPTIONS = RuntimeOptions(num_threads=1, kv_cache_bytes=1 << 20, max_positions=256)
U8 = {"KV_CACHE_PRECISION": "u8"}
TOKENS = np.random.default_rng(3).integers(0, TINY_VOCAB, 40).tolist()


def edited(ir: Path, directory: Path, edit: Callable[[ov.Output], ov.Output]) -> Path:
    """A copy of the IR whose logits are `edit(logits)`."""
    model = ov.Core().read_model(ir / "openvino_model.xml")
    result = model.output(0).get_node()
    changed = edit(result.input_value(0))
    changed.set_names({"logits"})
    result.input(0).replace_source_output(changed)
    model.validate_nodes_and_infer_types()
    directory.mkdir()
    ov.save_model(model, directory / "openvino_model.xml", compress_to_fp16=False)
    return directory


def all_logits(path: Path) -> np.ndarray:
    return OpenVinoPagedRuntime(path, OPTIONS).forward([SequenceSlice(TOKENS, 0, [1, 0], len(TOKENS))]).copy()


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # qwen2's LM head is its embedding
@pytest.mark.parametrize("int8", [False, True])
def test_rows_are_gathered_before_the_lm_head(tiny_ir: Callable[..., Path], family: str, int8: bool) -> None:
    """FP32 and INT8, tied or not: the LM head computes only the requested rows, with the correct logits."""
    path = tiny_ir(family, int8=int8)
    assert load_paged_model(path, OPTIONS, tree_masks=True).gathers_rows
    every = all_logits(path)
    three = OpenVinoPagedRuntime(path, OPTIONS).forward([SequenceSlice(TOKENS, 0, [0, 1], 3)])
    assert three.shape == (3, TINY_VOCAB) and np.abs(three - every[-3:]).max() < 1e-4
    assert np.abs(every - all_logits(tiny_ir(family))).max() < (0.5 if int8 else 1e-6)


@pytest.mark.parametrize(("int8", "num_threads"), [(False, 1), (False, 2), (True, 1), (True, 2), (True, 0)])
def test_logits_do_not_depend_on_the_batch(
    tiny_ir: Callable[..., Path], int8: bool, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit: one prefill, decoding token by token, verifying several, after a rollback, among other sequences.

    0 threads: one thread, and two rows in each step, as on a CPU that rounds one row differently.
    """
    if not num_threads:
        monkeypatch.setattr(OpenVinoPagedRuntime, "_rounds_one_row_differently", lambda runtime: True)
    runtime = OpenVinoPagedRuntime(tiny_ir("qwen2", int8=int8), replace(OPTIONS, num_threads=num_threads or 1))
    text, blocks = (TOKENS * 3)[:100], [9, 4, 7, 2]
    whole = runtime.forward([SequenceSlice(text, 0, blocks, 100)]).copy()
    for i in range(60, 70):
        assert np.array_equal(runtime.forward([SequenceSlice(text[i : i + 1], i, blocks, 1)]), whole[i : i + 1])
    assert np.array_equal(runtime.forward([SequenceSlice(text, 0, blocks, 1)]), whole[99:])
    assert len(runtime.forward([SequenceSlice(text, 0, blocks, 0)])) == 0
    neighbours = [SequenceSlice(text[:n], 0, [n, n + 1], 0) for n in (10, 20, 40)]
    for past, num_new in ((65, 5), (70, 2), (0, 33), (33, 60)):
        own = SequenceSlice(text[past : past + num_new], past, blocks, num_new)
        assert np.array_equal(runtime.forward([*neighbours, own]), whole[past : past + num_new])


def test_invariance_can_be_given_up(tiny_ir: Callable[..., Path]) -> None:
    """Without it the same step is laid out as whole sequences, with the same logits except for rounding."""
    fast = OpenVinoPagedRuntime(tiny_ir("llama"), replace(OPTIONS, is_batch_invariant=False))
    fast.forward([SequenceSlice(TOKENS[:30], 0, [5, 3], 0)])
    logits = fast.forward([SequenceSlice(TOKENS[30:], 30, [5, 3], 10)])
    assert np.abs(logits - all_logits(tiny_ir("llama"))[-10:]).max() < 1e-4


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        # The plugin takes slots for positions: a tree's logits would be off by 0.2 to 2.
        ("mistral", {"is_batch_invariant": False}, "sliding window or ALiBi"),
        ("bloom", {"is_batch_invariant": False}, "sliding window or ALiBi"),
        # Masks end batch invariance; a quantized cache cannot be moved. Both reasons name a remedy.
        ("llama", {}, "is_batch_invariant=False"),
        ("llama", {"is_batch_invariant": False, "properties": U8}, "use an f32 cache"),
    ],
)
def test_masks_that_would_be_wrong_are_not_used(
    tiny_ir: Callable[..., Path], family: str, options: dict[str, Any], reason: str
) -> None:
    """With a sliding window, ALiBi, batch invariance, or a cache of small numbers."""
    runtime = OpenVinoPagedRuntime(tiny_ir(family), replace(OPTIONS, **options))
    assert reason in str(runtime.why_no_trees)
    with pytest.raises(AssertionError, match=reason):
        runtime.move([1], [0])


def test_rows_are_gathered_before_a_soft_cap(tiny_ir: Callable[..., Path], tmp_path: Path) -> None:
    """Element-wise operations between LM head and logits (scaling, Gemma's soft cap) do not hide the MatMul."""

    def soft_cap(logits: ov.Output) -> ov.Output:
        return ops.multiply(ops.tanh(ops.divide(logits, np.float32(2.0))), np.float32(2.0)).output(0)

    path = edited(tiny_ir("llama"), tmp_path / "capped", soft_cap)
    assert load_paged_model(path, OPTIONS, tree_masks=True).gathers_rows
    expected = 2.0 * np.tanh(all_logits(tiny_ir("llama")) / 2.0)
    assert np.abs(all_logits(path) - expected).max() < 1e-4


def test_an_unknown_tail_falls_back_to_all_rows(
    tiny_ir: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If the graph's end is unknown, all rows are computed, the requested ones returned, and the log says so."""
    path = edited(tiny_ir("llama"), tmp_path / "tail", lambda logits: ops.softmax(logits, axis=-1).output(0))
    plain = all_logits(tiny_ir("llama"))
    with caplog.at_level(logging.INFO, logger="outrider"):
        runtime = OpenVinoPagedRuntime(path, OPTIONS)
        sequence = OpenVinoSequenceRuntime(path, OPTIONS)
    assert "computed for every token" in caplog.text
    odds = np.exp(plain[-2:])
    expected = odds / odds.sum(axis=-1, keepdims=True)
    assert np.abs(runtime.forward([SequenceSlice(TOKENS, 0, [0, 1], 2)]) - expected).max() < 1e-5
    assert np.abs(sequence.extend(TOKENS) - expected[-1]).max() < 1e-5


def test_cache_precision_is_a_property(tiny_ir: Callable[..., Path]) -> None:
    """On CPU the cache is f32 by default; u8 holds more blocks and changes the logits a little."""
    plain = OpenVinoPagedRuntime(tiny_ir("llama"), OPTIONS)
    small = OpenVinoPagedRuntime(tiny_ir("llama"), replace(OPTIONS, properties=U8))
    assert plain.num_blocks == (1 << 20) // (2 * 2 * 2 * 32 * 16 * 4)  # layers, k and v, heads, tokens, size, bytes
    assert small.num_blocks > plain.num_blocks
    step = [SequenceSlice(TOKENS, 0, [0, 1], 1)]
    assert 0 < np.abs(plain.forward(step) - small.forward(step)).max() < 0.2


def test_bad_options_and_files_are_named(tiny_ir: Callable[..., Path], tmp_path: Path) -> None:
    """Each mistake has its own error, which names the value."""
    ir = tiny_ir("llama")
    wrong: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (OpenVinoPagedRuntime, {"num_threads": -1}, ConfigError, "num_threads is -1"),
        (
            OpenVinoPagedRuntime,
            {"kv_cache_bytes": 100},
            ConfigError,
            "kv_cache_bytes is 100; one block of this model takes 16384",
        ),
        (
            OpenVinoSequenceRuntime,
            {"device": "NOSUCH"},
            RuntimeUnavailable,
            r"'NOSUCH': Device .* not registered .*; devices on this machine: .*CPU",
        ),
    ]
    for runtime, options, kind, message in wrong:
        with pytest.raises(kind, match=message):
            runtime(ir, replace(OPTIONS, **options))
    with pytest.raises(BundleError, match=r"no OpenVINO model at .*; expected openvino_model\.xml"):
        OpenVinoPagedRuntime(tmp_path, OPTIONS)
    x = ops.parameter([-1, 4], np.float32, name="x")
    ov.save_model(ov.Model([ops.relu(x)], [x]), tmp_path / "openvino_model.xml")
    with pytest.raises(BundleError, match="cannot use paged attention"):
        OpenVinoPagedRuntime(tmp_path, OPTIONS)
    bare = edited(ir, tmp_path / "bare", lambda logits: logits)  # no config.json beside it
    with pytest.raises(ConfigError, match="set max_positions"):
        OpenVinoPagedRuntime(bare, replace(OPTIONS, max_positions=0))
    # A configuration may give any length: the error says what is wrong and what to change.
    huge = copy_source(ir, tmp_path / "huge", max_position_embeddings=10**13)
    with pytest.raises(ConfigError, match=r"10,000,000,000,000 positions is more .* smaller max_position_embeddings"):
        OpenVinoSequenceRuntime(huge, replace(OPTIONS, max_positions=0))


def test_bad_slices_are_our_bugs(tiny_ir: Callable[..., Path]) -> None:
    """An address outside the cache never reaches the model."""
    runtime = OpenVinoPagedRuntime(tiny_ir("llama"), OPTIONS)
    for wrong in (
        [SequenceSlice([TINY_VOCAB], 0, [0], 1)],
        [SequenceSlice([-1], 0, [0], 1)],
        [SequenceSlice([], 0, [0], 0)],
        [SequenceSlice([1], 0, [runtime.num_blocks], 1)],
        [SequenceSlice([1], 32, [0], 1)],
        [SequenceSlice([1], 0, [0], 2)],
        [SequenceSlice([1], 0, [0], 1, positions=[256])],
        [SequenceSlice([1, 2], 0, [0], 1, mask=np.ones((1, 2), np.uint8))],
        [SequenceSlice([1, 2], 0, [0], 1, mask=np.zeros((2, 2), np.uint8))],
        [],
    ):
        with pytest.raises(AssertionError):
            runtime.forward(wrong)


def test_other_threads_run_during_a_forward(tiny_ir: Callable[..., Path]) -> None:
    """Inference releases the GIL: another thread makes progress that has no other chance to get it."""
    runtime = OpenVinoPagedRuntime(tiny_ir("llama"), OPTIONS)
    batch = [SequenceSlice([1] * 256, 0, list(range(8 * i, 8 * i + 8)), 0) for i in range(8)]
    assert lets_other_threads_run(lambda: runtime.forward(batch))


PINNED = """
import os, sys
from pathlib import Path
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from outrider.models.runtimes.base import RuntimeOptions, SequenceSlice
from outrider.models.runtimes.openvino_paged import OpenVinoPagedRuntime
runtime = OpenVinoPagedRuntime(Path(sys.argv[1]), RuntimeOptions(kv_cache_bytes=1 << 20))
runtime.forward([SequenceSlice([1] * 64, 0, [0, 1], 1)])
allowed = {frozenset(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")}
assert allowed == {frozenset(os.sched_getaffinity(0))}, allowed
assert runtime._model.compiled.get_property("INFERENCE_NUM_THREADS") == 1
assert not runtime._model.compiled.get_property("ENABLE_CPU_PINNING")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="affinity masks are Linux's")
def test_a_pinned_process_stays_on_its_core(tiny_ir: Callable[..., Path]) -> None:
    """With one core allowed, one inference thread is used, and no thread is moved off the core."""
    found = in_a_process(PINNED, tiny_ir("llama"), PYTHONPATH=":".join(sys.path))
    assert found.returncode == 0, found.stderr


def in_a_process(script: str, path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """What the script does with a model, and its output."""
    command = [sys.executable, "-c", script, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | variables)


def test_the_cache_is_made_for_what_a_sequence_needs(tiny_ir: Callable[..., Path], tmp_path: Path) -> None:
    """Whatever the longest sequence: 2,048 positions and those of branches at first, then at least twice as many."""
    path = copy_source(tiny_ir("llama"), tmp_path / "long", max_position_embeddings=1 << 17)
    few, many, runtime = (OpenVinoSequenceRuntime(path, replace(OPTIONS, max_positions=n)) for n in (1024, 2048, 0))

    def cache_bytes(of: OpenVinoSequenceRuntime) -> int:
        return sum(tensor.byte_size for tensor in of._shared.caches)

    assert runtime.limits.max_positions == 1 << 17 and cache_bytes(runtime) == cache_bytes(many)
    thousand = cache_bytes(many) - cache_bytes(few)
    text = (TOKENS * 60)[:2048]
    for each in (many, runtime):
        each.extend(text[:2040])
    assert cache_bytes(runtime) == cache_bytes(many)
    logits = many.extend(text[2040:]).copy()
    runtime.extend_branches([[*text[2040:], 1]])
    assert cache_bytes(runtime) == cache_bytes(many) + 2 * thousand
    assert np.abs(runtime.extend(text[2040:]) - logits).max() < 1e-4


_EVERY_LENGTH = """
import os
import sys
from pathlib import Path
import psutil
from outrider.models.runtimes.base import RuntimeOptions
from outrider.models.runtimes.openvino_sequence import OpenVinoSequenceRuntime
given = dict(os.environ)
runtime = OpenVinoSequenceRuntime(Path(sys.argv[1]), RuntimeOptions(num_threads=1, max_positions=256))
assert dict(os.environ) == given, "a user's own setting stays"
for length in range(1, 111):
    runtime.truncate(0)
    runtime.extend([1] * length)
    if length in (80, 110):
        print(psutil.Process().memory_info().rss)
"""


def test_a_new_length_of_a_prompt_costs_no_memory(tiny_ir: Callable[..., Path]) -> None:
    """OpenVINO keeps kernels for thousands of lengths: 100 more took 99 MB for a tiny model."""
    path = tiny_ir("llama")
    load_paged_model(path, OPTIONS, tree_masks=False)
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "128"
    # With fewer of oneDNN's own, the plugin's limit shows after fewer lengths.
    done = in_a_process(_EVERY_LENGTH, path, ONEDNN_PRIMITIVE_CACHE_CAPACITY="16")
    before, after = map(int, done.stdout.split())
    assert done.returncode == 0 and after - before < 8e6, (before, after)


WITHOUT_MEMORY = """
import resource, sys
from pathlib import Path
import psutil
from outrider.models.runtimes.base import RuntimeOptions, SequenceSlice
from outrider.models.runtimes.openvino_paged import OpenVinoPagedRuntime

runtime = OpenVinoPagedRuntime(Path(sys.argv[1]), RuntimeOptions(num_threads=1, kv_cache_bytes=16 << 20))
blocks = range(300 // runtime.block_size + 1)
first = runtime.forward([SequenceSlice([5, 6], 0, blocks, 2)]).copy()
resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms, resource.RLIM_INFINITY))
try:
    found = runtime.forward([SequenceSlice(range(5, 305), 0, blocks, 2)])
except RuntimeError:
    print("raised")
else:
    print("the step before" if (found == first).all() else "computed")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_a_step_that_lacks_memory_raises(reference_pair: PairPaths) -> None:
    """It does not return the rows of the step before."""
    found = in_a_process(WITHOUT_MEMORY, Bundle.open(reference_pair.target).model_file)
    assert found.stdout == "raised\n", found.stderr
