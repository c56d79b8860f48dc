"""The sweep: every draft that fits the device on one target's text, one recommended, nothing else left behind."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console
from tests.export_cli import run_export
from tests.test_card import acceptance, timed
from tests.tiny_models import make_tiny_model, make_tiny_tokenizer

from outrider.export.cli.display import figure_table, print_comparison
from outrider.export.make import sweep
from outrider.export.make.pair import Judging, PairOptions, PairPaths
from outrider.export.make.pipeline import StagedExport, stage_export
from outrider.export.make.sweep import recipes_for, sweep_pair
from outrider.export.recipes import ExportOptions
from outrider.export.report.card import TargetTimes, forecast_for, verdict
from outrider.export.report.card_html import card_html
from outrider.export.report.card_plots import COLOURS, GREY
from outrider.export.report.comparison import NotMade, compare
from outrider.models.bundle.bundle import Bundle
from outrider.models.bundle.manifest import Manifest
from outrider.models.errors import BundleError, ConfigError, ExportError, RuntimeUnavailable


def candidate(
    like: Manifest,
    precision: str,
    *,
    rate: float,
    draft_ms: float,
    size: int,
    is_on_device: bool = True,
    load_warning: str | None = None,
) -> Manifest:
    """A draft with these figures, for a target of 20 ms + 0.5 ms a drafted token."""
    accepted = (acceptance(rate),)
    forecast = forecast_for(accepted, draft_ms, TargetTimes(20.0, 0.5, "as given"))
    found = timed(like, token_ms=draft_ms, forecast=forecast, is_on_device=is_on_device, load_warning=load_warning)
    report = found.report.model_copy(update={"acceptance": accepted, "size_bytes": size})
    return found.model_copy(update={"report": report, "precision": precision})


@pytest.fixture
def like(reference_pair: PairPaths) -> Manifest:
    """A real draft's manifest, for those of the candidates."""
    return Bundle.open(reference_pair.draft).manifest


@pytest.mark.parametrize(
    ("figures", "round_trips_ms", "recommended", "reasons"),
    [
        # A faster INT4 draft that is accepted less often does not pay where drafting is cheap anyway.
        (
            {"fp32": (0.75, 2.0, 400), "int8": (0.75, 1.0, 100), "int4": (0.65, 0.7, 50)},
            [25.0],
            "int8",
            (" tokens/s", "25 ms"),
        ),
        # The same acceptances, a device ten times as slow: the quicker precision wins.
        ({"int8": (0.75, 18.0, 100), "int4": (0.7, 7.0, 50)}, [10.0], "int4", ("no other is within 2%",)),
        # Within 2 % of the highest the smallest is taken, whatever the order.
        (
            {"fp32": (0.751, 1.0, 400), "int8": (0.75, 1.0, 100)},
            [25.0, 50.0],
            "int8",
            ("smallest of 2 within 2%", "round trips of 25 and 50 ms"),
        ),
    ],
)
def test_the_recommended_draft_and_why(
    like: Manifest,
    figures: dict[str, tuple[float, float, int]],
    round_trips_ms: list[float],
    recommended: str,
    reasons: tuple[str, ...],
) -> None:
    """figures: acceptance, ms a token and size of each precision."""
    drafts = [
        candidate(like, precision, rate=rate, draft_ms=draft_ms, size=size)
        for precision, (rate, draft_ms, size) in figures.items()
    ]
    for order in (drafts, drafts[::-1]):
        found = compare(order, round_trips_ms)
        assert found.recommended == f"openvino {recommended}" and all(each in found.reason for each in reasons)
        for row in found.rows:  # 1000 ms / 20 ms
            assert row.tokens_per_s == pytest.approx([50.0 * each for each in row.speed_ups])
        assert found.best in drafts and found.best.precision == recommended


def test_a_draft_that_would_be_refused_is_not_recommended(like: Manifest) -> None:
    """None of them: no recommendation; unless it is forced."""
    bad = candidate(like, "int4", rate=0.2, draft_ms=0.1, size=10)
    good = candidate(like, "int8", rate=0.5, draft_ms=19.0, size=100)
    with pytest.raises(ExportError, match=r"the best of 1\).*expected at least 0\.3"):
        compare([bad], [50.0])
    found, forced = compare([bad, good], [50.0]), compare([bad], [50.0], is_forced=True)
    assert (found.recommended, forced.recommended) == ("openvino int8", "openvino int4")


