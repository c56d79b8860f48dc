"""torch's exporter with attention on one operator: exact for every family, quantized by name, the same bytes again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from tests.onnx_graphs import FIRST, VOCAB, load_fp32, truth_of, worst_delta
from tests.quantized import read_blocks
from tools.tiny_sources import make_tiny_model

from outrider.export.convert.onnx_attention import Recording, recording_attention
from outrider.export.convert.onnx_dynamo import export_with_dynamo
from outrider.export.convert.onnx_quantize import quantize_weights
from outrider.export.make import build
from outrider.export.recipes import ExportOptions
from outrider.models.errors import ExportError
from outrider.models.runtimes.base import RuntimeOptions
from outrider.models.runtimes.onnxruntime_sequence import OnnxRuntimeSequence
from outrider.models.runtimes.torch_loading import load_causal_lm

OPTIONS = RuntimeOptions(num_threads=1, max_positions=128)
# Odd sizes: heads of 20 and 12, widths that no block divides.
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {},
    "gpt_neox": {"num_hidden_layers": 1},
    "bloom": {"num_hidden_layers": 1, "hidden_size": 36, "num_attention_heads": 3},
    "gpt_neo": {"hidden_size": 60, "num_attention_heads": 3},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`source("bloom")` is the directory of that family's tiny model."""
    root = tmp_path_factory.mktemp("sources")

    def make(family: str) -> Path:
        directory = root / family
        return (
            directory
            if directory.is_dir()
            else make_tiny_model(family, directory, vocab_size=VOCAB, **FAMILIES.get(family, {}))
        )

    return make


@pytest.fixture(scope="module")
def graph(source: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`graph("bloom")` is the directory of its FP32 graph, exported once."""
    root = tmp_path_factory.mktemp("graphs")

    def make(family: str) -> Path:
        directory = root / family
        if not directory.is_dir():
            directory.mkdir()
            export_with_dynamo(load_fp32(source(family)), directory, family)
        return directory

    return make


def put_back(model: Any, onnx_file: Path) -> Any:
    """The model with the weights that a quantized graph computes with: each has the name of its parameter."""
    import torch

    for name, blocks in read_blocks(onnx_file).items():
        with torch.no_grad():
            model.get_parameter(name).copy_(torch.tensor(blocks.values))
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_sources(graph: Callable[[str], Path], source: Callable[[str], Path], family: str) -> None:
    """Windows, soft caps, ALiBi, learned positions, partial rotation: in prefill, steps and after rollbacks."""
    assert worst_delta(OnnxRuntimeSequence(graph(family), OPTIONS), truth_of(load_fp32(source(family)))) < 1e-4


@pytest.mark.parametrize(("family", "bits"), [("gemma3_text", 8), ("gpt_neox", 4), ("bloom", 8), ("gpt_neo", 4)])
def test_quantized_graphs_compute_with_the_weights_that_they_hold(
    graph: Callable[[str], Path], source: Callable[[str], Path], tmp_path: Path, family: str, bits: int
) -> None:
    """Against transformers with the dequantized weights only the kernel's INT8 activations are left as a difference."""
    quantize_weights(graph(family) / "model.onnx", tmp_path, bits)  # type: ignore[arg-type]
    blocks = read_blocks(tmp_path / "model.onnx")
    assert sum(part.bits == bits for part in blocks.values()) >= 4
    head = [part for part in blocks.values() if part.values.shape[0] == VOCAB]
    assert head and {part.bits for part in head} == {8}
    expected = truth_of(put_back(load_fp32(source(family)), tmp_path / "model.onnx"))
    assert worst_delta(OnnxRuntimeSequence(tmp_path, OPTIONS), expected) < 0.8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]


