"""Exports ONNX with torch's exporter, for families that onnxruntime-genai's builder lacks or converts incorrectly.

The graph takes `input_ids` and `position_ids` [1, n], the length of the cache after the step (`total_sequence_length`,
and `seqlens_k`, one less; int32 [1]), and of each layer the buffer `past_key_values.i.key` / `.value` [1,
kv_heads, positions, head_size], to be bound as `present.i.key` / `.value` too: a step writes its rows there. There is
no mask, and nothing of the cache is copied; see `onnx_attention`. `first_row` picks the rows of `logits`.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import onnx_ir as ir
import torch
from onnxscript.rewriter.ort_fusions import optimize_for_ort

from outrider.export.convert.onnx_attention import Recording, recording_attention
from outrider.export.convert.onnx_graph import (
    add_initializer,
    drop_unused,
    save_model,
    select_rows,
    strip_origins,
)
from outrider.export.quiet import quiet_upstream
from outrider.models.errors import ExportError

_OPSET: Final = 21
_CONTROLS: Final = ("input_ids", "position_ids", "seqlens_k", "total_sequence_length")


def export_with_dynamo(model: Any, destination: Path, name: str, precision: Literal["fp32", "fp16"] = "fp32") -> None:
    """Writes model.onnx and model.onnx.data of a transformers model to `destination`; deterministic.

    precision: of weights, activations and cache; FP16 is for CUDA, whose attention kernel takes nothing wider. The
    model is converted to it in place. Raises ExportError for attention that the operator cannot express, or where
    torch's exporter fails.
    """
    with quiet_upstream(f"exporting {name} to ONNX"):
        # Fuses RMS norms, residual additions and rotary embedding into one operator each, where recognised.
        graph, _ = optimize_for_ort(_export((_halve(model) if precision == "fp16" else model).eval()))
        _rotate_new_positions_only(graph)
        _unify_norms(graph.graph)
        drop_unused(graph)
        _name_weights(graph.graph, model)
        strip_origins(graph, f"torch {importlib.metadata.version('torch')}")
        select_rows(graph)
        drop_unused(graph)
        save_model(graph, destination)


def _halve(model: Any) -> Any:
    """The model in FP16, in place, but for its rotary frequencies.

    Their rounding, multiplied by the position, would turn the angles by tenths of a radian after some thousand tokens,
    where no check of a short text looks.
    """
    buffers = model.named_buffers(remove_duplicate=False)
    frequencies = {name: values for name, values in buffers if name.endswith("inv_freq")}
    model.half()
    for name, values in frequencies.items():
        place, _, own = name.rpartition(".")
        model.get_submodule(place).register_buffer(own, values, persistent=False)
    return model


def _export(model: Any) -> Any:
    """The onnx_ir model as torch writes it."""
    shapes = _find_shapes(model)
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    class Decoder(torch.nn.Module):
        """The model with its cache outside."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any, positions: Any, last_position: Any, total: Any, pasts: Any) -> Any:
            more = {"position_ids": positions} if takes_positions else {}
            with recording_attention(self.model, Recording(pasts, last_position, total)) as recording:
                logits = self.model(input_ids=ids, use_cache=False, **more).logits
            return logits, recording.presents

    dtype = next(model.parameters()).dtype
    num_new, positions = 3, 13  # all sizes differ, or the exporter would treat two as one
    dynamic = torch.export.Dim.DYNAMIC
    arguments = (
        torch.zeros(1, num_new, dtype=torch.long),
        torch.arange(5, 5 + num_new)[None],
        torch.tensor([7], dtype=torch.int32),
        torch.tensor([8], dtype=torch.int32),
        [tuple(torch.zeros(1, heads, positions, size, dtype=dtype) for _ in "kv") for heads, size in shapes],
    )
    slots = [f"{index}.{kind}" for index in range(len(shapes)) for kind in ("key", "value")]
    with torch.no_grad():
        program = torch.onnx.export(
            Decoder().eval(),
            arguments,
            dynamo=True,
            verbose=False,
            opset_version=_OPSET,
            input_names=[*_CONTROLS, *(f"past_key_values.{slot}" for slot in slots)],
            output_names=["logits", *(f"present.{slot}" for slot in slots)],
            dynamic_shapes=({1: dynamic}, {1: dynamic}, None, None, [({2: dynamic}, {2: dynamic})] * len(shapes)),
        )
    if program is None:
        raise ExportError("torch.onnx.export returned no program")
    _name_dimensions(program.model.graph)
    return program.model


