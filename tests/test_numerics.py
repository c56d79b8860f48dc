"""The error bounds of docs/numerics.md, weight by weight, on what exports write: IRs, files and ONNX graphs.

Weights are drawn, put into a small graph or file, quantized by the functions that exports use, written, read back from
the file and compared with what they were. `bench/` and the report card judge what such errors do to a model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import openvino as ov
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from openvino import opset13 as ops
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch
from tests.onnx_graphs import build
from tests.quantized import Blocks, read_blocks
from tests.stored_weights import Stored, read_ir
from tests.tiny_models import make_tiny_model
from tests.weight_bounds import (
    BF16,
    FP16,
    SHAPES,
    SMALLEST_BF16,
    SMALLEST_FP16,
    Matrix,
    asymmetric_bound,
    block_bound,
    drawn,
    rounding_bound,
    small_models,
    symmetric_bound,
)

from outrider.export.convert.onnx_quantize import BLOCK_SIZE, quantize_weights
from outrider.export.convert.openvino_ir import IR_NAME, finish_ir
from outrider.export.convert.safetensors_cast import cast_weights
from outrider.export.make.pair import PairPaths, reference_directories
from outrider.export.source.weight_files import BF16_MAX, FP16_MAX, require_range
from outrider.models.bundle.manifest import Device, Precision
from outrider.models.errors import ExportError


def write_ir(matrices: dict[str, Matrix], directory: Path) -> None:
    """An embedding and two products after it, as a language model begins and ends: nncf takes the ends for such."""
    ids = ops.parameter([1, -1], np.int64, name="input_ids")
    constants = {name: ops.constant(matrix, name=name) for name, matrix in matrices.items()}
    hidden = ops.gather(constants["embedding"], ids, ops.constant(0, np.int64))
    hidden = ops.matmul(hidden, constants["middle"], False, True)
    logits = ops.matmul(hidden, constants["head"], False, True)
    ov.save_model(ov.Model([logits], [ids], "small"), directory / f"{IR_NAME}.xml", compress_to_fp16=False)


def through_ir(matrices: dict[str, Matrix], precision: Precision, device: Device) -> dict[str, Stored]:
    """What the exported IR of these matrices holds."""
    with tempfile.TemporaryDirectory() as root:
        source, exported = Path(root) / "source", Path(root) / "exported"
        source.mkdir()
        exported.mkdir()
        write_ir(matrices, source)
        finish_ir(source, exported, "small", precision, device)
        return read_ir(exported / f"{IR_NAME}.xml")


def require_bound(name: str, stored: Stored, weights: Matrix) -> float:
    """Every weight within the bound of its format; returns the largest share of a bound that was used."""
    exact = weights.astype(np.float64)
    if stored.bits == 32:
        bound = np.full(exact.shape, 0.0)
    elif stored.bits == 16:
        bound = rounding_bound(exact, FP16, SMALLEST_FP16)
    elif (stored.scale_type, stored.group) == ("f32", weights.shape[1]):
        bound = symmetric_bound(exact)
    else:
        assert stored.scale_type == "f16", name
        bound = asymmetric_bound(exact, stored.group, 2**stored.bits - 1)
    error = np.abs(stored.values.reshape(exact.shape) - exact)
    assert np.isfinite(error).all(), name
    worst = np.unravel_index(np.argmax(error - bound), error.shape)
    assert error[worst] <= bound[worst], f"{name}{worst}: {exact[worst]} is off by {error[worst]}, bound {bound[worst]}"
    return float(np.divide(error, bound, out=np.zeros_like(error), where=bound > 0).max())


def ordinary_weights(vocab: int, width: int, inner: int) -> dict[str, Matrix]:
    rng = np.random.default_rng(0)
    shapes = {"embedding": (vocab, width), "middle": (inner, width), "head": (vocab, inner)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("precision", "device"), [("int8", "cpu"), ("int4", "cpu"), ("int8", "npu"), ("fp16", "gpu"), ("fp32", "cpu")]
)
@settings(max_examples=12, deadline=None)
@given(matrices=small_models())
def test_every_weight_of_an_ir_keeps_its_bound(
    precision: Precision, device: Device, matrices: dict[str, Matrix]
) -> None:
    """Whatever the rows are: zeros, denormals, outliers, one sign only."""
    stored = through_ir(matrices, precision, device)
    assert stored.keys() == matrices.keys()
    for name, weights in matrices.items():
        require_bound(name, stored[name], weights)


@pytest.mark.parametrize(
    ("precision", "device", "form"),
    [
        ("int8", "cpu", {"embedding": (8, 192, "f16"), "middle": (8, 192, "f16"), "head": (8, 128, "f16")}),
        ("int4", "cpu", {"embedding": (8, 192, "f16"), "middle": (4, 64, "f16"), "head": (8, 128, "f16")}),
        ("int8", "npu", {"embedding": (8, 192, "f32"), "middle": (8, 192, "f32"), "head": (8, 128, "f32")}),
        ("fp16", "gpu", dict.fromkeys(("embedding", "middle", "head"), (16, 0, ""))),
    ],
)
def test_the_formats_are_as_written_and_their_bounds_not_slack(
    precision: Precision, device: Device, form: dict[str, tuple[int, int, str]]
) -> None:
    """Bits, weights a scale and its type; the worst of ordinary weights uses most of the bound."""
    matrices = ordinary_weights(*SHAPES["large"])
    stored = through_ir(matrices, precision, device)
    assert {name: (found.bits, found.group, found.scale_type) for name, found in stored.items()} == form
    for name, weights in matrices.items():
        assert 0.9 < require_bound(name, stored[name], weights) <= 1


@pytest.mark.parametrize(("width", "bits", "group"), [(192, 4, 64), (96, 4, 32), (160, 4, 32), (48, 8, 48)])
def test_groups_of_int4_fit_the_width(width: int, bits: int, group: int) -> None:
    """64 weights a scale, 32 where 64 does not divide the row, and INT8 where 32 does not."""
    middle = through_ir(ordinary_weights(16, width, 32), "int4", "cpu")["middle"]
    assert (middle.bits, middle.group) == (bits, group)


@pytest.fixture(scope="module")
def target_weights() -> dict[str, Matrix]:
    """Every matrix of the bundled target, as its safetensors have it."""
    tensors = load_torch(reference_directories().target / "model.safetensors")
    return {name: tensor.float().numpy() for name, tensor in tensors.items() if tensor.ndim == 2}


@pytest.mark.parametrize(
    ("precision", "device"), [("int8", "cpu"), ("int4", "cpu"), ("int8", "npu"), ("fp16", "gpu"), ("fp32", "cpu")]
)
def test_every_weight_of_the_reference_target_keeps_its_bound(
    precision: Precision,
    device: Device,
    reference_pair: PairPaths,
    target_weights: dict[str, Matrix],
    tmp_path: Path,
) -> None:
    """A trained model, all of it, from the IR that was exported of it."""
    finish_ir(reference_pair.target, tmp_path, "target", precision, device)
    stored = {name.removeprefix("self."): found for name, found in read_ir(tmp_path / f"{IR_NAME}.xml").items()}
    assert stored.keys() >= target_weights.keys()
    shares = [require_bound(name, stored[name], weights) for name, weights in target_weights.items()]
    assert len(shares) == len(target_weights) > 40 and (max(shares) > 0.99 or precision == "fp32")


CASTS: dict[Precision, tuple[float, float, float]] = {
    "fp16": (FP16, SMALLEST_FP16, FP16_MAX),
    "bf16": (BF16, SMALLEST_BF16, BF16_MAX),
}


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@settings(max_examples=40, deadline=None)
@example(matrix=np.array([[1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8]], np.float32), scale=1.0)  # ties
@example(matrix=np.array([[2**-25, 3 * 2**-25, 2**-134, 3 * 2**-134, 0.0, -0.0]], np.float32), scale=1.0)
@given(matrix=drawn(16, 48), scale=st.sampled_from([1.0, 1e-30, 1e30]))
def test_every_weight_of_a_cast_keeps_its_bound(precision: Precision, matrix: Matrix, scale: float) -> None:
    """Rounded to nearest, ties to even, subnormal numbers kept, nothing made infinite."""
    unit, smallest, largest = CASTS[precision]
    weights = np.clip(matrix * np.float32(scale), -largest, largest)
    with tempfile.TemporaryDirectory() as root:
        source, out = Path(root) / "model.safetensors", Path(root) / "out"
        out.mkdir()
        save_file({"weights": weights}, source)
        require_range([source], precision)
        cast_weights([source], out, precision)
        cast = load_torch(out / source.name)["weights"]
    stored, exact = cast.double().numpy(), weights.astype(np.float64)
    assert cast.dtype == (torch.float16 if precision == "fp16" else torch.bfloat16) and np.isfinite(stored).all()
    assert (np.abs(stored - exact) <= rounding_bound(exact, unit, smallest)).all()
    if precision == "fp16":  # numpy rounds to nearest even
        np.testing.assert_array_equal(stored, weights.astype(np.float16).astype(np.float64))


@pytest.mark.parametrize(
    ("precision", "weight", "message"),
    [
        ("fp16", 65_520.0, "holds 65520, beyond the 65504 that fp16 can hold"),
        ("fp16", -1e5, "holds -100000, beyond"),
        ("bf16", 3.4e38, "holds .*, beyond the 3.38953e.38 that bf16 can hold"),
        ("int8", 1e7, "holds .*, beyond .* that int8 can hold"),
        ("int4", 1e6, "holds .*, beyond .* that int4 can hold"),
        ("fp32", float("nan"), "holds weights that are not finite numbers"),
        ("int8", float("-inf"), "holds weights that are not finite numbers"),
    ],
)
def test_a_weight_that_a_precision_cannot_hold_is_refused(
    tmp_path: Path, precision: Precision, weight: float, message: str
) -> None:
    """With the tensor's name and the weight; torch would make it infinite, OpenVINO clip it."""
    path = tmp_path / "model.safetensors"
    save_file({"layer.weight": np.array([[1.0, weight, 2.0]], np.float32)}, path)
    with pytest.raises(ExportError, match=rf"the tensor layer\.weight {message}"):
        require_range([path], precision)


