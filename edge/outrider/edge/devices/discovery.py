"""Lists the devices that the draft runtimes see on this machine, with advice for missing ones.

Knows nothing of bundles: which may run where is `placement`'s business. Listing changes and compiles nothing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from outrider.edge.devices.advice import gpu_advice, has_intel_plugins, npu_advice, provider_advice
from outrider.models.bundle.manifest import Device
from outrider.models.errors import RuntimeUnavailable
from outrider.models.process.extras import has_openvino_package, no_openvino_advice
from outrider.models.process.telemetry import disable_openvino_telemetry

ModelRuntime = Literal["openvino", "onnxruntime"]
RUNTIME_NAMES: Final[dict[ModelRuntime, str]] = {"openvino": "OpenVINO", "onnxruntime": "ONNX Runtime"}
PROVIDER_DEVICES: Final[dict[str, Device]] = {
    "CPUExecutionProvider": "cpu",
    "CUDAExecutionProvider": "gpu",
    "DmlExecutionProvider": "gpu",
    "MLXExecutionProvider": "gpu",
    "MIGraphXExecutionProvider": "gpu",
    "NvTensorRTRTXExecutionProvider": "gpu",
    "QNNExecutionProvider": "npu",
    "TensorrtExecutionProvider": "gpu",
    "VitisAIExecutionProvider": "npu",
    "WebGpuExecutionProvider": "gpu",
}
"""Devices of ONNX Runtime's execution providers; the others report theirs."""
NOT_RUN: Final = "not run on hardware"
TRIALS: Final[dict[str, str]] = {
    "CPU": "run in our tests",
    "CPUExecutionProvider": "run in our tests",
    "QNNExecutionProvider": f"its x86 emulation took none of the draft's matrix products; {NOT_RUN}",
    "WebGpuExecutionProvider": f"run on a GPU in software, where it was right up to 16 tokens only; {NOT_RUN}",
}
"""What was run on a device or provider, by us; on the others, nothing: `NOT_RUN`."""
_KINDS: Final[dict[str, Device]] = {"CPU": "cpu", "GPU": "gpu", "NPU": "npu"}
"""As both runtimes call them."""


def install_advice(runtime: ModelRuntime) -> str:
    """Advice for a runtime whose package is missing: the end of a sentence that begins "It is"."""
    if runtime == "openvino" and not has_openvino_package():
        return no_openvino_advice()
    extra = "edge" if runtime == "openvino" else "edge-onnxruntime"
    return f'not installed; run: pip install "outrider[{extra}]"'


@dataclass(frozen=True, slots=True)
class FoundDevice:
    """One device. name: as the runtime calls it ("GPU.1", "CUDAExecutionProvider"). full_name: its product name.

    device: its kind; None where the runtime does not say, or where it cannot be used: then full_name says why. driver:
    its version, where reported. trial: what we ran on such a device.
    """

    name: str
    full_name: str
    device: Device | None
    driver: str | None = None
    trial: str = NOT_RUN

    @property
    def words(self) -> str:
        """What it is, and what we ran on it, for people."""
        driver = f", driver {self.driver}" if self.driver else ""
        return f"{self.full_name}{driver}; {self.trial}"

    @property
    def index(self) -> int | None:
        """The number of "GPU.1" among devices of its kind; 0 where there is one. None: the runtime gives no numbers."""
        _, _, number = self.name.partition(".")
        if number:
            return int(number) if number.isdecimal() else None
        return None if self.name.endswith("ExecutionProvider") else 0


@dataclass(frozen=True, slots=True)
class FoundRuntime:
    """One runtime's version and devices. version: None if its package is not installed; then there are no devices."""

    runtime: ModelRuntime
    version: str | None
    devices: tuple[FoundDevice, ...]

    def has(self, device: Device, index: int | None = None) -> bool:
        """Whether a draft for `device` finds one. index: the number of the only one that will do.

        Where the runtime gives no numbers, opening the draft shows whether that one is there.
        """
        return any(found.device == device and (index is None or found.index in (None, index)) for found in self.devices)

    def as_json(self) -> dict[str, object]:
        """As plain data."""
        return asdict(self)


