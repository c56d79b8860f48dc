"""Tests which devices are found, where a bundle may run, and the messages about both."""

from __future__ import annotations

import asyncio
import io
import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import onnxruntime
import openvino
import pytest
from rich.console import Console
from tests.fake_runtime import FakeSequenceRuntime
from tests.serving import FakeServer, fake_tokenizer, save_fake_tokenizer, serve_fake, target_tokens
from tests.test_bundle import make_manifest

from outrider.cloud.recent.store import MemoryStore
from outrider.edge.cli import main as cli
from outrider.edge.cli.devices_screen import DRAFTS, devices_as_json, show_devices
from outrider.edge.cli.summary import draft_lines
from outrider.edge.devices import discovery
from outrider.edge.devices.advice import gpu_advice, has_intel_plugins, npu_advice, provider_advice
from outrider.edge.devices.discovery import FoundDevice, FoundRuntime, find_runtime, install_advice, require_device
from outrider.edge.devices.placement import AS_BUNDLED, EMULATED_NPU, DraftChoice, Placement, opened_as, place_draft
from outrider.edge.drafting.drafter import ModelDrafter
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.assemble import make_agent, open_drafter
from outrider.edge.results import GenerationRequest, GenerationResult, Mode
from outrider.models.bundle.bundle import Bundle
from outrider.models.bundle.bundle_writer import BundleWriter
from outrider.models.bundle.manifest import Device, FileEntry, Manifest, StaticShapes
from outrider.models.client.client import VerifierClient
from outrider.models.errors import BundleError, ConfigError, RuntimeUnavailable
from outrider.models.picks.sampling import SamplingParams
from outrider.models.process import extras
from outrider.models.runtimes.base import RuntimeOptions
from outrider.models.runtimes.npu_compile import npu_core

EMULATED = "NPU path emulated on the CPU; not run on hardware"
ALL_DEVICES = {
    "openvino": FoundRuntime(
        "openvino", "1", tuple(FoundDevice(name.upper(), "a " + name, name) for name in get_args(Device))
    ),
    "onnxruntime": FoundRuntime(
        "onnxruntime",
        "1",
        (
            FoundDevice("CUDAExecutionProvider", "a gpu", "gpu"),
            FoundDevice("CPUExecutionProvider", "a cpu", "cpu"),
            FoundDevice("QNNExecutionProvider", "an npu", "npu"),
        ),
    ),
}
PROVIDERS = {
    ("onnxruntime", "CPU"): "CPUExecutionProvider",
    ("onnxruntime", "GPU"): "CUDAExecutionProvider",
    ("onnxruntime", "NPU"): "QNNExecutionProvider",
    ("onnxruntime", "prefer-npu"): "QNNExecutionProvider",
}
CPU_ONLY = FoundRuntime("openvino", "1", (FoundDevice("CPU", "Some Processor", "cpu"),))


def manifest_for(runtime: str, device: str, checked_on: str) -> Manifest:
    """A draft's manifest."""
    manifest = make_manifest((FileEntry(path="openvino_model.xml", size=1, sha256="0" * 64),), "0" * 64)
    parity = manifest.report.parity.model_copy(update={"checked_on": checked_on})
    return manifest.model_copy(
        update={
            "runtime": runtime,
            "device": device,
            "precision": "int8",
            "static_shapes": StaticShapes() if device == "npu" else None,
            "report": manifest.report.model_copy(update={"parity": parity}),
        }
    )


