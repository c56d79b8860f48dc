"""Quantizes ONNX graphs: MatMulNBits for the matrices, GatherBlockQuantized for the token embedding, INT8 or INT4.

Only weights are quantized, symmetrically, in blocks of 32. The kernel quantizes activations to INT8 as
it runs: accuracy level 4, because at level 1, FP32, the 8-bit kernel is some thirty times slower. Of an INT4 model the
LM head and the embedding have 8 bits: on the reference draft the divergence from FP32 is 0.055 nats with that and 0.077
without. MatMulInteger (`quantize_dynamic`), the other INT8 of ONNX Runtime, took 1.6 times as long per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from outrider.export.convert.onnx_graph import (
    add_initializer,
    drop_unused,
    find_lm_head,
    load_model,
    save_model,
    swap_node,
)
from outrider.export.quiet import quiet_upstream
from outrider.models.errors import ExportError

BLOCK_SIZE: Final = 32


def quantize_blocks(weights: NDArray[np.float32], bits: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Quantizes [K, N] float32 symmetrically: packed [N, B, 32 * bits / 8] uint8 and scales [N, B] float32."""
    # Imported where upstream is quiet: it configures the process's logging.
    from onnxruntime.quantization import matmul_nbits_quantizer as quantizer

    config = quantizer.DefaultWeightOnlyQuantConfig(block_size=BLOCK_SIZE, is_symmetric=True, bits=bits)
    packed, scales, _ = quantizer.DefaultWeightOnlyQuantizer(config).qbits_block_quant(
        np.ascontiguousarray(weights, dtype=np.float32)
    )
    return packed, scales


_ACCURACY_LEVEL: Final = 4
_CONTRIB: Final = "com.microsoft"


def quantize_weights(src_onnx: Path, destination: Path, bits: Literal[8, 4]) -> None:
    """Writes the graph with quantized weights to `destination` as model.onnx and model.onnx.data.

    Every product with a constant matrix is quantized, the LM head to 8 bits in any case, and so is the embedding.
    Raises ExportError if there is nothing to quantize.
    """
    with quiet_upstream(f"quantizing {src_onnx.name}"):
        model = load_model(src_onnx)
        graph = model.graph
        head = find_lm_head(graph)
        products = [node for node in graph if _matrix(node) is not None]
        if not products:
            raise ExportError(
                f"{src_onnx} has no product with a constant matrix, so nothing can be quantized; try --precision fp32"
            )
        matrices: dict[tuple[str, int], tuple[Any, Any]] = {}
        for node in products:
            _quantize_product(graph, node, 8 if node is head else bits, matrices)
        _quantize_embedding(graph)
        graph.opset_imports.setdefault(_CONTRIB, 1)
        drop_unused(model)
        save_model(model, destination)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A product's constant: [N, K] if transposed, else [K, N]. alpha: what the product is multiplied with."""

    value: Any
    is_transposed: bool
    alpha: float = 1.0


def _matrix(node: Any) -> _Matrix | None:
    """The constant of a product worth quantizing; None for other nodes."""
    if node.op_type not in ("MatMul", "FusedMatMul", "Gemm"):
        return None
    flags = {name: attribute.value for name, attribute in node.attributes.items()}
    alpha = float(flags.get("alpha", 1.0))
    if any(flags.get(name) for name in ("transA", "transBatchA", "transBatchB")) or flags.get("beta", 1.0) != 1.0:
        return None
    value, is_turned = _through_transpose(node.inputs[1])
    is_transposed = bool(flags.get("transB")) != is_turned
    if not value.is_initializer() or value.const_value is None or len(value.shape) != 2:
        return None
    if value.shape[1 if is_transposed else 0] < BLOCK_SIZE or (node.op_type == "Gemm" and alpha != 1.0):
        return None  # shorter than a block: rotary frequencies, not a layer
    return _Matrix(value, is_transposed, alpha)


def _through_transpose(value: Any) -> tuple[Any, bool]:
    """The matrix that a value is the transpose of, and True; or the value itself, and False."""
    before = value.producer()
    if before is not None and before.op_type == "Transpose" and len(before.inputs[0].shape or ()) == 2:
        return before.inputs[0], True
    return value, False


