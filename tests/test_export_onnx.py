"""The ONNX exports: which families go which way, files that are always the same, nothing fetched or executed."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from tests.onnx_graphs import VOCAB, build, load_fp32, truth_of, worst_delta
from tests.quantized import read_blocks
from tools.tiny_sources import make_tiny_source

from outrider.export.convert.onnx_builder import build_with_genai, supports
from outrider.export.convert.onnx_quantize import BLOCK_SIZE, quantize_blocks
from outrider.export.source.family_facts import FAMILIES
from outrider.models.errors import ExportError
from outrider.models.runtimes.base import RuntimeOptions
from outrider.models.runtimes.onnxruntime_sequence import OnnxRuntimeSequence

OPTIONS = RuntimeOptions(num_threads=1, max_positions=128)
BUILDER_FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "mistral", "phi3")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`source("phi3")` is the directory of that family's tiny model with a tokenizer."""
    root = tmp_path_factory.mktemp("sources")

    def make(family: str) -> Path:
        directory = root / family
        return directory if directory.is_dir() else make_tiny_source(family, directory, vocab_size=VOCAB)

    return make


def config_of(source: Path, **changes: object) -> dict[str, object]:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    return {key: value for key, value in (config | changes).items() if value is not None}


@pytest.mark.parametrize("family", BUILDER_FAMILIES)
def test_families_of_the_builder_are_exact(source: Callable[[str], Path], tmp_path: Path, family: str) -> None:
    """FP32 logits are transformers', also beyond a sliding window and with Gemma's scale of the embedding."""
    assert supports(config_of(source(family)))
    runtime = OnnxRuntimeSequence(build(source(family), tmp_path / "graph", "fp32"), OPTIONS)
    assert worst_delta(runtime, truth_of(load_fp32(source(family)))) < 1e-4


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


