"""Rewrites a stateful IR into a static graph: N new tokens, keys and values of P slots as inputs, attention as asked.

An NPU runs static shapes only. Here each new token attends exactly the slots, and the other new tokens, that the caller
says: so N tokens may be a piece of a text, or the next nodes of a tree, and a sequence's keys and values may lie in any
slots. The new keys and values are outputs; the caller puts them where it wants to find them.

A model with a sliding window has a second mask, for its layers with the window. Which window a layer has is read off
the mask that the graph itself computes: it is run once. Knows no device and no compiler.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from openvino._offline_transformations import stateful_to_stateless_transformation

from outrider.models.errors import BundleError
from outrider.models.runtimes.openvino_graph import failure_reason, gather_rows

MASKED: Final = -65504.0
"""Added to the attention logits of what is not attended: the lowest finite FP16."""
_PROBED: Final = 2
"""New tokens of the graph whose own mask is looked at."""
_LIMIT: Final = -1e4
"""A graph's own mask hides what it gives less than this."""
MASK: Final = "mask."
"""Begins the names of the inputs for masks; their window follows."""
_INPUTS: Final = {"input_ids", "attention_mask", "position_ids"}
PAST: Final = "past_key_values."
_ATTENTION: Final = "ScaledDotProductAttention"
_MASK_INPUT: Final = 3
_PASS_ON: Final = frozenset({"Convert", "Reshape", "Maximum", "Squeeze", "Unsqueeze"})
"""May come between an attention's softmax and the sum of its logits and mask."""


def make_static(model: Any, xml: Path, num_new: int, num_slots: int, longest: int, *, one_row: bool) -> None:
    """Rewrites the stateful `model` of `xml`, in place. longest: sequence that it runs, at least 3.

    Its inputs are `input_ids` and `position_ids`, int64 [1, N], for each window `mask.<window>`, float32
    [1, 1, N, P + N], 0 where a token attends and else MASKED, and the caches, `past_key_values.*`, FP16 with P slots. A
    window is how many positions a token attends, itself included; 0: all. Outputs: `logits`, float32
    [1, N, vocabulary], and `present.*`, the new keys and values, FP16.

    one_row: only one row gets logits, which the input `logit_rows`, int64 [1], chooses; else all N do.
    Raises BundleError for a model that no such graph can be made of.
    """
    if not model.get_variables():
        raise BundleError(
            f"{xml} has no KV cache; expected the stateful decoder that `outrider-export` or optimum-intel's "
            "default text-generation export writes"
        )
    if missing := _INPUTS - port_names(model.inputs):
        raise BundleError(
            f"{xml} has no input {', '.join(sorted(missing))}, which the NPU's path needs to place tokens; "
            "export models without positions, such as Bloom, for the CPU (--device cpu)"
        )
    try:
        _rewrite(model, xml, num_new, num_slots, longest, one_row)
    except RuntimeError as error:
        raise BundleError(
            f"{xml} cannot be made static: {failure_reason(error)}; export it for the CPU (--device cpu)"
        ) from error


def _rewrite(model: Any, xml: Path, num_new: int, num_slots: int, longest: int, one_row: bool) -> None:
    stateful_to_stateless_transformation(model)
    # A mask says nothing about what is beyond the model's longest sequence, where slots may be.
    probe = model.clone()
    _reshape(probe, _PROBED, min(num_slots, longest - _PROBED))
    windows = [_window(port.get_source_output(), xml) for port in _mask_inputs(probe)]
    if not windows:
        raise BundleError(f"{xml} has no attention that the NPU's path knows; export it for the CPU (--device cpu)")
    axes = _reshape(model, num_new, num_slots)
    _replace_masks(model, windows, num_new, num_slots)
    _return_new_parts(model, xml, axes)
    _halve_caches(model, axes)
    if one_row and not gather_rows(model, num_rows=1):
        raise BundleError(f"{xml} has no MatMul in front of its logits; export it for the CPU (--device cpu)")


def _reshape(model: Any, num_new: int, num_slots: int) -> dict[str, int]:
    """Makes all shapes static; returns the axis of the slots of each cache."""
    shapes: dict[str, list[int]] = {}
    axes: dict[str, int] = {}
    for port in model.inputs:
        if (name := input_name(port)).startswith(PAST):
            dynamic = [axis for axis, size in enumerate(port.partial_shape) if axis and size.is_dynamic]
            if len(dynamic) != 1:
                raise BundleError(f"a cache has the shape {port.partial_shape} ({name}), not a text's length of it")
            axes[name] = axis = dynamic[0]
            sizes = [1 if size.is_dynamic else size.get_length() for size in port.partial_shape]
            shapes[name] = [*sizes[:axis], num_slots, *sizes[axis + 1 :]]
        else:
            shapes[name] = [1, num_new + num_slots if name == "attention_mask" else num_new]
    model.reshape(shapes)
    return axes


def input_name(port: Any) -> str:
    """The name by which we know an input: a port may have others."""
    return next(
        (name for name in port.get_names() if name in _INPUTS or name.startswith((PAST, MASK, "logit_row"))),
        str(port.any_name),
    )


# -- masks -------------------------------------------------------------------------------------------------------------


