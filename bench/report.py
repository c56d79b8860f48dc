"""Adds to every measurement's numbers where they come from."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

_PACKAGES: Final = ("openvino", "onnxruntime", "torch", "transformers", "triton")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    """Processor, cores, Python and the runtimes' versions."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "processor": model or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
        "load_1min": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def write_json(path: Path | None, document: dict[str, Any]) -> None:
    """Writes a document with the machine's facts in front; nothing without a path."""
    if path is not None:
        path.write_text(json.dumps({"machine": machine(), **document}, indent=2) + "\n", encoding="utf-8")
