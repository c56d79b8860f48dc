"""Tests that every system gets an edge that installs: the markers of the extras, and what the advice says of them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from outrider.models.process.extras import has_openvino_package

ROOT = Path(__file__).parent.parent

SYSTEMS = {
    ("linux", "x86_64"): ("openvino", "1.31.1"),
    ("linux", "aarch64"): ("openvino", "1.31.1"),
    ("win32", "AMD64"): ("openvino", "1.31.1"),
    ("win32", "ARM64"): ("onnxruntime", "1.31.1"),
    ("darwin", "arm64"): ("openvino", "1.31.1"),
    ("darwin", "x86_64"): ("onnxruntime", "1.23.2"),
    ("linux", "riscv64"): (None, None),
}
"""System -> the runtime that `edge` installs, and the ONNX Runtime that there is a package of.

As the package index had them for these versions. No marker knows a Linux system's C library: on ARM, OpenVINO needs
glibc 2.35.
"""
EVERYWHERE = {"httpx", "truststore", "prompt-toolkit", "starlette", "uvicorn", "httptools", "llguidance"}
"""What `edge` installs on each. httptools and llguidance have a package for each, also for Windows on ARM."""


def installed(extra: str, platform: str, machine: str, python: str = "3.12") -> dict[str, str]:
    """The packages of an extra on a system, with their versions."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = table["tool"]["hatch"]["metadata"]["hooks"]["custom"]["optional-dependencies"]
    system = {"sys_platform": platform, "platform_machine": machine, "python_version": python}
    found = [Requirement(text) for text in extras[extra]]
    chosen = [each for each in found if each.marker is None or each.marker.evaluate(system)]
    assert len({each.name for each in chosen}) == len(chosen), "two requirements for one package"
    return {each.name: str(each.specifier) for each in chosen}


@pytest.mark.parametrize(("platform", "machine"), SYSTEMS)
def test_every_system_gets_a_runtime_that_has_a_package_there(platform: str, machine: str) -> None:
    """OpenVINO where there is one, else ONNX Runtime, else neither; what link, chat and endpoint need everywhere."""
    runtime, version = SYSTEMS[platform, machine]
    edge = installed("edge", platform, machine)
    assert set(edge) == EVERYWHERE | ({runtime} if runtime else set())
    assert ("openvino" in edge) == has_openvino_package(platform, machine)
    onnx = installed("edge-onnxruntime", platform, machine)
    assert onnx.get("onnxruntime") == (f"=={version}" if version else None)
    assert edge.get("onnxruntime") in (None, onnx.get("onnxruntime"))
    assert ("openvino" in installed("cloud", platform, machine)) == ("openvino" in edge)


def test_a_python_without_a_package_still_drafts_with_lookup() -> None:
    """ONNX Runtime 1.23.2 has none for Python 3.14."""
    assert set(installed("edge", "darwin", "x86_64", "3.14")) == EVERYWHERE
