"""Tests what is exported for a first use: the reference pair, kept, and widened, which computes the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.export_cli import run_export
from tests.tiny_models import make_tiny_model, make_tiny_tokenizer

from outrider.edge.cli.draft_source import NPU_SHAPES, default_draft, draft_kind
from outrider.edge.devices.placement import AS_BUNDLED, DraftChoice
from outrider.export.cli import main as export_cli
from outrider.export.make.pair import PairOptions, PairPaths, reference_directories
from outrider.export.recipes import ExportOptions
from outrider.export.source.model_source import read_source
from outrider.export.source.torch_source import load_source_model, source_logits
from outrider.export.source.widen import describe_widening, widen
from outrider.models.bundle.bundle import hash_file
from outrider.models.bundle.reference_export import export_arguments
from outrider.models.errors import ExportError, RuntimeUnavailable


@pytest.mark.parametrize(
    ("arguments", "widen_mb", "precision"),
    [
        (["pair", "reference"], 700.0, "fp32"),
        (["pair", "reference", "--widen", "0"], None, None),
        (["pair", "reference", "--widen", "300", "--target-precision", "int8"], 300.0, "int8"),
        (["pair", "DRAFT", "TARGET"], None, None),
    ],
)
def test_the_reference_target_is_widened_unless_asked_otherwise(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    widen_mb: float | None,
    precision: str | None,
) -> None:
    """Said on the screen where it was not asked for; the next command is printed; others' pairs stay as they are."""
    seen: list[ExportOptions] = []

    def export(*_: object, options: PairOptions, **__: object) -> tuple[()]:
        seen.append(options.target)
        return ()

    monkeypatch.setattr(export_cli, "export_pair", export)
    assert run_export(monkeypatch, *arguments) == 0
    shown = capsys.readouterr()
    assert [(options.widen_mb, options.precision) for options in seen] == [(widen_mb, precision)]
    assert ("is widened to 700 MB" in shown.err) == (widen_mb == 700.0)
    assert shown.out.endswith("Serve it: outrider-cloud serve bundles/target\n")


def test_a_draft_of_ones_own_is_exported_with_the_reference_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name stands for the one model in its place, as it does for `distill`; nothing is widened unasked."""
    seen: list[tuple[object, ...]] = []

    def export(*given: object, options: PairOptions, **_: object) -> tuple[()]:
        seen.append((*given[:2], options.target.widen_mb))
        return ()

    monkeypatch.setattr(export_cli, "export_pair", export)
    assert run_export(monkeypatch, "pair", "mine", "reference") == 0
    assert run_export(monkeypatch, "pair", "reference", "theirs") == 0
    pair = reference_directories()
    assert seen == [("mine", pair.target, None), (pair.draft, "theirs", None)]


def test_the_cached_pair_is_printed_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the commands of the device and the server read; only the reference pair is kept."""
    seen: dict[str, object] = {}

    def export(**options: object) -> PairPaths:
        seen.update(options)
        return PairPaths(Path("d"), Path("t"))

    monkeypatch.setattr(export_cli, "export_reference_pair", export)
    assert run_export(monkeypatch, *export_arguments(700.0, *draft_kind(DraftChoice(emulate_npu=True)))) == 0
    assert json.loads(capsys.readouterr().out) == {"draft": "d", "target": "t"}
    assert (seen["widen_mb"], seen["target_precision"]) == (700.0, "fp32")
    assert seen["draft"] == ExportOptions("draft", device="npu", static_shapes=NPU_SHAPES)
    assert run_export(monkeypatch, *export_arguments(0.0, *draft_kind(DraftChoice("onnxruntime")))) == 0
    assert seen["widen_mb"] is None and seen["draft"] == ExportOptions("draft", runtime="onnxruntime")
    assert run_export(monkeypatch, "pair", "DRAFT", "TARGET", "--cached") == 2
    assert "--cached keeps the pair 'reference' only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        *((option, option) for option in ("--ahead-of-time", "--chat", "--sweep", "--keep", "--force", "--overwrite")),
        ("--same-tokenizer", "--same-tokenizer"),
        ("--out x", "--out"),
        ("--npu-platform NPU4000", "--npu-platform"),
        ("--target-device gpu", "--target-device"),
        ("--target-runtime torch", "--target-runtime"),
        ("--prompts x.json", "--prompts"),
        ("--step-ms 15", "--step-ms"),
        ("--extra-ms 1", "--extra-ms"),
        ("--rtt-ms 20", "--rtt-ms"),
        ("--threads 2", "--threads"),
        ("--threads 0 --out bundles", "--out, --threads"),  # also one that is given with its default
    ],
)
def test_the_cached_pair_refuses_options_that_it_would_drop(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, refused: str
) -> None:
    """By name, in one message, before any work."""
    monkeypatch.setattr(export_cli, "export_reference_pair", pytest.fail)
    assert run_export(monkeypatch, "pair", "reference", "--cached", "--widen", "0", *words.split()) == 2
    assert f"--cached does not take {refused}; leave out" in " ".join(capsys.readouterr().err.split())


