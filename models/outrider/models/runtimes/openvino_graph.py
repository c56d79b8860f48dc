"""Compiles the stateful IR that optimum-intel writes into a paged-attention model, and allocates its cache.

Both OpenVINO runtimes load models here. Two rewrites happen before compilation: attention over the model's own state
becomes paged attention over blocks that the caller addresses, and the LM head runs only for the requested rows (a
Gather in front of its MatMul), which for a large vocabulary is most of a prompt's cost.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops
from openvino._offline_transformations import paged_attention_transformation

from outrider.models.errors import BundleError, RuntimeUnavailable
from outrider.models.runtimes.base import ModelLimits, RuntimeOptions, longest_sequence
from outrider.models.runtimes.ragged import RaggedStep

logger = logging.getLogger(__name__)

MODEL_FILE: Final = "openvino_model.xml"
_STEP_INPUTS: Final = (
    "input_ids",
    "position_ids",
    "past_lens",
    "subsequence_begins",
    "block_indices",
    "block_indices_begins",
    "max_context_len",
)
"""Of the model, named as the arrays of a `RaggedStep`."""
_NO_REASON: Final = re.compile(r"\W*\w*(?:map|vector|optional|variant)\w*::\S*(?: .*)?|std::.*|basic_string.*")
_WINDOW_INPUT: Final = 10  # of PagedAttentionExtension
_ALIBI_INPUT: Final = 11
# The CPU plugin keeps a kernel for each number of tokens that a call ever had: 5,000 of each kind, and another 1,024 in
# oneDNN. A small draft took 1.7 MB more for every new length of a prompt. These many keep every size of a decode step.
_KEPT_KERNELS: Final = 64
_KEPT_BY_ONEDNN: Final = 128
# Only these may come between the LM head's MatMul and the result: each works row by row, so it commutes with the choice
# of rows (soft-capping, scaling, a change of type).
_ROW_WISE: Final = frozenset({"Add", "Convert", "Divide", "Multiply", "Subtract", "Tanh"})


@dataclass(frozen=True, slots=True)
class PagedModel:
    """A compiled paged-attention model with its own infer request; no cache is bound yet.

    block_bytes: bytes that one block takes over all layers, keys and values.
    gathers_rows: whether the graph has the `logit_rows` input; without it, every token gets logits.
    masks_by_position: whether tree masks are right: with a sliding window or ALiBi the plugin takes a token's slot for
      its position. has_plain_cache: whether a token's keys and values are rows of plain numbers in the cache.
    """

    compiled: Any
    request: Any
    limits: ModelLimits
    block_size: int
    block_bytes: int
    gathers_rows: bool
    masks_by_position: bool
    has_plain_cache: bool

    def bind_cache(self, num_blocks: int) -> list[Any]:
        """Allocates zeroed key and value tensors of `num_blocks` blocks and binds them; the caller must keep them.

        Where memory does not suffice for all of them, those that are bound stay.
        """
        ports = [port for port in self.compiled.inputs if _is_cache(port)]
        tensors = [self._cache_tensor(port.element_type, [num_blocks, *_trailing(port)]) for port in ports]
        for port, tensor in zip(ports, tensors, strict=True):
            self.request.set_tensor(port, tensor)
        return tensors

    def _cache_tensor(self, element_type: Any, shape: list[int]) -> Any:
        device = self.compiled.get_property("EXECUTION_DEVICES")[0]
        if device.startswith("GPU"):
            return _core().get_default_context(device).create_tensor(element_type, ov.Shape(shape), {})
        # The operating system zeroes pages on first touch: an unused part costs no memory.
        size = int(np.prod(shape)) * element_type.size
        return ov.Tensor(np.zeros(size, np.uint8), ov.Shape(shape), element_type)


@functools.cache
def _core() -> Any:
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(_KEPT_BY_ONEDNN))  # read at its first kernel
    return ov.Core()


def load_paged_model(path: Path, options: RuntimeOptions, *, tree_masks: bool) -> PagedModel:
    """Reads, rewrites and compiles the IR at `path` (a directory with openvino_model.xml, or an .xml file).

    tree_masks: adds the `qq_bias` inputs, which cost nothing measurable when empty.
    Raises BundleError when the files are missing or the model is not a stateful decoder, ConfigError for an
    option out of range, RuntimeUnavailable when the device is missing.
    """
    xml = find_ir(path)
    properties = _properties(options)
    model = _core().read_model(xml)
    try:
        paged_attention_transformation(model, allow_qq_bias=tree_masks)
    except RuntimeError as error:
        raise BundleError(
            f"{xml} cannot use paged attention: {failure_reason(error)}; expected the stateful decoder that "
            "`outrider-export` or optimum-intel's default text-generation export writes"
        ) from error
    masks_by_position = all(
        _is_zero(node.input_value(_WINDOW_INPUT)) and _is_zero(node.input_value(_ALIBI_INPUT))
        for node in model.get_ops()
        if node.get_type_name() == "PagedAttentionExtension"
    )
    gathers_rows = gather_rows(model)
    if not gathers_rows:
        logger.info("%s: no MatMul in front of the logits; they are computed for every token", xml)
    try:
        compiled = _core().compile_model(model, options.device, properties)
    except RuntimeError as error:
        available = ", ".join(_core().available_devices) or "none"
        raise RuntimeUnavailable(
            f"OpenVINO cannot run {xml} on {options.device!r}: {failure_reason(error)}; devices on this machine: "
            f"{available}"
        ) from error
    caches = [port for port in compiled.inputs if _is_cache(port)]
    values = next(port for port in caches if "value_cache" in port.any_name)
    return PagedModel(
        compiled=compiled,
        request=compiled.create_infer_request(),
        limits=ModelLimits(compiled.output(0).partial_shape[-1].get_length(), longest_sequence(xml.parent, options)),
        # Keys may be stored transposed (GPU); values are [blocks, heads, block size, head size] everywhere.
        block_size=_trailing(values)[1],
        block_bytes=sum(int(np.prod(_trailing(port))) * port.element_type.size for port in caches),
        gathers_rows=gathers_rows,
        masks_by_position=masks_by_position,
        has_plain_cache=all(port.element_type in (ov.Type.f32, ov.Type.f16) for port in caches),
    )


def find_ir(path: Path) -> Path:
    """The .xml of the IR at `path` (a directory with openvino_model.xml, or an .xml file). BundleError if missing."""
    xml = path if path.suffix == ".xml" else path / MODEL_FILE
    if not (xml.is_file() and xml.with_suffix(".bin").is_file()):
        raise BundleError(f"no OpenVINO model at {xml}; expected {xml.name} and {xml.with_suffix('.bin').name}")
    return xml


def failure_reason(error: RuntimeError) -> str:
    """The last line of OpenVINO's message: the others name its own sources."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[-1] if lines else type(error).__name__
    # The C++ library's own words for a key that is missing in a table of OpenVINO's.
    return f"an error of OpenVINO's own ({reason})" if _NO_REASON.fullmatch(reason) else reason


