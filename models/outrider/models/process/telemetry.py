"""Keeps OpenVINO from reporting its use over the network.

`import openvino` sends an event to an analytics service when the package `openvino_telemetry` is installed, and the
openvino wheel depends on it. OpenVINO uses a stub when that import fails, so this module makes it fail.
"""

from __future__ import annotations

import sys


def disable_openvino_telemetry() -> None:
    """Call before the first import of openvino or nncf; later it changes nothing."""
    # A None here makes `import openvino_telemetry` raise ModuleNotFoundError.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
