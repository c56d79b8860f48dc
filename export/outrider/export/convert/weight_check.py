"""Compares every matrix of a quantized IR with that of the IR that it was made from.

For mixtures of experts: their logits cannot be bounded tightly, because rounding lets some tokens choose other experts,
and an expert that few tokens choose hardly shows in them. Together with the check of the unquantized graph this leaves
no place for an error. Knows nothing of logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from outrider.export.quiet import quiet_upstream
from outrider.models.errors import ExportError

# Of a uniform grid over normal weights: 0.006 for a row of INT8, 0.1 for a group of INT4 (64 weights).
_LARGEST_ERROR: Final = {"int8": 0.05, "int4": 0.3}
"""Root mean square error of a matrix, over the root mean square of its weights."""
_INTEGERS: Final = ("u8", "i8", "u4", "i4")


def require_close_weights(exact: Path, quantized: Path, precision: str) -> None:
    """Raises ExportError for a matrix of the IR at `quantized` that is not that of `exact`, or is missing there.

    Of three-dimensional tensors, one matrix an expert, each is compared by itself.
    """
    with quiet_upstream("comparing quantized weights"):
        import openvino

        core = openvino.Core()
        # Both are kept: a node does not keep its model, and without it has no readers.
        exact_model, quantized_model = core.read_model(exact), core.read_model(quantized)
        found = dict(_matrices(quantized_model))
        for name, node in _matrices(exact_model):
            if name not in found:
                raise ExportError(
                    f"the quantized model has no matrix {name}; nothing was written: try --precision fp32"
                )
            expected = _values(node)
            values = _values(found[name]).reshape(expected.shape)
            for index, (matrix, own) in enumerate(zip(_split(expected), _split(values), strict=True)):
                scale = float(np.sqrt(np.square(matrix).mean()))
                error = float(np.sqrt(np.square(own - matrix).mean()))
                if not error <= _LARGEST_ERROR[precision] * scale:
                    raise ExportError(
                        f"matrix {index} of {name} differs from the source's after quantization to {precision}: error "
                        f"{error:.3g} on weights of {scale:.3g} (root mean squares, at most "
                        f"{_LARGEST_ERROR[precision]:g} relative); nothing was written: try --precision fp32"
                    )


def _matrices(model: Any) -> Iterator[tuple[str, Any]]:
    """The constants that hold a layer's matrices, by name: those that the converter named after a parameter."""
    for node in model.get_ordered_ops():
        name = node.get_friendly_name()
        if node.get_type_name() != "Constant" or "." not in name or name.endswith(("/scale", "/zero_point")):
            continue
        if sum(size > 1 for size in node.get_output_shape(0)) >= 2:
            yield name.removesuffix("_compressed"), node


def _split(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """[experts, rows, columns]; one matrix counts as one expert."""
    return values if values.ndim == 3 else values.reshape(1, *values.shape)


def _values(constant: Any) -> NDArray[np.float32]:
    """A constant's numbers, dequantized: (integers - zero point) * scale, as the graph computes them."""
    values: NDArray[np.float32] = constant.get_data(dtype=np.float32)
    if constant.get_output_element_type(0).get_type_name() not in _INTEGERS:
        return values
    node = _reader(constant)
    while node.get_type_name() in ("Convert", "Subtract"):
        if node.get_type_name() == "Subtract":
            values = values - _operand(node)
        node = _reader(node)
    if node.get_type_name() != "Multiply":
        raise ExportError(f"{constant.get_friendly_name()} has no scale after its integers; try --precision fp32")
    return values * _operand(node)


def _operand(node: Any) -> NDArray[np.float32]:
    """The constant that a node takes beside the weights."""
    source = node.input_value(1).get_node()
    while source.get_type_name() == "Convert":
        source = source.input_value(0).get_node()
    return np.asarray(source.get_data(dtype=np.float32))


def _reader(node: Any) -> Any:
    return next(iter(node.output(0).get_target_inputs())).get_node()
