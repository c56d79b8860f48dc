"""The ONNX exports, by onnxruntime-genai's builder and by torch's exporter: exact, quantized by name, always the same
files, nothing fetched or executed.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from tests.onnx_graphs import FIRST, VOCAB, build, load_fp32, truth_of, worst_delta
from tests.quantized import read_blocks
from tests.tiny_models import copy_source
from tools.tiny_sources import make_tiny_model, make_tiny_source

from outrider.export.convert import onnx_quantize
from outrider.export.convert.onnx_attention import Recording, recording_attention
from outrider.export.convert.onnx_builder import build_with_genai, supports
from outrider.export.convert.onnx_dynamo import export_with_dynamo
from outrider.export.convert.onnx_quantize import BLOCK_SIZE, quantize_blocks, quantize_weights
from outrider.export.make import build as stages
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
    """`source("bloom")` is the directory of that family's tiny model with a tokenizer."""
    root = tmp_path_factory.mktemp("sources")
    return functools.cache(
        lambda family: make_tiny_source(family, root / family, vocab_size=VOCAB, **FAMILIES.get(family, {}))
    )


@pytest.fixture(scope="module")
def graph(source: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`graph("bloom")` is the directory of its FP32 graph, exported once by torch's exporter."""

    @functools.cache
    def make(family: str) -> Path:
        directory = tmp_path_factory.mktemp(family)
        export_with_dynamo(load_fp32(source(family)), directory, family)
        return directory

    return make


def made(directory: Path) -> Path:
    """The directory, which was not there."""
    directory.mkdir(parents=True)
    return directory


def files_of(directory: Path) -> dict[str, bytes]:
    """Every file by its name."""
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def config_of(source: Path, **changes: object) -> dict[str, object]:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    return {key: value for key, value in (config | changes).items() if value is not None}


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        *((family, {}) for family in ("llama", "qwen2", "qwen3", "gemma2", "mistral", "phi3")),
        ("llama", {"rope_parameters": {
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        }}),  # of rotary scaling only this kind goes through the builder
    ],
)  # fmt: skip
def test_families_of_the_builder_are_exact(tmp_path: Path, family: str, fields: dict[str, Any]) -> None:
    """FP32 logits are transformers', also beyond a sliding window and with Gemma's scale of the embedding."""
    source = make_tiny_source(family, tmp_path / "source", vocab_size=VOCAB, **fields)
    assert supports(config_of(source))
    runtime = OnnxRuntimeSequence(build(source, tmp_path / "graph", "fp32"), OPTIONS)
    assert worst_delta(runtime, truth_of(load_fp32(source))) < 1e-4


def test_what_the_builder_is_not_used_for(source: Callable[[str], Path]) -> None:
    """Unknown to it, wrong in it, or nothing that its attention kernel takes."""
    llama = source("llama")
    for changes in (
        {"architectures": ["BloomForCausalLM"]},
        {"architectures": None},
        {"architectures": ["OlmoForCausalLM"]},
        {"architectures": ["Gemma3ForCausalLM"]},
        {"architectures": ["Lfm2ForCausalLM"]},
        {"layer_types": ["full_attention", "linear_attention"]},
        {"rope_parameters": {"rope_type": "yarn"}},
        {"head_dim": 8},
        {"partial_rotary_factor": 0.5},
    ):
        assert not supports(config_of(llama, **changes)), changes
    assert supports(config_of(llama, rope_parameters={"rope_type": "llama3", "factor": 8.0}))
    assert not supports(config_of(llama, rope_parameters={"rope_type": "llama3"}, architectures=["Qwen2ForCausalLM"]))


EXPORT = """
import os, sys
from pathlib import Path
import torch
from outrider.export.convert.onnx_builder import build_with_genai
from outrider.export.convert.onnx_dynamo import export_with_dynamo
from outrider.export.convert.onnx_quantize import quantize_weights
from outrider.models.runtimes.torch_loading import load_causal_lm
built, plain, small = (Path(sys.argv[3]) / name for name in ("built", "plain", "small"))
for directory in (built, plain, small):
    directory.mkdir()
os.chdir(sys.argv[3])
build_with_genai(Path(sys.argv[1]), built, "fp32", Path(sys.argv[3]), "again")
assert sorted(os.listdir()) == ["built", "plain", "small"]
export_with_dynamo(load_causal_lm(Path(sys.argv[2]), torch.float32, "eager"), plain, "again")
quantize_weights(plain / "model.onnx", small, 4)
"""


