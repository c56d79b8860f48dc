"""How an export looks in a terminal: a line a stage while it runs, a report card at the end."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from outrider.export.progress import Progress, StageEvent
from outrider.models.bundle import Bundle


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

    with console.status("starting") as status:

        def progress(event: StageEvent) -> None:
            nonlocal began, current
            finish()
            began, current = time.monotonic(), event
            status.update(escape(str(event)))

        yield progress
        finish()


def print_report(console: Console, bundle: Bundle) -> None:
    """The bundle's report card."""
    manifest = bundle.manifest
    shape, report = manifest.architecture, manifest.report
    table = Table(title=f"{manifest.role} {manifest.name}", title_justify="left", show_header=False)
    table.add_row("where", str(bundle.path))
    table.add_row(
        "model",
        f"{shape.name}, {shape.parameters / 1e6:,.1f}M parameters, {shape.layers} layers, "
        f"{shape.heads}/{shape.kv_heads} heads of {shape.head_size}, vocabulary {shape.tokenizer_size:,} "
        f"(padded {shape.vocab_size:,}), {shape.max_positions:,} positions",
    )
    table.add_row("made for", f"{manifest.runtime} on {manifest.device}, {manifest.precision}")
    table.add_row("size", f"{report.size_bytes / 1e6:,.1f} MB")
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
    for measured in report.acceptance:
        table.add_row(
            f"acceptance, T {measured.temperature:g}",
            f"{measured.rate:.3f} of {measured.tested_tokens} tested tokens, target {measured.target}",
        )
    console.print(table)
