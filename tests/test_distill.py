"""Distilling a draft: it learns, survives kills, leaves other files alone, and is never silently worse."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tools.tiny_sources import make_tiny_model, make_tiny_source, make_tiny_tokenizer
from typer.testing import CliRunner

from outrider.export.cli import main as cli
from outrider.export.distill.distill import DistillResult, distill_draft
from outrider.export.distill.options import DistillOptions
from outrider.export.distill.work import default_work, locked
from outrider.export.make.pair import PairPaths
from outrider.export.make.pipeline import export_model
from outrider.export.progress import Event
from outrider.export.recipes import ExportOptions
from outrider.export.source.model_source import read_source
from outrider.models.bundle.bundle import hash_file
from outrider.models.errors import ConfigError, DiskFull, ExportError, ModelFault, RuntimeUnavailable, TokenizerMismatch

OPTIONS = DistillOptions(
    steps=30,
    tokens=8000,
    row_length=48,
    rate=3e-3,
    target_dtype="fp32",
    num_threads=1,
    is_compiled=False,
    device="cpu",
)
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
WORDS = ("def", "verify", "tokens", "draft", "session", "class", "return", "True", "False", "naïve", "东", "42")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    """A Qwen2 draft of one layer and a Llama target of two, with one tokenizer and embeddings of different padding.

    The draft's generation_config.json contradicts itself, as published ones do: transformers reads and never writes it.
    """
    root, odd = tmp_path_factory.mktemp("distill"), {"do_sample": False, "temperature": 0.9, "pad_token_id": -1}
    draft = make_tiny_source("qwen2", root / "draft", vocab_size=320, seed=2, num_hidden_layers=1)
    (draft / "generation_config.json").write_text(json.dumps(odd | {"top_p": 0.6}), encoding="utf-8")
    return PairPaths(draft, make_tiny_source("llama", root / "target", vocab_size=384, seed=1))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hundred lines of words, from two to eight of them."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    lines = [" ".join(WORDS[(n * k) % len(WORDS)] for k in range(1, 3 + n % 7)) + f" {n}" for n in range(100)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def uninterrupted(pair: PairPaths, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> DistillResult:
    """One distillation from beginning to end."""
    return distill_draft(pair.draft, pair.target, prompts, tmp_path_factory.mktemp("whole") / "out", OPTIONS)


def record_of(result: DistillResult) -> dict[str, Any]:
    """The record of a measured result."""
    assert result.record is not None
    return result.record


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    """The record without the seconds, which differ from run to run."""
    return record | {name: record[name] | {"seconds": 0.0} for name in ("pool", "training")}


def hashes(directory: Path) -> dict[str, str]:
    """Every file of a directory with its hash."""
    return {path.name: hash_file(path) for path in sorted(directory.iterdir())}


def said(events: Sequence[Event]) -> str:
    """All of them in words."""
    return "\n".join(f"{event.stage}: {event.text}" for event in events)


def test_a_draft_learns_what_its_target_writes(
    uninterrupted: DistillResult, pair: PairPaths, prompts: Path, tmp_path: Path
) -> None:
    """Held-out acceptance rises beyond chance, at every temperature where there is any, and divergence falls.

    The record has hashes of both sources and of the new weights, the parts of the prompts, the best step; never a
    prompt's text. Everything but the weights is the draft's byte for byte, nothing lies about, the exporter takes it.
    """
    record, out = record_of(uninterrupted), uninterrupted.path
    assert (uninterrupted.status, record["verdict"]) == ("written", "better") and out is not None
    text = (out / "distillation.json").read_text(encoding="utf-8")
    assert json.loads(text) == record
    before, after, change = (record["heldout"][name] for name in ("before", "after", "change"))
    assert change["mean"]["rise"] > 3 * change["mean"]["error"] > 0
    assert all(now < 0.9 * was for was, now in zip(before["kl"], after["kl"], strict=True))
    assert [row["temperature"] for row in after["acceptance"]] == [0.0, 0.5, 0.8]
    for role, source in (("draft", pair.draft), ("target", pair.target)):
        assert record[role]["weights_sha256"] == read_source(source).describe().weights_sha256
    *learned, tested, dropped = (record["prompts"][name] for name in ("train", "validation", "test", "dropped"))
    assert (sum(learned), tested, dropped) == (90, 10, 0)
    steps = {one["step"]: one["match"] for one in record["training"]["validation"]}
    best = record["training"]["best_step"]
    assert list(steps) == [*range(0, 31, 3)] and best > 0 and steps[best] == max(steps.values())
    shown = json.dumps(record, ensure_ascii=False)
    assert not any(line in shown for line in prompts.read_text(encoding="utf-8").splitlines())
    ours, theirs = hashes(out), hashes(pair.draft)
    assert {name for name, _ in ours.items() ^ theirs.items()} == {"model.safetensors", "distillation.json"}
    assert record["weights"] == {"model.safetensors": ours["model.safetensors"]}
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    bundle = export_model(out, tmp_path / "bundle", ExportOptions("draft", "fp32", num_threads=1))
    assert bundle.manifest.source.weights_sha256 == read_source(out).describe().weights_sha256


def run_until(command: list[str], line: str, number: signal.Signals) -> tuple[int, str]:
    """Runs the console script, sends a signal when it says `line`, and returns its status and what else it said."""
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        for heard in process.stderr:
            if line in heard:
                process.send_signal(number)
                break
        else:
            pytest.fail(f"it ended without {line!r}")
        return process.wait(), process.stderr.read()


def test_a_killed_run_goes_on_and_ends_with_the_same_draft(
    uninterrupted: DistillResult, pair: PairPaths, prompts: Path, tmp_path: Path
) -> None:
    """Killed while the target wrote, killed while the draft learned, stopped: the weights are those of one run."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "outrider.export.cli", "distill", str(pair.draft), str(pair.target)]
    command += ["--prompts", str(prompts), "--out", str(out), "--steps", "30", "--tokens", "8000", "--row-length", "48"]
    command += ["--rate", "3e-3", "--target-dtype", "fp32", "--threads", "1", "--no-compile", "--device", "cpu"]
    for line in ("rows with", "step 12:"):
        assert run_until(command, line, signal.SIGKILL)[0] == -signal.SIGKILL
    status, rest = run_until(command, "step 18:", signal.SIGTERM)
    assert status == 128 + signal.SIGTERM and not out.exists()
    assert "the same command continues" in rest and "Traceback" not in rest
    result = distill_draft(pair.draft, pair.target, prompts, out, OPTIONS, (heard := list[Event]()).append)
    assert "resumed at step" in said(heard) and [path.name for path in tmp_path.iterdir()] == ["out"]
    assert without_times(record_of(result)) == without_times(record_of(uninterrupted))