def _properties(options: RuntimeOptions) -> dict[str, str]:
    """The compile properties; `options.properties` overrides them."""
    properties = {"PERFORMANCE_HINT": "LATENCY"}
    if options.device == "CPU":
        # bf16 arithmetic is slower than f32 with INT8 weights and can kill the process with FP32 ones.
        properties["INFERENCE_PRECISION_HINT"] = "f32"
        # Pinned threads of two processes would share the first core and stay there.
        properties["ENABLE_CPU_PINNING"] = "NO"
        properties["CPU_RUNTIME_CACHE_CAPACITY"] = str(_KEPT_KERNELS)
        # The default, u8, decides near ties by the history of the cache; f32 keeps a step equal to its replay.
        properties["KV_CACHE_PRECISION"] = "f32"
    if options.num_threads:
        properties["INFERENCE_NUM_THREADS"] = str(options.num_threads)
    if options.cache_dir is not None:
        properties["CACHE_DIR"] = options.cache_dir
    return properties | options.properties


def gather_rows(model: Any, *, num_rows: int = -1) -> bool:
    """Adds the input `logit_rows` (int64 [R]) and gathers these rows before the LM head; False if there is none.

    num_rows: R, -1: any.
    """
    node = model.output(0).get_node().input_value(0).get_node()
    while node.get_type_name() in _ROW_WISE and all(_is_constant(v) for v in node.input_values()[1:]):
        node = node.input_value(0).get_node()
    hidden = node.input_value(0).get_partial_shape() if node.get_type_name() == "MatMul" else None
    if hidden is None or hidden.rank.get_length() < 2:
        return False
    rows = ops.parameter([num_rows], ov.Type.i64, name="logit_rows")
    rows.output(0).set_names({"logit_rows"})
    # Paged, tokens come first; in a static graph they come behind a batch of one.
    axis = int(hidden[0] == 1 and hidden.rank.get_length() > 2)
    gathered = ops.gather(node.input_value(0), rows, ops.constant(axis, dtype=np.int64))
    node.input(0).replace_source_output(gathered.output(0))
    model.add_parameters([rows])
    model.validate_nodes_and_infer_types()
    return True


def _is_constant(value: Any) -> bool:
    node = value.get_node()
    return node.get_type_name() == "Constant" or (
        node.get_type_name() == "Convert" and _is_constant(node.input_value(0))
    )


def _is_zero(value: Any) -> bool:
    """Whether a value is a constant that is empty or zero."""
    node = value.get_node()
    return node.get_type_name() == "Constant" and not np.any(node.data)


def _is_cache(port: Any) -> bool:
    return "_cache." in port.any_name


def _trailing(port: Any) -> list[int]:
    return [dimension.get_length() for dimension in list(port.partial_shape)[1:]]


def run_request(request: Any) -> None:
    """Runs a request on the tensors that are bound to it, blocking, without the GIL. Raises RuntimeError.

    `infer` also makes a dictionary of all outputs, which takes 0.1 ms for a small draft. And it hides that memory was
    short (2026.4.1): it returns as if it had run, and the last run's logits are taken for this one's.
    """
    request.start_async(share_inputs=True)
    request.wait()


def bind_step(request: Any, model: PagedModel, step: RaggedStep) -> None:
    """Binds a step's arrays to a request, which reads their memory but does not keep it alive."""
    for name in _STEP_INPUTS:
        request.set_tensor(name, shared_tensor(getattr(step, name)))
    if model.gathers_rows:
        request.set_tensor("logit_rows", shared_tensor(step.logit_rows))


def step_logits(request: Any, model: PagedModel, step: RaggedStep) -> NDArray[np.float32]:
    """The logits of the rows of a step that has run, [R, vocab_size] float32, valid until the next call."""
    logits: NDArray[np.float32] = request.get_output_tensor(0).data
    logits = logits.reshape(-1, model.limits.vocab_size)
    return logits if model.gathers_rows else logits[step.logit_rows]


def shared_tensor(array: NDArray[Any]) -> Any:
    """An OpenVINO tensor over the memory of `array`, which must be contiguous.

    An infer request does not keep the tensor's memory alive: keep `array` (or the tensor).
    """
    return ov.Tensor(array, shared_memory=True)
