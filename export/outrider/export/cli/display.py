"""Shows an export in a terminal: a line per stage while it runs, then its report card, or JSON for programs."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from outrider.export.make.sweep import Swept
from outrider.export.progress import Progress, StageEvent
from outrider.export.report.card import (
    BY_GAP_EXPLAINED,
    DEPTH_OF_ALPHA,
    EXPLAINED,
    JUDGED_AT,
    TREES_EXPLAINED,
    ends_of,
    has_trees,
    judged,
    leads,
    step_of,
    tokens_per_pass,
    verdict,
    warnings_of,
    words_of_mapping,
)
from outrider.export.report.comparison import Comparison, forecast_of
from outrider.models.bundle.bundle import Bundle
from outrider.models.bundle.manifest import Acceptance, Forecast, Manifest
from outrider.models.visible import visible


def plain(text: str) -> str:
    """A string from a manifest or from upstream, for the console: neither the terminal nor rich obeys it."""
    return escape(visible(text))


@contextlib.contextmanager
def show_progress(*, is_quiet: bool) -> Iterator[Progress]:
    """A progress function: a spinner for the present stage, and a line with its seconds for each past one."""
    if is_quiet:
        yield lambda event: None
        return
    # The console keeps the present sys.stderr: quiet_upstream redirects it while upstream runs.
    console = Console(file=sys.stderr)
    began = time.monotonic()
    current: StageEvent | None = None

    def finish() -> None:
        if current is not None:
            console.print(f"  {plain(str(current))} [dim]{time.monotonic() - began:.1f} s[/dim]", highlight=False)

    with contextlib.ExitStack() as stack:
        status = console.status("")

        def progress(event: StageEvent) -> None:
            nonlocal began, current
            if current is None:  # not before: a download shows its own bars
                stack.enter_context(status)
            finish()
            began, current = time.monotonic(), event
            status.update(plain(str(event)))

        try:
            yield progress
        except KeyboardInterrupt:
            say_stopped(console)
            raise
        finish()


def say_stopped(console: Console, *, keeps_stages: bool = True) -> None:
    """What Ctrl-C has left."""
    kept = "finished stages are kept, and the same command goes on from there"
    console.print(
        f"Stopped. Nothing was put in place; {kept if keeps_stages else 'the same command begins anew'}.",
        style="yellow",
        highlight=False,
        soft_wrap=True,
    )


def print_report(console: Console, bundle: Bundle) -> None:
    """The bundle's report card."""
    manifest = bundle.manifest
    if manifest.role == "draft":
        console.print(f"[bold]{plain(verdict(manifest))}[/bold]", highlight=False)
        _print_mapping(console, manifest)
    console.print(_facts(manifest, str(bundle.path)))
    if manifest.report.acceptance:
        console.print(_acceptance(manifest.report.acceptance))
        found = judged(manifest.report.acceptance)
        if found is not None and found.by_gap:
            console.print(_by_rank(manifest.report.acceptance))
            console.print(_by_gap(found))
            console.print(f"  {BY_GAP_EXPLAINED}", style="dim", highlight=False)
    timing = manifest.report.timing
    if timing is not None and timing.forecast is not None:
        console.print(_curve(timing.forecast))
        if has_trees(timing.forecast):
            console.print(f"  {TREES_EXPLAINED}", style="dim", highlight=False)
        draft = (
            f"a draft of {timing.forecast.draft_ms:.3g} ms per token, of which {timing.forecast.alpha:.0%} are accepted"
        )
        for line in (*ends_of(timing.forecast), f"{step_of(timing.forecast)}, {draft}"):
            console.print(f"  {plain(line)}", highlight=False)


def _print_warnings(*bundles: Bundle) -> None:
    """The warnings of the reports, if they have any."""
    console = Console(stderr=True)
    for warning in (warning for bundle in bundles for warning in warnings_of(bundle.manifest)):
        console.print(f"[bold yellow]warning:[/bold yellow] {plain(warning)}", highlight=False, soft_wrap=True)


