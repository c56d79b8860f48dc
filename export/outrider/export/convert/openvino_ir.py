"""Converts a torch model to OpenVINO IR of any precision; the same input gives the same bytes.

transformers and optimum-intel are repaired meanwhile. Each repair says what is wrong without it. None is trusted: the
numerical check decides about the result.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from outrider.export.convert.symmetric import compress_int4_symmetric, compress_int8_symmetric
from outrider.export.quiet import quiet_upstream
from outrider.models.bundle.manifest import Device, Precision, Quantization

IR_NAME: Final = "openvino_model"
_SAME: Final = 1e-4
"""A larger difference would fail the check at FP32 by attention alone."""
_PROBE_TOKENS: Final = 24
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
    if device == "npu":
        return compress_int4_symmetric(model) if precision == "int4" else compress_int8_symmetric(model)
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


@contextlib.contextmanager
def repaired_upstream(model: Any) -> Iterator[None]:
    """Applies all repairs that converting `model`, a transformers model, to OpenVINO needs."""
    is_gpt_neo = model.config.model_type == "gpt_neo"
    with _any_version(), sliding_gpt_neo(model) if is_gpt_neo else contextlib.nullcontext():
        yield


def choose_attention(model: Any) -> None:
    """Switches `model` from plain to fused attention where the two compute the same.

    OpenVINO recognises fused attention only, and turns it into paged attention. But "sdpa" silently leaves out what it
    cannot do (Gemma 2's soft-capping); such a model keeps plain attention: correct, but it cannot be paged.
    """
    import torch

    tokens = torch.arange(_PROBE_TOKENS)[None] % model.get_input_embeddings().weight.shape[0]
    with torch.inference_mode():
        expected = model(input_ids=tokens, use_cache=False).logits
        try:
            model.set_attn_implementation("sdpa")
        except ValueError:
            return  # the family has its own attention, which the converter knows
        delta = (model(input_ids=tokens, use_cache=False).logits - expected).abs().max()
        if delta > _SAME * expected.abs().max():
            model.set_attn_implementation("eager")


def _any_version() -> contextlib.AbstractContextManager[Any]:
    """optimum-intel 2.1.0 refuses Gemma 2 and 3 with transformers > 5.0, but converts them correctly with 5.5."""
    from optimum.exporters.openvino import convert

    real = convert.is_transformers_version

    def is_version(operation: str, version: str) -> bool:
        return bool(operation != ">" and real(operation, version))

    return patch.object(convert, "is_transformers_version", is_version)


@contextlib.contextmanager
def sliding_gpt_neo(model: Any) -> Iterator[None]:
    """GPT-Neo's local layers with the sliding-window mask that other families have.

    Its own mask is a buffer of the module, cut to size. OpenVINO does not recognise it when it turns attention into
    paged attention: local layers then silently attend everything beyond the window.
    """
    import torch
    from optimum.exporters.openvino import model_patcher
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
    from transformers.models.gpt_neo import modeling_gpt_neo

    def create_masks(**arguments: Any) -> tuple[Any, Any]:
        return create_causal_mask(**arguments), create_sliding_window_causal_mask(**arguments)

    def attend(
        self: Any, query: Any, key: Any, value: Any, attention_mask: tuple[Any, Any], head_mask: None = None
    ) -> tuple[Any, None]:
        mask = attention_mask[1] if self.attention_type == "local" else attention_mask[0]
        # Not scaled by the root of the head size: the weights were trained without.
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=1.0), None

    with (
        patch.object(modeling_gpt_neo, "create_causal_mask", create_masks),
        patch.object(model_patcher, "_gpt_neo_attn_sdpa", attend),
        patch.object(model.config, "sliding_window", model.config.window_size, create=True),
    ):
        yield
