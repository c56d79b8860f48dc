"""Checks runtimes, drivers and devices, memory, disk, and the battery."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import psutil

from outrider.edge.devices.discovery import (
    RUNTIME_NAMES,
    FoundRuntime,
    ModelRuntime,
    advice,
    install_advice,
)
from outrider.edge.doctor.findings import Finding, fault, ok, warning
from outrider.edge.doctor.probe import ProbeFailed, ask_runtime
from outrider.models.bundle.manifest import Device

GIB: Final = 1 << 30
OVERHEAD_BYTES: Final = 300 << 20
"""Memory beyond the bundle's size that an agent may take."""
LEAST_DISK_BYTES: Final = 2 * GIB
NODES: Final[dict[Device, str]] = {"npu": "dev/accel/accel*", "gpu": "dev/dri/renderD*"}
"""Linux shows hardware whose driver has loaded by these."""


def check_runtimes(
    ask: Callable[[ModelRuntime], FoundRuntime] = ask_runtime, root: Path = Path("/")
) -> Iterator[Finding]:
    """Each runtime with its devices; then NPU and GPU, if no runtime drives one. root: where /dev is."""
    installed: list[FoundRuntime] = []
    for runtime, name in RUNTIME_NAMES.items():
        try:
            found = ask(runtime)
        except ProbeFailed as error:
            yield fault(name, f"it cannot list its devices: {error}", f"install it again: {_reinstall(runtime)}")
            continue
        if found.version is None:
            yield ok(name, "not installed", install_advice(runtime).partition("; ")[2] + ", if drafts need it")
            continue
        installed.append(found)
        devices = ", ".join(
            f"{each.name} ({each.full_name}{f', driver {each.driver}' if each.driver else ''})"
            for each in found.devices
        )
        if found.has("cpu"):
            yield ok(name, f"{found.version}: {devices}")
        else:
            yield fault(name, f"{found.version} has no CPU, only: {devices or 'nothing'}", advice(runtime, "cpu"))
    if not installed:
        yield warning("runtimes", "no runtime works, so only n-gram lookup drafts", install_advice("openvino"))
    for device, nodes in NODES.items():
        if installed and not any(found.has(device) for found in installed):
            runtime = "openvino" if installed[0].runtime == "openvino" else installed[0].runtime
            words = advice(runtime, device).partition(" To try the NPU path")[0]
            if any(root.glob(nodes)):
                yield warning(device.upper(), "the system shows one, and no runtime drives it", words)
            else:
                yield ok(device.upper(), "none", words)


def check_memory(needed_bytes: int | None, memory: Any = None) -> Iterator[Finding]:
    """Free memory against the draft's. needed_bytes: the bundle's size; None: unknown."""
    memory = memory if memory is not None else psutil.virtual_memory()
    free = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    needed = OVERHEAD_BYTES + (needed_bytes or 0)
    if memory.available < needed:
        yield warning(
            "memory", f"{free}; the draft needs about {needed / GIB:.1f}", "close programs, or take a smaller draft"
        )
    else:
        yield ok("memory", free)


def check_disk(place: Path, usage: Callable[[Path], Any] = shutil.disk_usage) -> Iterator[Finding]:
    """Free space where bundles and compiled models are kept."""
    there = next((each for each in (place, *place.parents) if each.is_dir()), Path("/"))
    free = usage(there).free
    found = f"{free / GIB:.1f} GiB free for {place}"
    if free < LEAST_DISK_BYTES:
        yield warning("disk", found, "free some space, or keep bundles elsewhere: OUTRIDER_CACHE")
    else:
        yield ok("disk", found)


def check_power(sensors: Callable[[], Any] | None = None) -> Iterator[Finding]:
    """Battery or mains."""
    ask: Any = sensors or getattr(psutil, "sensors_battery", None)  # missing on some systems
    battery = ask() if ask is not None else None
    if battery is None:
        yield ok("power", "no battery is reported")
    elif battery.power_plugged is False:
        yield warning("power", f"on battery, {battery.percent:.0f} %", "draft less: --effort low")
    else:
        yield ok("power", f"plugged in, battery at {battery.percent:.0f} %")


def _reinstall(runtime: ModelRuntime) -> str:
    return install_advice(runtime).partition("run: ")[2].replace("install", "install --force-reinstall", 1)
