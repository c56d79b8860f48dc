"""Chooses the execution provider for an ONNX model, by device, name or policy, and checks it afterwards.

ONNX Runtime moves whatever a provider does not take to the CPU and reports it only in its log. This module chooses
before a session exists and compares with what the session does: a requested provider that does not run the model's
matrix products is an error. Only a policy may end on the CPU, and then the log says so. Knows no model files.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import onnxruntime as ort

from outrider.models.errors import ConfigError, RuntimeUnavailable

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
    "VitisAIExecutionProvider": "an AMD Ryzen AI device, and AMD's Ryzen AI software",
    "CoreMLExecutionProvider": "a Mac: its onnxruntime has it",
}
_NPU_HELP: Final = (
    "an NPU with its vendor's driver and provider: pip install onnxruntime-qnn (Qualcomm) or onnxruntime-ep-openvino "
    "(Intel); OpenVINO drives Intel NPUs itself: --runtime openvino"
)
# Packages with a provider as a plug-in; each has get_ep_name() and get_library_path().
_PLUGINS: Final = (
    "onnxruntime_qnn",
    "onnxruntime_ep_openvino",
    "onnxruntime_ep_nv_tensorrt_rtx",
    "onnxruntime_ep_webgpu",
)
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

    name: the provider, or None for the policy "prefer an NPU". options: the provider's own. may_be_cpu: whether
    ending on the CPU is allowed (and then logged). asked: the caller's word for it, for messages.
    """

    name: str | None
    options: Mapping[str, str] = field(default_factory=dict)
    may_be_cpu: bool = False
    asked: str = "CPU"


@functools.cache
def register_plugins() -> None:
    """Registers the providers of the installed plug-in packages; one that fails is logged and skipped."""
    for name in _PLUGINS:
        if importlib.util.find_spec(name) is None:
            continue
        try:
            plugin = importlib.import_module(name)
            ort.register_execution_provider_library(plugin.get_ep_name(), plugin.get_library_path())
        except Exception as error:
            logger.warning("the plug-in package %s cannot be used: %s", name, error)


def available_providers() -> tuple[str, ...]:
    """Providers of the installed onnxruntime package, and those registered with it as plug-ins."""
    names = [*ort.get_available_providers(), *(device.ep_name for device in ort.get_ep_devices())]
    return tuple(dict.fromkeys(names))


def choose_provider(device: str, available: Iterable[str]) -> ProviderChoice:
    """The provider for `device`: "CPU", "GPU", "NPU", "prefer-npu" or a provider's full name.

    Raises RuntimeUnavailable when it is not available; the message lists what is and what it needs. Raises ConfigError
    for an unknown name.
    """
    there = tuple(available)
    if device.upper() == "CPU":
        return ProviderChoice(CPU)
    if device.upper() == "GPU":
        name = next((provider for provider in _GPU_PROVIDERS if provider in there), None)
        if name is None:
            helps = "; ".join(_HELP[provider] for provider in (CUDA, DIRECTML, OPENVINO))
            raise _unavailable("no GPU provider", there, helps)
        return ProviderChoice(name, {"device_type": "GPU"} if name == OPENVINO else {}, asked=device)
    if device.upper() == "NPU":
        return ProviderChoice(None, asked=device)
    if device.lower() == "prefer-npu":
        return ProviderChoice(None, may_be_cpu=True, asked=device)
    if not device.endswith("ExecutionProvider"):
        raise ConfigError(
            f"device is {device!r}; for ONNX Runtime expected CPU, GPU, NPU, prefer-npu or a provider's full name, "
            f"such as {', '.join(there)}"
        )
    if device not in there:
        raise _unavailable(f"no provider {device}", there, _HELP.get(device, "a build of onnxruntime that has it"))
    return ProviderChoice(device, asked=device)


def apply_choice(choice: ProviderChoice, options: Any) -> dict[str, Any]:
    """Sets up the SessionOptions; returns the rest of InferenceSession's arguments."""
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if choice.name is None:
        options.set_provider_selection_policy(ort.OrtExecutionProviderDevicePolicy.PREFER_NPU)
        return {}
    if choice.name in ort.get_available_providers():
        return {"providers": [choice.name], "provider_options": [dict(choice.options)]}
    kind = choice.options.get("device_type")
    devices = [
        device
        for device in ort.get_ep_devices()
        if device.ep_name == choice.name and kind in (None, device.device.type.name)
    ]
    if not devices:
        raise _unavailable(f"no {kind or 'device'} behind {choice.name}", available_providers(), _NPU_HELP)
    # The device already has its type: a plug-in provider takes no option for it.
    options.add_provider_for_devices(devices[:1], {})
    return {}


def check_provider(session: Any, choice: ProviderChoice) -> str:
    """The provider that runs the session's matrix products.

    Raises RuntimeUnavailable when the requested provider does not run all of them; a policy that ends on the CPU is
    logged.
    """
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
    if counts[wanted] < total or wanted not in session.get_providers():
        raise RuntimeUnavailable(
            f"{choice.asked}: {wanted} ran only {counts[wanted]} of {total} matrix products, {ran} {share}. Check its "
            f"driver; providers here: {', '.join(available_providers())}"
        )
    return wanted


def _unavailable(what: str, available: Iterable[str], helps: str) -> RuntimeUnavailable:
    return RuntimeUnavailable(
        f"{what} in this installation of ONNX Runtime; it has {', '.join(available)}. Needed: {helps}"
    )