def print_comparison(console: Console, found: Comparison) -> None:
    """A sweep: a row per draft, the reasons of those that were not made, the recommendation and the verdict."""
    # Short, so that the figures fit a terminal of 60 columns.
    figures = ("MB", "ms/\ntoken", "arg-\nmax", "T 0", "T 0.5", f"T {JUDGED_AT:g}", "per\npass")
    table = figure_table("drafts compared", *figures, first="draft", no_wrap=True)
    places = (f"at {rtt_ms:g} ms" for rtt_ms in found.round_trips_ms)
    speeds = figure_table("predicted tokens/s, and speed-up over cloud-only streaming", *places, first="draft")
    for row in found.rows:
        report, is_best = row.manifest.report, row.label == found.recommended
        assert report.timing is not None and report.agreement is not None
        name, style = (f"{row.label} *", "bold") if is_best else (row.label, None)
        table.add_row(
            plain(name),
            f"{report.size_bytes / 1e6:,.1f}",
            f"{report.timing.token_ms:.2f}",
            f"{report.agreement.argmax:.3f}",
            *(f"{measured.rate:.3f}" for measured in report.acceptance),
            f"{tokens_per_pass(report.acceptance):.2f}",
            style=style,
        )
        reached = zip(row.tokens_per_s, row.speed_ups, strict=True)
        speeds.add_row(plain(name), *(f"{tokens:.1f} ({speed_up:.2f}x)" for tokens, speed_up in reached), style=style)
    console.print(table)
    console.print(
        "  argmax: share equal to the unquantized model's; T: acceptance by temperature; "
        f"per pass: tokens per target pass at depth {DEPTH_OF_ALPHA}",
        style="dim",
    )
    console.print(speeds)
    for skipped in found.not_made:
        console.print(f"  [yellow]not made:[/yellow] {plain(skipped.label)}: {plain(skipped.reason)}", highlight=False)
    if (warning := found.load_warning()) is not None:
        console.print(f"  [yellow]warning:[/yellow] {plain(warning)}", highlight=False)
    console.print(f"  {plain(step_of(forecast_of(found.best)))}", highlight=False)
    console.print(f"[bold]recommended: {plain(found.recommended)}[/bold]: {plain(found.reason)}", highlight=False)
    console.print(plain(verdict(found.best)), highlight=False)
    _print_mapping(console, found.best)


def _print_mapping(console: Console, manifest: Manifest) -> None:
    if (words := words_of_mapping(manifest)) is not None:
        console.print(plain(words), highlight=False)