def test_half_precision_graphs_are_for_cuda_and_run_here(tmp_path: Path) -> None:
    """Gemma 3 in FP16, norms that scale in FP32 included, and quantized from there: weights, cache and logits."""
    small = make_tiny_model("gemma3_text", tmp_path / "small", vocab_size=VOCAB, num_hidden_layers=1)
    wide, narrow = tmp_path / "wide", tmp_path / "narrow"
    wide.mkdir()
    narrow.mkdir()
    export_with_dynamo(load_fp32(small), wide, "gemma3", "fp16")
    quantize_weights(wide / "model.onnx", narrow, 8)
    truth = truth_of(load_fp32(small))
    assert worst_delta(OnnxRuntimeSequence(wide, OPTIONS), truth) < 0.05
    assert worst_delta(OnnxRuntimeSequence(narrow, OPTIONS), truth) < 0.5
    graph = onnx.load(narrow / "model.onnx", load_external_data=False).graph
    floats = [tensor.name for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT]
    assert not [name for name in floats if name.endswith(("weight", "scales"))]


def test_the_graph_takes_what_its_docstring_says(graph: Callable[[str], Path]) -> None:
    """No mask, one buffer a layer in and out, rows selected; neither paths nor stack traces in the file."""
    model = onnx.load(graph("gpt_neo") / "model.onnx", load_external_data=False)
    slots = [f"{layer}.{kind}" for layer in (0, 1) for kind in ("key", "value")]
    pasts = [f"past_key_values.{slot}" for slot in slots]
    assert [value.name for value in model.graph.input] == [
        *("input_ids", "position_ids", "seqlens_k", "total_sequence_length"),
        *pasts,
        "first_row",
    ]
    assert [value.name for value in model.graph.output] == ["logits", *(f"present.{slot}" for slot in slots)]
    shapes = {
        value.name: [size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim]
        for value in (*model.graph.input, *model.graph.output)
    }
    assert shapes["input_ids"] == shapes["position_ids"] == [1, "num_new"]
    assert shapes[pasts[0]] == shapes["present.0.key"] == [1, 3, "positions", 24]  # 20, padded
    assert shapes["logits"] == [1, "num_rows", VOCAB]
    windows = [
        {part.name: part.i for part in node.attribute}["local_window_size"]
        for node in model.graph.node
        if node.op_type == "GroupQueryAttention"
    ]
    assert windows == [-1, 32]
    text = (graph("gpt_neo") / "model.onnx").read_bytes()
    assert b"site-packages" not in text and b".py" not in text and str(Path.cwd()).encode() not in text
    assert "position_ids" not in [
        value.name for value in onnx.load(graph("bloom") / "model.onnx", load_external_data=False).graph.input
    ]


def test_rotation_is_computed_for_new_tokens_only(graph: Callable[[str], Path]) -> None:
    """A step's cost does not grow with cosines of positions that were rotated long ago."""
    nodes = onnx.load(graph("gpt_neox") / "model.onnx", load_external_data=False).graph.node
    kinds = [node.op_type for node in nodes]
    assert kinds.count("RotaryEmbedding") == 2 and kinds.count("Cos") == 1
    assert "Range" not in kinds and "ReduceMax" not in kinds


EXPORT = """
import sys
from pathlib import Path
import torch
from outrider.export.convert.onnx_dynamo import export_with_dynamo
from outrider.export.convert.onnx_quantize import quantize_weights
from outrider.models.runtimes.torch_loading import load_causal_lm
plain, small = Path(sys.argv[2]) / "plain", Path(sys.argv[2]) / "small"
plain.mkdir(parents=True)
small.mkdir()
export_with_dynamo(load_causal_lm(Path(sys.argv[1]), torch.float32, "eager"), plain, "again")
quantize_weights(plain / "model.onnx", small, 4)
"""


