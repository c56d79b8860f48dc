"""Compiles a stateful IR for the NPU plugin's language-model path, on an NPU or emulated on the CPU.

Knows shapes, properties and devices; `openvino_npu` uses the compiled model. Refuses what that cannot drive, a model
without positions. Works around two faults of the plugin (2026.4.1): masks of true and false, and weights of matrix
products over two axes. A third, wrong logits with a cache in u8 or i8, meets only who sets that property.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from outrider.models.bundle.manifest import StaticShapes
from outrider.models.errors import BundleError, ConfigError, RuntimeUnavailable
from outrider.models.runtimes.base import RuntimeOptions
from outrider.models.runtimes.openvino_graph import failure_reason

logger = logging.getLogger(__name__)

_LOWEST: Final = -65504.0
"""Added to the logits of what is not attended: the lowest finite FP16."""


def compiled_shapes(shapes: StaticShapes) -> StaticShapes:
    """The lengths that the plugin compiles: it rounds prompt and response up to 64, steps of several tokens to 8.

    Raises ConfigError when the response has no room for one step.
    """
    step_len = 1 if shapes.step_len == 1 else _up(shapes.step_len, 8)
    rounded = StaticShapes(
        prompt_len=_up(shapes.prompt_len, 64), response_len=_up(shapes.response_len, 64), step_len=step_len
    )
    if rounded.step_len >= rounded.response_len:
        raise ConfigError(
            f"a step of {rounded.step_len} tokens leaves no room in a response of {rounded.response_len}; expected a "
            "step_len well below response_len"
        )
    return rounded


def npu_properties(shapes: StaticShapes, options: RuntimeOptions) -> dict[str, str]:
    """The compile properties for an NPU; `options.properties` overrides them."""
    properties = {
        "NPU_USE_NPUW": "YES",
        "NPUW_LLM": "YES",
        "NPUW_LLM_MAX_PROMPT_LEN": str(shapes.prompt_len),
        "NPUW_LLM_MIN_RESPONSE_LEN": str(shapes.response_len),
        "NPUW_LLM_MAX_GENERATION_TOKEN_LEN": str(shapes.step_len),
        # One device: with a list the plugin would silently go on to the next.
        "NPUW_DEVICES": "CPU" if options.emulate_npu else _device(options),
        # Compiled whole: slower to compile, faster to run. Cut into repeated blocks, the default, some models fail
        # ("Model references undeclared parameters"), the bundled draft among them.
        "NPUW_ONLINE_PIPELINE": "NONE",
    }
    if options.cache_dir is not None:
        properties["CACHE_DIR"] = options.cache_dir
    return properties | options.properties


def npu_core(options: RuntimeOptions, *, needs_device: bool = True) -> Any:
    """An OpenVINO core for compiling for an NPU; not shared, because the emulation changes its CPU settings.

    Raises ConfigError for another device, RuntimeUnavailable when an NPU is needed and there is none.
    """
    if options.device != "CPU" and options.device.split(".")[0] != "NPU":
        raise ConfigError(f"device is {options.device!r}; expected NPU, or NPU.0 and the like where there are several")
    core = ov.Core()
    if options.emulate_npu and not core.get_versions("NPU"):
        raise RuntimeUnavailable(
            "this package of OpenVINO has no NPU plugin, whose path --emulate-npu runs on the CPU; draft with a bundle "
            "for the CPU"
        )
    if options.emulate_npu:
        # Set on the device, because a model from the cache does not keep its compile properties; the default, bf16,
        # is off by 0.04 where f32 is off by 0.001. Pinned threads of two processes would share cores.
        emulated: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32", "ENABLE_CPU_PINNING": "NO"}
        if options.num_threads:
            emulated["INFERENCE_NUM_THREADS"] = options.num_threads
        core.set_property("CPU", emulated)
    elif needs_device and not any(device.split(".")[0] == "NPU" for device in core.available_devices):
        raise RuntimeUnavailable(
            f"OpenVINO finds no NPU on this machine, only {', '.join(core.available_devices) or 'no device'}; install "
            "the NPU's driver (on Linux the user also needs access to /dev/accel), or try the NPU's path on the CPU "
            "with --emulate-npu"
        )
    return core


def compile_for_npu(xml: Path, shapes: StaticShapes, options: RuntimeOptions) -> Any:
    """The IR compiled for `shapes`, as `compiled_shapes` gives them: minutes on an NPU, the first time.

    A blob beside the IR, compiled for these shapes, is used instead, unless the options ask for other properties; one
    that this OpenVINO or driver cannot read is skipped, with a warning.
    Raises BundleError for a model that the path cannot drive, ConfigError for an option out of range,
    RuntimeUnavailable when there is no NPU and no emulation, or the compiler fails.
    """
    core = npu_core(options)
    blob = blob_path(xml, shapes, emulated=options.emulate_npu)
    if blob.is_file() and not options.properties:
        try:
            return core.import_model(
                blob.read_bytes(), _device(options), {"WEIGHTS_PATH": str(xml.with_suffix(".bin"))}
            )
        except RuntimeError as error:
            logger.warning("%s is not for this OpenVINO or driver (%s); compiling again", blob, failure_reason(error))
    try:
        return compile_ir(core, xml, shapes, options)
    except RuntimeError as error:
        # On the CPU nothing of the NPU's driver runs: the plugin cannot take the model.
        advice = "" if options.emulate_npu else "; update the NPU's driver"
        raise RuntimeUnavailable(
            f"OpenVINO cannot compile {xml} for the NPU: {failure_reason(error)}{advice}"
        ) from error


def compile_ir(core: Any, xml: Path, shapes: StaticShapes, options: RuntimeOptions) -> Any:
    """As `compile_for_npu`, but without looking for a device or a blob; raises OpenVINO's own RuntimeError."""
    properties = npu_properties(shapes, options)
    try:
        model = core.read_model(xml)
    except RuntimeError as error:
        raise BundleError(f"{xml} cannot be read as an IR ({failure_reason(error)}); export the model again") from error
    if not model.get_variables():
        raise BundleError(
            f"{xml} has no KV cache; expected the stateful decoder that `outrider-export` or optimum-intel's "
            "default text-generation export writes"
        )
    if missing := {"input_ids", "attention_mask", "position_ids"} - port_names(model.inputs):
        raise BundleError(
            f"{xml} has no input {', '.join(sorted(missing))}, which the NPU's path needs to recognize a cached step; "
            "export models without positions, such as Bloom, for the CPU (--device cpu)"
        )
    _use_finite_masks(model)
    try:
        return core.compile_model(model, _device(options), properties)
    except RuntimeError as error:
        if "NPUW_FOLD" in properties:
            raise
        # Folding makes inputs of the scales of quantized weights, and loses or mistypes those of products over two axes
        # (GPT-2's `Conv1D`).
        logger.info("%s: compiling again without folding (%s)", xml, failure_reason(error))
        model = core.read_model(xml)
        _use_finite_masks(model)
        try:
            return core.compile_model(model, _device(options), properties | {"NPUW_FOLD": "NO"})
        except RuntimeError:
            raise error from None