@pytest.mark.parametrize(("precision", "weight"), [("fp16", FP16_MAX), ("bf16", BF16_MAX), ("fp32", 3.4e38)])
def test_the_largest_weight_of_a_precision_is_taken(tmp_path: Path, precision: Precision, weight: float) -> None:
    """The bound itself is inside; BF16 and integer tensors are read too."""
    path = tmp_path / "model.safetensors"
    others = {"brain": torch.ones(2, dtype=torch.bfloat16), "whole": torch.ones(1, dtype=torch.int32)}
    save_torch({"largest": torch.tensor([weight, -weight]), **others}, path)
    require_range([path], precision)


def test_in_an_fp16_ir_only_matrices_are_halved(tiny_ir: Callable[..., Path], tmp_path: Path) -> None:
    """Rotary frequencies, times the position, would turn their rounding into wrong angles far into a text."""
    finish_ir(tiny_ir("llama"), tmp_path, "tiny", "fp16", "gpu")
    before, after = (_constants(directory) for directory in (tiny_ir("llama"), tmp_path))
    vectors = {name: values for name, values in before.items() if sum(size > 1 for size in values.shape) < 2}
    assert any("rotary" in name and values.size > 1 for name, values in vectors.items())
    for values in vectors.values():
        assert any(other.dtype == np.float32 and np.array_equal(values, other) for other in after.values())
    halved = [name for name, values in after.items() if values.dtype == np.float16]
    assert len(halved) == len(before) - len(vectors) and all("weight" in name for name in halved)


