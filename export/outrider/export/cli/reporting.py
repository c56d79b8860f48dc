"""Prints the result of a command: report cards for people, JSON for programs, warnings on standard error."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from outrider.export.cli.display import print_comparison, print_report, print_warnings
from outrider.export.make.sweep import Swept
from outrider.export.report.card import warnings_of
from outrider.models.bundle.bundle import Bundle


def report(bundles: Sequence[Bundle], *, as_json: bool, page: Path | None = None) -> None:
    """Prints each report card; as JSON an object for one bundle, a list for several. page: the HTML's place, if any."""
    for bundle in bundles:
        print_warnings(Console(stderr=True), bundle.manifest)
    if as_json:
        found = [_as_json(bundle) for bundle in bundles]
        typer.echo(json.dumps(found[0] if len(found) == 1 else found, indent=2))
        return
    console = Console()
    for bundle in bundles:
        print_report(console, bundle)
    if page is not None:
        console.print(f"as a page: {escape(str(page))}", soft_wrap=True, highlight=False)


def report_sweep(swept: Swept, *, as_json: bool, page: Path) -> None:
    """Prints the comparison and the recommendation; as JSON with every manifest. page: where the HTML is."""
    for bundle in (swept.draft, swept.target):
        print_warnings(Console(stderr=True), bundle.manifest)
    found = swept.comparison
    if as_json:
        paths = {label: bundle.path for label, bundle in swept.kept.items()} | {found.recommended: swept.draft.path}
        rows = [
            {
                "label": row.label,
                "path": str(paths[row.label]) if row.label in paths else None,
                "tokens_per_s": [round(tokens, 3) for tokens in row.tokens_per_s],
                "speed_ups": [round(speed_up, 4) for speed_up in row.speed_ups],
                **row.manifest.model_dump(mode="json"),
                "warnings": warnings_of(row.manifest),
            }
            for row in found.rows
        ]
        whole = {
            "recommended": found.recommended,
            "reason": found.reason,
            "round_trips_ms": found.round_trips_ms,
            "rows": rows,
            "not_made": [{"label": skipped.label, "reason": skipped.reason} for skipped in found.not_made],
            "target": _as_json(swept.target),
        }
        typer.echo(json.dumps(whole, indent=2))
        return
    console = Console()
    print_comparison(console, found)
    written = ", ".join(str(path) for path in (swept.draft.path, swept.target.path, page))
    console.print(f"written: {escape(written)}", soft_wrap=True, highlight=False)


def _as_json(bundle: Bundle) -> dict[str, Any]:
    manifest = bundle.manifest
    return {"path": str(bundle.path), **manifest.model_dump(mode="json"), "warnings": warnings_of(manifest)}