@pytest.mark.parametrize(
    ("made", "choice", "placed"),
    [
        (("openvino", "cpu", "CPU"), AS_BUNDLED, ("openvino", "cpu", False, 0)),
        (("openvino", "cpu", "CPU"), DraftChoice("openvino", "cpu"), ("openvino", "cpu", False, 0)),
        (("openvino", "cpu", "CPU"), DraftChoice(device="gpu"), ("openvino", "gpu", False, 1)),
        (("openvino", "gpu", "GPU"), AS_BUNDLED, ("openvino", "gpu", False, 0)),
        (("openvino", "gpu", "GPU"), DraftChoice(device="cpu"), ("openvino", "cpu", False, 1)),
        (
            ("openvino", "gpu", "CPU in place of a GPU; not run on hardware"),
            DraftChoice(device="cpu"),
            ("openvino", "cpu", False, 0),
        ),
        (
            ("openvino", "gpu", "CPU in place of a GPU; not run on hardware"),
            AS_BUNDLED,
            ("openvino", "gpu", False, 1),
        ),
        (("openvino", "npu", "NPU"), AS_BUNDLED, ("openvino", "npu", False, 0)),
        (("openvino", "npu", EMULATED), DraftChoice(emulate_npu=True), ("openvino", "npu", True, 0)),
        (("openvino", "npu", EMULATED), DraftChoice("openvino", "npu", True), ("openvino", "npu", True, 0)),
        (("openvino", "npu", EMULATED), DraftChoice(device="npu"), ("openvino", "npu", False, 1)),
        (("openvino", "npu", "NPU"), DraftChoice(emulate_npu=True), ("openvino", "npu", True, 1)),
        (("onnxruntime", "cpu", "CPU"), DraftChoice("onnxruntime"), ("onnxruntime", "cpu", False, 0)),
        (("onnxruntime", "gpu", "CUDAExecutionProvider"), AS_BUNDLED, ("onnxruntime", "gpu", False, 0)),
        (("onnxruntime", "gpu", "CUDAExecutionProvider"), DraftChoice(device="cpu"), ("onnxruntime", "cpu", False, 1)),
        (("onnxruntime", "cpu", "CPU"), DraftChoice(device="npu"), ("onnxruntime", "npu", False, 1)),
        (("onnxruntime", "cpu", "CPU"), DraftChoice(provider="CPUExecutionProvider"), ("onnxruntime", "cpu", False, 0)),
        (("onnxruntime", "cpu", "CPU"), DraftChoice(provider="DmlExecutionProvider"), ("onnxruntime", "gpu", False, 1)),
        (("onnxruntime", "cpu", "CPU"), DraftChoice(provider="prefer-npu"), ("onnxruntime", "npu", False, 1)),
    ],
)
def test_a_bundle_runs_on_the_devices_of_its_runtime_and_says_where_it_was_not_checked(
    made: tuple[str, str, str], choice: DraftChoice, placed: tuple[str, str, bool, int]
) -> None:
    """The user's device, else the bundle's; a note wherever the numerical check ran elsewhere."""
    manifest = manifest_for(*made)
    placement = place_draft(manifest, choice, ALL_DEVICES[made[0]])
    provider = PROVIDERS.get((placement.runtime, placement.open_on), placement.open_on)
    placement = opened_as(placement, manifest, EMULATED_NPU if placement.is_emulated else provider, 512)
    assert placement.max_positions == 512 and placement.provider
    assert (placement.runtime, placement.device, placement.is_emulated, len(placement.notes)) == placed
    assert all(made[2] in note for note in placement.notes)


@pytest.mark.parametrize(
    ("made", "choice", "command"),
    [
        (("openvino", "cpu", "CPU"), DraftChoice("onnxruntime"), "--device cpu --runtime onnxruntime`"),
        (("onnxruntime", "cpu", "CPU"), DraftChoice("openvino"), "--device cpu --runtime openvino`"),
        (("onnxruntime", "cpu", "CPU"), DraftChoice("openvino", "gpu"), "--device gpu --runtime openvino`"),
        (("onnxruntime", "cpu", "CPU"), DraftChoice(emulate_npu=True), "--device npu --runtime openvino`"),
        (("openvino", "npu", EMULATED), DraftChoice("onnxruntime"), "--device cpu --runtime onnxruntime`"),
        (("openvino", "cpu", "CPU"), DraftChoice("onnxruntime", "npu"), "--device cpu --runtime onnxruntime`"),
        (("openvino", "cpu", "CPU"), DraftChoice(provider="prefer-npu"), "--device cpu --runtime onnxruntime`"),
        (("openvino", "cpu", "CPU"), DraftChoice(device="npu"), "--device npu --runtime openvino`"),
        (("openvino", "cpu", "CPU"), DraftChoice(emulate_npu=True), "--device npu --runtime openvino`"),
        (("openvino", "npu", EMULATED), DraftChoice(device="gpu"), "--device gpu --runtime openvino`"),
        (("openvino", "npu", EMULATED), DraftChoice(device="cpu"), "--device cpu --runtime openvino`"),
    ],
)
def test_a_bundle_runs_in_no_other_code_than_it_was_checked_in(
    made: tuple[str, str, str], choice: DraftChoice, command: str
) -> None:
    """Whatever devices there are: the error names what the bundle is for and the command that makes the right one."""
    with pytest.raises(ConfigError) as refused:
        place_draft(manifest_for(*made), choice, ALL_DEVICES[made[0]])
    assert f"bundle for {made[0]} on {made[1]}" in str(refused.value)
    assert str(refused.value).endswith(f"`outrider-export draft MODEL {command}"), "one piece of advice"