def _constants(directory: Path) -> dict[str, NDArray[Any]]:
    nodes = ov.Core().read_model(directory / f"{IR_NAME}.xml").get_ordered_ops()
    return {
        node.get_friendly_name(): node.get_data().copy()
        for node in nodes
        if node.get_type_name() == "Constant" and node.get_output_element_type(0).is_real()
    }


EMBEDDING = "model.embed_tokens.weight"


def write_onnx(matrices: dict[str, Matrix], directory: Path) -> Path:
    """The graph of `write_ir`."""
    initializers = [
        numpy_helper.from_array(matrix if name == "embedding" else np.ascontiguousarray(matrix.T), name)
        for name, matrix in matrices.items()
    ]
    nodes = [
        helper.make_node("Gather", ["embedding", "input_ids"], ["embedded"], name="gather"),
        helper.make_node("MatMul", ["embedded", "middle"], ["hidden"], name="product"),
        helper.make_node("MatMul", ["hidden", "head"], ["logits"], name="head_product"),
    ]
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, [1, "n"])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, "n", len(matrices["head"])])
    graph = helper.make_graph(nodes, "small", [ids], [logits], initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(onnx.shape_inference.infer_shapes(model), directory / "in.onnx")
    return directory / "in.onnx"


@pytest.mark.parametrize("bits", [8, 4])
@settings(max_examples=25, deadline=None)
@given(matrices=small_models())
def test_every_weight_of_an_onnx_graph_keeps_its_bound(bits: Literal[8, 4], matrices: dict[str, Matrix]) -> None:
    """Blocks of 32; the embedding and the LM head have 8 bits in any case."""
    with tempfile.TemporaryDirectory() as root:
        quantize_weights(write_onnx(matrices, Path(root)), Path(root), bits)
        found = read_blocks(Path(root) / "model.onnx")
    assert found.keys() == matrices.keys()
    for name, weights in matrices.items():
        require_block_bound(name, found[name], weights, 8 if name != "middle" else bits)


def require_block_bound(name: str, blocks: Blocks, weights: Matrix, bits: int, unit: float = 0.0) -> float:
    """As `require_bound`, of one matrix of an ONNX graph. unit: of the type that weights and scales were rounded to."""
    assert (blocks.bits, blocks.block_size, blocks.scales.dtype.name) == (bits, BLOCK_SIZE, "float32")
    exact, integers, zeros, scales = (
        part.astype(np.float64) for part in (weights, blocks.integers, blocks.zero_points, blocks.scales)
    )
    zeros, scales = (np.repeat(part, BLOCK_SIZE, axis=1) for part in (zeros, scales))
    # The embedding's rows are stored with the last block whole.
    integers, zeros, scales = (part[:, : exact.shape[1]] for part in (integers, zeros, scales))
    error = np.abs((integers - zeros) * scales - exact)
    rounding = np.abs(exact) * unit + (unit > 0) * SMALLEST_FP16 / 2
    bound = block_bound(exact, integers, bits) * (1 + unit) + (2 + 2.0 ** (1 - bits)) * rounding
    worst = np.unravel_index(np.argmax(error - bound), error.shape)
    assert error[worst] <= bound[worst], f"{name}{worst}: {exact[worst]} is off by {error[worst]}, bound {bound[worst]}"
    return float(np.divide(error, bound, out=np.zeros_like(error), where=bound > 0).max())


@pytest.mark.parametrize(
    ("precision", "wide"), [("int8", "fp32"), ("int4", "fp32"), ("int4", "fp16"), ("fp16", "fp16")]
)
def test_every_weight_of_the_builders_graph_keeps_its_bound(
    precision: Literal["int8", "int4", "fp16"], wide: Literal["fp32", "fp16"], tmp_path: Path
) -> None:
    """onnxruntime-genai's: on CUDA weights and scales are FP16; rotary angles are exact before they are rounded."""
    source = make_tiny_model("qwen2", tmp_path / "tiny", vocab_size=96, hidden_size=64, num_attention_heads=4)
    model = onnx.load(build(source, tmp_path / "graph", precision, wide) / "model.onnx")
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    blocks = read_blocks(tmp_path / "graph" / "model.onnx")
    unit = FP16 if wide == "fp16" else 0.0
    weights = as_the_builder_names_them(load_file(source / "model.safetensors"))
    for name, matrix in weights.items():
        if name in blocks:
            bits = 8 if name in ("lm_head.MatMul.weight", EMBEDDING) else int(precision.removeprefix("int"))
            require_block_bound(name, blocks[name], matrix, bits, unit)
        else:
            stored = arrays[name] if name == EMBEDDING else arrays[name].T
            np.testing.assert_array_equal(stored, matrix.astype(np.float16), strict=True)
    assert len(weights) == 12 and (len(blocks) == 0) == (precision == "fp16")
    positions, frequencies = np.arange(512)[:, None], 10_000.0 ** -(np.arange(8) / 8)
    for name, function in (("cos_cache", np.cos), ("sin_cache", np.sin)):
        error = np.abs(arrays[name].astype(np.float64) - function(positions * frequencies)).max()
        assert error <= unit / 2 + 512 * 2.0**-23  # FP32 angles


def as_the_builder_names_them(tensors: dict[str, Matrix]) -> dict[str, Matrix]:
    """The matrices of a Qwen2-type model: those of query, key and value are one."""
    renamed = {
        name.replace("self_attn", "attn").replace(".weight", ".MatMul.weight"): tensor
        for name, tensor in tensors.items()
        if tensor.ndim == 2 and name != EMBEDDING
    }
    for name in [name for name in renamed if "q_proj" in name]:
        parts = [renamed.pop(name.replace("q_proj", kind)) for kind in ("q_proj", "k_proj", "v_proj")]
        renamed[name.replace("q_proj", "qkv_proj")] = np.concatenate(parts)
    return renamed | {EMBEDDING: tensors[EMBEDDING]}
