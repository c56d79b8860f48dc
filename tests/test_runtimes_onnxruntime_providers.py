"""Tests which provider of ONNX Runtime a device means, and that nothing else runs the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import onnxruntime as ort
import pytest

from outrider.models.errors import ConfigError, RuntimeUnavailable
from outrider.models.runtimes.onnxruntime_providers import (
    CPU,
    ProviderChoice,
    apply_choice,
    check_provider,
    choose_provider,
)


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
