"""Finds ONNX Runtime's plug-in execution providers, and registers them with this process.

They come from two places: Python packages that carry a provider's library, by their known names, and Windows ML's
catalog of what Windows has installed for this machine's devices. Nothing else is loaded, neither from a model's
directory nor from the working directory, and nothing is downloaded. Opens no session.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import onnxruntime as ort

_PACKAGES: Final = {
    "onnxruntime_qnn": "QNNExecutionProvider",
    "onnxruntime_ep_openvino": "OpenVINOExecutionProvider",
    "onnxruntime_ep_nv_tensorrt_rtx": "NvTensorRTRTXExecutionProvider",
    "onnxruntime_ep_webgpu": "WebGpuExecutionProvider",
    "onnxruntime_ep_mlx": "MLXExecutionProvider",
}
"""Packages that carry a plug-in, and its provider. A registered provider takes the name that it is registered with."""
_WINDOWS_ML: Final = "windowsml"
_GET_IT: Final = (
    'Windows offers it and has not downloaded it. To have it downloaded: python -c "import windowsml; c = '
    "windowsml.EpCatalog(); [p.ensure_ready() for p in c.find_all_providers() if p.name == '{name}']\""
)
_LOCK: Final = threading.Lock()

_Source = tuple[str, str, Callable[[], str]]
"""A provider's name, where it comes from, and what finds its library; that may raise anything."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """A provider that is installed as a plug-in.

    name: of the provider. source: the package that it comes from. failure: why it cannot be used; None: it can.
    """

    name: str
    source: str
    failure: str | None = None


def register_plugins() -> tuple[Plugin, ...]:
    """Registers what is installed, once per process; returns all that was found. Raises nothing of a plug-in's."""
    with _LOCK:
        return _register_all()


@functools.cache
def _register_all() -> tuple[Plugin, ...]:
    built_in = set(ort.get_available_providers())
    found: dict[str, Plugin] = {}
    # One after the other: entries of Windows' catalog live while it is read.
    for name, source, find_library in itertools.chain(_from_packages(), _from_windows()):
        if name in built_in or (name in found and found[name].failure is None):
            continue
        found[name] = Plugin(name, source, _register(name, find_library))
    return tuple(found.values())


def _register(name: str, find_library: Callable[[], str]) -> str | None:
    """Why the provider cannot be used; None if it can."""
    num_devices = len(ort.get_ep_devices())
    try:
        ort.register_execution_provider_library(name, find_library())
    except Exception as error:  # whatever another's package raises
        return reason_of(error)
    return None if len(ort.get_ep_devices()) > num_devices else "it drives no device of this machine"


def _from_packages() -> Iterator[_Source]:
    for module, name in _PACKAGES.items():
        if _is_installed(module):
            yield name, module.replace("_", "-"), functools.partial(_library_of, module)


def _library_of(module: str) -> str:
    plugin = importlib.import_module(module)
    find: Callable[[], str] = getattr(plugin, "get_library_path", None) or plugin.library_path
    return find()


def _from_windows() -> Iterator[_Source]:
    if not _is_installed(_WINDOWS_ML):
        return
    try:
        windows: Any = importlib.import_module(_WINDOWS_ML)
        with windows.EpCatalog() as catalog:  # its entries live no longer
            for entry in catalog.find_all_providers():
                yield entry.name, _WINDOWS_ML, functools.partial(_library_from_windows, entry)
    except Exception as error:  # Windows' own, such as OSError
        yield "Windows ML", _WINDOWS_ML, functools.partial(_fail, error)


def _library_from_windows(entry: Any) -> str:
    if entry.ready_state.name == "NotPresent":
        raise LookupError(_GET_IT.format(name=entry.name))
    entry.ensure_ready()  # what Windows has installed becomes visible to this process; no download
    return str(entry.library_path)


def _fail(error: Exception) -> str:
    raise error


def _is_installed(module: str) -> bool:
    """Whether there is such a module, other than in the working directory."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return False
    return Path.cwd().resolve() not in list(Path(spec.origin).resolve().parents)[:2]


def reason_of(error: BaseException) -> str:
    """An error's message in one line, without ONNX Runtime's prefix "[ONNXRuntimeError] : number : NAME : "."""
    return " ".join(str(error).split(" : ", 3)[-1].split()) or type(error).__name__
