"""Tests `outrider doctor --npu`: the block for an issue, the steps in it, and what stands in no block."""

from __future__ import annotations

import getpass
import platform
import re
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.commands import Outrider
from tests.fake_runtime import FakeSequenceRuntime
from tests.serving import fake_tokenizer
from tests.test_bundle import make_manifest
from tests.tiny_models import export_openvino, make_tiny_model

from outrider.edge.cli.doctor_screen import draft_for_npu
from outrider.edge.devices.placement import DraftChoice
from outrider.edge.doctor.npu import (
    MAX_LINES,
    NOT_HARDWARE,
    PROPERTIES,
    WIDTH,
    NpuReport,
    examine_npu,
    system_npu,
    without_names,
)
from outrider.edge.doctor.npu_steps import LEAST_POSITIONS, POSITIONS, PROMPT, Place, Step, fixed_tokens, fork, scores
from outrider.edge.doctor.probe import ProbeFailed
from outrider.edge.store.shelf import PulledFor, Shelf
from outrider.models.bundle.bundle import Bundle
from outrider.models.bundle.bundle_writer import BundleWriter
from outrider.models.bundle.manifest import StaticShapes
from outrider.models.errors import BundleError, ConfigError

REAL = DraftChoice(device="npu")
SHAPES = StaticShapes(prompt_len=64, response_len=128, step_len=4)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A random model in FP32, as a draft for an NPU with the fake server's tokenizer."""
    root, tokenizer = tmp_path_factory.mktemp("npu draft"), fake_tokenizer()
    ir = export_openvino(make_tiny_model("llama", root / "model", vocab_size=tokenizer.size), root / "ir")
    return write_draft(root / "bundle", ir)


def write_draft(place: Path, ir: Path | None = None, **changes: Any) -> Bundle:
    """A draft bundle for an NPU. ir: its model; None: one that nothing can run. changes: of its manifest."""
    tokenizer = fake_tokenizer()
    with BundleWriter(place) as writer:
        shutil.copytree(tokenizer.directory, writer.directory, dirs_exist_ok=True)
        for name in ("openvino_model.xml", "openvino_model.bin"):
            (writer.directory / name).write_bytes((ir / name).read_bytes() if ir is not None else b"<net/>")
        if ir is not None:
            shutil.copy(ir / "config.json", writer.directory)
        manifest = make_manifest(writer.list_files(), tokenizer.fingerprint, "tiny-draft")
        sizes = {"vocab_size": tokenizer.size, "tokenizer_size": tokenizer.size}
        bounds = manifest.report.parity.model_copy(update={"max_relative_delta": 0.05, "max_own_delta": 0.05})
        new = {
            "device": "npu",
            "static_shapes": SHAPES,
            "architecture": manifest.architecture.model_copy(update=sizes),
            "report": manifest.report.model_copy(update={"parity": bounds}),
        }
        return writer.commit(manifest.model_copy(update=new | changes))


def lines_of(text: str) -> dict[str, str]:
    """The block's lines by their names; checks what holds for every block."""
    first, *lines, last = text.splitlines()
    assert (first, last) == ("```text", "```") and len(lines) + 2 <= MAX_LINES
    assert max(map(len, lines)) <= WIDTH and text.isascii() and "`" not in "".join(lines)
    for name in (str(Path.home()), getpass.getuser() if getpass.getuser() != "root" else "/root", platform.node()):
        assert not re.search(rf"\b{re.escape(name)}\b", text)
    return {line[:18].strip(): line[18:].strip() for line in lines if line[0] != " "}


def test_the_block_of_an_emulated_npu(
    draft: Bundle, config: Path, shelf: Shelf, tmp_path: Path, outrider: Outrider
) -> None:
    """Every step runs, and the block says first that it is no hardware; nothing else goes to standard output."""
    shown = outrider("doctor", "--npu", "--emulate-npu", "--draft", draft.path, "--threads", "1")
    assert "fork on the NPU" in shown.err
    found = lines_of(shown.out.rstrip("\n"))
    assert "FAILED" not in shown.out and NOT_HARDWARE in shown.out.splitlines()[2], shown.out
    for name in ("load, first time", "load again", "1 node(s)", "4 node(s)", f"prompt of {SHAPES.prompt_len}"):
        assert re.match(r"[\d.]+ m?s", found[name]), name
    assert found["equal picks"].startswith(f"{POSITIONS} of {POSITIONS} greedy")
    assert found["fork, cut back"].startswith("7 of 7 best tokens equal")
    assert draft.manifest.digest[:16] in shown.out and "step_len 4" in found["static shapes"]
    assert list((tmp_path / "cache").iterdir()) == []  # compiled models are gone


