"""The table of families: whole, of this version's ways, and the same in the document."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.export.cli.main import app
from outrider.export.make import support_table as families
from outrider.export.make.support_table import as_markdown, load_measured, measure, ways
from outrider.export.source.family_facts import FAMILIES

ROOT = Path(__file__).parent.parent


def test_every_family_was_measured_in_every_way() -> None:
    """No cell is missing, none is of a way that is no more."""
    wanted = {
        (family, o.role, o.device, o.resolved_runtime, o.resolved_precision) for family in FAMILIES for o in ways()
    }
    found = [(cell.family, cell.role, cell.device, cell.runtime, cell.precision) for cell in load_measured()]
    assert len(found) == len(set(found)) and set(found) == wanted


def test_the_document_is_the_measurement() -> None:
    """docs/families.md is generated, never edited."""
    assert (ROOT / "docs" / "families.md").read_text(encoding="utf-8") == as_markdown(load_measured())


def test_a_family_is_measured_as_the_table_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell of each kind, measured again: what works still works, and refusals have the same reason."""
    some = [o for o in ways() if (o.role, o.device, o.resolved_precision) in {("target", "cpu", "fp32")}]
    monkeypatch.setattr(families, "ways", lambda: iter(some))
    before = {(cell.family, cell.way): cell for cell in load_measured()}
    for cell in measure(["gpt_neo"], tmp_path):
        then = before[cell.family, cell.way]
        assert (cell.outcome, cell.words) == (then.outcome, then.words)
        assert cell.error <= 10 * then.error
    assert {before["gpt_neo", way].outcome for family, way in before if family == "gpt_neo"} >= {"works", "refused"}


def test_the_command_shows_the_table_and_refuses_what_it_has_no_model_of() -> None:
    """As JSON for programs; a family without a tiny model is the user's mistake, with a message."""
    shown = CliRunner().invoke(app, ["families", "llama", "--json"])
    assert shown.exit_code == 0 and {cell["family"] for cell in json.loads(shown.stdout)} == {"llama"}
    refused = CliRunner().invoke(app, ["families", "gpt9"])
    assert refused.exit_code != 0 and "no tiny model of the family 'gpt9'" in str(refused.exception)
