"""Tests which devices are found, what would help where one is missing, and what `outrider run` says of its draft."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock

import onnxruntime
import openvino
import pytest
from tests.commands import Outrider, screen
from tests.drafts import ALL_DEVICES, CPU_ONLY, manifest_for
from tests.serving import FakeServer, serve_fake
from tests.test_edge_placement import bundle
from tests.test_edge_shelf import offer

from outrider.cloud.recent.store import MemoryStore
from outrider.edge.cli.devices_screen import DRAFTS, devices_as_json, show_devices
from outrider.edge.devices.advice import gpu_advice, has_intel_plugins, npu_advice, provider_advice
from outrider.edge.devices.discovery import (
    FoundDevice,
    FoundRuntime,
    advice,
    find_runtime,
    install_advice,
    require_device,
)
from outrider.edge.devices.placement import DraftChoice, Placement, place_draft
from outrider.edge.modes.assemble import open_drafter
from outrider.edge.modes.draft_ladder import candidates_of
from outrider.edge.store.choice import Wishes, judge
from outrider.models.bundle.bundle import Bundle
from outrider.models.bundle.manifest import Device
from outrider.models.errors import ConfigError, RuntimeUnavailable
from outrider.models.process.extras import missing_extra
from outrider.models.runtimes.base import RuntimeOptions
from outrider.models.runtimes.npu_compile import npu_core


def test_a_runtime_that_is_not_installed_is_answered_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Asking finds it missing; wanting a device of it says how to get it."""
    for runtime, device in DRAFTS:
        monkeypatch.setitem(sys.modules, runtime, None)
        assert find_runtime(runtime) == FoundRuntime(runtime, None, ())
        extra = {"openvino": "edge", "onnxruntime": "edge-onnxruntime"}[runtime]
        with pytest.raises(RuntimeUnavailable, match=rf'not installed; run: pip install "outrider\[{extra}\]"'):
            require_device(runtime, device)


@pytest.mark.parametrize("error", [ImportError("DLL load failed"), RuntimeError("no plugins.xml")])
def test_a_broken_runtime_is_told_and_does_not_hide_the_other(
    error: Exception, monkeypatch: pytest.MonkeyPatch, outrider: Outrider
) -> None:
    """In the list of devices, and where drafts are chosen: for the other runtime, and for this one."""

    monkeypatch.setattr("outrider.edge.devices.discovery._find_openvino", Mock(side_effect=error))
    why = f"OpenVINO cannot be used: {type(error).__name__}: {error}"
    with pytest.raises(RuntimeUnavailable, match=why):
        require_device("openvino", "cpu")
    assert {each["runtime"] for each in json.loads(outrider("devices", "--json").out)["missing"]} == {"onnxruntime"}
    shown = " ".join(outrider("devices").out.split())
    assert why in shown and "CPUExecutionProvider" in shown and "not installed" not in shown
    one, other = judge([offer("one"), offer("other", runtime="onnxruntime")], Wishes())
    assert why in str(one.why_not) and other.why_not is None
    drafts = [bundle("one", "openvino", "cpu"), bundle("other", "onnxruntime", "cpu")]
    assert [each.bundle for each in candidates_of(drafts, DraftChoice())] == drafts[1:]


def test_what_is_found_here_is_what_the_runtimes_say() -> None:
    """Every machine has a CPU in both."""
    found = find_runtime("openvino")
    assert [device.name for device in found.devices] == openvino.Core().available_devices and found.has("cpu")
    assert found.version is not None and openvino.__version__.startswith(found.version)
    onnx = find_runtime("onnxruntime")
    assert onnx.version == onnxruntime.__version__ and onnx.has("cpu") and not onnx.has("npu")
    assert {device.name for device in onnx.devices} <= set(onnxruntime.get_available_providers())


