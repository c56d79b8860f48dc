"""The measured pages: docs/families.md is the table of families, whole and of this version's ways; docs/results.md, its
plot and README's table are what `bench.page` writes from docs/results.json.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from bench import page
from tools import families
from tools.families import as_markdown, measure, updated, ways_of
from tools.tiny_sources import list_tiny_families
from typer.testing import CliRunner

from outrider.export.check.advice import Cell, SupportTable, load_measured, works_somewhere
from outrider.export.cli.main import app
from outrider.export.source.family_facts import FAMILIES

ROOT = Path(__file__).parent.parent


def test_every_family_was_measured_in_every_way() -> None:
    """No cell is missing, none is of a way that is no more."""
    table = load_measured()
    expected = {
        (family, o.role, o.device, o.resolved_runtime, o.resolved_precision)
        for family in (*FAMILIES, *table.rows())
        for o in ways_of(family)
    }
    found = [(cell.family, cell.role, cell.device, cell.runtime, cell.precision) for cell in table.cells]
    assert len(found) == len(set(found)) and set(found) == expected


def test_every_language_model_of_transformers_is_in_the_table_or_has_a_reason() -> None:
    """No family is forgotten, and the well-known ones work somewhere."""
    table, listed = load_measured(), list_tiny_families()
    assert {*table.rows(), *table.left_out} == {*listed.names, *listed.left_out}
    assert all(works_somewhere(table.rows()[family]) for family in FAMILIES)


def test_the_document_is_the_measurement() -> None:
    """docs/families.md is generated, never edited."""
    assert (ROOT / "docs" / "families.md").read_text(encoding="utf-8") == as_markdown(load_measured())


def test_a_family_is_measured_as_the_table_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell of each kind, measured again: what works still works, and refusals have the same reason."""
    some = [o for o in families.ways() if (o.role, o.device, o.resolved_precision) == ("target", "cpu", "fp32")]
    monkeypatch.setattr(families, "ways", lambda: iter(some))
    before = load_measured().rows()["gpt_neo"]
    for cell in measure(["gpt_neo"], tmp_path).cells:
        then = before[cell.way]
        assert (cell.outcome, cell.words) == (then.outcome, then.words) and cell.error <= 10 * then.error
    assert {before[way].outcome for way in before} >= {"works", "refused"}


def test_some_families_are_replaced_in_the_stored_table() -> None:
    """A measurement of one family leaves the others as they were."""
    old = Cell(
        family="opt", role="target", device="cpu", runtime="torch", precision="fp32",
        outcome="refused", error=0.0, words="no",
    )  # fmt: skip
    new = old.model_copy(update={"outcome": "works", "error": 1e-6, "words": "CPU"})
    other = old.model_copy(update={"family": "phi"})
    table = SupportTable(cells=(old, other), left_out={"mamba": "recurrent", "xlm": "old"})
    newer = updated(table, SupportTable(cells=(new,), left_out={"xlm": "new"}))
    assert newer == SupportTable(cells=(other, new), left_out={"mamba": "recurrent", "xlm": "new"})
    assert list(newer.rows()) == ["opt", "phi"]


def test_the_command_shows_the_table_and_refuses_what_it_has_no_model_of() -> None:
    """As JSON for programs; a family that was not measured is the user's mistake, with a message."""
    shown = CliRunner().invoke(app, ["families", "--family", "llama", "--json"])
    assert shown.exit_code == 0 and {cell["family"] for cell in json.loads(shown.stdout)["cells"]} == {"llama"}
    refused = CliRunner().invoke(app, ["families", "--family", "gpt9"])
    assert refused.exit_code != 0 and "the family 'gpt9' was not measured" in str(refused.exception)


@pytest.mark.parametrize("arguments", [[], ["--family", "gpt_neo", "--family", "llama"]])
def test_it_fits_a_terminal_of_80_columns(arguments: list[str]) -> None:
    """Every line, and no name of a family or column is cut."""
    shown = CliRunner().invoke(app, ["families", *arguments], env={"COLUMNS": "80", "TERM": "dumb"})
    assert shown.exit_code == 0 and "gpt_neo" in shown.stdout and "llama" in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80 and "…" not in shown.stdout


@pytest.fixture(scope="module")
def results() -> Any:
    return json.loads(page.FIGURES.read_text("utf-8"))


def test_no_figure_of_the_page_is_typed_by_hand(results: Any) -> None:
    """Neither there nor in README."""
    assert page.page(results) == page.PAGE.read_text("utf-8")
    assert page.section(results) in page.README.read_text("utf-8")


def test_the_plot_is_that_of_the_figures(results: Any) -> None:
    """Byte for byte where matplotlib is the version that drew it. Its text has a colour for dark pages, too."""
    kept = page.PLOT.read_text("utf-8")
    if matplotlib.__version__ == results["matplotlib"]:
        assert page.plot(results) == kept
    assert "prefers-color-scheme:dark" in kept and "stop-and-wait" in kept


def test_other_figures_make_another_page(results: Any) -> None:
    other = copy.deepcopy(results)
    for place in other["parts"]["round trips"]["figures"]["round_trips"]:
        place["modes"]["tree"]["ratios"] = [0.5]
    assert page.section(other) != page.section(results) and page.plot(other) != page.plot(results)
    assert "at none of the round trips" in page.page(other)
