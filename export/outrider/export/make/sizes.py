"""Estimates how many bytes an export writes, before it begins.

Lower bounds: a refused export would not have fitted; one that runs out later gets the same message.
"""

from __future__ import annotations

from typing import Final

from outrider.export.recipes import ExportOptions
from outrider.export.source.model_source import SourceModel
from outrider.models.bundle.manifest import Precision

# Of the stored weights; scales and weights that keep more bits come on top.
_BYTES_PER_WEIGHT: Final[dict[Precision, float]] = {
    "fp32": 4.0,
    "fp16": 2.0,
    "bf16": 2.0,
    "int8": 1.0,
    "w8a8": 1.0,
    "int4": 0.5,
}
# Rows of logits that `Truth` keeps: of the parity check's two pairs, about 70 each, and of six held-out texts.
_TRUTH_ROWS: Final = 2 * 70 + 6 * 24


def finished_bytes(source: SourceModel, options: ExportOptions) -> float:
    """Bytes of the bundle of `source`."""
    return source.architecture.parameters * _BYTES_PER_WEIGHT[options.resolved_precision]


def widened_bytes(options: ExportOptions) -> float:
    """Bytes that widening adds: a temporary copy in FP32, and the bundle's growth."""
    copies = 1.0 + _BYTES_PER_WEIGHT[options.resolved_precision] / _BYTES_PER_WEIGHT["fp32"]
    return 1e6 * options.widen_mb * copies if options.widen_mb is not None else 0.0


def truth_bytes(source: SourceModel) -> float:
    """Bytes of the source's logits in the stage store."""
    return 4.0 * _TRUTH_ROWS * source.architecture.vocab_size


def converted_bytes(source: SourceModel, options: ExportOptions) -> float:
    """Bytes of the converted model in the stage store, before it is quantized: FP32, or FP16 for CUDA.

    The torch runtime's weights are cast straight into the bundle.
    """
    if options.resolved_runtime == "torch":
        return 0.0
    is_half = (options.device, options.resolved_runtime) == ("gpu", "onnxruntime")
    return (2.0 if is_half else 4.0) * source.architecture.parameters
