"""Converts a torch model to OpenVINO IR of any precision; the same input gives the same bytes."""

from __future__ import annotations

import gc
import importlib.metadata
import re
from pathlib import Path
from typing import Any, Final

from outrider.export.convert.upstream_repairs import choose_attention, repaired_upstream
from outrider.export.quiet import quiet_upstream
from outrider.models.bundle.manifest import Device, Precision, Quantization

IR_NAME: Final = "openvino_model"
# Names that OpenVINO generates with a counter of the process; names of modules stay.
_MADE_UP: Final = re.compile(r"[A-Za-z]+_\d+")
_INT4_GROUP: Final = 64
"""Weights per scale. Divides the sizes of most models; where it does not, nncf takes a smaller group."""


_ROUTERS: Final = r".*\.(?:gate|router|shared_expert_gate)(?:\.[a-z_]+)?/.*"
"""Products that choose experts: small, and an error in them gives a token other experts. They stay unquantized."""


def convert_to_ir(model: Any, directory: Path, name: str) -> None:
    """Writes the stateful FP32 IR of a transformers model to `directory`. The model may be spent afterwards."""
    with quiet_upstream(f"converting {name} to OpenVINO"):
        from optimum.exporters.openvino import export_from_model
        from optimum.intel import OVConfig

        choose_attention(model)
        with repaired_upstream(model):
            export_from_model(
                model=model,
                output=directory,
                task="text-generation-with-past",
                ov_config=OVConfig(dtype="fp32"),
                stateful=True,
            )
        for path in directory.iterdir():
            if path.stem != IR_NAME:
                path.unlink()  # configuration and tokenizer are taken from the source, unaltered


def finish_ir(
    directory: Path, destination: Path, name: str, precision: Precision, device: Device
) -> Quantization | None:
    """Writes the FP32 IR of `directory` to `destination` in `precision`, its names made stable.

    Returns how weights were quantized; None where they were not. The IR of `directory` stays.
    """
    is_quantized = precision in ("int8", "int4")
    with quiet_upstream(f"quantizing {name}" if is_quantized else f"writing {name}"):
        import openvino

        model = openvino.Core().read_model(directory / f"{IR_NAME}.xml")
        quantization = _compress(model, precision, device) if is_quantized else None
        save_ir(model, destination, halves=precision == "fp16")
        del model
        gc.collect()  # lets go of the mapped file, which Windows would not remove otherwise
    return quantization


def save_ir(model: Any, destination: Path, *, halves: bool = False) -> None:
    """Writes a model with names that do not depend on earlier exports of the process. halves: weights in FP16."""
    import openvino

    model.set_friendly_name(IR_NAME)
    for index, node in enumerate(model.get_ordered_ops()):
        if _MADE_UP.match(node.get_friendly_name()):
            node.set_friendly_name(f"{node.get_type_name()}_{index}")
    if halves:
        _halve_matrices(model)
    openvino.save_model(model, destination / f"{IR_NAME}.xml", compress_to_fp16=False)


def _halve_matrices(model: Any) -> None:
    """Casts constants to FP16 as OpenVINO does, then restores those that are not matrices.

    They take little room, and one of them holds the rotary frequencies: their rounding, multiplied by the position,
    would turn the angles by tenths of a radian after some thousand tokens, where no check of a short text looks.
    """
    import openvino
    from openvino._offline_transformations import compress_model_transformation

    vectors = {
        node.get_friendly_name(): node.get_data().copy()
        for node in model.get_ordered_ops()
        if node.get_type_name() == "Constant" and sum(size > 1 for size in node.get_output_shape(0)) < 2
    }
    compress_model_transformation(model)
    for node in model.get_ordered_ops():
        name = node.get_friendly_name()
        if node.get_type_name() == "Convert" and name in vectors:
            whole = openvino.op.Constant(vectors[name])
            whole.set_friendly_name(name)
            for reader in node.output(0).get_target_inputs():
                reader.replace_source_output(whole.output(0))


def _compress(model: Any, precision: Precision, device: Device) -> Quantization:
    """Quantizes the weights of `model` in place."""
    if device == "npu" and precision == "int4":
        from outrider.export.convert.symmetric import compress_int4_symmetric

        return compress_int4_symmetric(model)
    if device == "npu":
        from outrider.export.convert.symmetric import compress_int8_symmetric

        compress_int8_symmetric(model)
        return Quantization(tool="outrider", scheme="int8 symmetric, scale absmax / 127", granularity="row")
    import nncf

    routers = nncf.IgnoredScope(patterns=[_ROUTERS], validate=False)
    tool = f"nncf {importlib.metadata.version('nncf')}"
    if precision == "int8":
        # Asymmetric, one scale a row of each matrix: nncf's data-free default.
        nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM, ignored_scope=routers)
        return Quantization(tool=tool, scheme="int8 asymmetric", granularity="row")
    adjust = nncf.AdvancedCompressionParameters(group_size_fallback_mode=nncf.GroupSizeFallbackMode.ADJUST)
    nncf.compress_weights(
        model,
        mode=nncf.CompressWeightsMode.INT4_ASYM,
        group_size=_INT4_GROUP,
        ratio=1.0,
        ignored_scope=routers,
        advanced_parameters=adjust,
    )
    return Quantization(
        tool=tool, scheme="int4 asymmetric, embeddings and head int8", granularity=f"group of {_INT4_GROUP}"
    )
