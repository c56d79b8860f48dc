"""The report card as a page: what it shows, that it needs nothing else; written with the bundles or not at all."""

from __future__ import annotations

import datetime
import errno
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.export_cli import run_export
from tests.test_card import OPTIONS, draft, judged_at, reported, timed

from outrider.export.make.pair import Judging, PairPaths, export_pair
from outrider.export.make.sweep import sweep_pair
from outrider.export.report.card import (
    has_trees,
    judged,
    verdict,
)
from outrider.export.report.card_html import PageWriter, card_html, write_card_html
from outrider.export.report.card_plots import COLOURS, Item, speed_up_plot
from outrider.models.bundle.bundle import Bundle
from outrider.models.bundle.manifest import Manifest
from outrider.models.errors import BundleError, DiskFull, ExportError

__all__ = ["draft"]  # a fixture
Exported = Callable[..., str]


def test_the_same_figures_give_the_same_page(draft: Manifest, target: Manifest, tmp_path: Path) -> None:
    """Byte for byte, and without the day; another report card is replaced, and nothing is left beside it."""
    place = tmp_path / "report.html"
    write_card_html(place, [draft])
    assert write_card_html(place, [draft], target) == place
    assert place.read_text(encoding="utf-8") == card_html([draft], target)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert datetime.date.today().isoformat() not in place.read_text(encoding="utf-8")


def test_a_page_that_cannot_be_written_is_one_message(draft: Manifest, tmp_path: Path) -> None:
    """It says where, and that the bundles are as they were."""
    (tmp_path / "report.html").mkdir()
    for folder, kind, message in (
        ("nowhere", ExportError, r"nowhere/report\.html \(No such file or directory\); no bundle was changed"),
        (".", BundleError, "is not a report card of this version, so it is not replaced"),
    ):
        with pytest.raises(kind, match=message):
            write_card_html(tmp_path / folder / "report.html", [draft])
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


