"""Runs `outrider-export families`: shows the table of what works, as stored or measured now."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from outrider.export.check.measured import MEASURED, Cell, SupportTable, load_measured
from outrider.export.make.support_table import (
    as_markdown,
    in_one_line,
    measure,
    wide_ways,
    works_somewhere,
)
from outrider.export.source.family_facts import FAMILIES
from outrider.models.errors import ConfigError
from outrider.models.places import default_cache_dir

_STYLES = {"works": "green", "wrong": "red", "refused": "yellow"}


def families(
    family: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this model_type, in all measured ways; may be repeated."),
    ] = None,
    measures: Annotated[
        bool, typer.Option("--measure", help="Measure now, with tiny models: about an hour for all families.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="With --measure: go on with a measurement that was interrupted.")
    ] = False,
    write: Annotated[
        Path | None,
        typer.Option(metavar="DOC", help="Write the table to this document; with --measure also store the result."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the cells as JSON.")] = False,
) -> None:
    """Show which families of models work in which runtime and precision, with the measured error."""
    if resume and not measures:
        raise ConfigError("--resume is for measuring; add --measure")
    stored = load_measured()
    if measures:
        table = _measured_now(_chosen(family), resumes=resume, is_quiet=as_json)
        stored = table if family is None else stored.updated(table)
    else:
        table = stored
        if unknown := sorted(set(family or ()) - set(table.rows()) - set(table.left_out)):
            raise ConfigError(
                f"the family {unknown[0]!r} was not measured; its models are checked when they are exported. Run "
                "outrider-export families for the names of those that were"
            )
        table = table.only(family) if family else table
    if write is not None:
        _store(stored, write)
    if as_json:
        typer.echo(table.to_json(), nl=False)
    elif family:
        _show_families(Console(), table)
    else:
        _show_all(Console(), table)


def _chosen(family: list[str] | None) -> list[str]:
    from outrider.export.source.tiny import list_tiny_families

    listed = list_tiny_families()
    known = (*listed.names, *listed.left_out)
    if unknown := [name for name in family or () if name not in known]:
        raise ConfigError(
            f"transformers has no language models of the family {unknown[0]!r}; expected a model_type such as llama"
        )
    return family or sorted(known, key=lambda name: (name not in FAMILIES, name))


def _measured_now(chosen: list[str], *, resumes: bool, is_quiet: bool) -> SupportTable:
    progress = Console(stderr=True, quiet=is_quiet)

    def report(cell: Cell) -> None:
        progress.print(f"{cell.family}: {cell.way}: {cell.outcome} {cell.error:.1g}", style="dim", highlight=False)

    journal = default_cache_dir() / "families.jsonl"
    journal.parent.mkdir(parents=True, exist_ok=True)
    if not resumes:
        journal.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="outrider-families-") as work:
        table = measure(chosen, Path(work), report, journal)
    journal.unlink()
    return table


def _store(table: SupportTable, document: Path) -> None:
    try:
        document.write_text(as_markdown(table), encoding="utf-8", newline="\n")
        MEASURED.write_text(table.to_json(), encoding="utf-8", newline="\n")
    except OSError as error:
        raise ConfigError(
            f"{error.filename} cannot be written ({error.strerror}); use --write in a checkout of Outrider only"
        ) from error


def _show_all(console: Console, table: SupportTable) -> None:
    """A row per family, a column per path: 80 columns wide."""
    rows = table.rows()
    columns = [f"{o.role} {o.device} {o.resolved_runtime} {o.resolved_precision}" for o in wide_ways()]
    grid = Table(title="largest logit error of a tiny random model, relative to FP32", title_justify="left")
    grid.add_column("family", no_wrap=True)
    for column in columns:
        grid.add_column(
            column.replace(" ", "\n").replace("openvino", "open-\nvino").replace("onnxruntime", "onnx-\nruntime")
        )
    for family, row in rows.items():
        if works_somewhere(row):
            cells = (row.get(column) for column in columns)
            grid.add_row(family, *(_marked(cell) for cell in cells))
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