def test_the_same_source_gives_the_same_bytes(
    graph: Callable[[str], Path], source: Callable[[str], Path], tmp_path: Path
) -> None:
    """Another process with another hash seed writes the same files, plain and quantized, and prints nothing."""
    quantized = tmp_path / "quantized"
    quantized.mkdir()
    quantize_weights(graph("bloom") / "model.onnx", quantized, 4)
    command = [sys.executable, "-c", EXPORT, str(source("bloom")), str(tmp_path / "again")]
    environment = {"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "77"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout == run.stderr == ""
    for name in ("model.onnx", "model.onnx.data"):
        assert (graph("bloom") / name).read_bytes() == (tmp_path / "again" / "plain" / name).read_bytes()
        assert (quantized / name).read_bytes() == (tmp_path / "again" / "small" / name).read_bytes()


def test_the_model_is_left_as_it_was(source: Callable[[str], Path]) -> None:
    """Attention that is replaced for an export is the family's own again afterwards."""
    import torch

    model = load_causal_lm(source("bloom"), torch.float32, "eager")
    tokens = torch.tensor([FIRST[:20]])
    with torch.inference_mode():
        before = model(tokens).logits
        with recording_attention(model, Recording()) as recording:
            assert not torch.equal(model(tokens).logits, before)  # zeros in place of attention
        assert recording.shapes == [(3, 16)]  # heads of 12, padded
        assert model.config._attn_implementation == "eager"
        assert torch.equal(model(tokens).logits, before)


def test_attention_of_ones_own_is_refused(tmp_path: Path) -> None:
    """A family that does not use transformers' attention interface is an ExportError that says so."""
    import transformers

    config = transformers.FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    model = transformers.FalconForCausalLM(config)
    with pytest.raises(ExportError, match="0 of the 2 layers of FalconForCausalLM call attention through"):
        export_with_dynamo(model, tmp_path, "falcon")
    assert not list(tmp_path.iterdir())


def test_quantizing_a_quantized_graph_is_refused(graph: Callable[[str], Path], tmp_path: Path) -> None:
    """There is nothing left to quantize, and nothing is written."""
    once, twice = tmp_path / "once", tmp_path / "twice"
    once.mkdir()
    twice.mkdir()
    quantize_weights(graph("bloom") / "model.onnx", once, 8)
    with pytest.raises(ExportError, match="has no product with a constant matrix"):
        quantize_weights(once / "model.onnx", twice, 8)
    assert not list(twice.iterdir())


def test_a_graph_needs_its_data(graph: Callable[[str], Path], tmp_path: Path) -> None:
    """Without model.onnx.data quantizing is an ExportError, not a crash."""
    shutil.copyfile(graph("bloom") / "model.onnx", tmp_path / "model.onnx")
    with pytest.raises(ExportError, match=r"quantizing model\.onnx failed"):
        quantize_weights(tmp_path / "model.onnx", tmp_path, 8)


def test_a_stored_graph_that_a_killed_export_has_linked_is_quantized(
    graph: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """onnx reads no file with several links; what the killed export left is not changed."""
    stored, left, out = (tmp_path / name for name in ("stored", "left", "out"))
    shutil.copytree(graph("gpt_neox"), stored)
    for directory in (left, out):
        directory.mkdir()
    with monkeypatch.context() as patch:
        for name in ("chmod", "utime"):  # as on a network's disk that belongs to another user
            patch.setattr(os, name, lambda *args, **kwargs: pytest.fail("changed a mode or a time"))
        build.place_files(stored, left)
    before = {path.name: path.read_bytes() for path in left.iterdir()}
    assert (stored / "model.onnx.data").stat().st_nlink == 2
    monkeypatch.setattr(build, "_onnx_graph", lambda job: stored)
    options = ExportOptions("draft", "int8", "onnxruntime")
    job: Any = SimpleNamespace(options=options, directory=out, tell=lambda stage: None)
    assert build._build_onnx(job) is not None and (out / "model.onnx.data").is_file()
    assert {path.name: path.read_bytes() for path in left.iterdir()} == before
    assert sorted(path.name for path in stored.iterdir()) == sorted(before)


def test_rows_are_computed_as_asked(graph: Callable[[str], Path]) -> None:
    """`extend` has one row of logits made, `extend_rows` all, alike but for rounding."""
    runtime = OnnxRuntimeSequence(graph("gpt_neo"), OPTIONS)
    last = runtime.extend(FIRST[:30]).copy()
    assert runtime._logits.shape == (1, 1, VOCAB)
    runtime.truncate(0)
    every = runtime.extend_rows(FIRST[:30])
    assert runtime._logits.shape == (1, 30, VOCAB)
    assert np.abs(every[-1] - last).max() < 1e-5
