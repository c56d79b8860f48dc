"""Tests where a draft may run, which of several drafts and devices is chosen, and the words for both."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.commands import Outrider
from tests.drafts import ALL_DEVICES, CPU_ONLY, manifest_for

from outrider.edge.cli.devices_screen import DRAFTS
from outrider.edge.cli.draft_source import place_drafts
from outrider.edge.cli.placing import Ranked, placed_words, rank
from outrider.edge.cli.summary import draft_lines
from outrider.edge.devices.advice import npu_advice
from outrider.edge.devices.discovery import FoundDevice, FoundRuntime
from outrider.edge.devices.placement import AS_BUNDLED, EMULATED_NPU, DraftChoice, Placement, opened_as, place_draft
from outrider.edge.devices.profiles import Forecast, Link, Load, Profile, Profiles
from outrider.edge.doctor.probe import ProbeFailed
from outrider.edge.modes.draft_ladder import candidates_of
from outrider.models.bundle.bundle import Bundle
from outrider.models.errors import BundleError, ConfigError, RuntimeUnavailable

EMULATED = "NPU path emulated on the CPU; not run on hardware"
PROVIDERS = {
    ("onnxruntime", "CPU"): "CPUExecutionProvider",
    ("onnxruntime", "GPU"): "CUDAExecutionProvider",
    ("onnxruntime", "NPU"): "QNNExecutionProvider",
    ("onnxruntime", "prefer-npu"): "QNNExecutionProvider",
}
ORT = FoundRuntime("onnxruntime", "1.2", (FoundDevice("CPUExecutionProvider", "Some Processor", "cpu"),))
ALL = FoundRuntime(
    "openvino",
    "2026.1",
    tuple(FoundDevice(name, f"Some {name}", kind) for name, kind in (("CPU", "cpu"), ("GPU", "gpu"), ("NPU", "npu"))),  # type: ignore[arg-type]
)
CALM = Load()


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

    assert {(runtime, device) for role, device, runtime in RECIPES if role == "draft"} == set(DRAFTS)


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


def test_what_drafts_is_told_in_words_and_as_data() -> None:
    """The device, the runtime, the precision, the provider; an emulation is called one."""
    emulated = Placement("openvino", "npu", True, "int8", "NPU", EMULATED_NPU)
    onnx = Placement("onnxruntime", "cpu", False, "int8", "CPU", "CPUExecutionProvider")
    for placement, words in (
        (emulated, "int8, OpenVINO's NPU path emulated on the CPU"),
        (Placement("openvino", "gpu", False, "int4", "GPU", "GPU"), "int4, OpenVINO on the GPU"),
        (onnx, "int8, ONNX Runtime on the CPU (CPUExecutionProvider)"),
        (Placement("onnxruntime", None, False, "int8", "prefer-npu"), "int8, ONNX Runtime"),
        (Placement("ngram"), "n-gram lookup, no model"),
    ):
        assert placement.words == words
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
    assert len(draft_lines(placement, 60, 40)) == len(draft_lines(Placement("ngram"), 10_000, 1)) == 1
    assert "the cloud wrote everything after 40 tokens undrafted" in draft_lines(placement, 60, 41)[1]
    assert "the cloud wrote the whole text undrafted" in draft_lines(placement, 100, 1)[1]


def found(openvino: FoundRuntime = CPU_ONLY) -> Any:
    return lambda runtime: openvino if runtime == "openvino" else ORT


def bundle(name: str, runtime: str, device: str, tokenizer: str = "0" * 64) -> Bundle:
    """What placement asks of a bundle."""
    named = {"name": name, "tokenizer_fingerprint": tokenizer}
    manifest = manifest_for(runtime, device, device.upper()).model_copy(update=named)
    return SimpleNamespace(manifest=manifest, path=Path(f"/{name}"))  # type: ignore[return-value]


def profiles_of(times: dict[str, tuple[float, float]], asked: list[str] | None = None) -> Any:
    def measure(path: str, choice: DraftChoice, num_threads: int) -> Profile:
        key = f"{Path(path).name}{f' {choice.device}' if choice.device else ''}"
        if asked is not None:
            asked.append(key)
        if key not in times:
            raise ProbeFailed(f"{key} crashed")
        return Profile(calls_ms=dict(zip((1, 8), times[key], strict=True)))

    return measure


def ranked(
    place: Path, drafts: Sequence[Bundle], measure: Any, link: Link | None = None, load: Load = CALM, here: Any = None
) -> list[Ranked]:
    """The drafts as they are tried on this machine, the first first. place: of the profiles that are kept."""
    here = here or found()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.edge.devices.discovery.find_runtime", here)
        return rank(candidates_of(drafts, AS_BUNDLED, here), 0, link, Profiles(place), measure, lambda: load, here)


def names(ranked: Sequence[Ranked]) -> list[str]:
    return [f"{each.candidate.bundle.manifest.name} {each.candidate.placement.device}" for each in ranked]


TWO = [bundle("slow", "openvino", "cpu"), bundle("quick", "onnxruntime", "cpu")]


def test_the_faster_runtime_drafts_and_its_profile_is_kept(tmp_path: Path) -> None:
    """Of two drafts for the processor: measured once, whichever is named first; another version measures again."""
    asked: list[str] = []
    measure = profiles_of({"slow": (0.6, 2.0), "quick": (0.25, 2.0)}, asked)
    for _ in range(2):
        best = ranked(tmp_path, TWO, measure)
        assert names(best) == ["quick cpu", "slow cpu"] and asked == ["slow", "quick"]
    newer = found(FoundRuntime("openvino", "2", CPU_ONLY.devices))
    assert names(ranked(tmp_path, TWO, measure, here=newer)) == ["quick cpu", "slow cpu"]
    assert asked == ["slow", "quick", "slow"]
    words = placed_words(best).split("; ")
    assert words[0].startswith("quick (int8, ONNX Runtime on the CPU): ") and "slow (" in words[1]


def test_what_cannot_be_profiled_is_left_for_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes last and says why: a driver that hangs takes minutes at each start. Asked for, it is tried again. Times
    of a busy processor are used once, and nothing is kept of them.
    """
    drafts, asked = [bundle("broken", "openvino", "cpu"), TWO[1]], list[str]()
    measure = profiles_of({"quick": (0.25, 2.0)}, asked)
    for num in (1, 2):
        best, last = ranked(tmp_path, drafts, measure, load=Load(0.9))
        assert names([best, last]) == ["quick cpu", "broken cpu"] and last.error == "broken crashed"
        assert best.load == CALM and asked == ["broken", "quick"] * num  # the times have the load in them
    asked.clear()
    for _ in range(2):
        words = placed_words(ranked(tmp_path, drafts, measure))
        assert "no profile: broken crashed (`outrider devices --profile`" in words and asked == ["broken", "quick"]
    given = (candidates_of(drafts, AS_BUNDLED, found()), 0, None, Profiles(tmp_path), measure, lambda: CALM, found())
    assert rank(*given, retries=True)[1].error == "broken crashed" and asked[2:] == ["broken"]
    now = time.time()
    for moved_s, num_asked in ((86_000.0, 3), (-1.0, 4), (86_500.0, 5)):  # a clock may be set back
        monkeypatch.setattr(time, "time", lambda at_s=now + moved_s: at_s)
        ranked(tmp_path, drafts, measure)
        assert len(asked) == num_asked, moved_s