def test_the_same_source_gives_the_same_bytes(
    graph: Callable[[str], Path], source: Callable[[str], Path], tmp_path: Path
) -> None:
    """Another process in another place, inside a Git work tree, with another hash seed writes the same files, by the
    builder and by torch's exporter, plain and quantized, and prints nothing. Neither names a path.
    """
    built, small, again = (made(tmp_path / name) for name in ("one/built", "small", "two/deeper"))
    build_with_genai(source("gemma2"), built, "fp32", tmp_path / "one", "first")
    assert sorted(files_of(built)) == ["genai_config.json", "model.onnx", "model.onnx.data"]
    quantize_weights(graph("bloom") / "model.onnx", small, 4)
    environment = {"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "77", "PATH": os.environ["PATH"]}
    command = [sys.executable, "-c", EXPORT, str(source("gemma2")), str(source("bloom")), str(again)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    for first, name in ((built, "built"), (graph("bloom"), "plain"), (small, "small")):
        files = files_of(first)
        assert files == files_of(again / name)
        paths = (str(tmp_path), str(Path.cwd()), "site-packages", ".py", "/main")
        assert not [part for part in paths if part.encode() in files["model.onnx"]]


def test_building_fetches_and_executes_nothing(
    source: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code and pickles in the directory are not even seen, no socket is opened, and the source stays as it was."""
    own_code = {"AutoConfig": "trap.Config", "AutoModelForCausalLM": "trap.Model"}
    trapped = copy_source(source("llama"), tmp_path / "trapped", auto_map=own_code)
    traps = {"trap.py": "raise SystemExit('executed')", "pytorch_model.bin": "no pickle", "adapter_config.json": "{}"}
    for name, content in traps.items():
        (trapped / name).write_text(content)
    before = files_of(trapped)
    for name in ("socket", "create_connection"):
        monkeypatch.setattr(socket, name, Mock(side_effect=AssertionError("a socket was opened")))
    handlers, path = list(logging.getLogger().handlers), list(sys.path)
    build_with_genai(trapped, made(tmp_path / "graph"), "fp32", tmp_path / "work", "trapped")
    assert files_of(trapped) == before and not files_of(tmp_path / "work")
    assert logging.getLogger().handlers == handlers and sys.path == path


def test_builder_failures_are_export_errors(source: Callable[[str], Path], tmp_path: Path) -> None:
    """What the builder raises is told with its words, and nothing is left behind."""
    wrong = copy_source(source("llama"), tmp_path / "wrong", architectures=["BloomForCausalLM"])
    with pytest.raises(ExportError, match=r"building wrong with onnxruntime-genai failed: NotImplementedError"):
        build_with_genai(wrong, made(tmp_path / "graph"), "fp32", tmp_path / "work", "wrong")
    assert not files_of(tmp_path / "graph") and not files_of(tmp_path / "work")


def test_the_builders_files_run_under_onnxruntime_genai(source: Callable[[str], Path], tmp_path: Path) -> None:
    """Its own generator reads what we made of its graph, and goes on with the same tokens."""
    import onnxruntime_genai

    path = build(source("qwen2"), tmp_path / "graph", "int8")
    prompt, count = [5, 9, 100, 33, 7], 12
    parameters = onnxruntime_genai.GeneratorParams(onnxruntime_genai.Model(str(path)))
    parameters.set_search_options(max_length=len(prompt) + count, do_sample=False)
    generator = onnxruntime_genai.Generator(onnxruntime_genai.Model(str(path)), parameters)
    generator.append_tokens(np.array([prompt], np.int32))
    theirs = []
    while not generator.is_done():
        generator.generate_next_token()
        theirs.append(int(generator.get_next_tokens()[0]))
    runtime = OnnxRuntimeSequence(path, OPTIONS)
    ours = [int(runtime.extend(prompt).argmax())]
    while len(ours) < len(theirs):
        ours.append(int(runtime.extend(ours[-1:]).argmax()))
    assert len(theirs) > 3 and ours == theirs


def test_tied_embeddings_are_kept_once(tmp_path: Path) -> None:
    """INT8 and INT4: a tied embedding reads the LM head's own integers, an untied one has INT8 of its own."""
    sizes = {}
    for tied in (True, False):
        source = make_tiny_source(
            "llama", tmp_path / f"source-{tied}", vocab_size=5000, tie_word_embeddings=tied, num_hidden_layers=1
        )
        path = build(source, tmp_path / f"graph-{tied}", "int4")
        blocks = read_blocks(path / "model.onnx")
        assert ("model.embed_tokens.weight" in blocks) is not tied and blocks["lm_head.MatMul.weight"].bits == 8
        sizes[tied] = (path / "model.onnx.data").stat().st_size
    assert sizes[False] - sizes[True] == pytest.approx(5000 * 64 * (1 + 4 / BLOCK_SIZE), rel=0.01)


# -- torch's exporter, with attention on one operator ------------------------------------------------------------------


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
    assert sorted(files_of(tmp_path)) == ["model.onnx", "model.onnx.data"]


def test_half_precision_graphs_are_for_cuda_and_run_here(tmp_path: Path) -> None:
    """Gemma 3 in FP16, norms that scale in FP32 included, and quantized from there: weights, cache and logits. Some
    thousand tokens on its angles are the source's still: the rotary frequencies stay FP32.
    """
    fields: dict[str, Any] = {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "max_position_embeddings": 4096,
    }
    small = make_tiny_model("gemma3_text", tmp_path / "small", vocab_size=VOCAB, **fields)
    wide, narrow = made(tmp_path / "wide"), made(tmp_path / "narrow")
    export_with_dynamo(load_fp32(small), wide, "gemma3", "fp16")
    quantize_weights(wide / "model.onnx", narrow, 8)
    truth = truth_of(load_fp32(small))
    assert worst_delta(OnnxRuntimeSequence(wide, OPTIONS), truth) < 0.05
    assert worst_delta(OnnxRuntimeSequence(narrow, OPTIONS), truth) < 0.5
    text = np.random.default_rng(5).integers(0, VOCAB, 3500).tolist()
    far = OnnxRuntimeSequence(wide, replace(OPTIONS, max_positions=4096)).extend_rows(text)[-200:]
    assert np.abs(far - truth(text)[-200:]).max() < 0.015
    graph = onnx.load(narrow / "model.onnx", load_external_data=False).graph
    floats = [tensor.name for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT]
    assert not [name for name in floats if name.endswith(("weight", "scales"))]


def test_rotation_is_computed_for_new_tokens_only(graph: Callable[[str], Path]) -> None:
    """A step's cost does not grow with cosines of positions that were rotated long ago."""
    nodes = onnx.load(graph("gpt_neox") / "model.onnx", load_external_data=False).graph.node
    kinds = [node.op_type for node in nodes]
    assert [kinds.count(kind) for kind in ("RotaryEmbedding", "Cos", "Range", "ReduceMax")] == [2, 1, 0, 0]


def test_the_model_is_left_as_it_was(source: Callable[[str], Path]) -> None:
    """Attention that is replaced for an export is the family's own again afterwards."""
    import torch

    model = load_causal_lm(source("bloom"), torch.float32, "eager")
    tokens = torch.tensor([FIRST[:20]])
    with torch.inference_mode():
        before = model(tokens).logits
        with recording_attention(model, Recording()) as recording:
            assert not torch.equal(model(tokens).logits, before)  # zeros in place of attention
        assert torch.equal(model(tokens).logits, before) and model.config._attn_implementation == "eager"
    assert recording.shapes == [(3, 16)]  # heads of 12, padded


def test_attention_of_ones_own_is_refused(tmp_path: Path) -> None:
    """A family that does not use transformers' attention interface is an ExportError that says so."""
    import transformers

    config = transformers.FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    model = transformers.FalconForCausalLM(config)
    with pytest.raises(ExportError, match="0 of the 2 layers of FalconForCausalLM call attention through"):
        export_with_dynamo(model, tmp_path, "falcon")
    assert not files_of(tmp_path)


def test_what_cannot_be_quantized_is_refused(graph: Callable[[str], Path], tmp_path: Path) -> None:
    """A graph in which nothing is left to quantize, and one without its data: an error, and nothing is written."""
    once, twice = made(tmp_path / "once"), made(tmp_path / "twice")
    quantize_weights(graph("bloom") / "model.onnx", once, 8)
    with pytest.raises(ExportError, match="has no product with a constant matrix"):
        quantize_weights(once / "model.onnx", twice, 8)
    shutil.copyfile(graph("bloom") / "model.onnx", tmp_path / "model.onnx")
    with pytest.raises(ExportError, match=r"quantizing model\.onnx failed"):
        quantize_weights(tmp_path / "model.onnx", twice, 8)
    assert not files_of(twice)


def test_a_stored_graph_is_quantized_while_other_exports_link_it(
    graph: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and meanwhile, or by one that was killed. Nobody's files are changed, and none is added to the store."""
    stored, left, out = tmp_path / "stored", made(tmp_path / "left"), made(tmp_path / "out")
    shutil.copytree(graph("gpt_neox"), stored)
    with monkeypatch.context() as patch:
        for name in ("chmod", "utime"):  # as on a network's disk that belongs to another user
            patch.setattr(os, name, lambda *args, **kwargs: pytest.fail("changed a mode or a time"))
        stages.place_files(stored, left)
    before = {path: (path.read_bytes(), path.stat().st_ino) for root in (stored, left) for path in root.iterdir()}
    links = itertools.count()

    def quantize(weights: Any, bits: int) -> Any:
        stages.place_files(stored, tmp_path / f"other-{next(links)}")
        return quantize_blocks(weights, bits)

    monkeypatch.setattr(onnx_quantize, "quantize_blocks", quantize)
    monkeypatch.setattr(stages, "_onnx_graph", lambda job: stored)
    options = ExportOptions("draft", "int8", "onnxruntime")
    job: Any = SimpleNamespace(options=options, directory=out, tell=lambda stage: None)
    assert stages._build_onnx(job) is not None and (out / "model.onnx.data").is_file()
    assert next(links) > 2 and (stored / "model.onnx.data").stat().st_nlink > 3
    assert before == {
        path: (path.read_bytes(), path.stat().st_ino) for root in (stored, left) for path in root.iterdir()
    }