def test_commands_in_refusals_name_bundles_that_are_made() -> None:
    """Every runtime and device that a message can name is a row of the exporter's own table."""
    from outrider.export.recipes import RECIPES

    made = {(runtime, device) for role, device, runtime in RECIPES if role == "draft"}
    assert made == set(DRAFTS)


def test_a_target_is_no_draft() -> None:
    """A bundle that no draft runtime reads is refused by name."""
    with pytest.raises(BundleError, match="made for torch, which runs no drafts"):
        place_draft(manifest_for("torch", "cpu", "CPU"), AS_BUNDLED, CPU_ONLY)


@pytest.mark.parametrize("choice", [AS_BUNDLED, DraftChoice(device="npu"), DraftChoice("openvino")])
def test_a_missing_npu_is_an_error_that_says_what_would_help(choice: DraftChoice) -> None:
    """Never another device in silence, also where the bundle alone asks for it; emulation needs none."""
    manifest = manifest_for("openvino", "npu", EMULATED)
    with pytest.raises(RuntimeUnavailable) as missing:
        place_draft(manifest, choice, CPU_ONLY)
    for part in ("sees no NPU", "CPU (Some Processor)", npu_advice(), "--emulate-npu", "--device cpu", "ngram"):
        assert part in str(missing.value)
    assert place_draft(manifest, DraftChoice(emulate_npu=True), CPU_ONLY).is_emulated


def test_a_runtime_that_is_not_installed_is_answered_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Asking finds it missing; wanting a device of it says how to get it."""
    for runtime in DRAFTS:
        monkeypatch.setitem(sys.modules, runtime[0], None)
        found = find_runtime(runtime[0])
        assert found.version is None and found.devices == ()
        extra = {"openvino": "edge", "onnxruntime": "edge-onnxruntime"}[runtime[0]]
        with pytest.raises(RuntimeUnavailable, match=rf'not installed; run: pip install "outrider\[{extra}\]"'):
            require_device(*runtime)


def test_what_is_found_here_is_what_the_runtimes_say() -> None:
    """Every machine has a CPU in both."""
    found = find_runtime("openvino")
    assert [device.name for device in found.devices] == openvino.Core().available_devices and found.has("cpu")
    assert found.version is not None and openvino.__version__.startswith(found.version)
    found = find_runtime("onnxruntime")
    assert found.version == onnxruntime.__version__ and found.has("cpu") and not found.has("npu")
    assert {device.name for device in found.devices} <= set(onnxruntime.get_available_providers())


def test_devices_that_this_machine_lacks_are_told_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several GPUs are one family; a driver's version is told where the driver tells it."""
    names = {
        "CPU": "Intel(R) Core(TM) Ultra",
        "GPU.0": "Arc (iGPU)",
        "GPU.1": "Arc (dGPU)",
        "NPU": "Intel(R) AI Boost ",
    }

    class Core:
        available_devices = tuple(names)

        def get_property(self, device: str, name: str) -> object:
            if name == "FULL_DEVICE_NAME":
                return names[device]
            if device == "NPU" and name == "NPU_DRIVER_VERSION":
                return 1005
            raise RuntimeError(f"{device} has no {name}")

    fake = types.SimpleNamespace(Core=Core, __version__="2026.4.1-1-releases")
    monkeypatch.setitem(sys.modules, "openvino", fake)
    found = find_runtime("openvino")
    assert found.version == "2026.4.1"
    assert [(device.name, device.device, device.driver) for device in found.devices] == [
        ("CPU", "cpu", None), ("GPU.0", "gpu", None), ("GPU.1", "gpu", None), ("NPU", "npu", "1005"),
    ]  # fmt: skip
    assert found.devices[-1].full_name == "Intel(R) AI Boost"
    for device in get_args(Device):
        require_device("openvino", device, found)
    manifest = manifest_for("openvino", "gpu", "GPU")
    for asked, opened in (("gpu.1", "GPU.1"), ("GPU.0", "GPU.0"), ("gpu", "GPU")):
        placement = place_draft(manifest, DraftChoice(device=asked), found)
        assert (placement.device, placement.open_on) == ("gpu", opened)
    assert place_draft(manifest, DraftChoice(device="gpu.1"), found).words.endswith("OpenVINO on the GPU.1")
    with pytest.raises(RuntimeUnavailable, match=r"sees no GPU\.2 on this machine, only CPU .*GPU\.1 \(Arc \(dGPU\)\)"):
        place_draft(manifest, DraftChoice(device="gpu.2"), found)