def test_times_of_another_device_decide_nothing(like: Manifest) -> None:
    """An emulated NPU's slowest precision may be the real one's quickest: acceptance and size are what is left."""
    drafts = [
        candidate(like, "int8", rate=0.75, draft_ms=9.0, size=100, is_on_device=False),
        candidate(like, "w8a8", rate=0.70, draft_ms=1.0, size=90, is_on_device=False),
    ]
    found = compare(drafts, [10.0], [NotMade("x", "y")])
    assert found.recommended == "openvino int8" and "lacks the device" in found.reason
    assert found.not_made == (NotMade("x", "y"),)


@pytest.mark.parametrize(
    ("asked", "runtimes", "precisions"),
    [
        ({}, {"openvino", "onnxruntime"}, {"int8", "int4", "fp32"}),
        ({"precision": "int8"}, {"openvino", "onnxruntime"}, {"int8"}),
        ({"runtime": "onnxruntime"}, {"onnxruntime"}, {"int8", "int4", "fp32"}),
        ({"device": "npu"}, {"openvino"}, {"int8", "int4", "w8a8"}),
    ],
)
def test_a_sweep_is_of_all_that_fits_the_device(
    asked: dict[str, Any], runtimes: set[str], precisions: set[str]
) -> None:
    """And of no more than was asked for."""
    found = [(options.runtime, options.precision) for options in recipes_for(ExportOptions("draft", **asked))]
    assert sorted(found) == sorted(itertools.product(runtimes, precisions))


def test_drafts_timed_on_a_busy_machine_are_named(like: Manifest) -> None:
    """The recommended one has its own warning; the others stand in one line, on the page and in the terminal."""
    drafts = [
        candidate(like, precision, rate=0.75, draft_ms=draft_ms, size=100, load_warning=warning)
        for precision, draft_ms, warning in (("fp32", 9.0, "busy"), ("int8", 1.0, None), ("int4", 9.0, "busy"))
    ]
    found = compare(drafts, [25.0])
    words = "The machine was busy while these were timed too: openvino fp32, openvino int4."
    assert (found.recommended, found.load_warning()) == ("openvino int8", words)
    assert f"<strong>Warning:</strong> {words}" in card_html(drafts, None, found)
    assert compare(drafts[1:2], [25.0]).load_warning() is None


def test_a_table_that_does_not_fit_wraps_its_figures_and_keeps_the_names() -> None:
    """As speeds at five round trips do in a terminal of 80 columns."""
    console = Console(width=80, record=True, file=io.StringIO())
    places = [f"at {10 * number} ms" for number in range(1, 6)]
    console.print(figure_table("speeds", *places, first="draft", rows=[("int8-onnx", *["123.4 (1.85x)"] * 5)]))
    text = console.export_text()
    assert "int8-onnx" in text and "…" not in text and text.count("123.4") == text.count("(1.85x)") == 5


@pytest.mark.parametrize("columns", [60, 140])
def test_a_comparison_in_a_terminal_keeps_its_figures(like: Manifest, columns: int) -> None:
    """Also in one of 60 columns; the verdict comes last."""
    drafts = [
        candidate(like, "fp32", rate=0.75, draft_ms=9.12, size=6_200_000, load_warning="busy"),
        candidate(like, "int8", rate=0.71, draft_ms=1.34, size=2_100_000),
    ]
    found, console = compare(drafts, [25.0, 50.0, 100.0]), Console(width=columns, record=True, file=io.StringIO())
    print_comparison(console, found)
    text = console.export_text()
    assert "…" not in text and max(map(len, text.splitlines())) <= columns
    words = ["9.12", "1.34", "warning: The machine was busy", *(row.label for row in found.rows)]
    words += [f"{row.tokens_per_s[2]:.1f} ({row.speed_ups[2]:.2f}x)" for row in found.rows]
    assert [each for each in words if each not in text] == []
    assert " ".join(text.split()).endswith(verdict(found.best))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model, its own perfect draft."""
    directory = tmp_path_factory.mktemp("sources") / "itself"
    make_tiny_tokenizer(directory)
    return make_tiny_model("llama", directory, vocab_size=320)


TARGET = ExportOptions("target", "fp32", "torch", num_threads=1)
"""The quickest to make."""


def test_a_sweep_from_the_command_line(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every row in the JSON and on the page; the recommended draft in its place, the others kept, all of them whole."""
    out = tmp_path / "out"
    arguments = ["pair", str(model), str(model), "--out", str(out), "--sweep", "--keep", "--json"]
    arguments += ["--draft-runtime", "onnxruntime", "--target-runtime", "torch", "--rtt-ms", "10", "--rtt-ms", "50"]
    assert run_export(monkeypatch, *arguments, "--threads", "1", "--step-ms", "30", "--extra-ms", "0.5") == 0
    found = json.loads(capsys.readouterr().out)
    labels = [row["label"] for row in found["rows"]]
    assert labels == ["onnxruntime int8", "onnxruntime int4", "onnxruntime fp32"] and not found["not_made"]
    assert found["round_trips_ms"] == [10.0, 50.0] and all(len(row["tokens_per_s"]) == 2 for row in found["rows"])
    for row in found["rows"]:
        assert row["report"]["timing"]["forecast"]["step_ms"] == 30.0
        assert row["report"]["acceptance"][2]["rate"] > (0.99 if row["precision"] == "fp32" else 0.3)
        is_best = row["label"] == found["recommended"]
        place = out / "draft" if is_best else out / "sweep" / row["label"].replace(" ", "-")
        bundle = Bundle.open(row["path"])
        assert (bundle.path, bundle.manifest.precision) == (place, row["precision"])
    page = (out / "report.html").read_text(encoding="utf-8")
    assert all(label in page for label in labels) and f"Recommended: {found['recommended']}." in page
    assert f"{found['recommended']}, streamed" in page and "other drafts, streamed" in page
    # The recommended draft has a colour for its path and two for its trees; all others are grey.
    assert GREY in page and {colour for colour in COLOURS if colour in page} == {COLOURS[0], COLOURS[2], COLOURS[3]}
    assert sorted(path.name for path in out.iterdir()) == ["draft", "report.html", "sweep", "target"]
    assert len(list((out / "sweep").iterdir())) == 2


