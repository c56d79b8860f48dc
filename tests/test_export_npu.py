"""Exports for an NPU: symmetric INT8 and INT4 weights, INT8 weights and activations, and where they are taken."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
import torch
from numpy.typing import NDArray
from openvino import opset13 as ops
from safetensors.numpy import load_file
from tests.conftest import TINY_VOCAB
from tests.npu_path import OPTIONS, SHAPES, walked
from tests.stored_weights import Stored, read_ir
from tests.tiny_models import export_openvino, make_tiny_model
from tools.tiny_sources import make_tiny_source

from outrider.export.convert import symmetric
from outrider.export.convert.ahead_of_time import compile_ahead
from outrider.export.convert.calibration import NUM_TEXTS, TEXT_TOKENS, complete_texts, quantize_fully
from outrider.export.convert.openvino_ir import save_ir
from outrider.export.convert.symmetric import (
    GROUP,
    compress_int4_symmetric,
    compress_int8_symmetric,
    quantize_symmetric,
)
from outrider.export.make.pipeline import export_model
from outrider.export.recipes import ExportOptions
from outrider.models.bundle.manifest import Quantization, StaticShapes
from outrider.models.errors import BundleError, ExportError, RuntimeUnavailable
from outrider.models.picks.sampling import SamplingParams, pick
from outrider.models.runtimes import npu_compile
from outrider.models.runtimes.base import RuntimeOptions
from outrider.models.runtimes.openvino_npu import OpenVinoNpuRuntime
from outrider.models.runtimes.openvino_sequence import OpenVinoSequenceRuntime
from outrider.models.runtimes.torch_loading import load_causal_lm

XML = "openvino_model.xml"
TOKENS = np.random.default_rng(5).integers(0, TINY_VOCAB, 60).tolist()


def compressed(
    ir: Path, directory: Path, compress: Callable[[ov.Model], Quantization] = compress_int8_symmetric
) -> tuple[Path, Quantization]:
    """Writes the IR with smaller weights to a directory, and says how they are stored."""
    model = ov.Core().read_model(ir / XML)
    quantization = compress(model)
    save_ir(model, directory)
    shutil.copyfile(ir / "config.json", directory / "config.json")
    return directory, quantization


def quantized(ir: Path) -> dict[str, Stored]:
    """Every quantized matrix by its name in transformers."""
    return {name.removeprefix("self."): stored for name, stored in read_ir(ir / XML).items() if stored.scale_type}


def tensors_of(ir: Path) -> dict[str, torch.Tensor]:
    """What these matrices stand for."""
    return {name: torch.from_numpy(stored.values.astype(np.float32)) for name, stored in quantized(ir).items()}


def bytes_of(ir: Path) -> list[bytes]:
    """Graph and weights."""
    return [(ir / name).read_bytes() for name in (XML, "openvino_model.bin")]


@pytest.fixture(scope="module", params=["llama", "qwen2"])  # qwen2's LM head is its embedding
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def bundle(family: str, tiny_ir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compressed(tiny_ir(family), tmp_path_factory.mktemp("symmetric"))[0]


def test_both_paths_compute_with_these_weights(bundle: Path, family: str, tiny_model: Callable[[str], Path]) -> None:
    """The NPU's, in prompt, cached steps and rollback, and paged attention, which quantizes activations on the fly
    unless that is switched off: against transformers with the weights that the export stands for.
    """
    model = load_causal_lm(tiny_model(family), torch.float32, "sdpa")
    missing, unexpected = model.load_state_dict(tensors_of(bundle), strict=False)
    assert not unexpected and not any(name.endswith("proj.weight") for name in missing)
    found, expected = walked(OpenVinoNpuRuntime(bundle, OPTIONS), model, TOKENS)
    assert np.abs(found - expected).max() < 0.01
    for properties, most in (({"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}, 1e-4), ({}, 0.3)):
        rows = OpenVinoSequenceRuntime(bundle, RuntimeOptions(properties=properties)).extend_rows(TOKENS)
        assert np.abs(rows - expected[: len(TOKENS)]).max() < most


def test_the_same_model_gives_the_same_bytes(
    family: str, bundle: Path, tiny_ir: Callable[..., Path], tmp_path: Path
) -> None:
    """Names and integers do not depend on what the process did before."""
    assert bytes_of(compressed(tiny_ir(family), tmp_path)[0]) == bytes_of(bundle)


@pytest.mark.parametrize("axis", [0, 1])
def test_blocks_do_not_show(axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix that is quantized in pieces, for memory's sake, comes out as it would whole; columns as well as rows."""
    matrix = np.random.default_rng(5).normal(size=(37, 12)).astype(np.float32)
    whole = quantize_symmetric(matrix, axis)
    monkeypatch.setattr(symmetric, "_BLOCK_BYTES", 8 * 12 * 5)
    pieces = quantize_symmetric(matrix, axis)
    assert np.array_equal(whole.integers, pieces.integers) and np.array_equal(whole.scale, pieces.scale)
    assert whole.scale.shape == ((37, 1) if axis == 1 else (1, 12))


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused(wrong: float) -> None:
    """NaN and infinity are named as what they are, a broken model."""
    with pytest.raises(ExportError, match="not finite"):
        quantize_symmetric(np.array([[1.0, 1.0], [1.0, wrong]], np.float32), 1)