def find_runtime(runtime: ModelRuntime) -> FoundRuntime:
    """Asks `runtime` for its devices; imports its package, if that is installed. RuntimeUnavailable if it is broken."""
    try:
        return _find_openvino() if runtime == "openvino" else _find_onnxruntime()
    except (ImportError, RuntimeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == runtime:
            return FoundRuntime(runtime, None, ())
        name = RUNTIME_NAMES[runtime]
        raise RuntimeUnavailable(f"{name} cannot be used: {type(error).__name__}: {error}; install it again") from error


def require_device(
    runtime: ModelRuntime, device: Device, found: FoundRuntime | None = None, index: int | None = None
) -> None:
    """Raises RuntimeUnavailable, with advice, unless `runtime` has `device` here, with the number `index` if given.

    found: result of an earlier `find_runtime(runtime)`.
    """
    found = found or find_runtime(runtime)
    name = RUNTIME_NAMES[runtime]
    if found.version is None:
        raise RuntimeUnavailable(f"{name} is {install_advice(runtime)}")
    if found.has(device, index):
        return
    seen = ", ".join(f"{each.name} ({each.full_name})" for each in found.devices) or "nothing"
    if found.has(device):
        raise RuntimeUnavailable(
            f"{name} sees no {device.upper()}.{index} on this machine, only {seen}; give --draft-device one of these"
        )
    raise RuntimeUnavailable(
        f"{name} sees no {device.upper()} on this machine, only {seen}. {advice(runtime, device)} Until then: a "
        "draft for the CPU, from `outrider-export draft MODEL --device cpu`, or --runtime ngram, which needs no device"
    )


def advice(runtime: ModelRuntime, device: Device) -> str:
    """Advice for a missing `device`, in full sentences."""
    if device == "cpu":
        return f"This installation of {RUNTIME_NAMES[runtime]} is broken: install it again."
    if runtime == "onnxruntime":
        return provider_advice(device)
    if device == "gpu":
        return gpu_advice()
    if not has_intel_plugins():
        return npu_advice()
    return f"{npu_advice()} To try the NPU path without one, add --emulate-npu: it then runs on the CPU."


def _find_openvino() -> FoundRuntime:
    disable_openvino_telemetry()
    openvino: Any = importlib.import_module("openvino")
    core = openvino.Core()
    devices = tuple(_openvino_device(core, name) for name in core.available_devices)
    return FoundRuntime("openvino", str(openvino.__version__).partition("-")[0], devices)


def _openvino_device(core: Any, name: str) -> FoundDevice:
    try:
        full_name = str(core.get_property(name, "FULL_DEVICE_NAME")).strip()
    except RuntimeError as error:
        return FoundDevice(name, f"cannot be used: {error}", None, trial=_trial(name))
    driver = _optional_property(core, name, "NPU_DRIVER_VERSION") if name.startswith("NPU") else None
    return FoundDevice(name, full_name, _KINDS.get(name.partition(".")[0]), driver, _trial(name))


def _optional_property(core: Any, device: str, name: str) -> str | None:
    try:
        return str(core.get_property(device, name))
    except RuntimeError:
        return None  # an older driver does not report it


def _find_onnxruntime() -> FoundRuntime:
    onnxruntime: Any = importlib.import_module("onnxruntime")
    providers: Any = importlib.import_module("outrider.models.runtimes.onnxruntime_providers")
    plugins = providers.register_plugins()
    # Providers that are plug-ins know their hardware; that of the others shows when a model is loaded.
    reported = [
        FoundDevice(each.ep_name, _hardware(each), _KINDS.get(each.device.type.name), trial=_trial(each.ep_name))
        for each in onnxruntime.get_ep_devices()
        if each.ep_name != "AzureExecutionProvider"
    ]
    built_in = [
        FoundDevice(name, "built into this package", PROVIDER_DEVICES.get(name), trial=_trial(name))
        for name in providers.available_providers()
        if name not in {each.name for each in reported} and name != "AzureExecutionProvider"  # it calls a service
    ]
    unusable = [
        FoundDevice(each.name, f"from {each.source}, cannot be used: {each.failure}", None, trial=_trial(each.name))
        for each in plugins
        if each.failure is not None
    ]
    found = tuple(dict.fromkeys([*reported, *built_in, *unusable]))
    return FoundRuntime("onnxruntime", str(onnxruntime.__version__), found)


def _trial(name: str) -> str:
    return TRIALS.get(name, NOT_RUN)


def _hardware(each: Any) -> str:
    names = dict(each.device.metadata)
    vendor = each.device.vendor or f"PCI vendor {each.device.vendor_id:#06x}"  # Linux has no names of GPUs
    return str(names.get("Description") or f"{vendor} {each.device.type.name}").strip()
