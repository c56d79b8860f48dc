"""How an export looks in a terminal: a line a stage while it runs, a report card at the end."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from outrider.export.progress import Progress, StageEvent
from outrider.export.report.card import DEPTH_OF_ALPHA, JUDGED_AT, ends_of, step_of, tokens_per_pass, warnings_of
from outrider.export.report.comparison import Comparison, forecast_of
from outrider.models.bundle import Bundle
from outrider.models.manifest import Acceptance, Forecast, Manifest


@contextlib.contextmanager
def show_progress(*, is_quiet: bool) -> Iterator[Progress]:
    """A progress function that keeps the present stage spinning and leaves a line, with its seconds, for each
    past one.
    """
    if is_quiet:
        yield lambda event: None
        return
    # A file of its own, because quiet_upstream redirects sys.stderr while upstream runs.
    console = Console(file=sys.stderr)
    began = time.monotonic()
    current: StageEvent | None = None

    def finish() -> None:
        if current is not None:
            console.print(f"  {escape(str(current))} [dim]{time.monotonic() - began:.1f} s[/dim]", highlight=False)

    with contextlib.ExitStack() as stack:
        status = console.status("")

        def progress(event: StageEvent) -> None:
            nonlocal began, current
            if current is None:  # not before: a download has bars of its own
                stack.enter_context(status)
            finish()
            began, current = time.monotonic(), event
            status.update(escape(str(event)))

        yield progress
        finish()


def print_report(console: Console, bundle: Bundle) -> None:
    """The bundle's report card."""
    manifest = bundle.manifest
    console.print(_facts(manifest, str(bundle.path)))
    if manifest.report.acceptance:
        console.print(_acceptance(manifest.report.acceptance))
    timing = manifest.report.timing
    if timing is not None and timing.forecast is not None:
        console.print(_curve(timing.forecast))
        draft = f"a draft of {timing.forecast.draft_ms:.3g} ms a token, right {timing.forecast.alpha:.2f} times in one"
        for line in (*ends_of(timing.forecast), f"{step_of(timing.forecast)}, {draft}"):
            console.print(f"  {line}", highlight=False)


def print_warnings(console: Console, manifest: Manifest) -> None:
    """What a reader must not miss; nothing if there is nothing."""
    for warning in warnings_of(manifest):
        console.print(f"[bold yellow]warning:[/bold yellow] {escape(warning)}", highlight=False, soft_wrap=True)


