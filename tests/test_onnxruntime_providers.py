"""Tests which provider of ONNX Runtime a device means, that nothing else runs the model, and how plug-ins are found.

Plug-ins are found by the real ONNX Runtime, each in a process of its own: a process registers them once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import onnxruntime as ort
import pytest

from outrider.edge.devices.discovery import NOT_RUN, PROVIDER_DEVICES, TRIALS
from outrider.models.errors import ConfigError, RuntimeUnavailable
from outrider.models.runtimes import onnxruntime_plugins, onnxruntime_providers
from outrider.models.runtimes.onnxruntime_plugins import Plugin
from outrider.models.runtimes.onnxruntime_providers import (
    CPU,
    OPENVINO,
    ProviderChoice,
    apply_choice,
    check_provider,
    choose_provider,
)

CUDA, QNN = "CUDAExecutionProvider", "QNNExecutionProvider"
FIND = (
    "import json; from dataclasses import asdict; from outrider.models.runtimes.onnxruntime_plugins import "
    "register_plugins; print(json.dumps([asdict(each) for each in register_plugins()]))"
)
CATALOG = """
from types import SimpleNamespace

class EpCatalog:
    def __enter__(self):
        {enter}
        return self

    def __exit__(self, *error):
        self.is_closed = True

    is_closed = False

    def find_all_providers(self):
        return [self.entry(*each) for each in {entries!r}]

    def entry(self, name, state, path):
        def ensure_ready():
            assert state != "NotPresent", "that downloads"
            assert not self.is_closed
        return SimpleNamespace(
            name=name, ready_state=SimpleNamespace(name=state), ensure_ready=ensure_ready, library_path=path
        )
"""


def package(root: Path, name: str, source: str) -> Path:
    """An installed package with this source."""
    (root / name).mkdir(parents=True)
    (root / name / "__init__.py").write_text(source)
    return root


def python(code: str, *paths: Path, cwd: Path | None = None) -> Any:
    """What `code` prints, as JSON, in a process that has the packages of `paths` too."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=cwd, capture_output=True, text=True, check=True
    )
    assert "Traceback" not in ran.stderr
    return json.loads(ran.stdout)


def test_plug_ins_that_cannot_be_loaded_are_named_with_the_reason(tmp_path: Path) -> None:
    """Whatever is wrong with one, in one line, and the others are still found."""
    module = ort.capi.onnxruntime_pybind11_state.__file__
    defects = {
        "onnxruntime_qnn": ("def get_library_path(): return '/nowhere/qnn.so'", "/nowhere/qnn.so"),
        "onnxruntime_ep_openvino": ("def get_library_path(): return __file__", "__init__.py"),
        "onnxruntime_ep_nv_tensorrt_rtx": (f"def get_library_path(): return {module!r}", "CreateEpFactories"),
        "onnxruntime_ep_webgpu": ("raise ImportError('made for another\\nsystem')", "made for another system"),
        "onnxruntime_ep_mlx": ("def library_path(): raise FileNotFoundError('no library')", "no library"),
    }
    for name, (source, _) in defects.items():
        package(tmp_path, name, source)
    found = python(FIND, tmp_path)
    assert [each["source"] for each in found] == [name.replace("_", "-") for name in defects]
    for each, (_, why) in zip(found, defects.values(), strict=True):
        assert why in each["failure"] and "[ONNXRuntimeError]" not in each["failure"], each


