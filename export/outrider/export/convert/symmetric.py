"""Quantizes weights symmetrically, as suits NPUs best: INT8 with one scale per output channel, or INT4 in groups.

INT8: a channel's scale is s = max|w| / 127, its integers are q = round(w / s), so |w - s q| <= s / 2 for every weight
and q is never -128. nncf's INT8_SYM differs: it divides by 128, gives the scale the sign of the largest weight and
keeps it in FP16, whose rounding alone moves the largest weights by a sixteenth of an integer.

INT4, which Intel's guide prefers (docs/exporting.md cites it): 128 weights of a row share a scale; a matrix whose rows
are not several groups has one scale a row, the guide's other choice. Embeddings and the LM head are symmetric INT8.
nncf chooses the integers of INT4; its scales are FP16. Knows the graph and numpy, not what the weights are for.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from outrider.models.bundle.manifest import Quantization
from outrider.models.errors import ExportError

# Weights quantized at a time: bounds the memory beside the model and its INT8 copy.
_BLOCK_BYTES: Final = 32 << 20


@dataclass(frozen=True, slots=True)
class SymmetricWeights:
    """One matrix. integers: int8, -127 .. 127. scale: float32, one per channel, in a shape that broadcasts over them.

    `[rows, 1]` where a row is an output channel (every Linear and embedding), `[1, columns]` where a column is.
    """

    integers: NDArray[np.int8]
    scale: NDArray[np.float32]


def quantize_symmetric(weights: NDArray[np.floating[Any]], axis: int) -> SymmetricWeights:
    """Quantizes a matrix with one scale per channel; a channel's weights lie along `axis` (1: a row is a channel).

    scale = max|w| / 127. A channel of zeros, or of weights below 1.5e-36, becomes zeros with scale 1, so that nothing
    divides by zero. Raises ExportError for weights that are not finite.
    """
    largest = _largest(weights, axis)
    if not np.isfinite(largest).all():
        raise ExportError("the model has weights that are not finite; download it again")
    scale = (largest / 127.0).astype(np.float32)
    is_nothing = scale < np.finfo(np.float32).tiny
    scale[is_nothing] = 1.0
    divisor = scale.astype(np.float64)  # the quotient of float32 would be off by 1e-5
    divisor[is_nothing] = np.inf
    integers = np.empty(weights.shape, np.int8)
    for rows in _row_blocks(weights):
        integers[rows] = np.rint(weights[rows] / (divisor[rows] if axis == 1 else divisor))
    return SymmetricWeights(integers, scale)


def compress_int8_symmetric(model: Any) -> Quantization:
    """Replaces, in an `openvino.Model` and in place, the weights of every MatMul and embedding by INT8; returns how.

    What is replaced: matrices (rank 2, floating) that a MatMul takes on its right or a Gather looks rows up in; a
    matrix that serves both, a tied embedding, is stored once. As the plugins know it: Constant i8 -> Convert ->
    Multiply by the scales. Names follow the matrix's own, so the same model gives the same IR.
    Raises ExportError for weights that are not finite, or when there is nothing to compress.
    """
    import openvino as ov
    from openvino import opset13 as ops

    found = list(_matrices(model))
    if not found:
        raise ExportError("the model has no weight matrices to quantize; expected a decoder in FP32 or FP16")
    for constant, readers, axis in found:
        name = constant.get_friendly_name()
        weights = quantize_symmetric(constant.get_data(dtype=np.float32), axis)
        integers = ov.op.Constant(weights.integers)
        integers.set_friendly_name(name)
        scale = ov.op.Constant(weights.scale)
        scale.set_friendly_name(f"{name}/scale")
        widened = ops.convert(integers, ov.Type.f32, name=f"{name}/convert")
        product = ops.multiply(widened, scale, name=f"{name}/dequantized")
        for reader in readers:
            dtype = reader.get_element_type()
            value = product if dtype == ov.Type.f32 else ops.convert(product, dtype, name=f"{name}/cast")
            reader.replace_source_output(value.output(0))
    model.validate_nodes_and_infer_types()
    # The NPU plugin asks nncf's mark, not the graph, whether scales are per channel.
    model.set_rt_info("-1", ["nncf", "weight_compression", "group_size"])
    model.set_rt_info("int8_sym", ["nncf", "weight_compression", "mode"])
    return Quantization(tool="outrider", scheme="int8 symmetric, scale absmax / 127", granularity="row")


def _largest(weights: NDArray[np.floating[Any]], axis: int) -> NDArray[np.float64]:
    """max|w| of each channel, kept as an axis of one; NaN where a weight is."""
    parts = [np.abs(weights[rows]).max(axis=axis, keepdims=True) for rows in _row_blocks(weights)]
    joined = np.concatenate(parts) if axis == 1 else np.maximum.reduce(parts)
    return np.asarray(joined, np.float64)


def _row_blocks(weights: NDArray[np.floating[Any]]) -> Iterator[slice]:
    num_rows = max(1, _BLOCK_BYTES // (8 * weights.shape[1]))
    for begin in range(0, weights.shape[0], num_rows):
        yield slice(begin, begin + num_rows)


def _matrices(model: Any) -> Iterator[tuple[Any, list[Any], int]]:
    """Each constant to compress, the inputs that read it, and the axis along which one channel's weights lie."""
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Constant" or not _is_matrix(node):
            continue
        readers: list[Any] = []
        for reader in node.output(0).get_target_inputs():
            cast = reader.get_node()
            readers += cast.output(0).get_target_inputs() if cast.get_type_name() == "Convert" else [reader]
        axes = {axis for reader in readers if (axis := _channel_axis(reader)) is not None}
        if axes and len(axes) == 1:
            yield node, [reader for reader in readers if _channel_axis(reader) is not None], axes.pop()


