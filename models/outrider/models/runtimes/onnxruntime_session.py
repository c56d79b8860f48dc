"""Opens an ONNX file on its provider, and reads the names, sizes and types of its graph.

Reads two kinds of graph, both with `GroupQueryAttention` over one buffer for past and present. Graphs of
onnxruntime-genai's builder take the length of the cache from the length of `attention_mask`; those of the export kit
from the numbers `seqlens_k` and `total_sequence_length`. Either may have the input `first_row`: logits are computed
from that new token on. Runs nothing.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime as ort

from outrider.models.errors import BundleError, ConfigError, OutriderError, RuntimeUnavailable
from outrider.models.runtimes.base import ModelLimits, RuntimeOptions, longest_sequence
from outrider.models.runtimes.onnxruntime_plugins import reason_of, register_plugins
from outrider.models.runtimes.onnxruntime_providers import (
    CPU,
    ProviderChoice,
    apply_choice,
    available_providers,
    check_provider,
    choose_provider,
)

MODEL_FILE: Final = "model.onnx"
_TYPES: Final[dict[str, np.dtype[Any]]] = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(float16)": np.dtype(np.float16),
}
_KNOWN: Final = frozenset({"input_ids", "position_ids", "attention_mask", "seqlens_k", "total_sequence_length"})
_EXPECTED: Final = "expected the decoder that `outrider-export` or onnxruntime-genai's builder writes"
_FATAL: Final = 4  # ONNX Runtime's log level; errors come as exceptions too


@dataclass(frozen=True, slots=True)
class Cache:
    """One layer's keys or values: the names of past and present, and the sizes of [1, heads, positions, head_size]."""

    past: str
    present: str
    heads: int
    head_size: int


@dataclass(frozen=True, slots=True)
class OnnxModel:
    """A loaded session and its graph's inputs.

    device_id: the number of the provider's device. dtype: of the caches. logits_dtype: of the logits. inputs: those of
    `_KNOWN` that the graph has. selects_rows: whether it has the input `first_row`. takes_batches: whether it runs
    several sequences of different lengths in one step.
    """

    session: Any
    provider: str
    device_id: int
    limits: ModelLimits
    caches: tuple[Cache, ...]
    dtype: np.dtype[Any]
    logits_dtype: np.dtype[Any]
    inputs: frozenset[str]
    selects_rows: bool
    takes_batches: bool


def load_onnx_model(path: Path, options: RuntimeOptions) -> OnnxModel:
    """Loads `path` (an .onnx file, or a directory with model.onnx) on the provider that `options.device` names.

    Raises BundleError when files are missing or not such a decoder, ConfigError for an option
    out of range, RuntimeUnavailable when the provider is missing or did not take the model.
    """
    file = path if path.suffix == ".onnx" else path / MODEL_FILE
    if not file.is_file():
        raise BundleError(f"no ONNX model at {file}; {_EXPECTED}")
    if options.emulate_npu:
        raise ConfigError("ONNX Runtime has no NPU path to emulate; only the runtime openvino has")
    if options.device.upper() != "CPU":
        register_plugins()
    choice = choose_provider(options.device, available_providers())
    session = _open_session(file, choice, options.num_threads)
    return _read_model(file, session, check_provider(session, choice), choice.index or 0, options)


def _open_session(file: Path, choice: ProviderChoice, num_threads: int) -> Any:
    settings = ort.SessionOptions()
    settings.log_severity_level = _FATAL
    settings.inter_op_num_threads = 1  # a decoder is one chain: nothing runs in parallel
    settings.intra_op_num_threads = num_threads or _default_threads()
    # Sleeping threads cost tens of microseconds at every operator, spinning threads cost a core. So spin only for the
    # time between two steps of a draft (picking a token and its confidence).
    settings.add_session_config_entry("session.intra_op.spin_duration_us", "300")
    try:
        arguments = apply_choice(choice, settings)
        # No second attempt on the CPU, and no settings from the model file.
        return ort.InferenceSession(file, settings, enable_fallback=0, read_config_from_model=0, **arguments)
    except OutriderError:
        raise
    except Exception as error:  # ONNX Runtime's errors share no other base
        if choice.name != CPU and _loads_on_cpu(file):
            raise RuntimeUnavailable(
                f"{choice.asked}: {file.name} cannot be loaded there: {reason_of(error)}"
            ) from error
        raise BundleError(f"ONNX Runtime cannot load {file}: {reason_of(error)}; {_EXPECTED}") from error


