"""Says why a runtime sees no NPU or GPU here, as far as the system shows, and what the user can do about it.

Linux shows device nodes, who may open them, and which kernel modules are loaded. The requirements come from the
vendors: docs/overview.md of github.com/intel/linux-npu-driver, and OpenVINO's "Configurations for Intel NPU" and
"... for Intel Processor Graphics". OpenVINO's plugins for Intel's GPUs and NPUs are built for x86-64 Linux and Windows
only. Knows no runtime's interface, and opens no device.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from platform import machine as this_machine
from typing import Final

Access = Callable[[Path], bool]


def _may_use(node: Path) -> bool:
    return os.access(node, os.R_OK | os.W_OK)


def has_intel_plugins(platform: str = sys.platform, machine: str | None = None) -> bool:
    """Whether OpenVINO's packages for this system drive Intel's GPUs and NPUs, or run the NPU path on the CPU.

    machine: as `platform.machine()`.
    """
    return platform in ("linux", "win32") and (machine or this_machine()).lower() in ("x86_64", "amd64")


def npu_advice(
    platform: str = sys.platform,
    root: Path = Path("/"),
    may_use: Access = _may_use,
    machine: str | None = None,
) -> str:
    """Why OpenVINO sees no NPU, and what helps: one or two sentences.

    platform: as `sys.platform`. root: where /dev and /sys are. may_use: whether this user may open a node. machine: as
    `platform.machine()`.
    """
    if not has_intel_plugins(platform, machine):
        drives = "OpenVINO drives NPUs on x86-64 Linux and Windows only."
        if platform != "win32":
            return drives
        return (
            f"{drives} ONNX Runtime drives Qualcomm's: `pip install onnxruntime-qnn`, then --draft-device "
            "QNNExecutionProvider; not run on hardware, and its emulation took none of the draft's matrix products."
        )
    if platform == "win32":
        return (
            "An NPU needs the vendor's driver: Windows Update has it, or Intel's page 'Intel NPU Driver'; "
            "Device Manager then lists 'Intel(R) AI Boost'."
        )
    nodes = sorted((root / "dev" / "accel").glob("accel*"))
    has_module = (root / "sys" / "module" / "intel_vpu").is_dir()
    if not nodes and has_module:
        return (
            "The kernel module intel_vpu is loaded, but there is no /dev/accel/accel0: usually its firmware is "
            "missing (package intel-fw-npu); see `dmesg | grep intel_vpu`."
        )
    if not nodes:
        return (
            "There is no /dev/accel/accel0: OpenVINO drives the NPU of an Intel Core Ultra processor, through the "
            "kernel module intel_vpu (Linux 6.6 or newer; `sudo modprobe intel_vpu`) and its firmware (package "
            "intel-fw-npu)."
        )
    if not has_module:
        return f"{_named(nodes)} belongs to another driver than intel_vpu, and OpenVINO drives Intel's NPUs only."
    if not any(may_use(node) for node in nodes):
        return (
            f"This user may not open {_named(nodes)}: run `sudo usermod -aG render $USER` and log in again (where the "
            "node belongs to root alone, `sudo chown root:render` and `sudo chmod g+rw` it first)."
        )
    return (
        f"{_named(nodes)} is there and may be used, so what is missing is the user-space driver: install "
        "intel-level-zero-npu and intel-driver-compiler-npu (github.com/intel/linux-npu-driver/releases) and the Level "
        "Zero loader (libze1, or level-zero)."
    )


def gpu_advice(
    platform: str = sys.platform,
    root: Path = Path("/"),
    may_use: Access = _may_use,
    machine: str | None = None,
) -> str:
    """Why OpenVINO sees no GPU, and what helps: one to three sentences. Parameters as `npu_advice`."""
    drives = "OpenVINO drives Intel GPUs on x86-64 Linux and Windows only."
    if platform == "darwin":
        return f"{drives} {_METAL}"
    other = "An NVIDIA GPU is driven by ONNX Runtime: `outrider-export draft MODEL --device gpu --runtime onnxruntime`."
    if not has_intel_plugins(platform, machine):
        return f"{drives} {other}"
    if platform == "win32":
        return f"An Intel GPU needs Intel's graphics driver. {other}"
    nodes = sorted((root / "dev" / "dri").glob("renderD*"))
    if not nodes:
        return f"There is no /dev/dri/renderD*: the kernel drives no GPU, or this container was not given one. {other}"
    if not any(may_use(node) for node in nodes):
        return f"This user may not open {_named(nodes)}: run `sudo usermod -aG render $USER` and log in again. {other}"
    return (
        f"{_named(nodes)} is there and may be used, so what an Intel GPU lacks is its compute runtime: install "
        f"intel-opencl-icd and ocl-icd-libopencl1 (github.com/intel/compute-runtime/releases). {other}"
    )


def provider_advice(device: str, platform: str = sys.platform, machine: str | None = None) -> str:
    """Packages and drivers that ONNX Runtime needs for a "gpu" or an "npu": one to three sentences."""
    if platform == "darwin":
        return _METAL if device == "gpu" else "No provider that runs drafts drives a Mac's neural engine."
    windows = " `pip install windowsml` finds those that Windows has installed." if platform == "win32" else ""
    if not has_intel_plugins(platform, machine):
        if device == "npu":
            return f"Its provider for Qualcomm's NPUs is a package, onnxruntime-qnn, beside the driver.{windows}"
        if platform == "win32":
            return "Its package onnxruntime-directml, in place of onnxruntime, drives any DirectX 12 GPU."
        return "Its CUDA provider needs an NVIDIA GPU with CUDA and cuDNN, and a build of ONNX Runtime for it."
    if device == "npu":
        return (
            "Its providers for NPUs are packages of their own, beside the vendor's driver: onnxruntime-qnn (Qualcomm), "
            f"onnxruntime-ep-openvino (Intel).{windows} OpenVINO drives Intel's by itself: `outrider-export draft "
            "MODEL --device npu`."
        )
    return (
        "Its CUDA provider needs an NVIDIA GPU with CUDA and cuDNN, and another package: `pip uninstall onnxruntime`, "
        "then `pip install onnxruntime-gpu` of the same version; on Windows onnxruntime-directml drives any DirectX 12 "
        "GPU. OpenVINO drives Intel's by itself: `outrider-export draft MODEL --device gpu --runtime openvino`."
    )


_METAL: Final = (
    "A Mac's GPU (Metal) is no CUDA device. WebGPU drives it: `pip install onnxruntime-ep-webgpu`, then --draft-device "
    "WebGpuExecutionProvider; not run on hardware."
)


def _named(nodes: Sequence[Path]) -> str:
    return "/" + "/".join(nodes[0].parts[-3:])
