"""Tests ONNX Runtime: transformers' logits in every kind of step, honest providers, clear errors."""

from __future__ import annotations

import functools
import logging
import mmap
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from tests.onnx_graphs import FIRST, VOCAB, Truth, build, load_fp32, put_back, truth_of, worst_delta
from tests.quantized import read_blocks
from tests.tiny_models import copy_source
from tests.waiting import lets_other_threads_run
from tools.tiny_sources import make_tiny_model

from outrider.export.convert.onnx_dynamo import export_with_dynamo
from outrider.models.errors import BundleError, ConfigError, RuntimeUnavailable
from outrider.models.runtimes import open_sequence_runtime
from outrider.models.runtimes.base import RuntimeOptions, SequenceRuntime
from outrider.models.runtimes.onnxruntime_sequence import OnnxRuntimeSequence

OPTIONS = RuntimeOptions(num_threads=1, max_positions=128)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`source("llama")` is the directory of a tiny model: Llama's embeddings are tied and 48 wide, Qwen2's are not."""
    root = tmp_path_factory.mktemp("onnx-sources")

    def make(family: str) -> Path:
        tied = family == "llama"
        return make_tiny_model(
            family,
            root / family,
            vocab_size=VOCAB,
            tie_word_embeddings=tied,
            hidden_size=48 if tied else 64,
            num_attention_heads=3 if tied else 4,
            num_key_value_heads=1 if tied else 2,
        )

    return functools.cache(make)


@pytest.fixture(scope="module")
def graph(source: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`graph("llama", "int8")` is the directory of that model's ONNX graph."""
    root = tmp_path_factory.mktemp("onnx-graphs")
    return functools.cache(lambda family, kind: build(source(family), root / f"{family}-{kind}", kind))


@pytest.fixture(scope="module")
def truth(source: Callable[[str], Path]) -> Callable[[str], Truth]:
    return lambda family: truth_of(load_fp32(source(family)))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [("fp32", 5e-5), ("int8", 0.6)],  # for logits up to 5; random weights spread every rounding error to all of them
)
def test_logits_are_the_sources(
    graph: Callable[..., Path],
    truth: Callable[[str], Truth],
    family: str,
    precision: str,
    tolerance: float,
) -> None:
    """Prefill, single and multi-token steps, rollbacks into the draft, into the prompt and to nothing."""
    runtime = OnnxRuntimeSequence(graph(family, precision), OPTIONS)
    assert isinstance(runtime, SequenceRuntime)
    assert (runtime.limits.vocab_size, runtime.limits.max_positions) == (VOCAB, 128)
    assert runtime.provider == "CPUExecutionProvider"
    assert worst_delta(runtime, truth(family)) < tolerance


@pytest.mark.parametrize("exporter", ["builder", "dynamo"])
def test_a_device_that_copies_inputs_when_they_are_bound_sees_every_step(
    graph: Callable[..., Path],
    source: Callable[[str], Path],
    truth: Callable[[str], Truth],
    tmp_path: Path,
    exporter: str,
) -> None:
    """As GPU providers do, which would not see later changes in place, those of the host's caches included."""
    path = graph("llama", "fp32")
    if exporter == "dynamo":
        export_with_dynamo(load_fp32(source("llama")), tmp_path, "llama")
        shutil.copyfile(source("llama") / "config.json", tmp_path / "config.json")
        path = tmp_path
    runtime = OnnxRuntimeSequence(path, OPTIONS)
    bind = runtime._binding.bind_ortvalue_input

    def copy(name: str, value: ort.OrtValue) -> None:
        bind(name, ort.OrtValue.ortvalue_from_numpy(value.numpy().copy()))

    for name, cache in runtime._caches.items():
        copy(name, cache)
    runtime._binding.bind_ortvalue_input, runtime._is_on_host = copy, False
    assert worst_delta(runtime, truth("llama")) < 5e-5


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_quantized_graphs_compute_with_the_weights_that_they_hold(
    graph: Callable[..., Path], source: Callable[[str], Path], family: str, precision: str
) -> None:
    """Compared with transformers on the dequantized weights: only the kernel's INT8 activations differ."""
    path = graph(family, precision)
    blocks = read_blocks(path / "model.onnx")
    bits = [blocks[f"{name}.MatMul.weight"].bits for name in ("model.layers.0.attn.o_proj", "lm_head")]
    assert bits == [8 if precision == "int8" else 4, 8]
    expected = truth_of(put_back(load_fp32(source(family)), blocks))
    assert worst_delta(OnnxRuntimeSequence(path, OPTIONS), expected) < 0.5  # 3 with the source's weights, at INT4


def test_half_precision_caches_run_on_the_cpu_too(graph: Callable[..., Path], truth: Callable[[str], Truth]) -> None:
    """An export for CUDA can be checked without it: FP16 graph, FP16 cache, logits in FP32."""
    assert worst_delta(OnnxRuntimeSequence(graph("qwen2", "fp16"), OPTIONS), truth("qwen2")) < 0.1


