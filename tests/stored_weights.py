"""Reads what exports really store: integers, zero points and scales of every matrix, as float64, as the file has them.

Knows the formats' structure only, none of the bounds, and nothing of how the weights came to be.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Wide = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Stored:
    """A matrix of an IR. values: [rows, columns], what the file stands for, computed exactly. bits: 4, 8, 16 or 32.

    group: weights that share a scale; the row's length where a row has one; 0 where there is no scale.
    scale_type: the element type of the scales, "" for none. scales: one a group, flattened.
    """

    values: Wide
    bits: int
    group: int
    scale_type: str
    scales: Wide


def read_ir(xml: Path) -> dict[str, Stored]:
    """Every matrix of an IR by its name in the graph; quantized ones are those that a Multiply follows."""
    import openvino

    found: dict[str, Stored] = {}
    for node in openvino.Core().read_model(xml).get_ordered_ops():
        if node.get_type_name() != "Constant" or "/" in node.get_friendly_name():
            continue
        kind = node.get_output_element_type(0)
        if kind.is_real() and len(node.get_output_shape(0)) == 2:
            name = node.get_friendly_name().removesuffix("_compressed")
            found[name] = Stored(_numbers(node), kind.size * 8, 0, "", np.zeros(0))
        elif kind.get_type_name() in ("i4", "u4", "i8", "u8") and len(node.get_output_shape(0)) in (2, 3):
            found[node.get_friendly_name()] = _integers(node)
    return found


def _integers(constant: Any) -> Stored:
    integers, zero, node = _numbers(constant), np.zeros(1), _reader(_reader(constant))
    if node.get_type_name() == "Subtract":
        zero = _numbers(_constant(node.input_value(1)))
        node = _reader(node)
    assert node.get_type_name() == "Multiply", node
    scale = _constant(node.input_value(1))
    scales = _numbers(scale)
    values = (integers - zero) * scales
    return Stored(
        values=values.reshape(len(values), -1),
        bits=4 if constant.get_output_element_type(0).get_type_name() in ("i4", "u4") else 8,
        group=integers.size // scales.size,
        scale_type=scale.get_output_element_type(0).get_type_name(),
        scales=scales.ravel(),
    )


def _numbers(constant: Any) -> Wide:
    numbers: Wide = constant.get_data(dtype=np.float32).astype(np.float64)
    return numbers


def _constant(output: Any) -> Any:
    node = output.get_node()
    return node if node.get_type_name() == "Constant" else _constant(node.input_value(0))


def _reader(node: Any) -> Any:
    """The first of what reads a node; a tied embedding is read more than once."""
    return next(iter(node.output(0).get_target_inputs())).get_node()
