"""Exports for an NPU: symmetric INT8 and INT4 weights, and where they are taken."""

from __future__ import annotations

import logging
import shutil
from collections import Counter
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
from tests.npu_path import walked
from tests.quantized import dequantized, read_symmetric
from tests.tiny_models import export_openvino, make_tiny_model
from tools.tiny_sources import make_tiny_source

from outrider.export.convert import symmetric
from outrider.export.convert.ahead_of_time import compile_ahead
from outrider.export.convert.openvino_ir import save_ir
from outrider.export.convert.symmetric import (
    GROUP,
    SymmetricWeights,
    compress_int4_symmetric,
    compress_int8_symmetric,
    quantize_symmetric,
)
from outrider.export.make.pipeline import export_model
from outrider.export.recipes import ExportOptions
from outrider.models.bundle.manifest import Quantization, StaticShapes
from outrider.models.errors import BundleError, ExportError, RuntimeUnavailable
from outrider.models.runtimes import npu_compile
from outrider.models.runtimes.base import RuntimeOptions
from outrider.models.runtimes.openvino_graph import load_paged_model
from outrider.models.runtimes.openvino_npu import OpenVinoNpuRuntime
from outrider.models.runtimes.openvino_sequence import OpenVinoSequenceRuntime
from outrider.models.runtimes.torch_loading import load_causal_lm

XML = "openvino_model.xml"
NPU = RuntimeOptions(
    num_threads=1, emulate_npu=True, static_shapes=StaticShapes(prompt_len=64, response_len=64, step_len=8)
)
RNG = np.random.default_rng(5)
TOKENS = RNG.integers(0, TINY_VOCAB, 60).tolist()


def compressed(ir: Path, directory: Path) -> Path:
    model = ov.Core().read_model(ir / XML)
    compress_int8_symmetric(model)
    directory.mkdir(parents=True, exist_ok=True)
    save_ir(model, directory)
    shutil.copyfile(ir / "config.json", directory / "config.json")
    return directory