def test_devices_that_this_machine_lacks_are_told_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several GPUs are one family; a driver's version is told where the driver tells it."""
    names = {
        "CPU": "Intel(R) Core(TM) Ultra",
        "GPU.0": "Arc (iGPU)",
        "GPU.1": "Arc (dGPU)",
        "NPU": "Intel(R) AI Boost ",
        "GPU.2": "its driver is broken",
    }

    class Core:
        available_devices = tuple(names)

        def get_property(self, device: str, name: str) -> object:
            if name == "FULL_DEVICE_NAME" and device != "GPU.2":
                return names[device]
            if device == "NPU" and name == "NPU_DRIVER_VERSION":
                return 1005
            raise RuntimeError(f"{device} has no {name}")

    monkeypatch.setitem(sys.modules, "openvino", Mock(Core=Core, __version__="2026.4.1-1-releases"))
    found = find_runtime("openvino")
    assert found.version == "2026.4.1"
    assert [(device.name, device.full_name, device.device, device.driver) for device in found.devices] == [
        ("CPU", "Intel(R) Core(TM) Ultra", "cpu", None),
        ("GPU.0", "Arc (iGPU)", "gpu", None),
        ("GPU.1", "Arc (dGPU)", "gpu", None),
        ("NPU", "Intel(R) AI Boost", "npu", "1005"),
        ("GPU.2", "cannot be used: GPU.2 has no FULL_DEVICE_NAME", None, None),
    ]
    for device in get_args(Device):
        require_device("openvino", device, found)
    manifest = manifest_for("openvino", "gpu", "GPU")
    for asked, opened in (("gpu.1", "GPU.1"), ("GPU.0", "GPU.0"), ("gpu", "GPU")):
        placement = place_draft(manifest, DraftChoice(device=asked), found)
        assert (placement.device, placement.open_on) == ("gpu", opened)
        assert placement.words.endswith(f"OpenVINO on the {opened}")
    with pytest.raises(RuntimeUnavailable, match=r"sees no GPU\.2 on this machine, only CPU .*GPU\.1 \(Arc \(dGPU\)\)"):
        place_draft(manifest, DraftChoice(device="gpu.2"), found)


@pytest.mark.parametrize("asked", ["cpu.1", "gpu.", "gpu.x", "xpu", "gpu.1.2"])
def test_a_device_that_cannot_be_is_refused(asked: str) -> None:
    """With the words that are expected."""
    with pytest.raises(ConfigError, match=r"--draft-device is .*; expected cpu, gpu or npu, or one .* such as gpu\.1"):
        DraftChoice(device=asked)


NODE, DRIVER, RENDER = "dev/accel/accel0", "sys/module/intel_vpu/version", "dev/dri/renderD128"


@pytest.mark.parametrize(
    ("advice", "paths", "may_use", "said"),
    [
        (npu_advice, (), True, "no /dev/accel/accel0"),
        (npu_advice, (DRIVER,), True, "intel-fw-npu"),
        (npu_advice, (NODE,), True, "another driver than intel_vpu"),
        (npu_advice, (NODE, DRIVER), False, "usermod -aG render"),
        (npu_advice, (NODE, DRIVER), True, "intel-level-zero-npu and intel-driver-compiler"),
        (gpu_advice, (), True, "no /dev/dri/renderD*"),
        (gpu_advice, (RENDER,), False, "may not open /dev/dri/renderD128: run `sudo usermod -aG render"),
        (gpu_advice, (RENDER,), True, "intel-opencl-icd"),
    ],
)
def test_on_linux_the_first_thing_that_is_missing_is_named(
    tmp_path: Path, advice: Callable[..., str], paths: tuple[str, ...], may_use: bool, said: str
) -> None:
    """Kernel module, firmware, access, user-space driver: in the order in which they are needed. An NVIDIA GPU is ONNX
    Runtime's.
    """
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).touch()
    told = advice("linux", tmp_path, lambda node: may_use, "x86_64")
    assert said in told and (advice is npu_advice or "--runtime onnxruntime" in told)


@pytest.mark.parametrize(
    ("told", "named"),
    [
        (npu_advice("win32", machine="AMD64"), "Intel(R) AI Boost"),
        (gpu_advice("win32", machine="AMD64"), "graphics driver"),
        (provider_advice("gpu", "linux", "x86_64"), "onnxruntime-gpu"),
        (provider_advice("npu", "win32", "AMD64"), "onnxruntime-qnn"),
    ],
)
def test_elsewhere_the_vendors_driver_is_named(told: str, named: str) -> None:
    """Windows has drivers from its vendors; a Mac has none for OpenVINO."""
    assert named in told


