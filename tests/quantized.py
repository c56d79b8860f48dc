"""Reads quantized matrices back from ONNX graphs, as the runtime computes with them (IRs: tests/stored_weights.py)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


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


def read_blocks(onnx: Path) -> dict[str, Blocks]:
    """Every quantized matrix of an .onnx file by its name: of MatMulNBits and GatherBlockQuantized nodes.

    Fails for a format that it does not know.
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
        assert bits in (4, 8) and weight.const_value is not None, f"{onnx}: {node.name}"
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