def test_without_an_npu_the_block_says_why_and_times_the_cpu(draft: Bundle) -> None:
    """OpenVINO's advice for this machine, and what is there."""
    report = examine_npu(draft, REAL, 1)
    found = lines_of(report.text)
    assert report.is_faulty and found["NPU"].startswith("FAILED: OpenVINO finds none.")
    assert found["load, first time"].split() == ["-", "-"]
    assert re.fullmatch(r"- +[\d.]+ ms", found["1 node(s)"]) and "equal picks" not in found


def examined(draft: Bundle | str, choice: DraftChoice = REAL) -> tuple[NpuReport, dict[str, str]]:
    """The report, and its lines by their names."""
    report = examine_npu(draft, choice, 0)
    return report, lines_of(report.text)


def shortened(draft: Bundle, response_len: int) -> Bundle:
    """The same draft for texts of 16 tokens more than that."""
    shapes = StaticShapes(prompt_len=16, response_len=response_len, step_len=4)
    return replace(draft, manifest=draft.manifest.model_copy(update={"static_shapes": shapes}))


ROWS = np.zeros((POSITIONS, 300), np.float32)
ROWS[:, 5] = 9.0


@dataclass(slots=True)
class Steps:
    """Answers of the steps, in place of processes. failing: steps that raise. rows: scores by place."""

    failing: dict[tuple[Step, Place], str] = field(default_factory=dict)
    rows: dict[Place, NDArray[np.float32]] = field(default_factory=dict)
    fork: dict[str, Any] = field(default_factory=dict)
    asked: list[tuple[Step, Place]] = field(default_factory=list)

    def __call__(self, step: Step, place: Place, bundle: str, *rest: Any) -> dict[str, Any]:
        self.asked.append((step, place))
        if (step, place) in self.failing:
            raise ProbeFailed(self.failing[step, place].format(bundle=bundle, folder=rest[2]))
        if step == "scores":
            np.save(Path(rest[2]) / place, self.rows.get(place, ROWS))
        times = {"prompt_tokens": 64, "prompt_ms": 3.0, "calls_ms": {"1": 18.49, "16": 22.84}}
        right = {"num_equal": 7, "num_rows": 7, "delta": 0.01, "scale": 9.0}
        loaded = {"open_s": 2.0, "memory_mb": 100.0, "max_branches": 16, "max_positions": 192}
        return loaded | times | right | self.fork


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Steps of a machine with a working NPU."""
    found = Steps()
    properties = dict.fromkeys(PROPERTIES) | {"FULL_DEVICE_NAME": "Intel(R) AI Boost", "NPU_DRIVER_VERSION": "32.0"}
    facts = {"version": "2026.4.1", "devices": ["CPU", "NPU"], "processor": "Ultra", "npus": {"NPU": properties}}
    monkeypatch.setattr("outrider.edge.doctor.npu.ask_openvino", lambda properties: facts)
    monkeypatch.setattr("outrider.edge.doctor.npu.run_npu_step", found)
    return found


def test_what_openvino_says_of_an_npu_is_in_the_block(draft: Bundle, steps: Steps) -> None:
    """Each property, and which of them the driver does not report."""
    report, found = examined(draft)
    assert not report.is_faulty and NOT_HARDWARE not in report.text
    named = {"NPU name": "Intel(R) AI Boost", "NPU driver": "32.0", "NPU compiler": "not reported"}
    assert found | named == found and found["16 node(s)"].split() == ["22.84", "ms", "22.84", "ms"]


@pytest.mark.parametrize("step", ["times", "scores", "fork"])
def test_a_step_that_fails_is_named_and_the_others_run(step: Step, draft: Bundle, steps: Steps) -> None:
    """With its reason in the block, without any path in it."""
    steps.failing[step, "npu"] = "the driver ended: `{bundle}/openvino_model.xml`, {folder}/x.blob " + 400 * "so "
    report, found = examined(draft)
    assert report.is_faulty and found[f"{step}, NPU"].startswith("FAILED: the driver ended: '<path>', <path> so so")
    assert str(draft.path.parent) not in report.text and "npu-report" not in report.text
    assert len(steps.asked) == 6  # all of them


def test_a_draft_that_does_not_load_is_not_tried_again(draft: Bundle, steps: Steps) -> None:
    """Its compiler may have taken minutes."""
    steps.failing["load", "npu"] = "no answer within 1800 s"
    assert examine_npu(draft, REAL, 0).is_faulty
    assert [place for _, place in steps.asked] == ["npu", "cpu", "cpu"]


@pytest.mark.parametrize(
    ("rows", "fork", "is_faulty", "name", "words"),
    [
        (ROWS + np.float32(0.2), {}, False, "logits", "largest difference 0.2"),
        (np.roll(ROWS, 1, axis=1), {}, True, "logits", "FAILED: largest difference 9"),
        (np.roll(ROWS, 1, axis=1), {}, True, "equal picks", f"0 of {POSITIONS} greedy"),
        (np.full_like(ROWS, np.nan), {}, True, "equal picks", "FAILED"),
        (ROWS, {"delta": 3.0, "num_equal": 2}, True, "fork, cut back", "FAILED: 2 of 7 best tokens"),
        (ROWS, {"delta": None, "num_equal": 2}, True, "fork, cut back", "FAILED: 2 of 7 best tokens"),
    ],
    ids=["a little", "other logits", "other picks", "no numbers", "another fork", "a fork without numbers"],
)
def test_an_npu_that_computes_something_else_is_a_fault(
    draft: Bundle,
    steps: Steps,
    rows: NDArray[np.float32],
    fork: dict[str, Any],
    is_faulty: bool,
    name: str,
    words: str,
) -> None:
    """Beyond what the draft's check allows; below it the difference is only told."""
    steps.rows["npu"], steps.fork = rows, fork
    report, found = examined(draft)
    assert report.is_faulty == is_faulty and found[name].startswith(words)