def _replace_masks(model: Any, windows: Sequence[int], num_new: int, num_slots: int) -> None:
    """Gives every attention an input for its mask: the one of its window."""
    masks: dict[int, Any] = {}
    for window in sorted(set(windows)):
        masks[window] = ops.parameter([1, 1, num_new, num_slots + num_new], ov.Type.f32, name=f"{MASK}{window}")
        masks[window].output(0).set_names({f"{MASK}{window}"})
    model.add_parameters(list(masks.values()))
    for port, window in zip(list(_mask_inputs(model)), windows, strict=True):
        dtype = port.get_node().get_output_element_type(0)
        mask = masks[window] if dtype == ov.Type.f32 else ops.convert(masks[window], dtype)
        port.replace_source_output(mask.output(0))
    own = next(port.get_node() for port in model.inputs if input_name(port) == "attention_mask")
    ones = ops.constant(np.ones(list(own.shape), np.int64))
    for user in own.output(0).get_target_inputs():  # of its shape
        user.replace_source_output(ones.output(0))
    model.remove_parameter(own)
    model.validate_nodes_and_infer_types()


def _mask_inputs(model: Any) -> Iterator[Any]:
    """The inputs of the graph's nodes where attention takes its mask."""
    for node in model.get_ordered_ops():
        if node.get_type_name() == _ATTENTION and node.get_input_size() > _MASK_INPUT:
            yield node.input(_MASK_INPUT)
        elif node.get_type_name() == "Softmax":  # attention with operations of its own, as of logits that are capped
            above = node.input_value(0).get_node()
            while above.get_type_name() in _PASS_ON:
                above = above.input_value(0).get_node()
            if above.get_type_name() == "Add" and len(above.get_output_shape(0)) == 4:
                yield from (port for port in above.inputs() if not _holds(port.get_source_output(), "MatMul"))


def _holds(value: Any, kind: str) -> bool:
    return any(node.get_type_name() == kind for node in _above(value, of_shapes=False))


def _above(value: Any, *, of_shapes: bool) -> Iterator[Any]:
    """The nodes that a value is computed from. of_shapes: also those of which only the shape counts."""
    waiting, seen = [value.get_node()], set[str]()
    while waiting:
        node = waiting.pop()
        if node.get_name() not in seen:
            seen.add(node.get_name())
            yield node
            if of_shapes or node.get_type_name() != "ShapeOf":
                waiting += [each.get_node() for each in node.input_values()]


def _window(mask: Any, xml: Path) -> int:
    """How many positions a token attends by the graph's own mask, which is run once; 0: all before it."""
    *_, num_new, num_all = mask.get_shape()
    num_past = num_all - num_new
    inputs = [node for node in _above(mask, of_shapes=True) if node.get_type_name() == "Parameter"]
    alone = ov.Core().compile_model(ov.Model([ops.result(mask)], inputs, "mask"), "CPU")
    values = {port: np.zeros(list(port.shape), port.get_element_type().to_dtype()) for port in alone.inputs}
    for port, value in values.items():
        if input_name(port) == "attention_mask":
            value[:] = 1
        elif input_name(port) == "position_ids":
            value[:] = range(num_past, num_all)
    own = alone(values)[0].reshape(-1, num_new, num_all)
    attends = own if own.dtype == np.bool_ else own > _LIMIT
    distance = np.arange(num_past, num_all)[:, None] - np.arange(num_all)
    hidden = distance[(distance >= 0) & ~attends[0]]
    window = int(hidden.min()) if hidden.size else 0
    expected = (distance >= 0) & (distance < (window or num_all))
    if (attends != expected).any() or (own.dtype != np.bool_ and own[attends].any()):
        raise BundleError(
            f"{xml} attends neither all earlier tokens nor a window of them, or attends some more than others by a "
            "bias: no mask of a tree says that; export it for the CPU (--device cpu)"
        )
    return window


# -- caches and logits -------------------------------------------------------------------------------------------------


def _return_new_parts(model: Any, xml: Path, axes: dict[str, int]) -> None:
    """Returns the keys and values of the new tokens alone, in place of whole caches."""
    for name in axes:
        result = model.output(name.replace(PAST, "present.", 1)).get_node()
        joined = result.input_value(0).get_node()
        parts = joined.input_values()
        if joined.get_type_name() != "Concat" or len(parts) != 2 or parts[0].get_node().get_type_name() != "Parameter":
            raise BundleError(
                f"{xml} does not append new keys and values to its cache ({name}); export it for the CPU (--device cpu)"
            )
        new = ops.convert(parts[1], ov.Type.f16)
        result.input(0).replace_source_output(new.output(0))
        new.output(0).set_names({name.replace(PAST, "present.", 1)})


def _halve_caches(model: Any, axes: dict[str, int]) -> None:
    """Takes keys and values in FP16, as an NPU computes: half the bytes of a pass."""
    for name in axes:
        node = model.input(name).get_node()
        dtype, users = node.get_element_type(), list(node.output(0).get_target_inputs())
        node.set_element_type(ov.Type.f16)
        whole = ops.convert(node, dtype)
        for user in users:
            user.replace_source_output(whole.output(0))
    model.validate_nodes_and_infer_types()


def port_names(ports: Sequence[Any]) -> set[str]:
    """All names of a model's inputs or outputs."""
    return {name for port in ports for name in port.get_names()}
