"""Compiles the static graphs of a draft for an NPU, or for the CPU that emulates one.

Knows sizes, properties and devices; `static_graph` makes the graphs and `openvino_npu` runs them. They go through the
NPU plugin's own wrapper (NPUW), as OpenVINO GenAI's do: it keeps the weights out of the compiled graphs, once for all
of them. Works around a fault of it (2026.4.1): weights of matrix products over two axes.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any, Final

import openvino as ov

from outrider.models.bundle.manifest import StaticShapes
from outrider.models.errors import BundleError, ConfigError, RuntimeUnavailable
from outrider.models.runtimes.base import RuntimeOptions, longest_sequence
from outrider.models.runtimes.openvino_graph import failure_reason
from outrider.models.runtimes.static_graph import make_static

logger = logging.getLogger(__name__)

PROMPT_PASS: Final = 64
"""Tokens of a prompt's pass. A longer one takes less time per token, and its half-full passes more."""
_QUANTIZED: Final = "NPU_COMPILER_DYNAMIC_QUANTIZATION"
"""Of drivers whose compiler takes quantized weights as they are."""
_FOLDED: Final = {"NPUW_FOLD": "YES", "NPUW_FUNCALL_FOR_ALL": "YES"}
_SPARE: Final = 128
"""Slots for branches beside the longest text. Beyond them what was used longest ago is forgotten."""


def num_slots(shapes: StaticShapes) -> int:
    """Tokens whose keys and values are kept; with those of a step a multiple of 64."""
    whole = -(-(shapes.max_positions + _SPARE + shapes.step_len) // 64) * 64
    return whole - shapes.step_len


def graph_sizes(shapes: StaticShapes) -> tuple[int, ...]:
    """New tokens of each graph: a step's, and a prompt's where that is longer."""
    return (shapes.step_len, PROMPT_PASS) if shapes.step_len < PROMPT_PASS else (shapes.step_len,)


def npu_properties(core: Any, xml: Path, options: RuntimeOptions) -> dict[str, str]:
    """The compile properties for an NPU: those of the plugin's own pipeline for language models (its
    llm_compiled_model.cpp) for a graph that generates. `options.properties` overrides them.
    """
    properties = {
        "NPU_USE_NPUW": "YES",
        # One device: with a list the plugin would silently go on to the next.
        "NPUW_DEVICES": "CPU" if options.emulate_npu else device_of(options),
        # Compiled whole: slower to compile, faster to run. Cut into repeated blocks, the default, models fail
        # ("Model references undeclared parameters").
        "NPUW_ONLINE_PIPELINE": "NONE",
        # Weights as inputs, from one bank for a model's graphs: it tells weights by where they are in memory, where
        # another model's may be later.
        **_FOLDED,
        "NPUW_WEIGHTS_BANK": f"outrider-{_name_of(xml)}",
    }
    if not options.emulate_npu:
        properties["NPU_COMPILATION_MODE_PARAMS"] = (
            "compute-layers-with-higher-precision=Sqrt,Power,ReduceMean,Add_RMSNorm"
        )
        if _QUANTIZED in core.get_property("NPU", "SUPPORTED_PROPERTIES"):
            properties |= {_QUANTIZED: "YES", "NPUW_DQ": "YES", "NPUW_DQ_FULL": "NO"}
        else:
            properties |= {"NPUW_DQ": "YES", "NPUW_DCOFF_TYPE": "f16", "NPUW_DCOFF_SCALE": "YES"}
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
        # The CPU's fused kernels ("snippets") are wrong in models with two masks where a pass has as many tokens as an
        # attention has heads (2026.4.1). Activations are not quantized here, as an NPU would not.
        emulated: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": "f32",
            "ENABLE_CPU_PINNING": "NO",
            "SNIPPETS_MODE": "DISABLE",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
        }
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


