"""Quantizes weights to symmetric INT4, which Intel's guide prefers on an NPU (docs/exporting.md cites it).

128 weights of a row share a scale; a matrix whose rows are not several groups has one scale a row, the guide's other
choice. Embeddings and the LM head are symmetric INT8. nncf chooses the integers of INT4; its scales are FP16.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from typing import Any, Final

from outrider.export.convert.symmetric import compress_int8_symmetric
from outrider.models.bundle.manifest import Quantization

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
    name: str = node.get_friendly_name()
    return name


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