def test_another_tokenizer_is_refused_where_that_is_asked_for(pair: PairPaths, prompts: Path, tmp_path: Path) -> None:
    """The message names both models and the first difference, and nothing is made."""
    make_tiny_tokenizer(tmp_path / "other", special_tokens=("<|stop|>",))
    make_tiny_model("llama", tmp_path / "other", vocab_size=320)
    with pytest.raises(TokenizerMismatch, match=r"(?s)draft.*other.*first difference.*<\|end\|>.*<\|stop\|>"):
        distill_draft(pair.draft, tmp_path / "other", prompts, tmp_path / "out", replace(OPTIONS, same_tokenizer=True))
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama draft of one layer, with whole words of the prompts in its tokenizer."""
    root = tmp_path_factory.mktemp("stranger") / "stranger"
    make_tiny_tokenizer(root, vocab_size=400, special_tokens=("<|stop|>", "<|end|>"), text=(" ".join(WORDS) * 9,))
    return make_tiny_model("llama", root, vocab_size=448, seed=3, num_hidden_layers=1)


def test_a_draft_with_another_tokenizer_learns_the_targets_text(
    stranger: Path, pair: PairPaths, prompts: Path, tmp_path: Path
) -> None:
    """In its own tokens, by cross-entropy, which falls; acceptance rises; the record names both tokenizers."""
    out, heard = tmp_path / "out", list[Event]()
    result = distill_draft(stranger, pair.target, prompts, out, replace(OPTIONS, steps=40, rate=6e-3), heard.append)
    record = record_of(result)
    words = "stranger has another tokenizer than target", "--match and --cross-entropy have no"
    assert all(each in said(heard) for each in words)
    before, after = record["heldout"]["before"], record["heldout"]["after"]
    assert all(now < 0.9 * was for was, now in zip(before["kl"], after["kl"], strict=True))
    assert (result.status, record["verdict"]) == ("written", "better")
    expected = {
        "tokenizer_fingerprint": read_source(stranger).tokenizer.fingerprint,
        "target_tokenizer_fingerprint": read_source(pair.target).tokenizer.fingerprint,
        "options": record["options"] | {"kl": 0.0, "match": 0.0, "cross_entropy": 1.0},
    }
    assert expected.items() <= record.items()
    assert hash_file(out / "tokenizer.json") == hash_file(stranger / "tokenizer.json")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_draft_that_got_worse_is_not_written_unless_forced(pair: PairPaths, prompts: Path, tmp_path: Path) -> None:
    """A perfect draft can only lose: the message says so, the output stays, and --force writes it from the state."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "distillation.json").write_text("{}")
    options = replace(OPTIONS, steps=3, rate=0.05, overwrite=True)
    result, heard = distill_draft(pair.target, pair.target, prompts, out, options), list[Event]()
    assert (result.status, result.path) == ("not written", None)
    assert "FELL" in result.message and "--force" in result.message
    assert [row["in_chain"] for row in record_of(result)["heldout"]["before"]["acceptance"]] == [1.0, 1.0, 1.0]
    assert hashes(out) == {"distillation.json": hashlib.sha256(b"{}").hexdigest()}
    forced = distill_draft(pair.target, pair.target, prompts, out, replace(options, force=True), heard.append)
    assert (forced.status, forced.path, record_of(forced)["verdict"]) == ("written", out, "worse")
    assert without_times(record_of(forced)) == without_times(record_of(result)) and "FELL" in forced.message
    assert "step 1:" not in said(heard)  # nothing was trained anew