def print_comparison(console: Console, found: Comparison) -> None:
    """A sweep's drafts, a row each, those that were not made with their reasons, and the recommendation."""
    table = Table(title="drafts compared", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("draft")
    for name in ("MB", "ms/token", "argmax", "T 0", "T 0.5", f"T {JUDGED_AT:g}", "tokens/pass"):
        table.add_column(name, justify="right")
    for rtt_ms in found.round_trips_ms:
        table.add_column(f"{rtt_ms:g} ms", justify="right")
    for row in found.rows:
        report, is_best = row.manifest.report, row.label == found.recommended
        assert report.timing is not None and report.agreement is not None
        table.add_row(
            f"{row.label} *" if is_best else row.label,
            f"{report.size_bytes / 1e6:,.1f}",
            f"{report.timing.token_ms:.2f}",
            f"{report.agreement.argmax:.3f}",
            *(f"{measured.rate:.3f}" for measured in report.acceptance),
            f"{tokens_per_pass(report.acceptance):.2f}",
            *(
                f"{tokens:.1f} ({speed_up:.2f}x)"
                for tokens, speed_up in zip(row.tokens_per_s, row.speed_ups, strict=True)
            ),
            style="bold" if is_best else None,
        )
    console.print(table)
    console.print(
        f"  T: acceptance by temperature; tokens/pass at depth {DEPTH_OF_ALPHA}; then predicted tokens/s by round trip",
        style="dim",
    )
    for skipped in found.not_made:
        console.print(
            f"  [yellow]not made:[/yellow] {escape(skipped.label)}: {escape(skipped.reason)}", highlight=False
        )
    console.print(f"  {step_of(forecast_of(found.best))}", highlight=False)
    console.print(f"[bold]recommended: {escape(found.recommended)}[/bold]: {escape(found.reason)}", highlight=False)


def _facts(manifest: Manifest, where: str) -> Table:
    shape, report = manifest.architecture, manifest.report
    table = Table(title=escape(f"{manifest.role} {manifest.name}"), title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("where", escape(where))
    table.add_row(
        "model",
        f"{escape(shape.name)}, {shape.parameters / 1e6:,.1f}M parameters, {shape.layers} layers, "
        f"{shape.heads}/{shape.kv_heads} heads of {shape.head_size}, vocabulary {shape.tokenizer_size:,} "
        f"(padded {shape.vocab_size:,}), {shape.max_positions:,} positions",
    )
    table.add_row("made for", f"{manifest.runtime} on {manifest.device}, {manifest.precision}")
    table.add_row("size", f"{report.size_bytes / 1e6:,.1f} MB")
    if (timing := report.timing) is not None:
        table.add_row(
            "speed",
            f"{timing.token_ms:.3g} ms a token, {timing.extend_ms:.3g} ms for {timing.extend_tokens}, after "
            f"{timing.context} tokens ({escape(timing.machine)}, {escape(timing.provider)})",
        )
    table.add_row("tokenizer", manifest.tokenizer_fingerprint[:12])
    if manifest.widened is not None:
        table.add_row(
            "[yellow]widened[/yellow]",
            f"to {manifest.widened.fp32_megabytes:,.0f} MB in FP32 from "
            f"{manifest.widened.from_parameters / 1e6:,.1f}M parameters: for measurements, the function is "
            "unchanged",
        )
    for stage in report.parity.stages:
        table.add_row(
            f"parity, {stage.name}",
            f"max difference {stage.max_delta:.2g} on {stage.scale:.3g}, KL {stage.mean_kl:.2g}, "
            f"argmax {stage.argmax_agreement:.0%} of {stage.rows}",
        )
    if (agreement := report.agreement) is not None:
        table.add_row(
            "agreement",
            f"argmax {agreement.argmax:.3f}, KL {agreement.mean_kl:.2g} nats from the unquantized model, "
            f"{agreement.rows} rows of held-out text",
        )
    for warning in warnings_of(manifest):
        table.add_row("[yellow]warning[/yellow]", escape(warning))
    return table


def _acceptance(found: tuple[Acceptance, ...]) -> Table:
    title = escape(f"acceptance by {found[0].target}, {found[0].tested_tokens} tokens tested")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("temperature", justify="right")
    table.add_column("acceptance", justify="right")
    depths = [row.depth for row in found[0].by_depth]
    for depth in depths:
        table.add_column(f"depth {depth}", justify="right")
    for measured in found:
        at = {row.depth: f"{row.tokens_per_pass:.2f}" for row in measured.by_depth}
        table.add_row(
            f"{measured.temperature:g}",
            f"{measured.rate:.3f} ± {measured.error:.3f}",
            *(at.get(depth, "-") for depth in depths),
        )
    table.caption = "tokens per target pass by depth of drafting"
    table.caption_justify = "left"
    return table


def _curve(forecast: Forecast) -> Table:
    title = f"predicted speed-up over plain cloud streaming, times (temperature {forecast.temperature:g})"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True)
    table.add_column("round trip, ms", no_wrap=True)
    for point in forecast.curve:
        table.add_column(f"{point.rtt_ms:g}", justify="right")
    table.add_row("streamed", *(f"{point.stream:.2f}" for point in forecast.curve))
    table.add_row("stop-and-wait", *(f"{point.stop_and_wait:.2f}" for point in forecast.curve))
    return table