def _use_finite_masks(model: Any) -> None:
    """Replaces, in place, attention masks of true and false by masks of 0 and the lowest finite number.

    The plugin pads a prompt in front and makes minus infinity of false: a padded row attends nothing, its softmax is
    NaN, and 0 * NaN reaches every row of the next layer. Most families are converted with finite masks; OLMo 2 and OPT,
    among others, are not.
    """
    for node in model.get_ordered_ops():
        if node.get_type_name() != "ScaledDotProductAttention" or node.get_input_size() < 4:
            continue
        mask, dtype = node.input_value(3), node.input_value(0).get_element_type()
        if mask.get_element_type() == ov.Type.boolean:
            zero, lowest = (ops.convert(ops.constant(value, dtype=np.float32), dtype) for value in (0.0, _LOWEST))
            node.input(3).replace_source_output(ops.select(mask, zero, lowest).output(0))
    model.validate_nodes_and_infer_types()


def _device(options: RuntimeOptions) -> str:
    """As OpenVINO names it; "CPU" is the options' default, so nobody chose it."""
    return "NPU" if options.device == "CPU" else options.device


def blob_path(xml: Path, shapes: StaticShapes, *, emulated: bool) -> Path:
    """The path of an IR compiled ahead of time: beside the IR, named by device and shapes."""
    device = "cpu" if emulated else "npu"
    return xml.with_name(f"{xml.stem}.{device}-{shapes.prompt_len}-{shapes.response_len}-{shapes.step_len}.blob")


def _up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def port_names(ports: Sequence[Any]) -> set[str]:
    """All names of a model's inputs or outputs."""
    return {name for port in ports for name in port.get_names()}