@pytest.mark.parametrize("asked", ["cpu.1", "gpu.", "gpu.x", "xpu", "gpu.1.2"])
def test_a_device_that_cannot_be_is_refused(asked: str) -> None:
    """With the words that are expected."""
    with pytest.raises(ConfigError, match=r"--draft-device is .*; expected cpu, gpu or npu, or one .* such as gpu\.1"):
        DraftChoice(device=asked)


def make_nodes(root: Path, *paths: str) -> Path:
    """Files under `root`, as a system without an NPU can have them."""
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()
    return root


@pytest.mark.parametrize(
    ("paths", "may_use", "said"),
    [
        ((), True, "no /dev/accel/accel0"),
        (("sys/module/intel_vpu/version",), True, "intel-fw-npu"),
        (("dev/accel/accel0",), True, "another driver than intel_vpu"),
        (("dev/accel/accel0", "sys/module/intel_vpu/version"), False, "usermod -aG render"),
        (("dev/accel/accel0", "sys/module/intel_vpu/version"), True, "intel-level-zero-npu and intel-driver-compiler"),
    ],
)
def test_on_linux_the_first_thing_that_is_missing_for_an_npu_is_named(
    tmp_path: Path, paths: tuple[str, ...], may_use: bool, said: str
) -> None:
    """Kernel module, firmware, access, user-space driver: in the order in which they are needed."""
    assert said in npu_advice("linux", make_nodes(tmp_path, *paths), lambda node: may_use, "x86_64")


@pytest.mark.parametrize(
    ("paths", "may_use", "said"),
    [
        ((), True, "no /dev/dri/renderD*"),
        (("dev/dri/renderD128",), False, "may not open /dev/dri/renderD128: run `sudo usermod -aG render"),
        (("dev/dri/renderD128",), True, "intel-opencl-icd"),
    ],
)
def test_on_linux_the_first_thing_that_is_missing_for_a_gpu_is_named(
    tmp_path: Path, paths: tuple[str, ...], may_use: bool, said: str
) -> None:
    """Kernel driver, access, compute runtime; an NVIDIA GPU is ONNX Runtime's."""
    told = gpu_advice("linux", make_nodes(tmp_path, *paths), lambda node: may_use, "x86_64")
    assert said in told and "--runtime onnxruntime" in told


def test_elsewhere_the_vendors_driver_is_named() -> None:
    """Windows has drivers from its vendors; a Mac has none for OpenVINO."""
    assert "Intel(R) AI Boost" in npu_advice("win32", machine="AMD64")
    assert "graphics driver" in gpu_advice("win32", machine="AMD64")
    assert "onnxruntime-gpu" in provider_advice("gpu", "linux", "x86_64")
    assert "onnxruntime-qnn" in provider_advice("npu", "win32", "AMD64")