def test_no_kind_of_device_wins_unmeasured(tmp_path: Path) -> None:
    """NPU, GPU and processor by their times; a draft for an NPU runs nowhere else."""
    drafts = [bundle("npu", "openvino", "npu"), bundle("cpu", "openvino", "cpu")]
    places = [(each.bundle, each.placement.device) for each in candidates_of(drafts, AS_BUNDLED, found(ALL))]
    assert places == [(drafts[0], "npu"), (drafts[1], "cpu"), (drafts[1], "gpu")]
    times = {"npu": (5.0, 40.0), "cpu": (2.0, 6.0), "cpu gpu": (3.0, 3.5)}

    def order(link: Link | None = None, load: Load = CALM, place: Path = tmp_path) -> list[str]:
        return names(ranked(place, drafts, profiles_of(times), link, load, found(ALL)))

    for link, load, expected in (
        (Link(1.0, 40.0), CALM, ["cpu gpu", "cpu cpu", "npu npu"]),  # eight nodes in a call count more than 1 ms
        (Link(1.0, 5.0), CALM, ["cpu cpu", "cpu gpu", "npu npu"]),
        (Link(1.0, 40.0), Load(0.95), ["cpu gpu", "npu npu", "cpu cpu"]),
    ):
        assert order(link, load) == expected
    times.update(npu=(0.2, 1.6))
    assert order()[-1] == "npu npu"  # kept from before
    assert order(place=tmp_path / "fresh")[0] == "npu npu"