def test_llama3_scaling_is_exact(tmp_path: Path) -> None:
    """The one rotary scaling that goes through the builder."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    source = make_tiny_source("llama", tmp_path / "source", vocab_size=VOCAB, rope_parameters=rope)
    runtime = OnnxRuntimeSequence(build(source, tmp_path / "graph", "fp32"), OPTIONS)
    assert worst_delta(runtime, truth_of(load_fp32(source))) < 1e-4


BUILD = """
import os, sys
from pathlib import Path
from outrider.export.convert.onnx_builder import build_with_genai
source, destination = Path(sys.argv[1]), Path(sys.argv[2])
destination.mkdir(parents=True)
os.chdir(destination.parent)
build_with_genai(source, destination, "fp32", destination.parent, "again")
assert sorted(path.name for path in destination.parent.iterdir()) == [destination.name]
"""


def test_the_same_source_gives_the_same_bytes(source: Callable[[str], Path], tmp_path: Path) -> None:
    """Another process in another place, inside a Git work tree, with another hash seed: the same three files."""
    first, second = tmp_path / "one" / "graph", tmp_path / "two" / "deeper" / "bundle"
    first.mkdir(parents=True)
    build_with_genai(source("gemma2"), first, "fp32", tmp_path / "one", "first")
    environment = {"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": "77", "PATH": os.environ["PATH"]}
    command = [sys.executable, "-c", BUILD, str(source("gemma2")), str(second)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout == run.stderr == ""
    names = ["genai_config.json", "model.onnx", "model.onnx.data"]
    assert sorted(path.name for path in first.iterdir()) == sorted(path.name for path in second.iterdir()) == names
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes()
    for part in (str(tmp_path), "site-packages", "/main"):
        assert part.encode() not in (first / "model.onnx").read_bytes()


def test_building_fetches_and_executes_nothing(
    source: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code and pickles in the directory are not even seen, no socket is opened, and the source stays as it was."""
    trapped = tmp_path / "trapped"
    shutil.copytree(source("llama"), trapped)
    config = config_of(trapped, auto_map={"AutoConfig": "trap.Config", "AutoModelForCausalLM": "trap.Model"})
    (trapped / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (trapped / "trap.py").write_text("raise SystemExit('executed')", encoding="utf-8")
    (trapped / "pytorch_model.bin").write_bytes(b"not a pickle")
    (trapped / "adapter_config.json").write_text("{}", encoding="utf-8")
    before = {path.name: path.read_bytes() for path in trapped.iterdir()}

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    handlers, path = list(logging.getLogger().handlers), list(sys.path)
    destination = tmp_path / "graph"
    destination.mkdir()
    build_with_genai(trapped, destination, "fp32", tmp_path / "work", "trapped")
    assert {file.name: file.read_bytes() for file in trapped.iterdir()} == before
    assert logging.getLogger().handlers == handlers and sys.path == path
    assert not list((tmp_path / "work").iterdir())


def test_builder_failures_are_export_errors(source: Callable[[str], Path], tmp_path: Path) -> None:
    """What the builder raises is told with its words, and nothing is left behind."""
    wrong = tmp_path / "wrong"
    shutil.copytree(source("llama"), wrong)
    (wrong / "config.json").write_text(
        json.dumps(config_of(wrong, architectures=["BloomForCausalLM"])), encoding="utf-8"
    )
    destination = tmp_path / "graph"
    destination.mkdir()
    with pytest.raises(ExportError, match=r"building wrong with onnxruntime-genai failed: NotImplementedError"):
        build_with_genai(wrong, destination, "fp32", tmp_path / "work", "wrong")
    assert not list(destination.iterdir()) and not list((tmp_path / "work").iterdir())


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
        assert ("model.embed_tokens.weight" in blocks) is not tied
        assert blocks["lm_head.MatMul.weight"].bits == 8
        sizes[tied] = (path / "model.onnx.data").stat().st_size
    assert sizes[False] - sizes[True] == pytest.approx(5000 * 64 * (1 + 4 / BLOCK_SIZE), rel=0.01)


@pytest.mark.parametrize("bits", [8, 4])
def test_blocks_are_within_their_bounds(tmp_path: Path, bits: int) -> None:
    """A block's largest weight is exact, the others off by half a scale, clipped ones by one scale at most."""
    weights = np.random.default_rng(5).normal(size=(70, 9)).astype(np.float32)  # 70: two blocks and a piece
    weights[3, 0], weights[4, 0] = 9.0, -8.99  # clipped: of the other sign
    packed, scales = quantize_blocks(weights, bits)
    node = onnx.helper.make_node(
        "MatMulNBits", ["x", "w_Q", "s"], ["logits"], domain="com.microsoft", K=70, N=9, bits=bits, block_size=32
    )
    tensors = [onnx.numpy_helper.from_array(packed, f"w_Q{bits}"), onnx.numpy_helper.from_array(scales, "s")]
    node.input[1] = f"w_Q{bits}"
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [node], "g", [value("x", 1, ["n", 70])], [value("logits", 1, ["n", 9])], initializer=tensors
    )
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets), tmp_path / "one.onnx")
    found = read_blocks(tmp_path / "one.onnx")["w"]
    assert (found.bits, found.integers.shape, found.scales.shape) == (bits, (9, 70), (9, 3))
    assert (found.zero_points == (128 if bits == 8 else 8)).all()
    error = np.abs(found.values - weights.T)
    bound = np.abs(np.repeat(found.scales, 32, axis=1)[:, :70])
    assert (error <= bound * 1.001).all()
    assert (error[1:] <= bound[1:] * 0.501).mean() > 0.99
    for row, start in ((row, start) for row in range(9) for start in (0, 32, 64)):
        block = slice(start, min(start + 32, 70))
        largest = start + int(np.abs(weights[block, row]).argmax())
        assert error[row, largest] <= 1e-5
        assert scales[row, start // 32] == pytest.approx(-weights[largest, row] / (1 << (bits - 1)), rel=1e-5)
    most = ((1 << (bits - 1)) - 1) * bound[0, 4]  # what the other sign reaches
    assert error[0, 4] == pytest.approx(8.99 - most, rel=1e-3) and error[0, 4] > 0.8 * bound[0, 4]


def test_families_of_the_builder_are_not_more_than_tested() -> None:
    """A family that is made tiny and that the builder knows is tested above."""
    for family in FAMILIES:
        if family not in BUILDER_FAMILIES:
            assert not supports(_config(family))


def _config(family: str) -> dict[str, object]:
    import transformers

    config = transformers.AutoConfig.for_model(family)
    kind = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
    return {**config.to_dict(), "architectures": [kind], "model_type": family}
