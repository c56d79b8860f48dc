"""The error bounds of docs/numerics.md on ONNX graphs, weight by weight, as test_numerics has them on IRs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import load_file
from tests.onnx_graphs import build
from tests.quantized import Blocks, read_blocks
from tests.tiny_models import make_tiny_model
from tests.weight_bounds import FP16, SMALLEST_FP16, Matrix, block_bound, small_models

from outrider.export.convert.onnx_quantize import BLOCK_SIZE, quantize_weights

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
            assert stored.dtype == np.float16
            np.testing.assert_array_equal(stored, matrix.astype(np.float16))
    assert len(weights) == 12 and (len(blocks) == 0) == (precision == "fp16")
    positions, frequencies = np.arange(512)[:, None], 10_000.0 ** -(np.arange(8) / 8)
    for name, function in (("cos_cache", np.cos), ("sin_cache", np.sin)):
        error = np.abs(arrays[name].astype(np.float64) - function(positions * frequencies)).max()
        assert error <= unit / 2 + 512 * 2.0**-23  # FP32 angles


def as_the_builder_names_them(tensors: dict[str, Matrix]) -> dict[str, Matrix]:
    """The matrices of a Qwen2-type model: those of query, key and value are one."""
    renamed: dict[str, Matrix] = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and name != EMBEDDING:
            renamed[name.replace("self_attn", "attn").replace(".weight", ".MatMul.weight")] = tensor
    for name in [name for name in renamed if "q_proj" in name]:
        parts = [renamed.pop(name.replace("q_proj", kind)) for kind in ("q_proj", "k_proj", "v_proj")]
        renamed[name.replace("q_proj", "qkv_proj")] = np.concatenate(parts)
    return renamed | {EMBEDDING: tensors[EMBEDDING]}
