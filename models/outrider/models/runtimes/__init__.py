"""Opens model runtimes by name: `BatchRuntime` for the cloud's engine, `SequenceRuntime` for the device's draft.

A runtime is imported on first use, so a machine needs only the packages of the one that it runs.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Final, cast

from outrider.models.errors import ConfigError
from outrider.models.process.extras import missing_extra
from outrider.models.process.telemetry import disable_openvino_telemetry
from outrider.models.runtimes.base import BatchRuntime, RuntimeOptions, SequenceRuntime

# name -> module, class, the extra that installs what the module imports
BATCH_RUNTIMES: Final = {
    "openvino": ("outrider.models.runtimes.openvino_paged", "OpenVinoPagedRuntime", "cloud"),
    "torch": ("outrider.models.runtimes.torch_paged", "TorchPagedRuntime", "torch"),
}
SEQUENCE_RUNTIMES: Final = {
    "openvino": ("outrider.models.runtimes.openvino_sequence", "OpenVinoSequenceRuntime", "edge"),
    "openvino-npu": ("outrider.models.runtimes.openvino_npu", "OpenVinoNpuRuntime", "edge"),
    "onnxruntime": ("outrider.models.runtimes.onnxruntime_sequence", "OnnxRuntimeSequence", "edge-onnxruntime"),
}


def open_batch_runtime(kind: str, path: Path, options: RuntimeOptions) -> BatchRuntime:
    """Loads the model at `path` into the BatchRuntime named `kind` ("openvino", "torch").

    Raises ConfigError for an unknown name, RuntimeUnavailable when its package (the message has the pip command) or its
    device is missing, BundleError when the runtime cannot read the model's files.
    """
    return cast(BatchRuntime, _class_of(kind, BATCH_RUNTIMES)(path, options))


def open_sequence_runtime(kind: str, path: Path, options: RuntimeOptions) -> SequenceRuntime:
    """Loads the model at `path` into the SequenceRuntime named `kind`; raises as `open_batch_runtime`.

    kind: "openvino", "openvino-npu" or "onnxruntime". A bundle's is `sequence_kind(manifest.runtime, manifest.device)`.
    """
    return cast(SequenceRuntime, _class_of(kind, SEQUENCE_RUNTIMES)(path, options))


def sequence_kind(runtime: str, device: str) -> str:
    """The SequenceRuntime for a draft on `device` ("cpu", "gpu", "npu"): OpenVINO has a separate one for NPUs."""
    return "openvino-npu" if (runtime, device.lower()) == ("openvino", "npu") else runtime


def _class_of(kind: str, runtimes: dict[str, tuple[str, str, str]]) -> type:
    if kind not in runtimes:
        raise ConfigError(f"no runtime named {kind!r}; expected one of {', '.join(runtimes)}")
    module, name, extra = runtimes[kind]
    disable_openvino_telemetry()
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise missing_extra(error, f"the {kind} runtime", extra) from error
    return cast(type, getattr(loaded, name))