def _quantize_product(graph: Any, node: Any, bits: int, matrices: dict[tuple[str, int], tuple[Any, Any]]) -> None:
    found = _matrix(node)
    assert found is not None
    value = found.value
    weights = value.const_value.numpy()
    weights = weights.T if found.is_transposed else weights
    if (value.name, bits) not in matrices:
        packed, scales = quantize_blocks(weights, bits)
        matrices[value.name, bits] = (
            add_initializer(graph, f"{value.name}_Q{bits}", packed),
            add_initializer(graph, f"{value.name}_scales", scales.astype(weights.dtype)),
        )
    columns, rows = weights.shape
    product = ir.node(
        "MatMulNBits",
        [node.inputs[0], *matrices[value.name, bits]],
        {"K": columns, "N": rows, "bits": bits, "block_size": BLOCK_SIZE, "accuracy_level": _ACCURACY_LEVEL},
        domain=_CONTRIB,
        name=f"{node.name}_Q{bits}",
    )
    nodes = [product]
    if found.alpha != 1.0:
        alpha = add_initializer(graph, f"{node.name}_alpha", np.array(found.alpha, weights.dtype))
        nodes.append(ir.node("Mul", [product.outputs[0], alpha], name=f"{node.name}_scaled"))
    if node.op_type == "Gemm" and len(node.inputs) > 2 and node.inputs[2] is not None:
        nodes.append(ir.node("Add", [product.outputs[0], node.inputs[2]], name=f"{node.name}_bias"))
    swap_node(graph, node, nodes)


def _quantize_embedding(graph: Any) -> None:
    """Gives the token embedding 8 bits; the LM head's own integers where the two are one matrix.

    Does nothing where the graph does not simply gather rows of a constant by `input_ids`.
    """
    ids = next(value for value in graph.inputs if value.name == "input_ids")
    gather = next((node for node in ids.consumers() if node.op_type == "Gather"), None)
    if gather is None:
        return
    table, is_transposed = _through_transpose(gather.inputs[0])
    if not table.is_initializer() or table.dtype != ir.DataType.FLOAT:
        return
    weights = table.const_value.numpy()
    weights = weights.T if is_transposed else weights  # a tied one may be the transposed LM head
    width = weights.shape[1]
    padded = -(-width // BLOCK_SIZE) * BLOCK_SIZE
    packed, scales = quantize_blocks(weights.T, 8)
    head = find_lm_head(graph)
    nodes = []
    if _is_same(head, packed, scales):
        shape = add_initializer(graph, "embedding_shape", np.array([len(weights), padded], np.int64))
        nodes.append(ir.node("Reshape", [head.inputs[1], shape], name="embedding_of_lm_head"))
        data, factors = nodes[0].outputs[0], head.inputs[2]
    else:
        data = add_initializer(graph, f"{table.name}_Q8", packed.reshape(len(weights), padded))
        factors = add_initializer(graph, f"{table.name}_scales", scales)
    lookup = ir.node(
        "GatherBlockQuantized",
        [data, ids, factors],
        {"bits": 8, "block_size": BLOCK_SIZE, "gather_axis": 0, "quantize_axis": 1},
        domain=_CONTRIB,
        name=f"{gather.name}_Q8",
    )
    nodes.append(lookup)
    if padded != width:
        cut = [
            add_initializer(graph, f"embedding_{name}", np.array([value], np.int64))
            for name, value in (("start", 0), ("end", width), ("axis", -1))
        ]
        nodes.append(ir.node("Slice", [lookup.outputs[0], *cut], name=f"{gather.name}_cut"))
    swap_node(graph, gather, nodes)


def _is_same(head: Any, packed: Any, scales: Any) -> bool:
    """Whether the LM head holds the same integers and scales."""
    if head.op_type != "MatMulNBits" or head.attributes["bits"].as_int() != 8:
        return False
    if head.attributes["block_size"].as_int() != BLOCK_SIZE or (len(head.inputs) > 3 and head.inputs[3] is not None):
        return False
    own, own_scales = (head.inputs[index].const_value.numpy() for index in (1, 2))
    if own.shape != packed.shape or own_scales.size != scales.size:
        return False
    return np.array_equal(own, packed) and np.array_equal(own_scales.reshape(scales.shape), scales)
