"""The report card as a page: written with the bundles or not at all, and over nothing but another such page."""

from __future__ import annotations

import datetime
import errno
from pathlib import Path
from typing import Any

import pytest
from tests.export_cli import run_export

from outrider.export.make.pair import Judging, PairOptions, PairPaths, export_pair
from outrider.export.make.sweep import sweep_pair
from outrider.export.recipes import ExportOptions
from outrider.export.report.card_html import PageWriter, card_html, write_card_html
from outrider.models.bundle.bundle import Bundle
from outrider.models.errors import BundleError, DiskFull, ExportError


def test_the_same_figures_give_the_same_page(reference_pair: PairPaths, tmp_path: Path) -> None:
    """Byte for byte, and without the day; another report card is replaced, and nothing is left beside it."""
    draft, target = (Bundle.open(path).manifest for path in (reference_pair.draft, reference_pair.target))
    place = tmp_path / "report.html"
    write_card_html(place, [draft])
    assert write_card_html(place, [draft], target) == place
    assert place.read_text(encoding="utf-8") == card_html([draft], target)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert datetime.date.today().isoformat() not in place.read_text(encoding="utf-8")


def test_a_page_that_cannot_be_written_is_one_message(reference_pair: PairPaths, tmp_path: Path) -> None:
    """It says where, and that the bundles are as they were."""
    draft = Bundle.open(reference_pair.draft).manifest
    with pytest.raises(ExportError, match=r"nowhere/report\.html \(No such file or directory\); no bundle was changed"):
        write_card_html(tmp_path / "nowhere" / "report.html", [draft])
    taken = tmp_path / "report.html"
    taken.mkdir()
    with pytest.raises(BundleError, match="is not a report card of this version, so it is not replaced"):
        write_card_html(taken, [draft])
    assert list(tmp_path.iterdir()) == [taken]


def test_somebody_else_s_page_is_in_the_way_before_any_work(
    strangers: PairPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is built or replaced, even with --overwrite; a report card is replaced with --overwrite only."""
    page = tmp_path / "report.html"
    page.write_text("<h1>mine</h1>")
    command = ("pair", str(strangers.draft), str(strangers.target), "--out", str(tmp_path))
    for more in ((), ("--overwrite",), ("--sweep",)):
        assert run_export(monkeypatch, *command, *more) == 2
        told = capsys.readouterr().err
        assert "is not a report card" in told and "reading" not in told
    assert page.read_text() == "<h1>mine</h1>" and list(tmp_path.iterdir()) == [page]
    page.write_text('<meta name="generator" content="Outrider">')
    assert run_export(monkeypatch, *command) == 2
    assert "exists already; add --overwrite to replace it" in capsys.readouterr().err


@pytest.mark.parametrize("is_sweep", [False, True])
def test_a_page_that_cannot_be_written_leaves_no_bundle(
    strangers: PairPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_sweep: bool
) -> None:
    """Bundles and page are one export: all of it, or none, the page's first bytes included."""
    write_text = Path.write_text

    def full(path: Path, text: str, **named: Any) -> int:
        if "report.html" not in path.name:
            return write_text(path, text, **named)
        write_text(path, text[:100], **named)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    draft = ExportOptions("draft", "fp32", "onnxruntime", num_threads=1)
    target = ExportOptions("target", "fp32", "torch", num_threads=1)
    export = sweep_pair if is_sweep else export_pair
    out = tmp_path / "out"
    with pytest.raises(DiskFull):
        export(
            strangers.draft,
            strangers.target,
            out,
            options=PairOptions(draft, target),
            judging=Judging(is_forced=True),
            page=PageWriter(out / "report.html"),
        )
    assert not out.exists()


def test_a_page_that_the_system_refuses_is_one_message(
    strangers: PairPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the work, and after the bundles are in place; then the message says that they are."""
    assert (
        run_export(
            monkeypatch, "pair", str(strangers.draft), str(strangers.target), "--out", str(tmp_path / ("x" * 300))
        )
        == 2
    )
    assert "File name too long" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    for nameless in (Path(), Path("/")):
        with pytest.raises(BundleError, match="is not a report card"), PageWriter(nameless):
            pass
    page = PageWriter(tmp_path / "report.html")
    with page, pytest.raises(ExportError, match="the bundles are written"):
        page.commit()  # nothing was written that could be renamed
    assert not list(tmp_path.iterdir())


def test_what_is_in_the_way_of_the_draft_is_told_before_the_target_is_exported(
    strangers: PairPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The target is the larger of the two, and comes first."""
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "mine").touch()
    command = ("pair", str(strangers.draft), str(strangers.target), "--out", str(tmp_path))
    for more in ((), ("--sweep",), ("--overwrite",)):
        assert run_export(monkeypatch, *command, *more) == 2
        told = capsys.readouterr().err
        assert str(tmp_path / "draft") in told and "exists" in told and "reading" not in told
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]