def _is_matrix(constant: Any) -> bool:
    shape = constant.output(0).get_shape()
    return constant.output(0).get_element_type().is_real() and len(shape) == 2 and min(shape) > 1


def _channel_axis(reader: Any) -> int | None:
    """Along which axis one output channel lies, as this input uses the matrix; None if that is no weight."""
    node, index = reader.get_node(), reader.get_index()
    if node.get_type_name() == "MatMul" and index == 1:
        return 1 if node.get_attributes()["transpose_b"] else 0
    if node.get_type_name() == "Gather" and index == 0:
        return 1
    return None


GROUP: Final = 128


def compress_int4_symmetric(model: Any) -> Quantization:
    """Replaces, in an `openvino.Model` and in place, the weights of every layer by INT4 ones; returns how.

    Raises ExportError for weights that are not finite, or when there is nothing to compress.
    """
    import nncf

    widths = dict(_products(model))
    kept = {_head(model), *_lookups(model)}
    # One group is a row, and written as a group it crashes the plugin (2026.4.1).
    in_groups = {name for name, width in widths.items() if width % GROUP == 0 and width > GROUP} - kept
    in_rows = set(widths) - in_groups - kept
    for names, group_size in ((in_groups, GROUP), (in_rows, -1)):
        if names:
            left_out = sorted((set(widths) | kept) - names)
            nncf.compress_weights(
                model,
                mode=nncf.CompressWeightsMode.INT4_SYM,
                ratio=1.0,
                group_size=group_size,
                all_layers=True,
                ignored_scope=nncf.IgnoredScope(names=left_out, validate=False),
                backup_mode=nncf.BackupMode.NONE,
            )
    compress_int8_symmetric(model)
    # What the NPU plugin reads: whether all scales are per channel.
    model.set_rt_info(str(GROUP if in_groups else -1), ["nncf", "weight_compression", "group_size"])
    model.set_rt_info("int4_sym", ["nncf", "weight_compression", "mode"])
    granularity = f"group of {GROUP}" if in_groups else "row"
    if in_groups and in_rows:
        granularity += ", row where a row is not several groups"
    return Quantization(
        tool=f"nncf {importlib.metadata.version('nncf')}",
        scheme="int4 symmetric, embeddings and head int8 symmetric",
        granularity=granularity,
    )


def _products(model: Any) -> Iterator[tuple[str, int]]:
    """Every product with a constant matrix: its name, and how many weights make one output channel."""
    for node in model.get_ordered_ops():
        if node.get_type_name() == "MatMul" and _is_constant(node.input_value(1)):
            shape = node.input_value(1).get_shape()
            yield node.get_friendly_name(), shape[-1 if node.get_attributes()["transpose_b"] else -2]


def _head(model: Any) -> str:
    """The name of the last product before the logits."""
    node = model.output("logits").get_node()
    while node.get_type_name() != "MatMul" and node.get_input_size():
        node = next(value for value in node.input_values() if not _is_constant(value)).get_node()
    return str(node.get_friendly_name())


def _lookups(model: Any) -> Iterator[str]:
    """The names of embeddings."""
    for node in model.get_ordered_ops():
        if node.get_type_name() == "Gather" and _is_constant(node.input_value(0)):
            yield node.get_friendly_name()


def _is_constant(value: Any) -> bool:
    node = value.get_node()
    if node.get_type_name() == "Convert":
        node = node.input_value(0).get_node()
    return bool(node.get_type_name() == "Constant")