def _facts(manifest: Manifest, where: str) -> Table:
    shape, report = manifest.architecture, manifest.report
    table = Table(title=plain(f"{manifest.role} {manifest.name}"), title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("where", plain(where))
    table.add_row(
        "model",
        f"{plain(shape.name)}, {shape.parameters / 1e6:,.1f}M parameters, {shape.layers} layers, "
        f"{shape.heads}/{shape.kv_heads} heads of {shape.head_size}, vocabulary {shape.tokenizer_size:,} "
        f"(padded {shape.vocab_size:,}), {shape.max_positions:,} positions",
    )
    table.add_row("made for", f"{plain(manifest.runtime)} on {manifest.device}, {manifest.precision}")
    table.add_row("size", f"{report.size_bytes / 1e6:,.1f} MB")
    if (timing := report.timing) is not None:
        table.add_row(
            "speed",
            f"{timing.token_ms:.3g} ms per token, {timing.extend_ms:.3g} ms for {timing.extend_tokens}, after "
            f"{timing.context} tokens ({plain(timing.machine)}, {plain(timing.provider)})",
        )
    table.add_row("tokenizer", manifest.tokenizer_fingerprint[:12])
    if manifest.widened is not None:
        table.add_row(
            "[yellow]widened[/yellow]",
            f"to {manifest.widened.fp32_megabytes:,.0f} MB in FP32 from "
            f"{manifest.widened.from_parameters / 1e6:,.1f}M parameters, for measurements; its function is unchanged",
        )
    for stage in report.parity.stages:
        table.add_row(
            f"parity, {plain(stage.name)}",
            f"max difference {stage.max_delta:.2g} on {stage.scale:.3g}, KL {stage.mean_kl:.2g}, "
            f"argmax {stage.argmax_agreement:.0%} of {stage.rows}",
        )
    if (agreement := report.agreement) is not None:
        table.add_row(
            "agreement",
            f"argmax {agreement.argmax:.3f}, KL {agreement.mean_kl:.2g} nats from the unquantized model, "
            f"{agreement.rows} rows of held-out text. {EXPLAINED}",
        )
    for warning in warnings_of(manifest):
        table.add_row("[yellow]warning[/yellow]", plain(warning))
    return table


def _acceptance(found: tuple[Acceptance, ...]) -> Table:
    title = plain(f"acceptance by {found[0].target}, {found[0].tested_tokens} tokens tested")
    depths = [row.depth for row in found[0].by_depth]
    table = figure_table(title, "T", "acceptance", *(f"depth {depth}" for depth in depths))
    for measured in found:
        at = {row.depth: f"{row.tokens_per_pass:.2f}" for row in measured.by_depth}
        rate = f"{measured.rate:.3f} ± {measured.error:.3f}"
        table.add_row(f"{measured.temperature:g}", rate, *(at.get(depth, "-") for depth in depths))
    table.caption = "T: temperature; depth: tokens per target pass at that depth of drafting"
    table.caption_justify = "left"
    return table


def _by_rank(found: tuple[Acceptance, ...]) -> Table:
    rows = [(f"{measured.temperature:g}", *(f"{row.rate:.3f}" for row in measured.by_width)) for measured in found]
    widths = (f"{row.width}" for row in found[0].by_width)
    return figure_table("the target's pick is among the draft's best", "T", *widths, rows=rows)


def _by_gap(found: Acceptance) -> Table:
    title = f"acceptance by lead of the draft's pick (temperature {found.temperature:g})"
    rows = [
        (name, f"{row.share:.0%}", *(f"{rate:.2f}" for rate in row.rates))
        for name, row in zip(leads(found), found.by_gap, strict=True)
    ]
    return figure_table(title, "lead", "tokens", "first", "second", rows=rows, no_wrap=True)


def _curve(forecast: Forecast) -> Table:
    title = f"predicted speed-up over cloud-only streaming, times (temperature {forecast.temperature:g})"
    ways = {"streamed": "stream", "stop-and-wait": "stop_and_wait"}
    if has_trees(forecast):
        ways = {"path": "stream", "alternatives": "line", "tree": "tree", "stop-and-wait": "stop_and_wait"}
    rows = [(f"{point.rtt_ms:g}", *(f"{getattr(point, way):.2f}" for way in ways.values())) for point in forecast.curve]
    return figure_table(title, "round trip, ms", *ways, rows=rows)


def figure_table(
    title: str,
    *columns: str,
    first: str | None = None,
    rows: Iterable[Sequence[str]] = (),
    no_wrap: bool = False,
) -> Table:
    """A table of figures, each column to the right. first: a column of names before them. rows: the first ones.

    no_wrap: a narrow terminal cuts the names short, and no figure.
    """
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True)
    if first is not None:
        table.add_column(first)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=no_wrap)
    for row in rows:
        table.add_row(*row)
    return table


def report(bundles: Sequence[Bundle], *, as_json: bool, page: Path | None = None) -> None:
    """Prints each report card; as JSON an object for one bundle, a list for several. page: the HTML's place, if any."""
    _print_warnings(*bundles)
    if as_json:
        found = [_as_json(bundle) for bundle in bundles]
        typer.echo(json.dumps(found[0] if len(found) == 1 else found, indent=2))
        return
    console = Console()
    for bundle in bundles:
        print_report(console, bundle)
    if page is not None:
        console.print(f"as a page: {plain(str(page))}", soft_wrap=True, highlight=False)


def report_sweep(swept: Swept, *, as_json: bool, page: Path) -> None:
    """Prints the comparison and the recommendation; as JSON with every manifest. page: where the HTML is."""
    _print_warnings(swept.draft, swept.target)
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
    console.print(f"written: {plain(written)}", soft_wrap=True, highlight=False)


def _as_json(bundle: Bundle) -> dict[str, Any]:
    manifest = bundle.manifest
    return {"path": str(bundle.path), **manifest.model_dump(mode="json"), "warnings": warnings_of(manifest)}