def test_what_cannot_be_made_is_listed_with_its_reason(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are compared all the same, and without --keep only one is left. Where nothing can be made every reason
    is told, and nothing is left, the target neither.
    """

    def failing(source: Any, place: Path, options: ExportOptions, *rest: Any) -> AbstractContextManager[StagedExport]:
        if options.role == "draft" and options.precision in ("int8", "int4"):
            kind = RuntimeUnavailable if options.precision == "int8" else ExportError
            raise kind(f"no {options.precision} today")
        return stage_export(source, place, options, *rest)

    monkeypatch.setattr(sweep, "stage_export", failing)
    drafts = ExportOptions("draft", runtime="onnxruntime", num_threads=1)
    swept = sweep_pair(model, model, tmp_path / "out", options=PairOptions(drafts, TARGET))
    assert swept.comparison.recommended == "onnxruntime fp32" and not swept.kept
    expected = (NotMade("onnxruntime int8", "no int8 today"), NotMade("onnxruntime int4", "no int4 today"))
    assert swept.comparison.not_made == expected
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["draft", "target"]
    options = PairOptions(ExportOptions("draft", "int4", "onnxruntime"), TARGET)
    with pytest.raises(ExportError, match=r"no draft could be exported\. onnxruntime int4: no int4 today$"):
        sweep_pair(model, model, tmp_path / "none", options=options)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Judging(round_trips_ms=()), "at least one"),
        (lambda: Judging(round_trips_ms=(-1.0,)), r"round trip time is -1\.0 ms"),
        (lambda: Judging(step_ms=0.0), r"step takes 0\.0 ms"),
        (lambda: Judging(step_ms=-1.0), r"step takes -1\.0 ms"),
        (lambda: PairOptions(TARGET, TARGET), "for a target and a target; expected a draft and a target"),
    ],
)
def test_senseless_options_are_refused_before_any_work(make: Callable[[], object], message: str) -> None:
    """By name, before there is anything to export with them."""
    with pytest.raises(ConfigError, match=message):
        make()


def test_what_is_in_the_way_is_told_before_the_work(model: Path, tmp_path: Path) -> None:
    """A kept draft's place may be taken, and the one that is there stays as it is; a file may stand where a directory
    should be.
    """
    mine = tmp_path / "out" / "sweep" / "onnxruntime-int4" / "mine"
    mine.parent.mkdir(parents=True)
    mine.touch()
    (tmp_path / "file").touch()
    progress, options = Mock(), PairOptions(ExportOptions("draft", runtime="onnxruntime"), TARGET)
    with pytest.raises(BundleError, match="onnxruntime-int4"):
        sweep_pair(model, model, tmp_path / "out", options=options, keeps_all=True, progress=progress)
    with pytest.raises(ExportError, match="cannot be written"):
        sweep_pair(model, model, tmp_path / "file" / "deeper", keeps_all=True)
    assert not progress.called
    assert sorted(tmp_path.rglob("*")) == sorted({tmp_path / "file", *mine.parents[:3], mine})