@pytest.mark.parametrize(
    ("platform", "machine"), [("darwin", "arm64"), ("darwin", "x86_64"), ("win32", "ARM64"), ("linux", "aarch64")]
)
def test_where_intels_plugins_are_not_built_nothing_of_theirs_is_advised(platform: str, machine: str) -> None:
    """No driver of Intel's, no emulation; a Mac's GPU is Metal's, and CUDA is named where NVIDIA's GPUs are."""
    assert not has_intel_plugins(platform, machine)
    own = [npu_advice(platform, machine=machine), gpu_advice(platform, machine=machine)]
    words = " ".join([*own, provider_advice("npu", platform, machine), provider_advice("gpu", platform, machine)])
    for wrong in ("intel_vpu", "level-zero", "opencl", "graphics driver", "AI Boost", "--emulate", "ep-openvino"):
        assert wrong not in words
    assert ("Metal" in words) == (platform == "darwin") and ("NVIDIA" in words) == (platform != "darwin")
    assert ("onnxruntime-directml" in words) == (platform == "win32")
    assert all("x86-64 Linux and Windows only" in each for each in own)


def test_emulation_is_advised_only_where_its_plugin_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """And asking for it elsewhere is one clear error."""
    for is_there in (True, False):
        monkeypatch.setattr("outrider.edge.devices.discovery.has_intel_plugins", lambda is_there=is_there: is_there)
        assert ("--emulate-npu" in advice("openvino", "npu")) == is_there
    monkeypatch.setattr(openvino.Core, "get_versions", lambda core, device: {})
    with pytest.raises(RuntimeUnavailable, match=r"no NPU plugin, .* draft with a bundle for the CPU"):
        npu_core(RuntimeOptions(emulate_npu=True))


def test_where_openvino_has_no_package_nobody_is_told_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by `outrider devices` nor by a runtime that is missing."""
    for module in ("edge.devices.discovery", "models.process.extras"):
        monkeypatch.setattr(f"outrider.{module}.has_openvino_package", lambda: False)
    assert "pip install" not in install_advice("openvino") and "--runtime ngram" in install_advice("openvino")
    assert "edge-onnxruntime" in install_advice("onnxruntime")
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(RuntimeUnavailable, match=r"^OpenVINO is not made for this system .*--runtime onnxruntime"):
        require_device("openvino", "cpu")
    missing = missing_extra(ModuleNotFoundError(name="openvino"), "the openvino runtime", "edge")
    assert "the openvino runtime needs OpenVINO, which is not made for this system" in str(missing)


def test_outrider_devices_lists_what_is_here_and_what_would_help(outrider: Outrider) -> None:
    """--json is one document with the same content."""
    document = json.loads(outrider("devices", "--json").out)
    assert document == json.loads(json.dumps(devices_as_json([find_runtime("openvino"), find_runtime("onnxruntime")])))
    here = {(entry["runtime"], device["device"]) for entry in document["runtimes"] for device in entry["devices"]}
    missing = {(entry["runtime"], entry["device"]) for entry in document["missing"]}
    assert here >= {("openvino", "cpu"), ("onnxruntime", "cpu")} and missing == set(DRAFTS) - here
    assert all(entry["help"] for entry in document["missing"])


def test_the_table_of_devices_has_a_row_for_each_and_a_paragraph_for_what_is_missing() -> None:
    """Also for a runtime that is not installed, and a provider that no bundle is made for."""
    providers = (
        FoundDevice("CPUExecutionProvider", "a cpu", "cpu"),
        FoundDevice("XnnpackExecutionProvider", "x", None),
    )
    for found, parts in (
        (CPU_ONLY, ["Some Processor", "--device cpu", "no NPU in OpenVINO", "no GPU in OpenVINO"]),
        (ALL_DEVICES["openvino"], ["a npu", "--device npu", "--device gpu"]),
        (FoundRuntime("openvino", None, ()), ['pip install "outrider[edge]"']),
        (FoundRuntime("onnxruntime", None, ()), ['pip install "outrider[edge-onnxruntime]"']),
        (FoundRuntime("onnxruntime", "1", providers), ["no draft is made for it", "no GPU in ONNX Runtime"]),
    ):
        console, out = screen(width=200, no_color=True)
        show_devices(console, [found])
        assert all(part in out.getvalue() for part in parts), out.getvalue()
        assert ("no NPU" in out.getvalue()) == (found is CPU_ONLY)


@pytest.fixture
def command(server: FakeServer, fake_bundle: Path) -> list[Any]:
    """`outrider run` of eight tokens from the fake server; add to it."""
    words = ["run", "def def def def", "--cloud", server.url, "--draft", fake_bundle]
    return [*words, "--seed", "4", "--max-tokens", "8", "--ignore-eos"]


def test_a_run_says_what_drafted(outrider: Outrider, command: list[Any]) -> None:
    """In the summary and in the JSON; nothing where nothing drafts."""
    texts = list[str]()
    for how, words, data in (
        (("--runtime", "ngram"), "drafted by: n-gram lookup, no model", Placement("ngram").as_json()),
        (("--mode", "cloud-only"), "", None),
    ):
        shown, document = outrider(*command, *how), json.loads(outrider(*command, *how, "--json").out)
        assert words in shown.err and ("drafted by" in shown.err) == bool(words)
        assert document["draft"] == data and shown.out == document["text"]
        texts.append(shown.out)
    assert texts[0] == texts[1]


def test_a_comparison_starts_from_nothing(fake_bundle: Path, outrider: Outrider) -> None:
    """The server drafts none of its texts from an earlier one, and keeps none; another run's text is kept."""
    with serve_fake(recent=MemoryStore()) as server:
        assert server.core.recent is not None
        command = ["run", "def def", "--cloud", server.url, "--draft", fake_bundle, "--runtime", "ngram"]
        for arguments, num in ((["--compare"], 0), ([], 1)):
            outrider(*command, "--ignore-eos", *arguments)
            server.wait_until(server.is_empty)
            counts = server.core.recent.stats().counts
            assert (counts.misses, counts.stored) == (num, num)


