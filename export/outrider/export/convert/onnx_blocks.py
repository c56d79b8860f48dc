"""Quantizes weights in blocks, as ONNX Runtime's weight-only formats store them.

A block is 32 neighbours along the input dimension of a matrix, and has one FP32 scale; a weight is
`(integer - zero_point) * scale`. Symmetric: zero_point is 128 (8 bits) or 8 (4 bits), and scale is the block's
weight of largest magnitude, sign included, over -128 or -8. That weight is exact; the others are off by at most half a
scale, or by at most one scale where a weight of opposite sign and nearly the same magnitude is clipped.
(onnxruntime, MatMulNBits; its `matmul_nbits_quantizer` does the arithmetic.)
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.export.convert.onnx_graph import quiet_onnx

BLOCK_SIZE: Final = 32


def quantize_blocks(weights: NDArray[np.float32], bits: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Quantizes [K, N] float32 symmetrically: packed [N, B, 32 * bits / 8] uint8 and scales [N, B] float32."""
    with quiet_onnx():
        from onnxruntime.quantization import matmul_nbits_quantizer as quantizer

        config = quantizer.DefaultWeightOnlyQuantConfig(block_size=BLOCK_SIZE, is_symmetric=True, bits=bits)
        packed, scales, _ = quantizer.DefaultWeightOnlyQuantizer(config).qbits_block_quant(
            np.ascontiguousarray(weights, dtype=np.float32)
        )
    return packed, scales
