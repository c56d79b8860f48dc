"""Finishes ONNX graphs before they are written: names, choice of rows, one data file.

Works on `onnx_ir` models, whose weights stay in their files until they are written. Knows neither transformers nor how
a graph was made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import replace_nodes_and_values
from onnx_ir.passes.common import RemoveUnusedNodesPass

from outrider.models.errors import ExportError

MODEL_FILE: Final = "model.onnx"
FIRST_ROW: Final = "first_row"
# Only these may stand between the LM head and the logits: each works row by row, so it commutes with choosing rows.
_ROW_WISE: Final = frozenset({"Add", "Cast", "Div", "Identity", "Mul", "Sub", "Tanh"})
_PRODUCTS: Final = frozenset({"MatMul", "MatMulNBits", "FusedMatMul", "Gemm"})
_TO_THE_END: Final = 2**63 - 1


def strip_origins(model: Any, producer: str) -> None:
    """Removes traces of the machine that made the graph: stack traces, paths, the commit of a work tree."""
    graph = model.graph
    model.producer_name, _, model.producer_version = producer.partition(" ")
    graph.name = "decoder"
    values = [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]
    for part in (model, graph, *graph, *values):
        part.doc_string = None
        part.metadata_props.clear()


def find_lm_head(graph: Any) -> Any:
    """The node that multiplies by the LM head. Raises ExportError where there is none before the logits."""
    value = next((output for output in graph.outputs if output.name == "logits"), None)
    node = value.producer() if value is not None else None
    while node is not None and node.op_type in _ROW_WISE:
        computed = [input_ for input_ in node.inputs if input_ is not None and not is_constant(input_)]
        node = computed[0].producer() if len(computed) == 1 else None
    if node is None or node.op_type not in _PRODUCTS:
        raise ExportError(
            "the graph has no matrix product before its logits, so its LM head is unknown; try another --runtime"
        )
    return node


def is_constant(value: Any) -> bool:
    """Whether a value is the same in every run."""
    if value.is_initializer() and not value.is_graph_input():
        return True
    node = value.producer()
    return node is not None and node.op_type == "Constant"


def select_rows(model: Any) -> None:
    """Gives the graph the input `first_row` (int64 [1]): logits come from that new token on, -1 the last alone.

    Its default, 0, gives every row, so programs that do not know the input are unaffected.
    """
    graph = model.graph
    head = find_lm_head(graph)
    first = add_initializer(graph, FIRST_ROW, np.zeros(1, np.int64))
    graph.inputs.append(first)
    hidden = head.inputs[0]
    ends = add_initializer(graph, "last_row", np.array([_TO_THE_END], np.int64))
    axes = add_initializer(graph, "row_axis", np.array([1], np.int64))
    rows = ir.node("Slice", [hidden, first, ends, axes], name="select_rows")
    rows.outputs[0].name = "selected_rows"
    rows.outputs[0].dtype = hidden.dtype
    graph.insert_before(head, rows)
    head.replace_input_with(0, rows.outputs[0])
    _forget_rows(head.outputs[0])


def _forget_rows(value: Any) -> None:
    """Removes dimension names that say that there are as many logits as tokens."""
    if value.is_graph_output():
        value.shape = ir.Shape([value.shape[0], "num_rows", value.shape[-1]])
    else:
        value.shape = None
        for node in value.consumers():
            _forget_rows(node.outputs[0])


def add_initializer(graph: Any, name: str, array: Any) -> Any:
    """A new constant of the graph, a numpy array."""
    tensor = ir.Tensor(array, name=name)
    value = ir.val(name, tensor.dtype, tensor.shape, const_value=tensor)
    graph.register_initializer(value)
    return value


def swap_node(graph: Any, node: Any, replacements: list[Any]) -> None:
    """Puts nodes in the place of one; the last one's output takes the name and the readers of the old output."""
    old, new = node.outputs[0], replacements[-1].outputs[0]
    new.name, new.dtype, new.shape = old.name, old.dtype, old.shape
    replace_nodes_and_values(graph, node, [node], replacements, [old], [new])


def drop_unused(model: Any) -> None:
    """Removes nodes and constants that nothing reads."""
    RemoveUnusedNodesPass()(model)


def load_model(path: Path) -> Any:
    """Reads a graph that `save_model` wrote. Its data may have other names, by which running exports place it."""
    model: Any = ir.load(path)
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor):
            # Read from a directory, a file with several links is refused: in a stranger's it may be anyone's file. This
            # one is ours, and lies beside the graph whatever the graph says.
            data = path.absolute().parent / Path(tensor.location).name
            value.const_value = ir.ExternalTensor(
                data, tensor.offset, tensor.length, tensor.dtype, shape=tensor.shape, name=tensor.name or value.name
            )
    return model


def save_model(model: Any, destination: Path) -> None:
    """Writes model.onnx and model.onnx.data to the directory. The same model gives the same bytes."""
    model.graph.sort()
    ir.save(model, destination / MODEL_FILE, external_data=f"{MODEL_FILE}.data")