def test_long_prompts_go_in_pieces(graph: Callable[..., Path], truth: Callable[[str], Truth]) -> None:
    """A prompt of several pieces ends with the logits of one pass; `extend_rows` has all of its rows."""
    tokens = (FIRST * 7)[:600]
    runtime = OnnxRuntimeSequence(graph("llama", "fp32"), replace(OPTIONS, max_positions=0))
    assert runtime.limits.max_positions == 512
    expected = truth("llama")(tokens[:512])
    assert np.abs(runtime.extend(tokens[:500]) - expected[499]).max() < 1e-4
    assert np.abs(runtime.extend_rows(tokens[500:512]) - expected[500:]).max() < 1e-4
    runtime.truncate(0)
    assert np.abs(runtime.extend_rows(tokens[:512]) - expected).max() < 1e-4
    runtime.truncate(100)
    with pytest.raises(ConfigError, match="600 tokens do not fit the 512 positions"):
        runtime.extend_rows(tokens[:500])
    assert runtime.length == 100


def test_a_graph_without_row_selection_is_driven_as_well(
    graph: Callable[..., Path], truth: Callable[[str], Truth], tmp_path: Path
) -> None:
    """A graph as onnxruntime-genai's builder writes it, which computes every row, gives the same logits."""
    path = tmp_path / "plain"
    shutil.copytree(graph("llama", "fp32"), path)
    model = onnx.load(path / "model.onnx", load_external_data=False)
    model.graph.input.remove(next(value for value in model.graph.input if value.name == "first_row"))
    for value in (*model.graph.input, *model.graph.output):
        if value.name.startswith(("past", "present")):
            value.type.tensor_type.shape.dim[3].dim_param = "head"
    onnx.save(model, path / "model.onnx")
    assert worst_delta(OnnxRuntimeSequence(path, OPTIONS), truth("llama")) < 5e-5
    for content in ("[" * 100_000, "{}", "[]"):
        (path / "genai_config.json").write_text(content)
        with pytest.raises(BundleError, match=r"genai_config\.json does not give the size of a head"):
            OnnxRuntimeSequence(path, OPTIONS)
    (path / "genai_config.json").unlink()
    with pytest.raises(BundleError, match="does not give the sizes of past_key_values"):
        OnnxRuntimeSequence(path, OPTIONS)


def test_the_caches_memory_is_what_was_reached(graph: Callable[..., Path]) -> None:
    """A step writes its own rows of the cache in place; a rollback writes nothing."""
    runtime = OnnxRuntimeSequence(graph("llama", "fp32"), OPTIONS)
    runtime.extend(FIRST[:40])
    key = next(iter(runtime._caches.values())).numpy()[0]
    before = key.copy()
    assert np.abs(key[:, :40]).max() > 0 and not key[:, 40:].any()
    runtime.truncate(30)
    assert np.array_equal(key, before)
    runtime.extend(FIRST[50:53])
    changed = np.flatnonzero((key != before).any(axis=(0, 2)))
    assert changed.tolist() == [30, 31, 32]


@pytest.mark.skipif(not hasattr(mmap, "MADV_NOHUGEPAGE"), reason="how much memory an array has is known on Linux")
def test_positions_that_no_token_reached_take_no_memory(graph: Callable[..., Path], tmp_path: Path) -> None:
    """A cache for very many positions is made when they are needed, and takes memory for pages that were written."""
    path = copy_source(graph("qwen2", "fp32"), tmp_path / "long", max_position_embeddings=1 << 20)
    runtime = OnnxRuntimeSequence(path, replace(OPTIONS, max_positions=1 << 20))
    before = resident_bytes()
    logits = runtime.extend(FIRST).copy()
    for num_positions in (2048, 1 << 20):
        runtime._reserve(num_positions)
        reserved = sum(cache.numpy().nbytes for cache in runtime._caches.values())
        assert reserved == 4 * 2 * num_positions * 16 * 4  # keys and values of two layers, two heads of 16
        assert resident_bytes() - before < 32 << 20
    runtime.truncate(len(FIRST) - 1)
    assert np.abs(runtime.extend(FIRST[-1:]) - logits).max() < 1e-5


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


