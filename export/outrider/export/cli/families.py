"""Runs `outrider-export families`: shows the table of what works. `tools.families` measures it."""

from __future__ import annotations

import re
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from outrider.export.check.advice import WIDE, Cell, SupportTable, load_measured, works_somewhere
from outrider.models.errors import ConfigError

_STYLES = {"works": "green", "wrong": "red", "refused": "yellow"}


def families(
    family: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this model_type, in all measured ways; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the cells as JSON.")] = False,
) -> None:
    """Show which families of models work in which runtime and precision, with the measured error."""
    table = load_measured()
    if unknown := sorted(set(family or ()) - set(table.rows()) - set(table.left_out)):
        raise ConfigError(
            f"the family {unknown[0]!r} was not measured; its models are checked when they are exported. Run "
            "outrider-export families for the names of those that were"
        )
    table = table.only(family) if family else table
    if as_json:
        typer.echo(table.to_json(), nl=False)
    elif family:
        _show_families(Console(), table)
    else:
        _show_all(Console(), table)


def _show_all(console: Console, table: SupportTable) -> None:
    """A row per family, a column per path: 80 columns wide."""
    rows = table.rows()
    columns = [" ".join(way) for way in WIDE]
    grid = Table(title="largest logit error of a tiny random model, relative to FP32", title_justify="left")
    grid.add_column("family", no_wrap=True)
    for column in columns:
        grid.add_column(
            column.replace(" ", "\n").replace("openvino", "open-\nvino").replace("onnxruntime", "onnx-\nruntime")
        )
    for family, row in rows.items():
        if works_somewhere(row):
            grid.add_row(family, *(_marked(row.get(column)) for column in columns))
    console.print(grid)
    refused = [family for family, row in rows.items() if not works_somewhere(row)]
    for title, names in (("No path takes", refused), ("Not measured:", table.left_out)):
        if names:
            console.print(f"{title} {', '.join(names)}.", style="dim", highlight=False)
    console.print("More of one: outrider-export families --family NAME", highlight=False)


def _marked(cell: Cell | None) -> str:
    """The error, WRONG or a dash."""
    if cell is None:
        return ""
    shown = {"works": f"{cell.error:.1g}", "wrong": "WRONG", "refused": "-"}[cell.outcome]
    return f"[{_STYLES[cell.outcome]}]{shown}[/]"


def _show_families(console: Console, table: SupportTable) -> None:
    """A line for each way of each family, and the reasons of those that do not work."""
    for family, row in table.rows().items():
        notes: list[str] = []
        console.print(f"[bold]{escape(family)}[/]: largest logit error of a tiny random model, relative to FP32")
        for way, cell in row.items():
            shown = f"{cell.error:.1g}"
            if cell.outcome != "works":
                words = escape(in_one_line(cell.words))
                notes += [words] if words not in notes else []
                shown = f"{'WRONG ' if cell.outcome == 'wrong' else ''}\\[{notes.index(words) + 1}]"
            console.print(f"  {way:32s} [{_STYLES[cell.outcome]}]{shown}[/]", highlight=False)
        for number, words in enumerate(notes, 1):
            console.print(Padding(f"[dim]\\[{number}][/dim] {words}", (0, 0, 0, 2)), highlight=False)
    for family, reason in table.left_out.items():
        console.print(f"[bold]{escape(family)}[/]: not measured: {escape(reason)}", highlight=False)


def in_one_line(words: str) -> str:
    """A message without line breaks and colours."""
    return " ".join(re.sub(r"\x1b?\[[0-9;]*m", "", words).split())
