"""The table of families: whole, of this version's ways, and the same in the document."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
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
        assert (cell.outcome, cell.words) == (then.outcome, then.words)
        assert cell.error <= 10 * then.error
    assert {before[way].outcome for way in before} >= {"works", "refused"}


def test_a_measurement_goes_on_where_it_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the journal holds is not measured again; what ended the process twice is not tried a third time."""
    measured: list[str] = []

    def measure_one(family: str, source: Path, options: object, work: Path, store: object) -> Cell:
        assert (source / "model.safetensors").is_file()
        measured.append(families._way(options))  # type: ignore[arg-type]  # an ExportOptions
        if len(measured) == 3:
            raise KeyboardInterrupt
        return families._cell(family, options, "works", 1e-6, "CPU")  # type: ignore[arg-type]

    monkeypatch.setattr(families, "measure_one", measure_one)
    journal = tmp_path / "journal.jsonl"
    all_ways = [families._way(options) for options in ways_of("stablelm")]
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            measure(["stablelm"], tmp_path, journal=journal)
        assert measured == all_ways[:3]
        del measured[2:]
    measured.append("")
    table = measure(["stablelm", "t5", "bart"], tmp_path, journal=journal)
    assert measured[3:] == all_ways[3:]
    assert [cell.way for cell in table.cells] == all_ways
    assert [cell.outcome for cell in table.cells] == ["works", "works", "refused"] + ["works"] * (len(all_ways) - 3)
    assert "it ends the process" in table.cells[2].words
    assert table.left_out == {"t5": "transformers has no such family of language models", "bart": "an encoder-decoder"}


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
    assert list(newer.rows()) == ["opt", "phi"]
    assert newer == SupportTable(cells=(other, new), left_out={"mamba": "recurrent", "xlm": "new"})


def test_families_share_notes_that_differ_in_names_only() -> None:
    """A note is numbered once; the staging directory and the family's names are left out."""
    legend = families.Legend()
    words = (
        "torch cannot run it: the model in .{0}-torch.partial-0a1b2c3d fails ({1}ForCausalLM): {0} has no optional x"
    )
    cells = [
        Cell(
            family=name, role="target", device="cpu", runtime="torch", precision="fp32",
            outcome="refused", error=0.0, words=words.format(name, name.upper()),
        )
        for name in ("opt", "phi")
    ]  # fmt: skip
    assert [families.in_short(cell, legend) for cell in cells] == ["[1]", "[1]"]
    assert legend.notes == ["torch cannot run it: the model fails (*Family*): *family* has no optional x"]


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
    assert shown.exit_code == 0
    assert max(map(len, shown.stdout.splitlines())) <= 80 and "…" not in shown.stdout
    assert "gpt_neo" in shown.stdout and "llama" in shown.stdout