@pytest.mark.parametrize(
    ("platform", "machine"), [("darwin", "arm64"), ("darwin", "x86_64"), ("win32", "ARM64"), ("linux", "aarch64")]
)
def test_where_intels_plugins_are_not_built_nothing_of_theirs_is_advised(platform: str, machine: str) -> None:
    """No driver of Intel's, no emulation; a Mac's GPU is Metal's, and CUDA is named where NVIDIA's GPUs are."""
    assert not has_intel_plugins(platform, machine)
    said = [npu_advice(platform, machine=machine), gpu_advice(platform, machine=machine)]
    said += [provider_advice("npu", platform, machine), provider_advice("gpu", platform, machine)]
    words = " ".join(said)
    for wrong in ("intel_vpu", "level-zero", "opencl", "graphics driver", "AI Boost", "--emulate", "ep-openvino"):
        assert wrong not in words
    assert ("Metal" in words) == (platform == "darwin") and ("NVIDIA" in words) == (platform != "darwin")
    assert ("onnxruntime-directml" in words) == (platform == "win32")
    assert "x86-64 Linux and Windows only" in said[0] and "x86-64 Linux and Windows only" in said[1]


def test_emulation_is_advised_only_where_its_plugin_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """And asking for it elsewhere is one clear error."""
    monkeypatch.setattr(discovery, "has_intel_plugins", lambda: True)
    assert "--emulate-npu" in discovery.advice("openvino", "npu")
    monkeypatch.setattr(discovery, "has_intel_plugins", lambda: False)
    assert "--emulate-npu" not in discovery.advice("openvino", "npu")
    monkeypatch.setattr(openvino.Core, "get_versions", lambda core, device: {})
    with pytest.raises(RuntimeUnavailable, match=r"no NPU plugin, .* draft with a bundle for the CPU"):
        npu_core(RuntimeOptions(emulate_npu=True))


