"""Measures which families of models can be exported in which way.

A tiny random model of each family is exported in every way, and the pipeline's numerical check gives the result.
`support_table.json` beside this module holds the last measurement, docs/families.md shows it, and
`outrider-export families --measure` repeats it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter

from outrider.export.make.pipeline import stage_export
from outrider.export.make.stage_store import StageStore
from outrider.export.progress import silent
from outrider.export.recipes import RECIPES, ExportOptions
from outrider.export.source.model_source import read_source
from outrider.export.source.tiny import make_tiny_source
from outrider.models.errors import OutriderError, ParityFailure
from outrider.models.manifest import Precision, Role, StaticShapes

MEASURED: Final = Path(__file__).with_name("support_table.json")
OUTCOMES: Final = ("works", "wrong", "refused")

Outcome = Literal["works", "wrong", "refused"]


class Cell(BaseModel):
    """One way of exporting a tiny model of one family.

    outcome: "works"; "wrong" where the result computes other logits, so that the check refuses it; "refused" where it
    cannot be made. error: largest |delta logit| over the largest |logit|, of the four kinds of step; 0 where
    refused. words: the message where it does not work, else where it was checked.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    family: str
    role: Role
    device: str
    runtime: str
    precision: Precision
    outcome: Outcome
    error: float
    words: str

    @property
    def way(self) -> str:
        """The column that the cell is in."""
        return f"{self.role} {self.device} {self.runtime} {self.precision}"


@dataclass(frozen=True, slots=True)
class Legend:
    """Messages that cells refer to by number, in the order of their first use."""

    notes: list[str]

    def mark(self, words: str) -> int:
        """The number of a note, from 1."""
        if words not in self.notes:
            self.notes.append(words)
        return self.notes.index(words) + 1


def ways() -> Iterator[ExportOptions]:
    """All ways of exporting."""
    for (role, device, runtime), precisions in RECIPES.items():
        shapes = StaticShapes(prompt_len=128, response_len=128) if device == "npu" else None
        for precision in precisions:
            yield ExportOptions(role, precision, runtime, num_threads=1, device=device, static_shapes=shapes)


def measure(
    families: Sequence[str], work: Path, on_cell: Callable[[Cell], None] = lambda cell: None
) -> tuple[Cell, ...]:
    """Exports a tiny model of each family every way, in `work`; `on_cell` is called with each result.

    Raises ExportError for a family without a tiny model.
    """
    cells: list[Cell] = []
    for family in families:
        source = work / family
        make_tiny_source(family, source)
        store = StageStore(work / "stages")
        for options in ways():
            cells.append(_measure_one(family, source, options, work / "bundle", store))
            on_cell(cells[-1])
        store.release()
    return tuple(cells)


def _measure_one(family: str, source: Path, options: ExportOptions, place: Path, store: StageStore) -> Cell:
    outcome: Outcome
    try:
        with stage_export(read_source(source), place, options, silent, store) as staged:
            parity = staged.manifest.report.parity
            error = max(stage.max_delta / stage.scale for stage in parity.stages)
            outcome, words = "works", parity.checked_on
    except ParityFailure as failure:
        outcome, error, words = "wrong", failure.relative_delta, str(failure)
    except OutriderError as refusal:
        outcome, error, words = "refused", 0.0, str(refusal)
    return Cell(
        family=family,
        role=options.role,
        device=options.device,
        runtime=options.resolved_runtime,
        precision=options.resolved_precision,
        outcome=outcome,
        error=float(f"{error:.2g}"),
        words=words.replace(str(source), family).replace(str(source.parent) + "/", ""),
    )


def load_measured() -> tuple[Cell, ...]:
    """The measurement stored with this version of Outrider."""
    cells = TypeAdapter(tuple[Cell, ...]).validate_json(MEASURED.read_bytes())
    assert cells, f"{MEASURED} holds no measurement"
    return cells


def to_json(cells: Iterable[Cell]) -> str:
    """The text of `support_table.json`."""
    return json.dumps([cell.model_dump() for cell in cells], indent=1) + "\n"


def grid(cells: Sequence[Cell]) -> tuple[list[str], dict[str, dict[str, Cell]]]:
    """The columns in order, and by family the cell of each."""
    columns = list(dict.fromkeys(cell.way for cell in cells))
    rows: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        rows.setdefault(cell.family, {})[cell.way] = cell
    return columns, rows


def in_short(cell: Cell, legend: Legend) -> str:
    """A cell of the table: the error where it works, otherwise the outcome and the number of its note."""
    if cell.outcome == "works":
        return f"{cell.error:.1g}"
    number = legend.mark(cell.words)
    return f"{'WRONG ' if cell.outcome == 'wrong' else 'refused'} [{number}]".replace("  ", " ")


def as_markdown(cells: Sequence[Cell]) -> str:
    """The document docs/families.md."""
    columns, rows = grid(cells)
    legend = Legend([])
    lines = [
        "# Families",
        "",
        "Each cell: the largest logit error of a tiny random model, relative to FP32, in prefill, cached steps,",
        "multi-token steps and steps after a rollback, in the runtime that will run it. Random models are the hardest",
        "case for quantization: a trained model has smaller errors.",
        "",
        "* *WRONG*: it computes other logits than its source, so the check refuses the export; the note says in which",
        "  kind of step, and by how much.",
        "* *refused*: it cannot be exported; the note says why.",
        "",
        "Where a device was not in the machine, the list below says what ran in its place. INT4 of a random model is",
        "mostly noise, which could hide an error of the graph: the graph of a quantized export is checked unquantized",
        "first, and its steps against its own prefill.",
        "",
        "Generated by `outrider-export families --measure --write`. A family that is not listed is exported and",
        "checked like any other, and refused if the check fails.",
        "",
    ]
    for role in dict.fromkeys(cell.role for cell in cells):
        mine = [column for column in columns if column.startswith(role)]
        lines += [f"## {role.capitalize()}s", ""]
        lines.append("| family | " + " | ".join(column.removeprefix(f"{role} ") for column in mine) + " |")
        lines.append("|---" * (len(mine) + 1) + "|")
        for family, row in rows.items():
            lines.append(f"| {family} | " + " | ".join(in_short(row[column], legend) for column in mine) + " |")
        lines.append("")
    places = {cell.way: cell.words for cell in cells if cell.outcome == "works" and cell.words != "CPU"}
    lines += ["## Where it ran", ""]
    lines += [f"* {way}: {words}" for way, words in places.items()] + ["", "## Notes", ""]
    lines += [f"{number}. {' '.join(words.split())}" for number, words in enumerate(legend.notes, 1)]
    return "\n".join(lines) + "\n"