def test_where_no_draft_pays_the_quickest_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their speeds differ by rounding errors only."""

    def expect(profile: Profile, *given: object) -> Forecast:
        return Forecast(100.00000000000004 if profile.token_ms == 600.0 else 100.0, 1, profile.token_ms, 10.0, 0.0)

    monkeypatch.setattr("outrider.edge.cli.placing.forecast", expect)
    measure = profiles_of({"slow": (600.0, 4800.0), "quick": (500.0, 4000.0)})
    assert names(ranked(tmp_path, TWO, measure)) == ["quick cpu", "slow cpu"]


def test_drafts_of_different_targets_do_not_compete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.edge.devices.discovery.find_runtime", found())
    one = bundle("a", "openvino", "cpu")
    with pytest.raises(ConfigError, match="different tokenizers"):
        candidates_of([one, bundle("b", "openvino", "cpu", "1" * 64)], AS_BUNDLED, found())
    with pytest.raises(RuntimeUnavailable):
        candidates_of([bundle("a", "openvino", "npu")], AS_BUNDLED, found())
    assert [each.placement.runtime for each in candidates_of([one], DraftChoice("ngram"), found())] == ["ngram"]


def test_a_named_device_comes_first_whatever_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others follow for the case that it fails; one candidate is not profiled."""
    monkeypatch.setattr("outrider.edge.devices.discovery.find_runtime", found(ALL))
    monkeypatch.setattr("outrider.edge.modes.draft_ladder.find_runtime", found(ALL))
    monkeypatch.setattr("outrider.edge.cli.draft_source.rank", lambda *given: pytest.fail("it was profiled"))
    monkeypatch.setattr(candidates_of, "__defaults__", (found(ALL),))
    placed = place_drafts([bundle("cpu", "openvino", "cpu")], DraftChoice(device="gpu"), 0, [], None)  # type: ignore[arg-type]
    assert [each.placement.device for each in placed] == ["gpu", "cpu"]


@pytest.mark.usefixtures("shelf")
def test_devices_profile_prints_a_table(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of given drafts, the best first; as JSON too; without --profile the options are refused."""
    monkeypatch.setattr("outrider.edge.devices.discovery.find_runtime", found())
    drafts, measured = {each.manifest.name: each for each in TWO}, {"slow": (0.6, 2.0), "quick": (0.25, 2.0)}
    monkeypatch.setattr("outrider.edge.cli.placing.open_draft_bundle", lambda path: drafts[path.name])
    monkeypatch.setattr("outrider.edge.cli.placing.profile_draft", profiles_of(measured))
    given = ["--draft", "slow", "--draft", "quick"]
    best, other = json.loads(outrider("devices", "--profile", *given, "--json").out)["profiles"]
    assert (best["draft"], best["calls_ms"]) == ("quick", {"1": 0.25, "8": 2.0})
    assert (other["draft"], other["calls_ms"]) == ("slow", {"1": 0.6, "8": 2.0})
    assert best["tokens_per_s"] >= other["tokens_per_s"] > 0.0
    monkeypatch.setenv("COLUMNS", "200")
    shown = outrider("devices", "--profile", *given).out
    assert shown.index("quick") < shown.index("slow") and "ms/8" in shown and "ms/16" not in shown
    assert "energy: not shown, " in shown or "nodes/J: " in shown
    assert "add --profile" in outrider("devices", *given, code=2).err