class Forgetting(FakeSequenceRuntime):
    """After a cut it answers as another model would, until it begins anew."""

    def truncate(self, length: int) -> None:
        self._seed = np.uint64(self.length if length else 0)
        super().truncate(length)


@pytest.mark.parametrize("max_branches", [1, 16])
@pytest.mark.parametrize("kind", [FakeSequenceRuntime, Forgetting])
def test_a_cut_that_leaves_a_trace_is_found(kind: type[FakeSequenceRuntime], max_branches: int) -> None:
    """By comparing each row with a run from the start."""
    found = fork(kind(max_branches=max_branches), list(range(1, PROMPT + 20)))
    assert found["num_rows"] == 7 and (found["num_equal"] < 7) == (found["delta"] > 0.0) == (kind is Forgetting)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("cannot open /home/ann/x.xml, it is gone", "cannot open <path>, it is gone"),
        (r"C:\Users\Ann\x.xml (5) and \\nas\models\y", "<path> (5) and <path>"),
        ("~/x.bin: 3 of 4 ms/token, 1 / 2", "<path> 3 of 4 ms/token, 1 / 2"),
        ("https://docs.openvino.ai/2024/x.html and /dev/accel/accel0", None),
        ("github.com/intel/linux-npu-driver/releases", None),
        ("see file:///home/ann/x.bin, file:///C:/Users/Ann%20M/x", "see <path>, <path>"),
        (r"C:\Users\Ann Müller\bundles\x.bin is gone", "<path> is gone"),
        (r"\\?\C:\Users\Ann Maria Müller\x.bin is gone", "<path> is gone"),
        ("/data/secret dir/x.xml is gone", "<path> is gone"),
        ("No such file: '/data/secret dir/my x.xml' [2]", "No such file: '<path>' [2]"),
        ("~ann/secret dir/x", "<path>"),
        ("ann on anns-laptop.home, or anns-laptop: planned", "<name> on <name>, or <name>: planned"),
    ],
)
def test_no_path_and_no_name_stays_in_a_reason(text: str, left: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses and the NPU's device node are no such paths; names are the user's and the machine's, as whole words."""
    monkeypatch.setattr("getpass.getuser", lambda: "ann")
    monkeypatch.setattr("platform.node", lambda: "anns-laptop.home")
    assert without_names(text) == (text if left is None else left)


def test_a_draft_of_short_texts_is_examined_as_far_as_they_go(draft: Bundle) -> None:
    """Both places compare the positions that the draft has."""
    tokens, runtime = fixed_tokens(shortened(draft, 16)), FakeSequenceRuntime(vocab_size=300, max_positions=32)
    assert len(tokens) == LEAST_POSITIONS == 32
    assert scores(runtime, tokens).shape == (16, 300) and runtime.length < 32
    runtime.truncate(0)
    assert fork(runtime, tokens)["num_equal"] == 7


def test_a_draft_of_too_short_texts_is_said_to_be_one(draft: Bundle, steps: Steps) -> None:
    """That is no fault of the device: nothing has FAILED."""
    report, found = examined(shortened(draft, 8))
    assert not report.is_faulty and steps.asked == [("load", "npu")] and found["load, first time"].startswith("2.00 ")
    assert found["other steps"] == "not run: the draft takes texts of at most 24 tokens, and they need 32"


def test_what_is_too_much_for_the_block_is_counted() -> None:
    """A device's properties go first; what has FAILED stays, and so does all else that has room."""
    report = NpuReport()
    for index in range(30):
        report.add(f"NPU {index}", "property", importance=0)
        report.add(f"time {index}", "5 ms")
    report.fail("fork, cut back", "why")
    for num_more, num_out, counts in ((0, 4, (26, 30, 0)), (40, 44, (0, 30, 26))):
        for index in range(num_more):
            report.add(f"more {index}", "9 ms")
        lines = report.text.splitlines()
        assert len(lines) == MAX_LINES and lines[-2] == f"... {num_out} lines left out"
        assert tuple(sum(word in line for line in lines) for word in ("property", "5 ms", "9 ms")) == counts
        assert "FAILED: why" in lines[-3 - counts[2]]


def test_the_block_stays_small() -> None:
    """Whatever fails, and however long the reasons are; fences and control characters do no harm."""
    report = NpuReport()
    for index in range(40):
        report.fail(f"step {index}", "```\x1b[2J é " + "x" * 5000)
        report.add(f"line {index}", "word " * 100)
    lines = report.text.splitlines()
    assert len(lines) <= MAX_LINES and max(map(len, lines)) <= WIDTH and lines[-2].endswith("lines left out")
    assert report.text.isascii() and "\x1b" not in report.text
    assert [line for line in lines if "`" in line] == ["```text", "```"]


def test_what_the_system_shows_of_an_npu(tmp_path: Path) -> None:
    """The node, whether this user may open it, the module."""
    for new, found in (
        ("dev/accel", "no /dev/accel/accel0"),
        ("dev/accel/accel0", "/dev/accel/accel0: this user may open it; intel_vpu is not loaded"),
        ("sys/module/intel_vpu", "/dev/accel/accel0: this user may open it; intel_vpu is loaded"),
    ):
        (tmp_path / new).mkdir(parents=True)
        assert system_npu(tmp_path) == found


def test_the_draft_is_the_named_one_or_the_latest_pulled_for_an_npu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for another device is refused; where none is here and none can be made, the block says why."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr("outrider.edge.cli.draft_source.is_installed", lambda name: name != "torch")
    assert "'torch' is not installed" in str(draft_for_npu("auto", REAL))
    shelf = Shelf()
    for letter, device, shapes, at_s in (("a", "npu", SHAPES, 1.0), ("b", "npu", SHAPES, 2.0), ("c", "cpu", None, 3.0)):
        write_draft(shelf.place(letter * 64), device=device, static_shapes=shapes)
        shelf.note(letter * 64, "t", PulledFor(model="m", server="http://127.0.0.1", name=device, at_s=at_s))
    found = draft_for_npu("auto", REAL)
    assert isinstance(found, Bundle) and found.path == shelf.place("b" * 64)
    assert isinstance(draft_for_npu(str(found.path), DraftChoice(device="npu.1")), Bundle)
    assert isinstance(draft_for_npu("reference", REAL), str)
    for wrong, error, words in (
        (shelf.place("c" * 64), ConfigError, "--device npu"),
        (tmp_path / "none", BundleError, "expected a bundle"),
    ):
        with pytest.raises(error, match=words):
            draft_for_npu(str(wrong), REAL)


def test_a_block_without_a_draft_says_so(steps: Steps) -> None:
    """Nothing is measured then."""
    report = examine_npu("the reference draft cannot be exported; run `outrider pull`", REAL, 0)
    assert report.is_faulty and "FAILED: the reference draft" in lines_of(report.text)["draft"] and not steps.asked


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json"], "--npu prints a block of text, and --json a document"),
        (["--cloud", "http://x", "--api-key", "k"], "--npu asks no cloud, so --cloud and --api-key would have no"),
        (["--draft-device", "cpu"], "--npu runs OpenVINO on an NPU"),
        (["--draft", "a", "--draft", "b"], "--npu measures one draft, and 2 are named; name one with --draft"),
        (["--runtime", "ngram"], "--npu runs OpenVINO on an NPU"),
        (["--draft-device", "QNNExecutionProvider"], "--npu runs OpenVINO on an NPU"),
    ],
)
def test_options_without_effect_are_refused(
    arguments: list[str], message: str, config: Path, outrider: Outrider
) -> None:
    """Before anything is measured."""
    assert message in " ".join(outrider("doctor", "--npu", *arguments, code=2).err.split())