def test_outrider_devices_names_it_and_a_device_that_asks_for_it_says_why_it_is_not_there(tmp_path: Path) -> None:
    """As a device of no kind, so that nothing is placed on it."""
    package(tmp_path, "onnxruntime_ep_openvino", "def get_library_path(): return '/nowhere/provider.so'")
    found = python(
        "import json; from outrider.edge.devices.discovery import find_runtime\n"
        "from outrider.models.errors import RuntimeUnavailable\n"
        "from outrider.models.runtimes.onnxruntime_providers import available_providers, choose_provider\n"
        f"devices = find_runtime('onnxruntime').as_json()['devices']\n"
        f"try: choose_provider('{OPENVINO}', available_providers())\n"
        "except RuntimeUnavailable as error: print(json.dumps([devices, str(error)]))",
        tmp_path,
    )
    devices, error = found
    assert [(each["name"], each["device"], each["trial"]) for each in devices] == [
        (CPU, "cpu", "run in our tests"),
        (OPENVINO, None, NOT_RUN),
    ]
    unusable = "from onnxruntime-ep-openvino, cannot be used: "
    assert devices[1]["full_name"].startswith(unusable)
    words = (f"no provider {OPENVINO}", "pip install onnxruntime-ep-openvino", unusable, "/nowhere/provider.so")
    assert all(each in error for each in words), error


def test_nothing_is_imported_from_the_working_directory(tmp_path: Path) -> None:
    """Even where Python would: a folder with a model may hold anything."""
    package(tmp_path, "onnxruntime_qnn", "raise SystemExit('imported')")
    package(tmp_path, "windowsml", "raise SystemExit('imported')")
    (tmp_path / "onnxruntime_ep_openvino.py").write_text("raise SystemExit('run')")
    assert python(FIND, cwd=tmp_path) == []
    (tmp_path / "elsewhere" / "onnxruntime_ep_webgpu").mkdir(parents=True)  # a folder and no package
    assert python(FIND, tmp_path, tmp_path / "elsewhere", cwd=tmp_path) == []


def test_what_windows_has_is_registered_and_what_it_would_download_is_only_named(tmp_path: Path) -> None:
    """A stand-in for Windows' catalog, over the real registration; a Python package comes before the catalog."""
    entries = [
        ("VitisAIExecutionProvider", "Ready", "C:/vitis.dll"),
        (QNN, "NotReady", "C:/qnn.dll"),
        (OPENVINO, "NotPresent", ""),
    ]
    package(tmp_path, "windowsml", CATALOG.format(enter="pass", entries=entries))
    found = python(FIND, tmp_path)
    vitis, qnn, openvino = (each.pop("failure") for each in found)
    assert found == [{"name": name, "source": "windowsml"} for name, _, _ in entries]
    assert "vitis.dll" in vitis and "qnn.dll" in qnn
    assert "has not downloaded it" in openvino and f"'{OPENVINO}'" in openvino


def test_a_catalog_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Windows' error, and no traceback."""
    package(tmp_path, "windowsml", CATALOG.format(enter="raise OSError('0x80070490')", entries=[]))
    assert python(FIND, tmp_path) == [{"name": "Windows ML", "source": "windowsml", "failure": "0x80070490"}]


def test_every_provider_that_we_know_of_has_a_kind_and_what_was_run_on_it() -> None:
    """OpenVINO's drives several kinds, and says which."""
    assert set(onnxruntime_plugins._PACKAGES.values()) - set(PROVIDER_DEVICES) == {OPENVINO}
    for name, trial in TRIALS.items():
        assert (NOT_RUN in trial) != name.startswith("CPU")


# -- the choice --------------------------------------------------------------------------------------------------------


def test_gpu_is_the_first_provider_that_is_there() -> None:
    """NVIDIA's comes first; Intel's takes the type of device as an option."""
    for asked, known, expected in (
        ("gpu", [CPU, CUDA], (CUDA, "GPU", None)),
        ("GPU", [OPENVINO, CPU], (OPENVINO, "GPU", None)),
        ("gpu.1", [CUDA], (CUDA, "GPU", 1)),
        ("cpu", [], (CPU, None, None)),
    ):
        found = choose_provider(asked, known)
        assert (found.name, found.kind, found.index) == expected
    assert not choose_provider("NPU", []).may_be_cpu and choose_provider("prefer-npu", []).may_be_cpu


