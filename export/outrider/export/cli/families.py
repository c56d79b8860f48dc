"""Runs `outrider-export families`: shows the table of what works, as stored or measured now."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from outrider.export.make.support_table import (
    MEASURED,
    Cell,
    Legend,
    as_markdown,
    grid,
    in_short,
    load_measured,
    measure,
    to_json,
)
from outrider.export.source.family_facts import FAMILIES
from outrider.models.errors import ConfigError


def families(
    family: Annotated[list[str] | None, typer.Argument(help="Only these; all if none is named.")] = None,
    measures: Annotated[
        bool, typer.Option("--measure", help="Measure now, with tiny models of these families (minutes).")
    ] = False,
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="DOC", help="With --measure of all families: store the result, and write it to this document."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the cells as JSON.")] = False,
) -> None:
    """Show which families of models work in which runtime and precision, with the measured error."""
    chosen = tuple(family or FAMILIES)
    unknown = [name for name in chosen if name not in FAMILIES]
    if unknown:
        raise ConfigError(
            f"there is no tiny model of the family {unknown[0]!r}; expected some of {', '.join(FAMILIES)}. A model of "
            "another family is checked when it is exported"
        )
    if write is not None and (chosen != tuple(FAMILIES) or not measures):
        raise ConfigError("--write stores a measurement of all families; add --measure and name no family")
    cells = _measured_now(chosen, is_quiet=as_json) if measures else load_measured()
    cells = tuple(cell for cell in cells if cell.family in chosen)
    if write is not None:
        try:
            write.write_text(as_markdown(cells), encoding="utf-8", newline="\n")
            MEASURED.write_text(to_json(cells), encoding="utf-8", newline="\n")
        except OSError as error:
            raise ConfigError(
                f"{error.filename} cannot be written ({error.strerror}); use --write in a checkout of Outrider only"
            ) from error
    if as_json:
        typer.echo(to_json(cells), nl=False)
    else:
        _show(Console(), cells)


def _measured_now(chosen: tuple[str, ...], *, is_quiet: bool) -> tuple[Cell, ...]:
    progress = Console(stderr=True, quiet=is_quiet)

    def tell(cell: Cell) -> None:
        progress.print(f"{cell.family}: {cell.way}: {cell.outcome} {cell.error:.1g}", style="dim", highlight=False)

    with tempfile.TemporaryDirectory(prefix="outrider-families-") as work:
        return measure(chosen, Path(work), tell)


def _show(console: Console, cells: tuple[Cell, ...]) -> None:
    """A row per way of exporting, a column per family: there are more ways than fit a terminal side by side."""
    ways, rows = grid(cells)
    legend = Legend([])
    table = Table(
        "for", *rows, title="largest logit error of a tiny random model, relative to FP32", title_justify="left"
    )
    styles = {"works": "green", "wrong": "red", "refused": "yellow"}
    for way in ways:
        found = [row[way] for row in rows.values()]
        marked = [f"[{styles[cell.outcome]}]{escape(in_short(cell, legend))}[/]" for cell in found]
        table.add_row(way, *marked)
    console.print(table)
    for number, words in enumerate(legend.notes, 1):
        console.print(f"[dim]\\[{number}][/dim] {escape(words)}", highlight=False, soft_wrap=True)