def test_a_comparison_of_a_text_that_is_too_short_is_refused(outrider: Outrider, command: list[Any]) -> None:
    """Eight tokens have no rate that a ratio could be made of; the texts are still compared."""
    document = json.loads(outrider(*command, "--runtime", "ngram", "--compare", "--json").out)
    assert document == document | {"speed_up": None, "speed_ups": [], "identical": True}
    assert document["speed_up_unknown"] in ("only 8 tokens", "the text came in one burst")
    about = outrider(*command, "--runtime", "ngram", "--compare").err
    assert "Too short to compare: " in about and "Raise --max-tokens." in about and "the same text" in about


def test_the_prompt_is_read_from_standard_input_where_none_is_given(
    outrider: Outrider, command: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newline that echo adds is no part of it; - says the same."""
    texts, (run, prompt, *options) = set[str](), command
    for given, piped in (([prompt], b""), ([], prompt.encode() + b"\n"), (["-"], prompt.encode())):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(piped)))
        texts.add(outrider(run, *given, *options, "--mode", "cloud-only").out)
    assert len(texts) == 1


def test_a_provider_is_chosen_by_name_or_by_policy_and_the_one_that_ran_is_told(
    onnx_draft: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A name that is not here is an error; only a policy may end on the CPU, and that is logged."""
    if find_runtime("onnxruntime").has("npu"):
        pytest.skip("this machine has an NPU that ONNX Runtime drives")
    bundle = Bundle.open(onnx_draft)
    for asked in ("CPUExecutionProvider", "prefer-npu"):
        opened = open_drafter(bundle, DraftChoice(provider=asked), num_threads=1)
        opened.drafter.close()
        found = opened.placement
        assert (found.words, found.notes) == ("int8, ONNX Runtime on the CPU (CPUExecutionProvider)", ())
        assert ("no NPU took the model" in caplog.text) == (asked == "prefer-npu")
    for missing in (DraftChoice(provider="QNNExecutionProvider"), DraftChoice(device="npu")):
        with pytest.raises(RuntimeUnavailable, match="onnxruntime-qnn"):
            open_drafter(bundle, missing)
    with pytest.raises(ConfigError, match=r"expected CPU, GPU, GPU\.1, NPU, prefer-npu or a provider's full name"):
        open_drafter(bundle, DraftChoice(provider="abacus"))
