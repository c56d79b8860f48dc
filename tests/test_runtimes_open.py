"""Opens runtimes by name: unknown names, missing packages, and what opening does not import.

Then which provider of ONNX Runtime a device means, and that nothing else runs the model.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime as ort
import pytest

from outrider.models import runtimes
from outrider.models.errors import BundleError, ConfigError, RuntimeUnavailable
from outrider.models.runtimes import open_batch_runtime, open_sequence_runtime
from outrider.models.runtimes.base import PROMISED_POSITIONS, RuntimeOptions
from outrider.models.runtimes.onnxruntime_providers import (
    CPU,
    ProviderChoice,
    apply_choice,
    check_provider,
    choose_provider,
)

OPTIONS = RuntimeOptions()


def test_unknown_names_list_the_known_ones(tmp_path: Path) -> None:
    """A misspelt runtime is a ConfigError that lists the runtimes."""
    with pytest.raises(ConfigError, match="no runtime named 'vllm'; expected one of openvino, torch"):
        open_batch_runtime("vllm", tmp_path, OPTIONS)
    with pytest.raises(ConfigError, match="no runtime named 'torch'; expected one of openvino"):
        open_sequence_runtime("torch", tmp_path, OPTIONS)


@pytest.mark.parametrize(
    ("opener", "kind", "package", "extra"),
    [
        (open_batch_runtime, "openvino", "openvino", "cloud"),
        (open_batch_runtime, "torch", "torch", "torch"),
        (open_sequence_runtime, "openvino", "openvino", "edge"),
    ],
)
def test_a_missing_package_prints_the_pip_command(
    opener: Callable[[str, Path, RuntimeOptions], object],
    kind: str,
    package: str,
    extra: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error for a missing package names the extra that installs it."""
    for name in [name for name in sys.modules if name.startswith("outrider.models.runtimes.")]:
        if not name.endswith(".base"):
            # Put back in both places: a later test would patch the package's module, which no runtime uses.
            monkeypatch.setattr(runtimes, name.rpartition(".")[2], sys.modules[name], raising=False)
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        RuntimeUnavailable, match=rf'needs the package \'{package}\'.*pip install "outrider\[{extra}\]"'
    ):
        opener(kind, tmp_path, OPTIONS)


def test_the_package_itself_imports_no_runtime() -> None:
    """Neither openvino nor torch is loaded before a runtime is opened."""
    code = (
        "import sys, outrider.models.runtimes, tests.fake_runtime, outrider.models.runtimes.ngram\n"
        "assert not {'openvino', 'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=True)


def test_torch_refuses_what_it_cannot_do(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Devices, types, sizes and directories that do not work each have an error that names them."""
    model = tiny_model("llama")
    with pytest.raises(ConfigError, match="device is 'abacus'"):
        open_batch_runtime("torch", model, RuntimeOptions(device="abacus"))
    with pytest.raises(ConfigError, match="dtype is 'int3'; the torch runtime takes f32, bf16, f16"):
        open_batch_runtime("torch", model, RuntimeOptions(properties={"dtype": "int3"}))
    with pytest.raises(ConfigError, match="kv_cache_bytes is 10;"):
        open_batch_runtime("torch", model, RuntimeOptions(kv_cache_bytes=10))
    with pytest.raises(BundleError, match="transformers cannot load"):
        open_batch_runtime("torch", tmp_path, OPTIONS)
    for family in ("bloom", "gpt_neo"):
        with pytest.raises(BundleError, match=rf"{family} does not use transformers' attention interface"):
            open_batch_runtime("torch", tiny_model(family), OPTIONS)


def test_torch_keeps_to_the_length_that_an_export_promises(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """The exporter writes it to config.json, beside the model's own length."""
    model = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps(config | {PROMISED_POSITIONS: 100}), encoding="utf-8")
    for options, expected in ((OPTIONS, 100), (RuntimeOptions(max_positions=64), 64)):
        runtime = open_batch_runtime("torch", model, options)
        assert runtime.limits.max_positions == expected
        runtime.close()


# -- providers of ONNX Runtime -----------------------------------------------------------------------------------------


def test_gpu_is_the_first_provider_that_is_there() -> None:
    """NVIDIA's comes first; Intel's takes the type of device as an option."""
    assert choose_provider("gpu", ["CPUExecutionProvider", "CUDAExecutionProvider"]).name == "CUDAExecutionProvider"
    intel = choose_provider("GPU", ["OpenVINOExecutionProvider", "CPUExecutionProvider"])
    assert (intel.name, intel.kind, intel.index) == ("OpenVINOExecutionProvider", "GPU", None)
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
    intel = "OpenVINOExecutionProvider"
    devices = [found_device(intel, kind) for kind in ("CPU", "GPU", "GPU", "NPU")]
    monkeypatch.setattr(ort, "get_ep_devices", lambda: devices)
    for asked, device in (("GPU", devices[1]), ("gpu.1", devices[2]), (intel, devices[3])):
        settings = Settings()
        assert apply_choice(choose_provider(asked, [intel]), settings) == {}
        assert settings.given == [([device], {})]
    with pytest.raises(RuntimeUnavailable, match=r"only 2 of GPU behind OpenVINOExecutionProvider"):
        apply_choice(choose_provider("GPU.2", [intel]), Settings())
    del devices[1:]
    apply_choice(choose_provider(intel, [intel]), Settings())
    assert "OpenVINOExecutionProvider: it has no device here but the CPU" in caplog.text


def test_a_provider_that_is_built_in_gets_the_number_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an option, in the provider's own words; one that takes none refuses it."""
    built_in = ["CUDAExecutionProvider", "OpenVINOExecutionProvider", "WebGpuExecutionProvider"]
    monkeypatch.setattr(ort, "get_available_providers", lambda: built_in)
    for name, expected in zip(built_in, ({"device_id": "1"}, {"device_type": "GPU.1"}), strict=False):
        arguments = apply_choice(choose_provider("GPU.1", [name]), Settings())
        assert arguments == {"providers": [name], "provider_options": [expected]}
    with pytest.raises(ConfigError, match=r"WebGpuExecutionProvider takes no number of a device"):
        apply_choice(choose_provider("GPU.1", built_in[2:]), Settings())


def test_a_provider_that_took_nothing_that_can_be_seen_is_an_error() -> None:
    """A model without a known matrix product proves nothing: the CPU may have run all of it."""
    node = SimpleNamespace(op_type="FusedProduct")
    session = SimpleNamespace(
        get_provider_graph_assignment_info=lambda: [SimpleNamespace(ep_name=CPU, get_nodes=lambda: [node])],
        get_providers=lambda: ["WebGpuExecutionProvider", CPU],
    )
    with pytest.raises(RuntimeUnavailable, match=r"WebGpuExecutionProvider ran only 0 of 0 matrix products"):
        check_provider(session, ProviderChoice("WebGpuExecutionProvider", asked="GPU"))
    assert check_provider(session, ProviderChoice(CPU)) == CPU


def test_a_version_that_reports_no_providers_runs_on_the_cpu_only() -> None:
    """ONNX Runtime 1.23, the last for Macs with an Intel processor."""
    session = object()
    assert check_provider(session, ProviderChoice(CPU)) == CPU
    with pytest.raises(RuntimeUnavailable, match="does not report what GPU ran; draft on the CPU"):
        check_provider(session, ProviderChoice("CoreMLExecutionProvider", asked="GPU"))