def applied(asked: str, *providers: str) -> tuple[dict[str, Any], list[Any]]:
    """A session's arguments by a choice of these, and the devices and options that a plug-in gets."""
    settings = MagicMock()
    arguments = apply_choice(choose_provider(asked, providers), settings)
    for entry in settings.add_session_config_entry.call_args_list:
        assert entry.args[0] == "session.record_ep_graph_assignment_info"
    return arguments, [call.args for call in settings.add_provider_for_devices.call_args_list]


def found_device(name: str, kind: str) -> Any:
    """A device as ONNX Runtime reports it for a plug-in."""
    return SimpleNamespace(ep_name=name, device=SimpleNamespace(type=SimpleNamespace(name=kind)))


def test_a_plug_in_gets_the_device_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its devices are numbered within their kind; one that is not there is an error, and the CPU is a warning."""
    devices = [found_device(OPENVINO, kind) for kind in ("CPU", "GPU", "GPU", "NPU")]
    monkeypatch.setattr(ort, "get_ep_devices", lambda: devices)
    for asked, device in (("GPU", devices[1]), ("gpu.1", devices[2]), (OPENVINO, devices[3])):
        assert applied(asked, OPENVINO) == ({}, [([device], {})])
    with pytest.raises(RuntimeUnavailable, match=r"only 2 of GPU behind OpenVINOExecutionProvider"):
        applied("GPU.2", OPENVINO)
    del devices[1:]
    applied(OPENVINO, OPENVINO)
    assert "OpenVINOExecutionProvider: it has no device here but the CPU" in caplog.text


def test_a_registered_plug_in_gets_its_device_although_its_name_is_in_the_list_of_providers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As ONNX Runtime 1.31 lists it. By its name alone it would get no device, and the CPU would run the model."""
    device = found_device(QNN, "NPU")
    monkeypatch.setattr(ort, "get_available_providers", lambda: [CPU, QNN])
    monkeypatch.setattr(ort, "get_ep_devices", lambda: [device])
    monkeypatch.setattr(onnxruntime_providers, "register_plugins", lambda: (Plugin(QNN, "onnxruntime-qnn"),))
    assert applied(QNN, QNN) == ({}, [([device], {})])


def test_a_provider_that_is_built_in_gets_the_number_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an option, in the provider's own words; one that takes none refuses it."""
    built_in = [CUDA, OPENVINO, "WebGpuExecutionProvider"]
    monkeypatch.setattr(ort, "get_available_providers", lambda: built_in)
    for name, expected in zip(built_in, ({"device_id": "1"}, {"device_type": "GPU.1"}), strict=False):
        assert applied("GPU.1", name) == ({"providers": [name], "provider_options": [expected]}, [])
    with pytest.raises(ConfigError, match=r"WebGpuExecutionProvider takes no number of a device"):
        applied("GPU.1", *built_in[2:])


def test_what_cannot_be_seen_is_not_taken_for_run() -> None:
    """A model without a known matrix product proves nothing: the CPU may have run all of it. ONNX Runtime 1.23, the
    last for Macs with an Intel processor, reports no providers: it runs on the CPU only.
    """
    node = SimpleNamespace(op_type="FusedProduct")
    session = SimpleNamespace(
        get_provider_graph_assignment_info=lambda: [SimpleNamespace(ep_name=CPU, get_nodes=lambda: [node])],
        get_providers=lambda: ["WebGpuExecutionProvider", CPU],
    )
    with pytest.raises(RuntimeUnavailable, match=r"WebGpuExecutionProvider ran only 0 of 0 matrix products"):
        check_provider(session, ProviderChoice("WebGpuExecutionProvider", asked="GPU"))
    with pytest.raises(RuntimeUnavailable, match="does not report what GPU ran; draft on the CPU"):
        check_provider(object(), ProviderChoice("CoreMLExecutionProvider", asked="GPU"))
    assert [check_provider(each, ProviderChoice(CPU)) for each in (session, object())] == [CPU, CPU]