def test_other_threads_run_during_a_step(graph: Callable[..., Path]) -> None:
    """The step releases the GIL: another thread makes progress that has no other chance to get it. Closing, once or
    twice, releases model and cache.
    """
    runtime = OnnxRuntimeSequence(graph("llama", "fp32"), OPTIONS)

    def step() -> None:
        runtime.truncate(0)
        runtime.extend(FIRST)

    assert lets_other_threads_run(step)
    for _ in range(2):
        runtime.close()
        assert runtime._model is None and not runtime._caches


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        ({"device": "GPU"}, RuntimeUnavailable, r"no GPU provider.*CPUExecutionProvider.*pip install onnxruntime-gpu"),
        ({"device": "NPU"}, RuntimeUnavailable, r"no NPU took the model.*pip install onnxruntime-qnn"),
        (
            {"device": "CUDAExecutionProvider"},
            RuntimeUnavailable,
            r"no provider CUDAExecutionProvider.*pip install onnxruntime-gpu",
        ),
        ({"device": "OpenVINOExecutionProvider"}, RuntimeUnavailable, r"pip install onnxruntime-ep-openvino"),
        # In every build, and takes no local node: ONNX Runtime uses the CPU, which is reported.
        (
            {"device": "AzureExecutionProvider"},
            RuntimeUnavailable,
            r"AzureExecutionProvider ran only 0 of \d+ matrix products.*Check its driver",
        ),
        ({"device": "abacus"}, ConfigError, r"device is 'abacus'; .* expected CPU, GPU, GPU\.1, NPU, prefer-npu"),
        ({"num_threads": -1}, ConfigError, "num_threads is -1"),
        ({"emulate_npu": True}, ConfigError, "no NPU path to emulate"),
    ],
    ids=str,
)
def test_devices_that_are_not_here_and_bad_options_are_errors(
    graph: Callable[..., Path], wrong: dict[str, Any], kind: type[Exception], message: str
) -> None:
    """GPU, NPU and named providers: never the CPU instead; the error says what is there and what is needed."""
    with pytest.raises(kind, match=message):
        OnnxRuntimeSequence(graph("llama", "int8"), replace(OPTIONS, **wrong))


def test_preferring_an_npu_may_end_on_the_cpu_and_says_so(
    graph: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    """The policy uses what it finds; that this is the CPU is in `provider` and in the log."""
    with caplog.at_level(logging.WARNING, logger="outrider"):
        runtime = OnnxRuntimeSequence(graph("llama", "fp32"), replace(OPTIONS, device="prefer-npu"))
    assert runtime.provider == "CPUExecutionProvider"
    assert "no NPU took the model, so the CPU runs it" in caplog.text
    assert runtime.extend([1, 2]).shape == (VOCAB,)


def test_broken_files_are_named(graph: Callable[..., Path], tmp_path: Path) -> None:
    """Missing, truncated, garbled or another kind of file: each is a BundleError, on the CPU and elsewhere."""

    def broken(change: Callable[[Path], object], match: str, device: str = "CPU") -> None:
        path = tmp_path / "broken"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(graph("llama", "int8"), path)
        change(path)
        with pytest.raises(BundleError, match=match):
            OnnxRuntimeSequence(path, replace(OPTIONS, device=device))

    def other_graph(path: Path) -> None:
        text = (
            '<ir_version: 10, opset_import: ["" : 21]> other (float[1] x) => (float[1] logits) { logits = Identity(x) }'
        )
        onnx.save(onnx.parser.parse_model(text), path / "model.onnx")

    broken(lambda path: (path / "model.onnx").unlink(), "no ONNX model at .*model.onnx")
    broken(lambda path: (path / "model.onnx.data").unlink(), "cannot load .*External data path")
    broken(lambda path: (path / "model.onnx").write_bytes(b"PK" * 500), "cannot load .*No graph was found")
    broken(lambda path: (path / "model.onnx.data").write_bytes(b""), "cannot load", "prefer-npu")
    broken(other_graph, "is not a decoder that this runtime can drive: inputs x; outputs logits")


def test_lengths_that_are_not_known_or_held_are_named(graph: Callable[..., Path], tmp_path: Path) -> None:
    """A configuration may give any length, or none: the error says what is wrong and what to change."""
    huge = copy_source(graph("llama", "int8"), tmp_path / "huge", max_position_embeddings=10**13)
    with pytest.raises(ConfigError, match=r"10,000,000,000,000 positions is more .* smaller max_position_embeddings"):
        OnnxRuntimeSequence(huge, replace(OPTIONS, max_positions=0))
    lengthless = shutil.copytree(graph("llama", "fp32"), tmp_path / "lengthless")
    (lengthless / "config.json").unlink()
    with pytest.raises(ConfigError, match="does not give max_position_embeddings; set max_positions"):
        OnnxRuntimeSequence(lengthless, replace(OPTIONS, max_positions=0))
    for content in ("[" * 100_000, "{", "[]"):
        (lengthless / "config.json").write_text(content)
        with pytest.raises(ConfigError, match=r"config\.json is no configuration of a model"):
            OnnxRuntimeSequence(lengthless, OPTIONS)


def test_it_opens_by_name_and_its_threads_spin_shortly(graph: Callable[..., Path]) -> None:
    """`open_sequence_runtime` takes the .onnx file itself."""
    runtime = open_sequence_runtime("onnxruntime", graph("llama", "fp32") / "model.onnx", OPTIONS)
    assert isinstance(runtime, OnnxRuntimeSequence)
    settings = runtime._model.session.get_session_options()
    assert settings.get_session_config_entry("session.intra_op.spin_duration_us") == "300"
    assert settings.intra_op_num_threads == 1