def _loads_on_cpu(file: Path) -> bool:
    settings = ort.SessionOptions()
    settings.log_severity_level = _FATAL
    try:
        ort.InferenceSession(file, settings, providers=[CPU], enable_fallback=0, read_config_from_model=0)
    except Exception:
        return False
    return True


def _default_threads() -> int:
    """As many as cores are allowed, hyper-threads counted once; 0, ONNX Runtime's own choice, where that is unknown.

    Its own choice counts the machine's cores, not the process's, and pins a thread to each.
    """
    if not hasattr(os, "sched_getaffinity"):
        return 0
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text(encoding="ascii").strip() if siblings.is_file() else str(cpu))
    return len(cores)


def _read_model(file: Path, session: Any, provider: str, device_id: int, options: RuntimeOptions) -> OnnxModel:
    inputs = {node.name: node for node in session.get_inputs()}
    outputs = {node.name: node for node in session.get_outputs()}
    pasts = [name for name in inputs if name.startswith("past_key_values.")]
    strangers = sorted(set(inputs) - set(pasts) - _KNOWN)
    presents = ["present" + name.removeprefix("past_key_values") for name in pasts]
    missing = [name for name in ("logits", *presents) if name not in outputs]
    if strangers or missing or not pasts or "input_ids" not in inputs:
        found = f"inputs {', '.join(inputs) or 'none'}; outputs {', '.join(outputs) or 'none'}"
        raise BundleError(f"{file} is not a decoder that this runtime can drive: {found}; {_EXPECTED}")
    if ("attention_mask" in inputs) == ({"seqlens_k", "total_sequence_length"} <= set(inputs)):
        raise BundleError(f"{file} has no input, or two, for the length of its cache; {_EXPECTED}")
    head_size = _head_size(file)
    caches = []
    for past, present in zip(pasts, presents, strict=True):
        shape = inputs[past].shape  # [1, heads, positions, head_size]
        sizes = _size(file, past, shape[1]), _size(file, past, shape[3], head_size)
        caches.append(Cache(past, present, *sizes))
    types = {inputs[past].type for past in pasts} | {outputs["logits"].type}
    if not types <= set(_TYPES):
        raise BundleError(f"{file} has caches and logits of {', '.join(sorted(types))}; expected float or float16")
    dtype = _TYPES[inputs[pasts[0]].type]
    vocab_size = _size(file, "logits", outputs["logits"].shape[-1])
    return OnnxModel(
        session=session,
        provider=provider,
        device_id=device_id,
        limits=ModelLimits(vocab_size, longest_sequence(file.parent, options)),
        caches=tuple(caches),
        dtype=dtype,
        logits_dtype=_TYPES[outputs["logits"].type],
        inputs=frozenset(inputs) & _KNOWN,
        selects_rows=any(node.name == "first_row" for node in session.get_overridable_initializers()),
        takes_batches="attention_mask" in inputs
        and not any(
            isinstance(node.shape[0], int) for node in (inputs["input_ids"], inputs[pasts[0]], outputs["logits"])
        ),
    )


def _size(file: Path, name: str, size: int | str | None, default: int = 0) -> int:
    found = size if isinstance(size, int) else default
    if found <= 0:
        raise BundleError(f"{file} does not give the sizes of {name}; {_EXPECTED}")
    return found


def _head_size(file: Path) -> int:
    """From genai_config.json, for graphs that do not give it; 0 without that file."""
    config = file.parent / "genai_config.json"
    if not config.is_file():
        return 0
    try:
        return int(json.loads(config.read_text(encoding="utf-8"))["model"]["decoder"]["head_size"])
    except (ValueError, LookupError, TypeError, RecursionError):
        raise BundleError(f"{config} does not give the size of a head; {_EXPECTED}") from None