@pytest.fixture(scope="module", params=["llama", "qwen2"])  # qwen2's LM head is its embedding
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def bundle(family: str, tiny_ir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compressed(tiny_ir(family), tmp_path_factory.mktemp("symmetric"))


@pytest.fixture(scope="module")
def weights(bundle: Path) -> dict[str, SymmetricWeights]:
    return read_symmetric(bundle / XML)


@pytest.fixture(scope="module")
def truth(family: str, weights: dict[str, SymmetricWeights], tiny_model: Callable[[str], Path]) -> NDArray[np.float32]:
    """transformers' FP32 logits with the weights that the export stands for."""
    model = load_causal_lm(tiny_model(family), torch.float32, "sdpa")
    changed = {name.removeprefix("self."): torch.from_numpy(dequantized(matrix)) for name, matrix in weights.items()}
    missing, unexpected = model.load_state_dict(changed, strict=False)
    assert not unexpected and not any(name.endswith("proj.weight") for name in missing)
    with torch.inference_mode():
        logits: NDArray[np.float32] = model(torch.tensor([TOKENS]), use_cache=False).logits[0].numpy()
    return logits


def test_scales_are_absmax_over_127(
    family: str, weights: dict[str, SymmetricWeights], tiny_model: Callable[[str], Path]
) -> None:
    """Every matrix of the model, one scale a row, each weight within half a step of its source."""
    source = load_causal_lm(tiny_model(family), torch.float32, "sdpa").state_dict()
    matrices = {f"self.{name}" for name, tensor in source.items() if tensor.dim() == 2}
    assert set(weights) == (matrices - {"self.lm_head.weight"} if family == "qwen2" else matrices)
    for name, found in weights.items():
        exact = source[name.removeprefix("self.")].numpy().astype(np.float64)
        largest = np.abs(exact).max(axis=1, keepdims=True)
        assert np.array_equal(found.scale, (largest / 127).astype(np.float32))
        assert found.integers.dtype == np.int8 and found.integers.min() >= -127
        error = np.abs(exact - found.scale.astype(np.float64) * found.integers)
        assert (error <= found.scale * (0.5 + 1e-6)).all()


def test_the_npus_path_computes_with_these_weights(bundle: Path, truth: NDArray[np.float32]) -> None:
    """Prompt, cached steps and rollback, against transformers with the dequantized weights."""
    runtime = OpenVinoNpuRuntime(bundle, NPU)
    assert np.abs(runtime.extend_rows(TOKENS[:40]) - truth[:40]).max() < 0.01
    runtime.extend(TOKENS[10:20])
    runtime.truncate(40)
    assert np.abs(runtime.extend_rows(TOKENS[40:]) - truth[40:]).max() < 0.01
    runtime.close()


def test_the_ordinary_path_computes_with_these_weights(bundle: Path, truth: NDArray[np.float32]) -> None:
    """Paged attention takes them too; there activations are quantized on the fly unless that is switched off."""
    plain = OpenVinoSequenceRuntime(bundle, RuntimeOptions(properties={"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}))
    assert np.abs(plain.extend_rows(TOKENS) - truth).max() < 1e-4
    assert np.abs(OpenVinoSequenceRuntime(bundle, RuntimeOptions()).extend_rows(TOKENS) - truth).max() < 0.3


def test_the_cpu_keeps_the_weights_compressed(bundle: Path, weights: dict[str, SymmetricWeights]) -> None:
    """No FP32 copy of a matrix is made when the model is compiled: every FullyConnected and Gather reads INT8."""
    compiled = load_paged_model(bundle, RuntimeOptions(num_threads=1), tree_masks=False).compiled
    read: Counter[tuple[str, str]] = Counter()
    for node in compiled.get_runtime_model().get_ordered_ops():
        layer = str(node.get_rt_info()["layerType"].value)
        if layer == "FullyConnected":
            read[layer, node.input_value(1).get_element_type().get_type_name()] += 1
        elif layer == "Gather" and len(node.input_value(0).get_partial_shape()) == 2:
            read[layer, node.input_value(0).get_element_type().get_type_name()] += 1
    assert read["FullyConnected", "i8"] == sum("embed" not in name for name in weights) + (
        "self.lm_head.weight" not in weights
    )
    assert read["Gather", "i8"] == 1
    assert ("FullyConnected", "f32") not in read


def test_the_same_model_gives_the_same_bytes(family: str, tiny_ir: Callable[..., Path], tmp_path: Path) -> None:
    """Names and integers do not depend on what the process did before."""
    first = compressed(tiny_ir(family), tmp_path / "first")
    second = compressed(tiny_ir(family), tmp_path / "second")
    for name in (XML, "openvino_model.bin"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_empty_rows_are_not_divided_by() -> None:
    """A row of zeros, or of what FP32 cannot divide by, is zeros with scale 1; the smallest rows keep the bound."""
    rows = RNG.normal(size=(6, 8)).astype(np.float32)
    rows[1] = 0.0
    rows[2] = np.float32(1e-40)
    rows[3] *= np.float32(1e-36)
    rows[4] *= np.float32(1e30)
    found = quantize_symmetric(rows, 1)
    assert found.scale[[1, 2], 0].tolist() == [1.0, 1.0]
    assert not found.integers[[1, 2]].any()
    assert np.abs(found.integers[[0, 3, 4, 5]]).max(axis=1).tolist() == [127] * 4
    error = np.abs(rows.astype(np.float64) - found.scale.astype(np.float64) * found.integers)
    assert (error <= found.scale * (0.5 + 1e-6)).all()
    assert np.isfinite(dequantized(found)).all()


@pytest.mark.parametrize("axis", [0, 1])
def test_blocks_do_not_show(axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix that is quantized in pieces, for memory's sake, comes out as it would whole; columns as well as rows."""
    matrix = RNG.normal(size=(37, 12)).astype(np.float32)
    whole = quantize_symmetric(matrix, axis)
    monkeypatch.setattr(symmetric, "_BLOCK_BYTES", 8 * 12 * 5)
    pieces = quantize_symmetric(matrix, axis)
    assert np.array_equal(whole.integers, pieces.integers) and np.array_equal(whole.scale, pieces.scale)
    assert whole.scale.shape == ((37, 1) if axis == 1 else (1, 12))


def test_weights_that_are_not_finite_are_refused() -> None:
    """NaN and infinity are named as what they are, a broken model."""
    for wrong in (np.nan, np.inf):
        matrix = np.ones((3, 4), np.float32)
        matrix[1, 2] = wrong
        with pytest.raises(ExportError, match="not finite"):
            quantize_symmetric(matrix, 1)


def small_graph(multiply: Callable[[Any], Any]) -> ov.Model:
    x = ops.parameter([-1, 8], np.float32, name="x")
    return ov.Model([multiply(x)], [x], "small")


def run(model: ov.Model, x: NDArray[np.float32]) -> NDArray[np.float32]:
    found: NDArray[np.float32] = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(x)[0]
    return found


def test_a_matrix_stored_by_columns(tmp_path: Path) -> None:
    """Where a MatMul takes its matrix untransposed, a column is an output channel; FP16 weights are taken as well."""
    matrix = RNG.normal(size=(8, 6)).astype(np.float16)

    def product(x: Any) -> Any:
        return ops.matmul(x, ops.convert(ops.constant(matrix, name="w"), np.float32), False, False)

    model = small_graph(product)
    x = RNG.normal(size=(3, 8)).astype(np.float32)
    before = run(model, x)
    compress_int8_symmetric(model)
    save_ir(model, tmp_path)
    (found,) = read_symmetric(tmp_path / XML).values()
    assert found.scale.shape == (1, 6)
    after = run(ov.Core().read_model(tmp_path / XML), x)
    assert np.abs(after - x @ dequantized(found)).max() < 1e-5
    assert 0 < np.abs(after - before).max() < 0.1


def test_what_is_no_weight_is_left_alone() -> None:
    """Vectors and the products of two inputs are not weights; a model of nothing else is refused."""
    model = small_graph(lambda x: ops.matmul(ops.multiply(x, ops.constant(np.ones(8, np.float32))), x, False, True))
    with pytest.raises(ExportError, match="no weight matrices"):
        compress_int8_symmetric(model)


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of two groups, and of 320 weights, which 128 does not divide."""
    directory = tmp_path_factory.mktemp("wide")
    return make_tiny_model(
        "llama", directory, vocab_size=TINY_VOCAB, hidden_size=256, intermediate_size=320, initializer_range=0.06
    )


@pytest.fixture(scope="module")
def int4(wide_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Quantization]:
    directory = tmp_path_factory.mktemp("int4")
    model = ov.Core().read_model(export_openvino(wide_model, tmp_path_factory.mktemp("wide-ir")) / XML)
    quantization = compress_int4_symmetric(model)
    save_ir(model, directory)
    shutil.copyfile(wide_model / "config.json", directory / "config.json")
    return directory, quantization


def stored_weights(ir: Path) -> dict[str, tuple[ov.Node, NDArray[np.float32]]]:
    """By its name in transformers, each matrix's constant and what the runtime makes of it."""
    found = {}
    for node in ov.Core().read_model(ir / XML).get_ordered_ops():
        port = {"MatMul": 1, "Gather": 0}.get(node.get_type_name())
        name = node.get_friendly_name().split("/")[0].removeprefix("__module.") + ".weight"
        if port is None or not name.startswith(("model.layers", "model.embed", "lm_head")):
            continue
        constant = node.input_value(port)
        while constant.get_node().get_input_size():
            constant = constant.get_node().input_value(0)
        if constant.get_node().get_type_name() == "Constant":
            compiled = ov.Core().compile_model(ov.Model([node.input_value(port)], [], "weight"), "CPU")
            found[name] = (constant.get_node(), compiled([])[0].astype(np.float32))
    return found


def test_int4_is_symmetric_in_groups_or_rows(int4: tuple[Path, Quantization], wide_model: Path) -> None:
    """Layers in groups of 128, in rows where 128 does not divide them; embeddings and head INT8; nothing is FP32.

    nncf's scale is the group's largest weight / 8: one as large with the other sign is a whole step off.
    """
    ir, quantization = int4
    assert quantization.scheme == "int4 symmetric, embeddings and head int8 symmetric"
    assert quantization.granularity == "group of 128, row where a row is not several groups"
    source = load_file(wide_model / "model.safetensors")
    weights = stored_weights(ir)
    assert set(weights) == {name for name, tensor in source.items() if tensor.ndim == 2}
    for name, (constant, stored) in weights.items():
        exact = source[name].astype(np.float64)
        kind, shape = constant.get_output_element_type(0).get_type_name(), list(constant.get_output_shape(0))
        if "layers" not in name:
            assert kind == "i8"
            continue
        group = GROUP if exact.shape[1] % GROUP == 0 else exact.shape[1]
        assert kind == "i4"
        assert shape == (list(exact.shape) if group != GROUP else [len(exact), exact.shape[1] // GROUP, GROUP]), name
        grouped = exact.reshape(len(exact), -1, group)
        step = np.abs(grouped).max(axis=2, keepdims=True) / 8
        assert (np.abs(stored.reshape(grouped.shape) - grouped) <= step * (1 + 2.0**-7)).all(), name
    told = ov.Core().read_model(ir / XML).get_rt_info(["nncf", "weight_compression"])
    assert (told["group_size"], told["mode"]) == ("128", "int4_sym")


def test_the_npus_path_computes_with_int4_weights(int4: tuple[Path, Quantization], wide_model: Path) -> None:
    """Prompt, cached steps and rollback, against transformers with the dequantized weights."""
    model = load_causal_lm(wide_model, torch.float32, "sdpa")
    weights = {name: torch.from_numpy(stored) for name, (_, stored) in stored_weights(int4[0]).items()}
    assert not model.load_state_dict(weights, strict=False).unexpected_keys
    found, expected = walked(OpenVinoNpuRuntime(int4[0], NPU), model, TOKENS)
    assert np.abs(found - expected).max() < 0.02


def test_an_int4_export_is_checked_like_the_others(tmp_path: Path) -> None:
    """The parity check passes; the manifest says how the weights are stored and that no NPU ran it."""
    source = make_tiny_source("llama", tmp_path / "llama")
    options = ExportOptions(
        "draft", "int4", device="npu", num_threads=1, static_shapes=StaticShapes(prompt_len=64, response_len=64)
    )
    manifest = export_model(source, tmp_path / "out", options).manifest
    assert manifest.precision == "int4" and manifest.quantization is not None
    assert manifest.quantization.granularity == "row"  # of 64 and 128 weights
    assert "not run on hardware" in manifest.report.parity.checked_on
    assert [stage.name for stage in manifest.report.parity.stages][-1:] == ["nodes of a tree"]


def test_a_blob_made_ahead_is_taken_instead_of_the_ir(bundle: Path, tmp_path: Path) -> None:
    """Compiled here, exported, and imported by the runtime from beside the IR, with the IR's own logits."""
    for name in (XML, "openvino_model.bin", "config.json"):
        shutil.copyfile(bundle / name, tmp_path / name)
    assert NPU.static_shapes is not None
    blobs = compile_ahead(tmp_path, NPU.static_shapes, tmp_path, emulate_npu=True)
    assert [blob.name for blob in blobs] == ["openvino_model.cpu-312-8.blob", "openvino_model.cpu-312-64.blob"]
    of_ir, of_blob = OpenVinoNpuRuntime(bundle, NPU), OpenVinoNpuRuntime(tmp_path, NPU)
    assert of_ir.limits == of_blob.limits
    assert np.array_equal(of_ir.extend(TOKENS[:40]), of_blob.extend(TOKENS[:40]))
    assert np.array_equal(of_ir.extend_rows(TOKENS[40:45]), of_blob.extend_rows(TOKENS[40:45]))
    # No graph to compile: what ran above cannot have been the IR.
    (tmp_path / XML).write_text("<net/>")
    OpenVinoNpuRuntime(tmp_path, NPU).close()
    with pytest.raises(BundleError, match="cannot be read as an IR"):
        OpenVinoNpuRuntime(tmp_path, replace(NPU, properties={"KV_CACHE_PRECISION": "f32"}))


def test_a_blob_of_another_version_is_passed_over(
    bundle: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be read as a blob is compiled anew from the IR, and the log says so."""
    for name in (XML, "openvino_model.bin", "config.json"):
        shutil.copyfile(bundle / name, tmp_path / name)
    assert NPU.static_shapes is not None
    blob, _ = compile_ahead(tmp_path, NPU.static_shapes, tmp_path, emulate_npu=True)
    raw = bytearray(blob.read_bytes())
    raw[0] ^= 1  # what it begins with
    blob.write_bytes(raw)
    with caplog.at_level(logging.WARNING, logger="outrider"):
        runtime = OpenVinoNpuRuntime(tmp_path, NPU)
    assert "not for this OpenVINO or driver" in caplog.text and "compiling again" in caplog.text
    assert np.isfinite(runtime.extend(TOKENS[:5])).all()
    runtime.close()


def test_without_the_npus_compiler_it_says_where_to_get_it(bundle: Path, tmp_path: Path) -> None:
    """The pip package has none on Linux: the error names the library, where it comes from, and what happens without."""
    assert NPU.static_shapes is not None
    if npu_compiler_is_here():
        pytest.skip("this machine has an NPU compiler")
    with pytest.raises(RuntimeUnavailable, match=r"no NPU compiler: .*npu_compiler.*driver.*at its first run"):
        compile_ahead(bundle, NPU.static_shapes, tmp_path, platform="NPU4000")
    options = ExportOptions("draft", device="npu", compiles_ahead=True)
    with pytest.raises(RuntimeUnavailable, match="no NPU compiler"):  # before the model is looked at: there is none
        export_model(tmp_path / "nowhere", tmp_path / "out", options)
    assert not list(tmp_path.iterdir())


def test_another_failure_is_told_as_it_is(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What OpenVINO says, not that the compiler were missing; and what the NPU's path says of another model."""
    assert NPU.static_shapes is not None
    monkeypatch.setattr(npu_compile, "npu_properties", lambda core, xml, options: {"NPU_USE_NPUW": "PERHAPS"})
    with pytest.raises(RuntimeUnavailable, match=r"cannot compile .* ahead of time: .*name the NPU to compile for"):
        compile_ahead(bundle, NPU.static_shapes, tmp_path, emulate_npu=True)
    inputs = [ops.parameter([-1, -1], np.int64, name=name) for name in ("input_ids", "attention_mask", "position_ids")]
    for node in inputs:
        node.output(0).set_names({node.get_friendly_name()})
    kept = ops.read_value(ops.constant(np.zeros((1, 1), np.int64)), "kept")
    total = ops.add(ops.add(inputs[0], inputs[1]), ops.add(inputs[2], kept))
    model = ov.Model([ops.result(total)], [ops.assign(total, "kept")], inputs, "no language model")
    ov.save_model(model, tmp_path / XML)
    shutil.copyfile(bundle / "config.json", tmp_path / "config.json")
    with pytest.raises(BundleError, match=r"cannot be made static: .*beam_idx.*--device cpu"):
        compile_ahead(tmp_path, NPU.static_shapes, tmp_path, emulate_npu=True)


def npu_compiler_is_here() -> bool:
    """Whether OpenVINO was installed with the NPU's compiler."""
    return bool(list((Path(ov.__file__).parent / "libs").glob("*npu_compiler*")))
