"""Quantizes and dequantizes weights in blocks, as ONNX Runtime's weight-only formats store them.

A block is 32 neighbours along the input dimension of a matrix, and has one FP32 scale; a weight is
`(integer - zero_point) * scale`. Symmetric: zero_point is 128 (8 bits) or 8 (4 bits), and scale is the block's
weight of largest magnitude, sign included, over -128 or -8. That weight is exact; the others are off by at most half a
scale, or by at most one scale where a weight of opposite sign and nearly the same magnitude is clipped.
(onnxruntime, MatMulNBits; its `matmul_nbits_quantizer` does the arithmetic.)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from outrider.export.convert.onnx_graph import quiet_onnx
from outrider.models.errors import ExportError

BLOCK_SIZE: Final = 32


@dataclass(frozen=True, slots=True)
class Blocks:
    """A quantized matrix of N rows (outputs) and K columns (inputs), B = ceil(K / block_size) blocks per row.

    name: of the matrix before it was quantized. bits: 4 or 8. integers: [N, K] uint8. scales: [N, B] float32.
    zero_points: [N, B] uint8. values: [N, K] float32, what the runtime computes with.
    """

    name: str
    bits: int
    block_size: int
    integers: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zero_points: NDArray[np.uint8]
    values: NDArray[np.float32]


def quantize_blocks(weights: NDArray[np.float32], bits: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Quantizes [K, N] float32 symmetrically: packed [N, B, 32 * bits / 8] uint8 and scales [N, B] float32."""
    with quiet_onnx():
        from onnxruntime.quantization import matmul_nbits_quantizer as quantizer

        config = quantizer.DefaultWeightOnlyQuantConfig(block_size=BLOCK_SIZE, is_symmetric=True, bits=bits)
        packed, scales, _ = quantizer.DefaultWeightOnlyQuantizer(config).qbits_block_quant(
            np.ascontiguousarray(weights, dtype=np.float32)
        )
    return packed, scales


def read_dequantized(onnx: Path) -> dict[str, Blocks]:
    """Every quantized matrix of an .onnx file by its name: of MatMulNBits and GatherBlockQuantized nodes.

    Raises ExportError for a format that it does not know.
    """
    import onnx_ir as ir

    found: dict[str, Blocks] = {}
    model: Any = ir.load(onnx)
    for node in model.graph:
        if node.op_type == "MatMulNBits":
            size = (node.attributes["N"].as_int(), node.attributes["K"].as_int())
            weight, scales, zero_points = node.inputs[1], node.inputs[2], _optional(node, 3)
        elif node.op_type == "GatherBlockQuantized":
            weight, scales, zero_points = node.inputs[0], node.inputs[2], _optional(node, 3)
            if not weight.is_initializer():  # reshaped, from the LM head that it shares its weights with
                continue
            size = (weight.shape[0], weight.shape[1] * 8 // node.attributes["bits"].as_int())
        else:
            continue
        bits, block_size = node.attributes["bits"].as_int(), node.attributes["block_size"].as_int()
        if bits not in (4, 8) or weight.const_value is None:
            raise ExportError(
                f"{onnx}: {node.name} has {bits}-bit weights in an unknown format; expected 4 or 8 bits, constant"
            )
        blocks = _unpack(weight, scales, zero_points, size, bits, block_size)
        found[blocks.name] = blocks
    return found


def _optional(node: Any, index: int) -> Any:
    return node.inputs[index] if len(node.inputs) > index else None


def _unpack(weight: Any, scales: Any, zero_points: Any, size: tuple[int, int], bits: int, block_size: int) -> Blocks:
    rows, columns = size
    per_row = -(-columns // block_size)
    integers = _nibbles(weight.const_value.numpy().reshape(rows, -1), bits)[:, :columns]
    factors = scales.const_value.numpy().astype(np.float32).reshape(rows, per_row)
    zeros = np.full((rows, per_row), 1 << (bits - 1), np.uint8)
    if zero_points is not None:
        zeros = _nibbles(zero_points.const_value.numpy().reshape(rows, -1), bits)[:, :per_row]
    wide = [np.repeat(array, block_size, axis=1)[:, :columns] for array in (zeros, factors)]
    values = (integers.astype(np.float32) - wide[0]) * wide[1]
    name = weight.name.removesuffix(f"_Q{bits}")
    return Blocks(name, bits, block_size, integers, factors, zeros, values.astype(np.float32))


def _nibbles(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """One integer per element; of two in a byte the lower half comes first."""
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], -1)
