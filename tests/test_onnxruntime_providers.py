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

QNN = "QNNExecutionProvider"
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
    cpu, plugin = found[0]
    assert (cpu["name"], cpu["device"], cpu["trial"]) == ("CPUExecutionProvider", "cpu", "run in our tests")
    assert (plugin["name"], plugin["device"], plugin["trial"]) == (OPENVINO, None, NOT_RUN)
    assert plugin["full_name"].startswith("from onnxruntime-ep-openvino, cannot be used: ")
    assert f"no provider {OPENVINO}" in found[1] and "pip install onnxruntime-ep-openvino" in found[1]
    assert "from onnxruntime-ep-openvino, cannot be used: " in found[1] and "/nowhere/provider.so" in found[1]


def test_nothing_is_imported_from_the_working_directory(tmp_path: Path) -> None:
    """Even where Python would: a folder with a model may hold anything."""
    package(tmp_path, "onnxruntime_qnn", "raise SystemExit('imported')")
    package(tmp_path, "windowsml", "raise SystemExit('imported')")
    assert python(FIND, cwd=tmp_path) == []
    (tmp_path / "onnxruntime_qnn.py").write_text("raise SystemExit('run')")
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
    found = {each["name"]: each for each in python(FIND, tmp_path)}
    assert list(found) == ["VitisAIExecutionProvider", QNN, OPENVINO]
    assert {each["source"] for each in found.values()} == {"windowsml"}
    assert "vitis.dll" in found["VitisAIExecutionProvider"]["failure"] and "qnn.dll" in found[QNN]["failure"]
    assert "has not downloaded it" in found[OPENVINO]["failure"] and f"'{OPENVINO}'" in found[OPENVINO]["failure"]


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
    assert choose_provider("gpu", [CPU, "CUDAExecutionProvider"]).name == "CUDAExecutionProvider"
    intel = choose_provider("GPU", [OPENVINO, CPU])
    assert (intel.name, intel.kind, intel.index) == (OPENVINO, "GPU", None)
    second = choose_provider("gpu.1", ["CUDAExecutionProvider"])
    assert (second.name, second.kind, second.index) == ("CUDAExecutionProvider", "GPU", 1)
    assert choose_provider("cpu", []).name == "CPUExecutionProvider"
    assert not choose_provider("NPU", []).may_be_cpu and choose_provider("prefer-npu", []).may_be_cpu


class Settings:
    """Takes the place of SessionOptions and notes the devices and options that a plug-in gets."""

    def __init__(self) -> None:
        self.given: list[tuple[list[Any], dict[str, str]]] = []

    def add_session_config_entry(self, key: str, value: str) -> None:
        assert key == "session.record_ep_graph_assignment_info"

    def add_provider_for_devices(self, devices: list[Any], options: dict[str, str]) -> None:
        self.given.append((devices, options))


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
        settings = Settings()
        assert apply_choice(choose_provider(asked, [OPENVINO]), settings) == {}
        assert settings.given == [([device], {})]
    with pytest.raises(RuntimeUnavailable, match=r"only 2 of GPU behind OpenVINOExecutionProvider"):
        apply_choice(choose_provider("GPU.2", [OPENVINO]), Settings())
    del devices[1:]
    apply_choice(choose_provider(OPENVINO, [OPENVINO]), Settings())
    assert "OpenVINOExecutionProvider: it has no device here but the CPU" in caplog.text


def test_a_registered_plug_in_gets_its_device_although_its_name_is_in_the_list_of_providers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As ONNX Runtime 1.31 lists it. By its name alone it would get no device, and the CPU would run the model."""
    device, settings = found_device(QNN, "NPU"), Settings()
    monkeypatch.setattr(ort, "get_available_providers", lambda: [CPU, QNN])
    monkeypatch.setattr(ort, "get_ep_devices", lambda: [device])
    monkeypatch.setattr(onnxruntime_providers, "register_plugins", lambda: (Plugin(QNN, "onnxruntime-qnn"),))
    assert apply_choice(choose_provider(QNN, [QNN]), settings) == {}
    assert settings.given == [([device], {})]


def test_a_provider_that_is_built_in_gets_the_number_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an option, in the provider's own words; one that takes none refuses it."""
    built_in = ["CUDAExecutionProvider", OPENVINO, "WebGpuExecutionProvider"]
    monkeypatch.setattr(ort, "get_available_providers", lambda: built_in)
    for name, expected in zip(built_in, ({"device_id": "1"}, {"device_type": "GPU.1"}), strict=False):
        arguments = apply_choice(choose_provider("GPU.1", [name]), Settings())
        assert arguments == {"providers": [name], "provider_options": [expected]}
    with pytest.raises(ConfigError, match=r"WebGpuExecutionProvider takes no number of a device"):
        apply_choice(choose_provider("GPU.1", built_in[2:]), Settings())


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
