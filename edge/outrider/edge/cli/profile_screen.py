"""Profiles drafts on this machine's devices: `outrider devices --profile`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from outrider.edge.cli.placing import Ranked, acceptance_of, rank
from outrider.edge.devices.placement import AS_BUNDLED
from outrider.edge.modes.assemble import open_draft_bundle
from outrider.edge.modes.draft_ladder import candidates_of
from outrider.edge.store.shelf import Shelf
from outrider.models.bundle.bundle import Bundle
from outrider.models.errors import BundleError


def show_profiles(drafts: Sequence[Path], num_threads: int, console: Console, *, as_json: bool) -> None:
    """Measures what is not kept yet, and prints a table, or a list where it is too wide. Raises OutriderError.

    drafts: bundles; none: all pulled ones.
    """
    bundles = [open_draft_bundle(path) for path in drafts] or _pulled()
    groups: dict[str, list[Bundle]] = {}
    for bundle in bundles:  # drafts for different targets do not compete
        groups.setdefault(bundle.manifest.tokenizer_fingerprint, []).append(bundle)
    ranked = [rank(candidates_of(group, AS_BUNDLED), num_threads) for group in groups.values()]
    if as_json:
        typer.echo(json.dumps({"profiles": [each.as_json() for group in ranked for each in group]}, indent=2))
        return
    for group in ranked:
        _show(console, group)


def _pulled() -> list[Bundle]:
    bundles = [open_draft_bundle(each.bundle.path) for each in Shelf().drafts()]
    if not bundles:
        raise BundleError("no draft is here to profile; pull one with `outrider pull`, or name one with --draft")
    return bundles


def _show(console: Console, ranked: Sequence[Ranked]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("draft", "runtime and device"):
        table.add_column(name, overflow="fold")
    for name in ("ms/token", "ms/8 nodes", "accepted", "busy", "score"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in ranked:
        placement, profile = each.candidate.placement, each.profile
        rate = acceptance_of(each.candidate.bundle)
        times = (f"{profile.token_ms:.2f}", f"{profile.eight_ms:.2f}") if profile is not None else ("-", "-")
        score = f"{each.score_ms:.2f}" if each.score_ms is not None else "-"
        busy = f"{100 * each.load.utilisation:.0f} %"
        accepted = f"{100 * rate:.0f} %" if rate is not None else "-"
        table.add_row(
            escape(each.candidate.bundle.manifest.name), escape(placement.words), *times, accepted, busy, score
        )
    console.print(table, highlight=False)
    for each in ranked:
        if each.error is not None:
            console.print(f"{escape(each.candidate.words)}: {escape(each.error)}", highlight=False, style="yellow")
