"""About how many bytes an export writes, known before it begins.

Estimates from below: what is refused for lack of room does not fit. What does not fit although it was not refused ends
in the same message, later.
"""

from __future__ import annotations

from typing import Final

from outrider.export.recipes import ExportOptions
from outrider.export.source.model_source import SourceModel
from outrider.models.manifest import Precision

# Of the stored weights; scales and what is left in more bits come on top.
_BYTES_A_WEIGHT: Final[dict[Precision, float]] = {
    "fp32": 4.0,
    "fp16": 2.0,
    "bf16": 2.0,
    "int8": 1.0,
    "w8a8": 1.0,
    "int4": 0.5,
}
# Rows of logits that `truth` keeps: of the parity check's passages, about 70 each, and of six held-out texts.
_TRUTH_ROWS: Final = 2 * 70 + 6 * 24


def finished_bytes(source: SourceModel, options: ExportOptions) -> float:
    """What the bundle of `source` takes."""
    return source.architecture.parameters * _BYTES_A_WEIGHT[options.resolved_precision]


def widened_bytes(options: ExportOptions) -> float:
    """What widening the source adds: a copy in FP32 beside the bundle for a while, and what the bundle has more."""
    copies = 1.0 + _BYTES_A_WEIGHT[options.resolved_precision] / _BYTES_A_WEIGHT["fp32"]
    return 1e6 * options.widen_mb * copies if options.widen_mb is not None else 0.0


def truth_bytes(source: SourceModel) -> float:
    """What the source's logits take in the work store."""
    return 4.0 * _TRUTH_ROWS * source.architecture.vocab_size


def converted_bytes(source: SourceModel, options: ExportOptions) -> float:
    """What the converted model takes in the work store, before it is quantized: FP32, or FP16 for CUDA.

    The torch runtime's weights are cast straight into the bundle.
    """
    if options.resolved_runtime == "torch":
        return 0.0
    is_half = (options.device, options.resolved_runtime) == ("gpu", "onnxruntime")
    return (2.0 if is_half else 4.0) * source.architecture.parameters