def test_where_openvino_has_no_package_nobody_is_told_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by `outrider devices` nor by a runtime that is missing."""
    for module in (discovery, extras):
        monkeypatch.setattr(module, "has_openvino_package", lambda: False)
    assert "pip install" not in install_advice("openvino") and "--runtime ngram" in install_advice("openvino")
    assert "edge-onnxruntime" in install_advice("onnxruntime")
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(RuntimeUnavailable, match=r"^OpenVINO is not made for this system .*--runtime onnxruntime"):
        require_device("openvino", "cpu")
    missing = extras.missing_extra(ModuleNotFoundError(name="openvino"), "the openvino runtime", "edge")
    assert "the openvino runtime needs OpenVINO, which is not made for this system" in str(missing)


def test_outrider_devices_lists_what_is_here_and_what_would_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--json is one document with the same content."""
    monkeypatch.setattr(sys, "argv", ["outrider", "devices", "--json"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    document = json.loads(capsys.readouterr().out)
    assert not ended.value.code
    assert document == json.loads(json.dumps(devices_as_json([find_runtime("openvino"), find_runtime("onnxruntime")])))
    for entry in document["runtimes"]:
        assert {device["device"] for device in entry["devices"]} >= {"cpu"}
    here = {(entry["runtime"], device["device"]) for entry in document["runtimes"] for device in entry["devices"]}
    missing = {(entry["runtime"], entry["device"]) for entry in document["missing"]}
    assert missing == set(DRAFTS) - here and all(entry["help"] for entry in document["missing"])


def test_the_table_of_devices_has_a_row_for_each_and_a_paragraph_for_what_is_missing() -> None:
    """Also for a runtime that is not installed, and a provider that no bundle is made for."""
    providers = (
        FoundDevice("CPUExecutionProvider", "a cpu", "cpu"),
        FoundDevice("XnnpackExecutionProvider", "x", None),
    )
    nothing = FoundRuntime("openvino", None, ())
    for found, parts in (
        (CPU_ONLY, ["Some Processor", "--device cpu", "no NPU in OpenVINO", "no GPU in OpenVINO"]),
        (ALL_DEVICES["openvino"], ["a npu", "--device npu", "--device gpu"]),
        (nothing, ['pip install "outrider[edge]"']),
        (FoundRuntime("onnxruntime", None, ()), ['pip install "outrider[edge-onnxruntime]"']),
        (FoundRuntime("onnxruntime", "1", providers), ["no draft is made for it", "no GPU in ONNX Runtime"]),
    ):
        out = io.StringIO()
        show_devices(Console(file=out, width=200, no_color=True), [found])
        assert all(part in out.getvalue() for part in parts), out.getvalue()
        assert ("no NPU" in out.getvalue()) == (found is CPU_ONLY)


def test_what_drafts_is_told_in_words_and_as_data() -> None:
    """The device, the runtime, the precision, the provider; an emulation is called one."""
    emulated = Placement("openvino", "npu", True, "int8", "NPU", EMULATED_NPU)
    assert emulated.words == "int8, OpenVINO's NPU path emulated on the CPU"
    assert Placement("openvino", "gpu", False, "int4", "GPU", "GPU").words == "int4, OpenVINO on the GPU"
    onnx = Placement("onnxruntime", "cpu", False, "int8", "CPU", "CPUExecutionProvider")
    assert onnx.words == "int8, ONNX Runtime on the CPU (CPUExecutionProvider)"
    assert Placement("onnxruntime", None, False, "int8", "prefer-npu").words == "int8, ONNX Runtime"
    assert Placement("ngram").words == "n-gram lookup, no model"
    assert json.loads(json.dumps(emulated.as_json())) == {
        "runtime": "openvino",
        "device": "npu",
        "provider": "NPU path emulated on the CPU",
        "precision": "int8",
        "is_emulated": True,
        "max_positions": None,
        "notes": [],
    }


def test_the_summary_says_from_where_on_a_text_was_too_long_for_the_draft() -> None:
    """Once, and only then."""
    placement = Placement("openvino", "npu", True, "int8", max_positions=100)
    assert len(draft_lines(placement, 60, 40)) == 1
    assert "the cloud wrote everything after 40 tokens undrafted" in draft_lines(placement, 60, 41)[1]
    assert "the cloud wrote the whole text undrafted" in draft_lines(placement, 100, 1)[1]
    assert len(draft_lines(Placement("ngram"), 10_000, 1)) == 1


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with serve_fake() as server:
        yield server


@pytest.mark.parametrize("mode", [Mode.STREAM, Mode.STOP_AND_WAIT])
@pytest.mark.parametrize("num_prompt", [15, 16, 17, 40])
def test_a_prompt_that_the_draft_cannot_hold_is_continued_by_the_cloud_alone(
    server: FakeServer, mode: Mode, num_prompt: int
) -> None:
    """An NPU's positions are fixed at export: beyond them nothing is drafted, and the text is the same."""
    prompt, params = tuple(range(5, 5 + num_prompt)), SamplingParams(0.7, seed=3)
    request = GenerationRequest(prompt, params, 12, stop_ids=frozenset(), ignore_eos=True)
    draft = ModelDrafter(FakeSequenceRuntime(vocab_size=fake_tokenizer().size, max_positions=16))

    async def generate() -> GenerationResult:
        async with VerifierClient(server.url) as client:
            return await make_agent(mode, Endpoints([client]), draft, "4").generate(request)

    result = asyncio.run(generate())
    assert result.tokens == tuple(target_tokens(prompt, 12, params)) and result.draft_error is None
    assert result.num_drafted <= max(0, 16 - num_prompt) * 12  # a rejected one may be drafted again
    assert (result.num_drafted > 0) == (num_prompt < 16)


@pytest.fixture
def fake_bundle(tmp_path: Path) -> Path:
    """A draft bundle with the fake server's tokenizer and a model that nothing can run."""
    with BundleWriter(tmp_path / "draft") as writer:
        save_fake_tokenizer(writer.directory)
        for suffix in ("xml", "bin"):
            (writer.directory / f"openvino_model.{suffix}").write_text("none")
        return writer.commit(make_manifest(writer.list_files(), fake_tokenizer().fingerprint)).path


Run = Callable[..., tuple[str, str]]


@pytest.fixture
def run(
    server: FakeServer, fake_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """`run("--json", ...)`: standard output and error of `outrider run`, of eight tokens from the fake server."""

    def run(*arguments: str) -> tuple[str, str]:
        command = ["outrider", "run", "def def def def", "--cloud", server.url, "--draft", str(fake_bundle)]
        monkeypatch.setattr(sys, "argv", [*command, "--seed", "4", "--max-tokens", "8", "--ignore-eos", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        shown = capsys.readouterr()
        assert not ended.value.code, shown.err
        return shown.out, shown.err

    return run


def test_a_run_says_what_drafted(run: Run) -> None:
    """In the summary and in the JSON; nothing where nothing drafts."""
    text, about = run("--runtime", "ngram")
    assert "drafted by: n-gram lookup, no model" in about
    document = json.loads(run("--runtime", "ngram", "--json")[0])
    assert document["draft"] == Placement("ngram").as_json() and text == document["text"]
    alone = json.loads(run("--mode", "cloud-only", "--json")[0])
    assert alone["draft"] is None and alone["tokens"] == document["tokens"]
    assert "drafted by" not in run("--mode", "cloud-only")[1]


def test_a_comparison_starts_from_nothing(
    fake_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server drafts none of its texts from an earlier one, and keeps none; another run's text is kept."""
    with serve_fake(recent=MemoryStore()) as server:
        assert server.core.recent is not None
        for arguments, num in ((["--compare"], 0), ([], 1)):
            command = ["outrider", "run", "def def", "--cloud", server.url, "--draft", str(fake_bundle)]
            monkeypatch.setattr(sys, "argv", [*command, "--runtime", "ngram", "--ignore-eos", *arguments])
            with pytest.raises(SystemExit) as ended:
                cli.main()
            assert not ended.value.code, capsys.readouterr().err
            server.wait_until(server.is_empty)
            counts = server.core.recent.stats().counts
            assert (counts.misses, counts.stored) == (num, num)


def test_a_comparison_of_a_text_that_is_too_short_is_refused(run: Run) -> None:
    """Eight tokens have no rate that a ratio could be made of; the texts are still compared."""
    document = json.loads(run("--runtime", "ngram", "--compare", "--json")[0])
    assert document["speed_up"] is None and document["speed_ups"] == [] and document["identical"] is True
    assert document["speed_up_unknown"] in ("only 8 tokens", "the text came in one burst")
    about = run("--runtime", "ngram", "--compare")[1]
    assert "Too short to compare: " in about and "Raise --max-tokens." in about and "the same text" in about


def test_the_prompt_is_read_from_standard_input_where_none_is_given(
    server: FakeServer, fake_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newline that echo adds is no part of it; - says the same."""
    texts = set()
    for given, piped in (("def def", None), (None, b"def def\n"), ("-", b"def def")):
        command = ["outrider", "run", *([given] if given else []), "--cloud", server.url, "--draft", str(fake_bundle)]
        monkeypatch.setattr(sys, "argv", [*command, "--seed", "4", "--max-tokens", "6", "--mode", "cloud-only"])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(piped or b"")))
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
        texts.add(capsys.readouterr().out)
    assert len(texts) == 1


def test_ngrams_need_no_model_of_the_bundle(fake_bundle: Path) -> None:
    """Its files are never opened as one."""
    opened = open_drafter(Bundle.open(fake_bundle), DraftChoice("ngram"))
    assert opened.placement == Placement("ngram")
    opened.drafter.close()


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
        assert opened.placement.words == "int8, ONNX Runtime on the CPU (CPUExecutionProvider)"
        assert opened.placement.notes == ()
        assert ("no NPU took the model" in caplog.text) == (asked == "prefer-npu")
    for missing in (DraftChoice(provider="QNNExecutionProvider"), DraftChoice(device="npu")):
        with pytest.raises(RuntimeUnavailable, match="onnxruntime-qnn"):
            open_drafter(bundle, missing)
    with pytest.raises(ConfigError, match=r"expected CPU, GPU, GPU\.1, NPU, prefer-npu or a provider's full name"):
        open_drafter(bundle, DraftChoice(provider="abacus"))