def _find_shapes(model: Any) -> list[tuple[int, int]]:
    """(kv_heads, head_size) of each layer, from one pass in torch."""
    recording, failure = Recording(), None
    try:
        with torch.no_grad(), recording_attention(model, recording):
            model(input_ids=torch.zeros(1, 3, dtype=torch.long), use_cache=False)
    except ExportError:
        raise  # the layer calls attention through the interface, and the operator cannot express it
    except Exception as error:
        if recording.shapes:
            raise
        # Attention outside the interface fails without its mask; the layers that lack it are reported below.
        failure = error
    expected = model.config.num_hidden_layers
    if len(recording.shapes) != expected:
        first = f" (first failure: {type(failure).__name__}: {failure})" if failure is not None else ""
        raise ExportError(
            f"{len(recording.shapes)} of the {expected} layers of {type(model).__name__} call attention through "
            f"transformers' attention interface; the others cannot be exported{first}"
        ) from failure
    return recording.shapes


def _name_dimensions(graph: Any) -> None:
    """Gives dimensions telling names in place of the exporter's s70 and s62; removes unused inputs."""
    for value in (*graph.inputs, *graph.outputs):
        if value.name.startswith(("past_key_values.", "present.")):
            value.shape = ir.Shape([1, value.shape[1], "positions", value.shape[3]])
        elif value.name in ("input_ids", "position_ids"):
            value.shape = ir.Shape([1, "num_new"])
    for value in [value for value in graph.inputs if not value.uses()]:
        graph.inputs.remove(value)


def _name_weights(graph: Any, model: Any) -> None:
    """Gives matrices that the exporter transposed the names of the model's parameters again."""
    for value in list(graph.initializers.values()):
        value.name = value.name.removeprefix("model.")
    taken = {value.name for value in graph.initializers.values()}
    lost = [(name, array) for name, array in model.named_parameters() if array.dim() == 2 and name not in taken]
    for node in graph:
        value = node.inputs[1] if node.op_type in ("MatMul", "FusedMatMul", "Gemm") else None
        if value is None or not value.is_initializer() or not value.name.startswith("val_"):
            continue
        found = value.const_value.numpy()
        for index, (name, array) in enumerate(lost):
            own = array.detach().numpy()
            if any(own.shape == side.shape and np.array_equal(own, side) for side in (found, found.T)):
                value.name = name
                del lost[index]
                break


def _unify_norms(graph: Any) -> None:
    """Casts the scales of Gemma's norms, always FP32, to the model's type: the fused operator has one type for all."""
    for node in graph:
        if node.op_type != "SkipSimplifiedLayerNormalization":
            continue
        gamma, dtype = node.inputs[2], node.inputs[0].dtype
        if dtype is not None and gamma.dtype not in (None, dtype) and gamma.const_value is not None:
            values = gamma.const_value.numpy().astype(dtype.numpy())
            node.replace_input_with(2, add_initializer(graph, f"{node.name}_gamma", values))
            node.outputs[0].dtype = dtype  # the cast after it becomes a no-op


def _rotate_new_positions_only(model: Any) -> None:
    """Computes cosines for the new tokens only; the fusion computes them for every position in every step."""
    graph = model.graph
    positions = next((value for value in graph.inputs if value.name == "position_ids"), None)
    ranges = [node for node in graph if node.op_type == "Range" and _ends_after(node, positions)]
    if positions is None or not ranges:
        return
    flat = add_initializer(graph, "flat", np.array([-1], np.int64))
    zero = add_initializer(graph, "zero", np.array([0], np.int64))
    for node in ranges:
        row = ir.node("Reshape", [positions, flat], name=f"{node.name}_new")
        graph.insert_before(node, row)
        node.outputs[0].replace_all_uses_with(row.outputs[0])
    first = ir.node("Gather", [positions, zero], {"axis": 1}, name="first_position")
    local = ir.node("Sub", [positions, first.outputs[0]], name="new_positions")
    graph.insert_before(next(iter(graph)), [first, local])
    for node in graph:
        if node.op_type == "RotaryEmbedding" and node.inputs[1] is positions:
            node.replace_input_with(1, local.outputs[0])


def _ends_after(node: Any, positions: Any) -> bool:
    """Whether a Range ends one after the largest of `positions`."""
    add = node.inputs[1].producer()
    largest = add.inputs[0].producer() if add is not None and add.op_type == "Add" else None
    return largest is not None and largest.op_type == "ReduceMax" and largest.inputs[0] is positions