@pytest.fixture
def exported(strangers: PairPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Exported:
    """What `outrider-export pair` says of two strangers, which it refuses to write."""

    def export(out: Path, *more: str) -> str:
        command = ("pair", str(strangers.draft), str(strangers.target), "--out", str(out), *more)
        assert run_export(monkeypatch, *command) == 2
        return capsys.readouterr().err

    return export


def test_somebody_else_s_page_is_in_the_way_before_any_work(exported: Exported, tmp_path: Path) -> None:
    """Nothing is built or replaced, even with --overwrite; a report card is replaced with --overwrite only."""
    page = tmp_path / "report.html"
    page.write_text("<h1>mine</h1>")
    for more in ((), ("--overwrite",), ("--sweep",)):
        told = exported(tmp_path, *more)
        assert "is not a report card" in told and "reading" not in told
    assert page.read_text() == "<h1>mine</h1>" and list(tmp_path.iterdir()) == [page]
    page.write_text('<meta name="generator" content="Outrider">')
    assert "exists already; add --overwrite to replace it" in exported(tmp_path)


@pytest.mark.parametrize("export", [export_pair, sweep_pair])
def test_a_page_that_cannot_be_written_leaves_no_bundle(
    strangers: PairPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, export: Any
) -> None:
    """Bundles and page are one export: all of it, or none, the page's first bytes included."""
    write_text = Path.write_text

    def full(path: Path, text: str, **named: Any) -> int:
        if "report.html" not in path.name:
            return write_text(path, text, **named)
        write_text(path, text[:100], **named)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    out = tmp_path / "out"
    page, judging = PageWriter(out / "report.html"), Judging(is_forced=True)
    with pytest.raises(DiskFull):
        export(strangers.draft, strangers.target, out, options=OPTIONS, judging=judging, page=page)
    assert not out.exists()


def test_a_page_that_the_system_refuses_is_one_message(
    exported: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the work, and after the bundles are in place; then the message says that they are."""
    assert "File name too long" in exported(tmp_path / ("x" * 300))
    monkeypatch.chdir(tmp_path)
    for nameless in (Path(), Path("/")):
        with pytest.raises(BundleError, match="is not a report card"), PageWriter(nameless):
            pass
    with PageWriter(tmp_path / "report.html") as page, pytest.raises(ExportError, match="the bundles are written"):
        page.commit()  # nothing was written that could be renamed
    assert not list(tmp_path.iterdir())


def test_what_is_in_the_way_of_the_draft_is_told_before_the_target_is_exported(
    exported: Exported, tmp_path: Path
) -> None:
    """The target is the larger of the two, and comes first."""
    (tmp_path / "draft" / "mine").mkdir(parents=True)
    for more in ((), ("--sweep",), ("--overwrite",)):
        told = exported(tmp_path, *more)
        assert str(tmp_path / "draft") in told and "exists" in told and "reading" not in told
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]


class Page(HTMLParser):
    """Reads a page strictly: tags must be closed in order; keeps what it names and what it says."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Opens."""
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Closes the last opened."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Text."""
        self.words.append(data)


@pytest.fixture(scope="module")
def target(reference_pair: PairPaths) -> Manifest:
    """The reference target's."""
    return Bundle.open(reference_pair.target).manifest


@pytest.fixture(scope="module")
def pages(draft: Manifest, target: Manifest) -> dict[str, str]:
    """The page of a pair, of a draft alone without a target, and of a target alone."""
    alone = reported(timed(draft, forecast=None), acceptance=())
    return {"pair": card_html([draft], target), "draft": card_html([alone]), "target": card_html([], target)}


def test_the_page_needs_nothing_else(pages: dict[str, str]) -> None:
    """Well-formed, without scripts, and without anything to fetch; all of its links stay inside it."""
    for page in map(Page, pages.values()):
        assert "script" not in page.tags and "link" not in page.tags and "img" not in page.tags
        for name, value in page.attributes:
            assert not name.startswith("on")
            if name in ("href", "src", "xlink:href") or "url(" in value:
                assert value.startswith("#") or value.startswith("url(#")
            elif not name.startswith("xmlns"):
                assert "://" not in value


def test_the_page_shows_what_was_measured(draft: Manifest, target: Manifest, pages: dict[str, str]) -> None:
    """The verdict in plain words before any figure, plots and tables of a pair; a draft without a target has no
    acceptance to show, nor what follows from it.
    """
    read = {name: Page(text) for name, text in pages.items()}
    assert [read[name].tags.count("svg") for name in ("pair", "draft", "target")] == [3, 1, 1]
    found, timing = judged(draft.report.acceptance), draft.report.timing
    assert found is not None and timing is not None and timing.forecast is not None
    even = f"breaks even at {timing.forecast.breaks_even_ms:.0f} ms"
    for words in (f"{found.rate:.3f}", "Predicted speed-up", "stop-and-wait", even):
        assert words in read["pair"].text and words not in read["draft"].text
    assert "step after rollback" in read["draft"].text
    assert "argmaxes equal to the unquantized model's" in read["target"].text
    for name, manifest in (("pair", draft), ("target", target)):
        text = read[name].text
        assert 0 < text.index(verdict(manifest)) < text.index(" MB size")
        assert "KL divergence: how far its probabilities are from that model's" in text


def test_tables_show_that_they_scroll_and_can_be_reached_by_keyboard(pages: dict[str, str]) -> None:
    """Every table is in a named region that takes the focus; shadows and a hint show that there is more."""
    text = pages["pair"]
    page = Page(text)
    assert page.tags.count("table") == text.count('role="region"') == text.count('tabindex="0"') == 6
    assert text.count("The table scrolls sideways") == 6 and "linear-gradient" in text
    names = {value for name, value in page.attributes if name == "aria-labelledby"}
    assert len(names) == 6 and names <= {value for name, value in page.attributes if name == "id"}


def test_plots_are_readable_on_a_phone(pages: dict[str, str]) -> None:
    """At 360 pixels, 320 of them for the plot, no letter is smaller than 10; the page does not shrink or stretch it."""
    for svg in re.findall(r"<svg.*?</svg>", pages["pair"], flags=re.DOTALL):
        width = float(re.search(r'viewBox="0 0 ([\d.]+)', svg)[1])  # type: ignore[index]
        sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", svg)]
        assert sizes and min(sizes) * 320 / width >= 10.0


def test_the_page_warns_and_shows_any_name_as_text(draft: Manifest) -> None:
    """As the terminal does; a name is never markup."""
    names = {"name": "<script>alert(1)</script>", "runtime": r"$\frac{$"}
    html = card_html([judged_at(draft.model_copy(update=names), 0.45)])
    page = Page(html)
    assert html.count(r"$\frac{$ int8</text>") == 2  # size, and time
    assert "Warning: acceptance is 0.45" in page.text
    assert "script" not in page.tags and "<script>alert(1)</script>" in page.text


def test_drafts_that_branch_are_points_where_the_table_has_them(draft: Manifest) -> None:
    """A point at each round trip that was simulated, as many as the plot has room for, and no line between them."""
    forecast = draft.report.timing and draft.report.timing.forecast
    assert forecast and has_trees(forecast)
    for fades_ms, num_points in ((4.0, 2), (None, len(forecast.curve))):
        faded = forecast.model_copy(update={"fades_ms": fades_ms})
        svg = speed_up_plot([Item("draft", timed(draft, forecast=faded))])
        for colour in COLOURS[2:4]:
            assert len(re.findall(f"<use .*fill: {colour}", svg)) == num_points + 1  # and one in the legend
            assert not re.search(f"fill: none; stroke: {colour}", svg)
        assert re.search(f"fill: none; stroke: {COLOURS[0]}", svg)  # the formula's curve is one


def test_inspect_makes_the_page_of_any_bundle(
    reference_pair: PairPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the given path, in addition to the printed card."""
    for path in (reference_pair.draft, reference_pair.target):
        place = tmp_path / f"{path.name}.html"
        assert run_export(monkeypatch, "inspect", str(path), "--html", str(place)) == 0
        assert f"Report card: {path.name} outrider-reference" in Page(place.read_text(encoding="utf-8")).text
    said = capsys.readouterr().out.replace("\n", "")
    assert "agreement" in said and "target.html" in said