def test_a_changed_option_begins_anew_and_says_which(pair: PairPaths, prompts: Path, tmp_path: Path) -> None:
    """Another rate keeps the target's text, another seed does not; what was made for others is kept and named."""
    options = replace(OPTIONS, steps=2, tokens=1000, work=tmp_path / "work", force=True)
    assert "stays in" in distill_draft(pair.draft, pair.target, prompts, tmp_path / "a", options).message

    changes: dict[str, dict[str, Any]] = {"b": {"rate": 1e-4}, "c": {"seed": 5}, "d": {"resume": False}}
    for out, words, is_written_again in (
        ("b", ["continuing the target's text"], False),
        ("c", ["the target's text begins again", "seed 0, now 5"], True),
        ("d", ["beginning again (--no-resume)"], True),
    ):
        changed, heard = replace(options, **changes[out]), list[Event]()
        distill_draft(pair.draft, pair.target, prompts, tmp_path / out, changed, heard.append)
        assert all(each in said(heard) for each in words) and ("rows with" in said(heard)) is is_written_again


def test_an_output_that_may_not_be_replaced_is_refused(pair: PairPaths, prompts: Path, tmp_path: Path) -> None:
    """An existing directory without --overwrite, one that is not a distilled draft in any case, and the sources."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    for out, options, message in (
        (tmp_path / "mine", OPTIONS, "add --overwrite"),
        (tmp_path / "mine", replace(OPTIONS, overwrite=True), "is not a distilled draft"),
        (pair.draft, replace(OPTIONS, overwrite=True), "contains, the source"),
        (pair.draft.parent, replace(OPTIONS, overwrite=True), "contains, the source"),
    ):
        with pytest.raises(ExportError, match=message):
            distill_draft(pair.draft, pair.target, prompts, out, options)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "all of it"


def test_only_one_works_in_a_folder(pair: PairPaths, prompts: Path, tmp_path: Path) -> None:
    """A second distillation to the same place is refused while the first is at it; the folder goes when both are."""
    out = tmp_path / "out"
    with locked(default_work(out)), pytest.raises(ExportError, match="another distillation is at work"):
        distill_draft(pair.draft, pair.target, prompts, out, OPTIONS)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said_and_harms_nothing(pair: PairPaths, prompts: Path, tmp_path: Path) -> None:
    """Finished work stays, the output is unchanged, and the run continues when there is room."""
    if not Path("/dev/full").exists():
        pytest.skip("this platform has no /dev/full")
    work, out = tmp_path / "work", tmp_path / "out"
    options = replace(OPTIONS, steps=2, tokens=1000, work=work, force=True)
    distill_draft(pair.draft, pair.target, prompts, out, options)
    before, options = hashes(out), replace(options, overwrite=True)
    (folder,) = work.glob("pool-*")
    (folder / "texts.json").unlink()
    (folder / ".texts.json.partial").symlink_to("/dev/full")
    with pytest.raises(
        DiskFull, match=r"the disk is full; the same command goes on from .* the destination is unchanged"
    ):
        distill_draft(pair.draft, pair.target, prompts, out, options)
    assert hashes(out) == before
    assert distill_draft(pair.draft, pair.target, prompts, out, options).status == "written"


def test_a_target_of_nonsense_is_a_fault(pair: PairPaths, prompts: Path, tmp_path: Path) -> None:
    """Logits that are no numbers end it, with advice, before anything is learned from them."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(pair.target, tmp_path / "broken")
    tensors = load_file(tmp_path / "broken" / "model.safetensors")
    tensors["model.norm.weight"][:] = float("nan")
    save_file(tensors, tmp_path / "broken" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFault, match="not finite"):
        distill_draft(pair.draft, tmp_path / "broken", prompts, tmp_path / "out", OPTIONS)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"minutes": 1.0}, "expected one of them"),
        ({"rate": float("nan")}, "rate is nan"),
        ({"steps": 0}, "steps is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"heldout": 0.9}, "expected up to 0.5"),
        ({"temperatures": (0.0,)}, "between 0.05 and 5"),
        ({"kl": 0.0, "cross_entropy": 0.0}, "KL or cross-entropy"),
        ({"row_length": 8}, "at least 16"),
    ],
)
def test_options_are_checked(wrong: dict[str, Any], message: str) -> None:
    """Each impossible choice is refused with what was found and what is expected."""
    with pytest.raises(ConfigError, match=message):
        replace(OPTIONS, **wrong)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"row_length": 600}, ConfigError, r"600 tokens do not fit the 512 positions of draft"),
        ({"work": Path("out")}, ConfigError, r"--work .*out is in .*out, which the result replaces; choose"),
        ({"work": Path("out", "..", "out", "work")}, ConfigError, "is in .*out, which the result replaces"),
        ({"tokens": 10**13}, DiskFull, r"distilling needs about [\d,]+ MB at .* fewer --tokens"),
        pytest.param({"device": "cuda"}, RuntimeUnavailable, "no CUDA device", marks=without_cuda),
    ],
)
def test_what_cannot_be_done_here_is_refused_before_the_work(
    changes: dict[str, Any], error: type[Exception], message: str, pair: PairPaths, prompts: Path, tmp_path: Path
) -> None:
    """A row longer than a model's positions, a state inside the output, more text than the disk has room for, CUDA
    where there is none.
    """
    heard: list[Event] = []
    if "work" in changes:
        changes = {"work": tmp_path / changes["work"]}
    with pytest.raises(error, match=message):
        distill_draft(pair.draft, pair.target, prompts, tmp_path / "out", replace(OPTIONS, **changes), heard.append)
    assert "rows with" not in said(heard) and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("result", "exit_code"),
    [
        (DistillResult("not written", "It got worse.", None, {"verdict": "worse"}), 1),
        (DistillResult("stopped", "Stopped at step 3.", signal=int(signal.SIGTERM)), 143),
    ],
)
def test_a_run_without_a_draft_says_so_in_json_and_status(
    result: DistillResult, exit_code: int, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One object again, and a status that ends a script."""
    monkeypatch.setattr("outrider.export.distill.distill.distill_draft", lambda *arguments: result)
    run = CliRunner().invoke(cli.app, ["distill", "a", "b", "--prompts", str(prompts), "--json"])
    found, verdict = json.loads(run.stdout), (result.record or {}).get("verdict")
    assert (found["status"], found["path"], found["message"]) == (result.status, None, result.message)
    assert (run.exit_code, found.get("verdict")) == (exit_code, verdict)


def test_the_command_shows_before_and_after_or_prints_its_record_as_json(
    pair: PairPaths, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --json there is a card with acceptance at three temperatures, and the verdict in words. With it all is
    one object: the status, the place and the record; the exit status is 0 once it is written.
    """
    monkeypatch.chdir(tmp_path)
    arguments = ["distill", str(pair.draft), str(pair.target), "--prompts", str(prompts), "--no-compile", "--force"]
    arguments += ["--steps", "1", "--tokens", "500", "--row-length", "32", "--threads", "1", "--device", "cpu"]
    run = CliRunner().invoke(cli.app, arguments, catch_exceptions=False)
    words = "acceptance, T 0", "acceptance, T 0.5", "acceptance, T 0.8", "held-out acceptance", "Written to"
    assert all(each in run.stdout for each in words)
    arguments += ["--temperatures", "0.7,1", "--heldout", "0.2", "--cross-entropy", "0", "--match", "0"]
    run = CliRunner().invoke(cli.app, [*arguments, "--json", "--overwrite"], catch_exceptions=False)
    found = json.loads(run.stdout)
    assert (run.exit_code, found["status"], found["path"]) == (0, "written", str(tmp_path / "distilled"))
    assert (found["prompts"]["test"], found["options"]["cross_entropy"]) == (20, 0.0)
    assert found["options"]["temperatures"] == found["heldout"]["before"]["temperatures"] == [0.7, 1.0]