def small_graph(multiply: Callable[[Any], Any]) -> ov.Model:
    x = ops.parameter([-1, 8], np.float32, name="x")
    return ov.Model([multiply(x)], [x], "small")


def run(model: ov.Model, x: NDArray[np.float32]) -> NDArray[np.float32]:
    found: NDArray[np.float32] = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(x)[0]
    return found


def test_a_matrix_stored_by_columns(tmp_path: Path) -> None:
    """Where a MatMul takes its matrix untransposed, a column is an output channel; FP16 weights are taken as well."""
    weights = ops.constant(np.random.default_rng(5).normal(size=(8, 6)).astype(np.float16), name="w")
    model = small_graph(lambda x: ops.matmul(x, ops.convert(weights, np.float32), False, False))
    x = np.random.default_rng(5).normal(size=(3, 8)).astype(np.float32)
    before = run(model, x)
    compress_int8_symmetric(model)
    save_ir(model, tmp_path)
    (found,) = read_ir(tmp_path / XML).values()
    assert found.scales.shape == (6,)
    after = run(ov.Core().read_model(tmp_path / XML), x)
    assert np.abs(after - x @ found.values).max() < 1e-5
    assert 0 < np.abs(after - before).max() < 0.1


def test_what_is_no_weight_is_left_alone() -> None:
    """Vectors and the products of two inputs are not weights; a model of nothing else is refused."""
    model = small_graph(lambda x: ops.matmul(ops.multiply(x, ops.constant(np.ones(8, np.float32))), x, False, True))
    with pytest.raises(ExportError, match="no weight matrices"):
        compress_int8_symmetric(model)


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of two groups, and of 320 weights, which 128 does not divide."""
    sizes = {"vocab_size": TINY_VOCAB, "hidden_size": 256, "intermediate_size": 320}
    return make_tiny_model("llama", tmp_path_factory.mktemp("wide"), initializer_range=0.06, **sizes)


@pytest.fixture(scope="module")
def int4(wide_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Quantization]:
    ir = export_openvino(wide_model, tmp_path_factory.mktemp("wide-ir"))
    return compressed(ir, tmp_path_factory.mktemp("int4"), compress_int4_symmetric)


def test_int4_is_symmetric_in_groups_or_rows(int4: tuple[Path, Quantization], wide_model: Path) -> None:
    """Layers in groups of 128, in rows where 128 does not divide them; embeddings and head INT8; nothing is FP32.

    nncf's scale is the group's largest weight / 8: one as large with the other sign is a whole step off.
    """
    ir, quantization = int4
    assert quantization.scheme == "int4 symmetric, embeddings and head int8 symmetric"
    assert quantization.granularity == "group of 128, row where a row is not several groups"
    source, weights = load_file(wide_model / "model.safetensors"), quantized(ir)
    assert set(weights) == {name for name, tensor in source.items() if tensor.ndim == 2}
    for name, stored in weights.items():
        exact = source[name].astype(np.float64)
        group = GROUP if exact.shape[1] % GROUP == 0 else exact.shape[1]
        if "layers" not in name:
            assert stored.bits == 8
            continue
        assert (stored.bits, stored.group) == (4, group), name
        grouped = exact.reshape(len(exact), -1, group)
        step = np.abs(grouped).max(axis=2, keepdims=True) / 8
        assert (np.abs(stored.values.reshape(grouped.shape) - grouped) <= step * (1 + 2.0**-7)).all(), name
    told = ov.Core().read_model(ir / XML).get_rt_info(["nncf", "weight_compression"])
    assert (told["group_size"], told["mode"]) == ("128", "int4_sym")


def test_the_npus_path_computes_with_int4_weights(int4: tuple[Path, Quantization], wide_model: Path) -> None:
    """Prompt, cached steps and rollback, against transformers with the dequantized weights."""
    model = load_causal_lm(wide_model, torch.float32, "sdpa")
    assert not model.load_state_dict(tensors_of(int4[0]), strict=False).unexpected_keys
    found, expected = walked(OpenVinoNpuRuntime(int4[0], OPTIONS), model, TOKENS)
    assert np.abs(found - expected).max() < 0.02


def test_an_int4_export_is_checked_like_the_others(tmp_path: Path) -> None:
    """The parity check passes; the manifest says how the weights are stored and that no NPU ran it."""
    source = make_tiny_source("llama", tmp_path / "llama")
    options = ExportOptions(
        "draft", "int4", device="npu", num_threads=1, static_shapes=StaticShapes(prompt_len=64, response_len=64)
    )
    manifest = export_model(source, tmp_path / "out", options).manifest
    parity = manifest.report.parity
    assert manifest.precision == "int4" and manifest.quantization is not None
    assert manifest.quantization.granularity == "row"  # of 64 and 128 weights
    assert "not run on hardware" in parity.checked_on and parity.stages[-1].name == "nodes of a tree"


def test_a_blob_made_ahead_is_taken_instead_of_the_ir(bundle: Path, tmp_path: Path) -> None:
    """Compiled here, exported, and imported by the runtime from beside the IR, with the IR's own logits."""
    place = shutil.copytree(bundle, tmp_path / "bundle")
    blobs = compile_ahead(place, SHAPES, place, emulate_npu=True)
    assert [blob.name for blob in blobs] == ["openvino_model.cpu-312-8.blob", "openvino_model.cpu-312-64.blob"]
    of_ir, of_blob = OpenVinoNpuRuntime(bundle, OPTIONS), OpenVinoNpuRuntime(place, OPTIONS)
    assert of_ir.limits == of_blob.limits
    for tokens in (TOKENS[:40], TOKENS[40:45]):
        assert np.array_equal(of_ir.extend_rows(tokens), of_blob.extend_rows(tokens))
    # No graph to compile: what ran above cannot have been the IR.
    (place / XML).write_text("<net/>")
    OpenVinoNpuRuntime(place, OPTIONS).close()
    with pytest.raises(BundleError, match="cannot be read as an IR"):
        OpenVinoNpuRuntime(place, replace(OPTIONS, properties={"KV_CACHE_PRECISION": "f32"}))