def test_without_the_exporter_a_run_asks_for_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """One piece of advice: to name one."""
    monkeypatch.setattr("outrider.edge.cli.draft_source.is_installed", lambda name: name != "torch")
    with pytest.raises(RuntimeUnavailable, match=r"'torch' is not installed\. Get a draft from your server with"):
        default_draft(AS_BUNDLED)


TOKENS = list(range(2, 60))


def make_source(directory: Path, family: str = "llama", **overrides: Any) -> Path:
    size = make_tiny_tokenizer(directory)
    return make_tiny_model(family, directory, vocab_size=size, **overrides)


def logits(directory: Path) -> NDArray[np.float32]:
    return source_logits(load_source_model(directory), TOKENS)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [("llama", {"mlp_bias": True}), ("qwen2", {"tie_word_embeddings": True}), ("qwen3", {})],
)
def test_a_widened_model_computes_the_same(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    """Logits move by no more than the order of a sum moves them."""
    source = make_source(tmp_path / "source", family, **overrides)
    widened = widen(source, tmp_path / "wide", 4.0)
    before, after = logits(source), logits(tmp_path / "wide")
    assert np.abs(after - before).max() <= 2e-6 * np.abs(before).max()
    assert widened.architecture.parameters * 4e-6 == pytest.approx(4.0, rel=0.02)


def test_added_neurons_do_real_work(tmp_path: Path) -> None:
    """Not zero, and far from the denormal numbers that would make kernels slow; only their output is zero."""
    from safetensors.numpy import load_file

    source = make_source(tmp_path / "source")
    widen(source, tmp_path / "wide", 1.0)
    tensors = load_file(tmp_path / "wide" / "model.safetensors")
    original = read_source(source).architecture.intermediate_size
    for kind in ("gate", "up"):
        added = tensors[f"model.layers.0.mlp.{kind}_proj.weight"][original:]
        assert len(added) and np.abs(added).min() > 1e-3 and np.abs(added).max() < 1
    assert not tensors["model.layers.0.mlp.down_proj.weight"][:, original:].any()


def test_it_says_that_it_is_widened_and_from_what(tmp_path: Path) -> None:
    """In config.json, and from there in the manifest."""
    source = make_source(tmp_path / "source")
    widened = widen(source, tmp_path / "wide", 2.0)
    told = describe_widening(widened)
    assert told is not None
    assert told.from_parameters == read_source(source).architecture.parameters
    assert told.from_intermediate_size == 128
    assert told.fp32_megabytes == pytest.approx(2.0, rel=0.05)
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["outrider_widened"] == 128
    assert describe_widening(read_source(source)) is None


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    """A widened bundle can be cached by its source."""
    source = make_source(tmp_path / "source")
    for name in ("a", "b"):
        widen(source, tmp_path / name, 2.0)
    first, second = ({p.name: hash_file(p) for p in (tmp_path / name).iterdir()} for name in ("a", "b"))
    assert first == second


def test_what_cannot_be_widened_is_refused(tmp_path: Path) -> None:
    """Too small a wish, a widened model, a place that is taken, a feed-forward of another make."""
    source = make_source(tmp_path / "source")
    with pytest.raises(ExportError, match="cannot be widened"):
        widen(source, tmp_path / "wide", 0.01)
    with pytest.raises(ExportError, match=r"\(gpt_neox\) cannot be widened: it has 0 matrices"):
        widen(make_source(tmp_path / "ungated", "gpt_neox"), tmp_path / "wide", 2.0)
    widen(source, tmp_path / "wide", 2.0)
    with pytest.raises(ExportError, match="not empty"):
        widen(source, tmp_path / "wide", 2.0)
    with pytest.raises(ExportError, match="widened already"):
        widen(tmp_path / "wide", tmp_path / "wider", 4.0)
