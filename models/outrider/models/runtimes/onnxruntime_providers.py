"""Chooses the execution provider for an ONNX model, by device, name or policy, and checks it afterwards.

ONNX Runtime moves whatever a provider does not take to the CPU and reports it only in its log. This module chooses
before a session exists and compares with what the session does: a requested provider that does not run the model's
matrix products is an error. Only a policy may end on the CPU, and then the log says so. Knows no model files.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import onnxruntime as ort

from outrider.models.errors import ConfigError, RuntimeUnavailable
from outrider.models.runtimes.onnxruntime_plugins import register_plugins

logger = logging.getLogger(__name__)

CPU: Final = "CPUExecutionProvider"
CUDA: Final = "CUDAExecutionProvider"
DIRECTML: Final = "DmlExecutionProvider"
OPENVINO: Final = "OpenVINOExecutionProvider"
# For "GPU", the first one available.
_GPU_PROVIDERS: Final = (
    CUDA,
    "NvTensorRTRTXExecutionProvider",
    DIRECTML,
    "MIGraphXExecutionProvider",
    OPENVINO,
    "MLXExecutionProvider",
    "WebGpuExecutionProvider",
)
_HELP: Final = {
    CUDA: "an NVIDIA GPU with its driver, and: pip install onnxruntime-gpu (in place of onnxruntime)",
    "TensorrtExecutionProvider": "an NVIDIA GPU, TensorRT, and: pip install onnxruntime-gpu (in place of onnxruntime)",
    "NvTensorRTRTXExecutionProvider": "an NVIDIA RTX GPU, and: pip install onnxruntime-ep-nv-tensorrt-rtx",
    DIRECTML: "Windows with a DirectX 12 GPU, and: pip install onnxruntime-directml (in place of onnxruntime)",
    OPENVINO: "an Intel device with its driver, and: pip install onnxruntime-ep-openvino",
    "WebGpuExecutionProvider": "a GPU with its driver, and: pip install onnxruntime-ep-webgpu",
    "QNNExecutionProvider": "a Qualcomm device, and: pip install onnxruntime-qnn",
    "MIGraphXExecutionProvider": "an AMD GPU with ROCm, and: pip install onnxruntime-migraphx (not onnxruntime)",
    "MLXExecutionProvider": "a Mac with Apple's processor, and: pip install onnxruntime-ep-mlx",
    "VitisAIExecutionProvider": "an AMD Ryzen AI device, and AMD's Ryzen AI software, or on Windows windowsml",
    "CoreMLExecutionProvider": "a Mac: its onnxruntime has it",
}
_NPU_HELP: Final = (
    "an NPU with its vendor's driver and provider: pip install onnxruntime-qnn (Qualcomm) or onnxruntime-ep-openvino "
    "(Intel), or on Windows windowsml (also AMD); OpenVINO drives Intel NPUs itself: --runtime openvino"
)
# Built-in providers that take the number of a GPU as an option.
_NUMBERED: Final = frozenset({CUDA, DIRECTML, "MIGraphXExecutionProvider", "NvTensorRTRTXExecutionProvider"})
# The nodes that take a decoder's time; shape arithmetic may stay on the CPU, these may not.
_HEAVY: Final = frozenset(
    {
        *("MatMul", "MatMulNBits", "FusedMatMul", "Gemm", "MatMulInteger", "DynamicQuantizeMatMul", "EPContext"),
        *("GroupQueryAttention", "MultiHeadAttention", "Attention"),
    }
)


@dataclass(frozen=True, slots=True)
class ProviderChoice:
    """The provider to open a session with.

    name: the provider, or None for the policy "prefer an NPU". kind: of the device, "GPU" or "NPU", where the provider
    drives several; index: its number among those. may_be_cpu: whether ending on the CPU is allowed (and then logged).
    asked: the caller's word for it, for messages.
    """

    name: str | None
    kind: str | None = None
    index: int | None = None
    may_be_cpu: bool = False
    asked: str = "CPU"


def available_providers() -> tuple[str, ...]:
    """Providers of the installed onnxruntime package, and those registered with it as plug-ins."""
    names = [*ort.get_available_providers(), *(device.ep_name for device in ort.get_ep_devices())]
    return tuple(dict.fromkeys(names))


def choose_provider(device: str, available: Iterable[str]) -> ProviderChoice:
    """The provider for `device`: "CPU", "GPU", "GPU.1", "NPU", "prefer-npu" or a provider's full name.

    Raises RuntimeUnavailable when it is not available; the message lists what is and what it needs. Raises ConfigError
    for an unknown name.
    """
    there = tuple(available)
    if device.upper() == "CPU":
        return ProviderChoice(CPU)
    kind, _, number = device.upper().partition(".")
    if kind == "GPU" and (number.isdecimal() or not number):
        name = next((provider for provider in _GPU_PROVIDERS if provider in there), None)
        if name is None:
            helps = "; ".join(_HELP[provider] for provider in (CUDA, DIRECTML, OPENVINO))
            raise _unavailable("no GPU provider", there, helps)
        return ProviderChoice(name, kind="GPU", index=int(number) if number else None, asked=device)
    if device.upper() == "NPU":
        return ProviderChoice(None, asked=device)
    if device.lower() == "prefer-npu":
        return ProviderChoice(None, may_be_cpu=True, asked=device)
    if not device.endswith("ExecutionProvider"):
        raise ConfigError(
            f"device is {device!r}; for ONNX Runtime expected CPU, GPU, GPU.1, NPU, prefer-npu or a provider's full "
            f"name, such as {', '.join(there)}"
        )
    if device not in there:
        raise _unavailable(f"no provider {device}", there, _HELP.get(device, "a build of onnxruntime that has it"))
    return ProviderChoice(device, asked=device)


def apply_choice(choice: ProviderChoice, options: Any) -> dict[str, Any]:
    """Sets up the SessionOptions; returns the rest of InferenceSession's arguments.

    Raises ConfigError for a number that the provider does not take, RuntimeUnavailable where the device is not there.
    """
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if choice.name is None:
        options.set_provider_selection_policy(ort.OrtExecutionProviderDevicePolicy.PREFER_NPU)
        return {}
    # A registered plug-in is in this list too; asked for by name alone, it gets no device, and the CPU runs the model.
    if choice.name in ort.get_available_providers() and choice.name not in _usable_plugins(choice):
        return {"providers": [choice.name], "provider_options": [_device_options(choice)]}
    own = [device for device in ort.get_ep_devices() if device.ep_name == choice.name]
    kinds = [device.device.type.name for device in own]
    # A plug-in may list the CPU first, and nobody names a provider to run on that.
    kind = choice.kind or next((kind for kind in ("NPU", "GPU") if kind in kinds), None)
    if kind is None and own:
        logger.warning("%s: it has no device here but the CPU, so the CPU runs the model", choice.asked)
    devices = [device for device in own if kind in (None, device.device.type.name)]
    place = choice.index or 0
    if place >= len(devices):
        what = f"only {len(devices)} of {kind}" if devices else f"no {kind or 'device'}"
        helps = _HELP.get(choice.name, "a device with its driver")
        raise _unavailable(f"{what} behind {choice.name}", available_providers(), helps)
    # The device already has its type and number: a plug-in provider takes no option for them.
    options.add_provider_for_devices([devices[place]], {})
    return {}


def _usable_plugins(choice: ProviderChoice) -> set[str]:
    """Names of the registered plug-ins; for the CPU none is registered."""
    return {each.name for each in register_plugins() if each.failure is None} if choice.name != CPU else set()


def _device_options(choice: ProviderChoice) -> dict[str, str]:
    """Options that name the device to a provider that is built in."""
    number = "" if choice.index is None else str(choice.index)
    if choice.name == OPENVINO and choice.kind is not None:
        return {"device_type": f"{choice.kind}.{number}" if number else choice.kind}
    if number and choice.name not in _NUMBERED:
        raise ConfigError(f"{choice.asked}: {choice.name} takes no number of a device; leave out the number")
    return {"device_id": number} if number else {}


def check_provider(session: Any, choice: ProviderChoice) -> str:
    """The provider that runs the session's matrix products.

    Raises RuntimeUnavailable when the requested provider does not run all of them; a policy that ends on the CPU is
    logged.
    """
    if not hasattr(session, "get_provider_graph_assignment_info"):
        # 1.23, the last version with packages for Macs with an Intel processor.
        if choice.name == CPU:
            return CPU
        raise RuntimeUnavailable(
            f"ONNX Runtime {ort.__version__} does not report what {choice.asked} ran; draft on the CPU"
        )
    counts: Counter[str] = Counter()
    for subgraph in session.get_provider_graph_assignment_info():
        counts[subgraph.ep_name] += sum(node.op_type in _HEAVY for node in subgraph.get_nodes())
    ran, share = max(counts.items(), key=lambda item: item[1], default=(CPU, 0))
    total = counts.total()
    wanted = choice.name
    if wanted is None:
        if ran != CPU and share == total:
            return ran
        if choice.may_be_cpu:
            if ran == CPU:
                logger.warning(
                    "%s: no NPU took the model, so the CPU runs it; an NPU needs: %s", choice.asked, _NPU_HELP
                )
                return CPU
            logger.warning("%s: %s took %d of the model's %d matrix products", choice.asked, ran, share, total)
            return f"{ran} and others"
        raise _unavailable("no NPU took the model whole", available_providers(), _NPU_HELP)
    if (wanted != CPU and not total) or counts[wanted] < total or wanted not in session.get_providers():
        raise RuntimeUnavailable(
            f"{choice.asked}: {wanted} ran only {counts[wanted]} of {total} matrix products, {ran} {share}. Check its "
            f"driver; providers here: {', '.join(available_providers())}"
        )
    return wanted


def _unavailable(what: str, available: Iterable[str], helps: str) -> RuntimeUnavailable:
    failed = "".join(
        f". {each.name}, from {each.source}, cannot be used: {each.failure}"
        for each in register_plugins()
        if each.failure is not None
    )
    return RuntimeUnavailable(
        f"{what} in this installation of ONNX Runtime; it has {', '.join(available)}. Needed: {helps}{failed}"
    )