def test_a_blob_of_another_version_is_passed_over(
    bundle: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be read as a blob is compiled anew from the IR, and the log says so."""
    place = shutil.copytree(bundle, tmp_path / "bundle")
    blob, _ = compile_ahead(place, SHAPES, place, emulate_npu=True)
    first, *rest = blob.read_bytes()
    blob.write_bytes(bytes([first ^ 1, *rest]))
    with caplog.at_level(logging.WARNING, logger="outrider"):
        runtime = OpenVinoNpuRuntime(place, OPTIONS)
    assert "not for this OpenVINO or driver" in caplog.text and "compiling again" in caplog.text
    assert np.isfinite(runtime.extend(TOKENS[:5])).all()
    runtime.close()


def test_without_the_npus_compiler_it_says_where_to_get_it(bundle: Path, tmp_path: Path) -> None:
    """The pip package has none on Linux: the error names the library, where it comes from, and what happens without."""
    if list((Path(ov.__file__).parent / "libs").glob("*npu_compiler*")):
        pytest.skip("this machine has an NPU compiler")
    with pytest.raises(RuntimeUnavailable, match=r"no NPU compiler: .*npu_compiler.*driver.*at its first run"):
        compile_ahead(bundle, SHAPES, tmp_path, platform="NPU4000")
    with pytest.raises(RuntimeUnavailable, match="no NPU compiler"):  # before the model is looked at: there is none
        export_model(tmp_path / "nowhere", tmp_path / "out", ExportOptions("draft", device="npu", compiles_ahead=True))
    assert not list(tmp_path.iterdir())


def test_another_failure_is_told_as_it_is(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What OpenVINO says, not that the compiler were missing; and what the NPU's path says of another model."""
    monkeypatch.setattr(npu_compile, "npu_properties", lambda core, xml, options: {"NPU_USE_NPUW": "PERHAPS"})
    with pytest.raises(RuntimeUnavailable, match=r"cannot compile .* ahead of time: .*name the NPU to compile for"):
        compile_ahead(bundle, SHAPES, tmp_path, emulate_npu=True)
    inputs = [ops.parameter([-1, -1], np.int64, name=name) for name in ("input_ids", "attention_mask", "position_ids")]
    for node in inputs:
        node.output(0).set_names({node.get_friendly_name()})
    kept = ops.read_value(ops.constant(np.zeros((1, 1), np.int64)), "kept")
    total = ops.add(ops.add(inputs[0], inputs[1]), ops.add(inputs[2], kept))
    model = ov.Model([ops.result(total)], [ops.assign(total, "kept")], inputs, "no language model")
    ov.save_model(model, tmp_path / XML)
    shutil.copyfile(bundle / "config.json", tmp_path / "config.json")
    with pytest.raises(BundleError, match=r"cannot be made static: .*beam_idx.*--device cpu"):
        compile_ahead(tmp_path, SHAPES, tmp_path, emulate_npu=True)


# -- INT8 weights and activations, and the text that they are calibrated with ------------------------------------------


@pytest.fixture(scope="module")
def fully_quantized(tiny_ir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("w8a8")
    quantize_fully(tiny_ir("qwen2"), directory, [TOKENS], "tiny")
    shutil.copyfile(tiny_ir("qwen2") / "config.json", directory / "config.json")
    return directory


def test_every_weight_of_full_int8_keeps_its_bound(fully_quantized: Path, tiny_model: Callable[[str], Path]) -> None:
    """Half of absmax / 127 of what smooth quantization made of the source: each column over what its activations are
    multiplied by. Activations have 256 levels over one range a tensor (docs/numerics.md).
    """
    source = load_file(tiny_model("qwen2") / "model.safetensors")
    source["lm_head.weight"] = source["model.embed_tokens.weight"]  # tied
    num_seen = num_smoothed = 0
    for node in ov.Core().read_model(fully_quantized / XML).get_ordered_ops():
        name = node.get_friendly_name().removeprefix("__module.").removesuffix("/aten::linear/MatMul") + ".weight"
        if node.get_type_name() != "MatMul" or name not in source:
            continue
        quantizer, product = (node.input_value(port).get_node() for port in (0, 1))
        low, high, *out = (quantizer.input_value(port).get_node().get_data() for port in range(1, 5))
        assert quantizer.get_attributes()["levels"] == 256 and low < high and [low, high] == out
        smoothing, columns = quantizer.input_value(0).get_node(), np.ones(1)
        if smoothing.get_friendly_name().endswith("nncf_smooth_quant"):  # not where a weight is read twice
            columns = smoothing.input_value(1).get_node().get_data().astype(np.float64).ravel()
            num_smoothed += 1
        smoothed = source[name].astype(np.float64) / columns
        integers, scale = (product.input_value(port).get_node() for port in (0, 1))
        stored = integers.input_value(0).get_node().get_data().astype(np.float64) * scale.get_data()
        step = np.abs(smoothed).max(axis=1, keepdims=True) / 127
        assert (np.abs(stored - smoothed) <= (0.5 + 2.0**-12) * step).all(), name
        num_seen += 1
    assert num_seen == num_smoothed + 1 == 15


def test_full_int8_runs_on_the_npus_path(
    fully_quantized: Path, tiny_ir: Callable[..., Path], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Prompt, cached steps and rollback, near transformers' FP32; the same model and texts give the same files."""
    model = load_causal_lm(tiny_model("qwen2"), torch.float32, "sdpa")
    found, expected = walked(OpenVinoNpuRuntime(fully_quantized, OPTIONS), model, TOKENS)
    log_p, log_q = (torch.log_softmax(torch.from_numpy(rows), -1) for rows in (expected, found))
    assert torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="batchmean") < 0.01
    assert np.abs(found - expected).max() < 0.5
    quantize_fully(tiny_ir("qwen2"), tmp_path, [TOKENS], "tiny")
    assert bytes_of(tmp_path) == bytes_of(fully_quantized)


def test_missing_text_is_written_by_the_model(tiny_ir: Callable[..., Path], tiny_model: Callable[[str], Path]) -> None:
    """Feeds are kept, long ones cut, and continued by the picks from transformers' logits of what stands before; the
    rest begins all over the vocabulary; enough is left alone.
    """
    core = ov.Core()
    model = core.read_model(tiny_ir("llama") / XML)
    long = np.random.default_rng(5).integers(0, TINY_VOCAB, TEXT_TOKENS + 5).tolist()
    texts = complete_texts(core, model, [TOKENS, long])
    assert [len(text) for text in texts] == [TEXT_TOKENS] * NUM_TEXTS
    assert texts[0][: len(TOKENS)] == TOKENS and texts[1] == long[:TEXT_TOKENS] and texts[2][:5] == long[TEXT_TOKENS:]
    assert len({text[0] for text in texts[3:]}) == NUM_TEXTS - 3
    assert all(0 <= token < TINY_VOCAB for text in texts for token in text)
    assert complete_texts(core, model, [TOKENS, long]) == complete_texts(core, model, texts) == texts
    with torch.inference_mode():
        source = load_causal_lm(tiny_model("llama"), torch.float32, "sdpa")
        logits = source(torch.tensor([texts[0]]), use_cache=False).logits[0].numpy()
    params, written = SamplingParams(temperature=1.0, seed=0), range(len(TOKENS), TEXT_TOKENS)
    assert [pick(logits[i - 1], params, i) for i in written] == texts[0][len(TOKENS) :]