def compile_for_npu(xml: Path, shapes: StaticShapes, options: RuntimeOptions) -> list[Any]:
    """The IR compiled for each of `graph_sizes`: minutes on an NPU, the first time.

    A blob beside the IR, compiled for these sizes, is used instead, unless the options ask for other properties; one
    that this OpenVINO or driver cannot read is skipped, with a warning.
    Raises BundleError for a model that the graphs cannot be made of, ConfigError for an option out of range,
    RuntimeUnavailable when there is no NPU and no emulation, or the compiler fails.
    """
    core = npu_core(options)
    model: Any = None
    compiled: list[Any] = []
    for num_new in graph_sizes(shapes):
        if (graph := _imported(core, xml, shapes, num_new, options)) is None:
            model = model or read_ir(core, xml)
            try:
                graph = compile_graph(core, model, xml, shapes, num_new, options)
            except RuntimeError as error:
                # On the CPU nothing of the NPU's driver runs: the plugin cannot take the model.
                advice = "" if options.emulate_npu else "; update the NPU's driver"
                raise RuntimeUnavailable(
                    f"OpenVINO cannot compile {xml} for the NPU: {failure_reason(error)}{advice}"
                ) from error
        compiled.append(graph)
    return compiled


def _imported(core: Any, xml: Path, shapes: StaticShapes, num_new: int, options: RuntimeOptions) -> Any:
    """The graph of a blob beside the IR; None where there is none, or none to use."""
    blob = blob_path(xml, shapes, num_new, emulated=options.emulate_npu)
    if not blob.is_file() or options.properties:
        return None
    try:
        weights = {"WEIGHTS_PATH": str(xml.with_suffix(".bin"))}
        return core.import_model(blob.read_bytes(), device_of(options), weights)
    except RuntimeError as error:
        logger.warning("%s is not for this OpenVINO or driver (%s); compiling again", blob, failure_reason(error))
        return None


def read_ir(core: Any, xml: Path) -> Any:
    """The IR, read once for all graphs: they share its weights' memory. Raises BundleError."""
    try:
        return core.read_model(xml)
    except RuntimeError as error:
        raise BundleError(f"{xml} cannot be read as an IR ({failure_reason(error)}); export the model again") from error


def compile_graph(core: Any, model: Any, xml: Path, shapes: StaticShapes, num_new: int, options: RuntimeOptions) -> Any:
    """Compiles the graph of `num_new` tokens of `model`, which stays as it is.

    Raises OpenVINO's RuntimeError, BundleError as `compile_for_npu`.
    """
    longest = longest_sequence(xml.parent, options)
    properties = npu_properties(core, xml, options)

    def graph() -> Any:
        copied = model.clone()
        make_static(copied, xml, num_new, num_slots(shapes), longest, one_row=num_new != shapes.step_len)
        return copied

    made = graph()
    try:
        return core.compile_model(made, device_of(options), properties)
    except RuntimeError as error:
        if _FOLDED.keys() & options.properties.keys():
            raise
        # Folding makes inputs of the scales of quantized weights, and loses or mistypes those of products over two axes
        # (GPT-2's `Conv1D`).
        logger.warning("%s: compiling again without folding (%s)", xml, failure_reason(error))
        unfolded = {name: value for name, value in properties.items() if name not in _FOLDED} | {"NPUW_FOLD": "NO"}
        try:
            return core.compile_model(graph(), device_of(options), unfolded)
        except RuntimeError:
            raise error from None


def _name_of(xml: Path) -> str:
    """A name of a model's contents: wherever it lies, what was compiled of it is found again."""
    weights = xml.with_suffix(".bin")
    known = hashlib.sha256(xml.read_bytes())
    with weights.open("rb") as file:
        known.update(f"{weights.stat().st_size} ".encode() + file.read(1 << 20))
    return known.hexdigest()[:16]


def device_of(options: RuntimeOptions) -> str:
    """As OpenVINO names it; "CPU" is the options' default, so nobody chose it."""
    return "NPU" if options.device == "CPU" else options.device


def blob_path(xml: Path, shapes: StaticShapes, num_new: int, *, emulated: bool) -> Path:
    """The path of a graph compiled ahead of time: beside the IR, named by device and sizes."""
    device = "cpu" if emulated else "npu"
    return xml.with_name(f"{xml.stem}.{device}-{num_slots(shapes)}-{num_new}.blob")
