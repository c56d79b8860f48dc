"""Runs `outrider-export heads`: its options, and what the heads guess on held-out text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from outrider.export.cli.display import say_stopped
from outrider.export.cli.distill import shown
from outrider.export.distill.options import TargetDtype
from outrider.export.make.pair import reference_directories
from outrider.export.source.prompts import read_prompts
from outrider.models.bundle.manifest import Heads
from outrider.models.bundle.reference_export import REFERENCE


def heads(
    bundle: Annotated[Path, typer.Argument(help="Target bundle that gets the heads.")],
    model: Annotated[str, typer.Argument(help=f"Model that it was made from: directory, hub id, or '{REFERENCE}'.")],
    prompts: Annotated[
        Path, typer.Option(help="Prompts like those it will serve: JSON list, JSONL, or text with one prompt per line.")
    ],
    out: Annotated[Path | None, typer.Option(help="Write the bundle here instead of in its own place.")] = None,
    count: Annotated[int, typer.Option(help="Number of heads; the first guesses the token after the next.")] = 3,
    minutes: Annotated[float | None, typer.Option(help="Minutes of training; 5 without --steps.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps in place of minutes: reproducible.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens that the target writes to train on.")] = 200_000,
    row_length: Annotated[int, typer.Option(help="Tokens per row; of longer prompts the last half is kept.")] = 256,
    rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Seed of the split, the text and the order.")] = 0,
    heldout: Annotated[float, typer.Option(help="Share of the prompts held out to measure with.")] = 0.1,
    chat: Annotated[bool, typer.Option("--chat", help="Prompts are user messages: apply the chat template.")] = False,
    target_dtype: Annotated[TargetDtype, typer.Option(help="Precision of the target in memory.")] = "bf16",
    device: Annotated[str, typer.Option(help="Device that trains, as torch names it.")] = "cpu",
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0 leaves it to torch.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the measurement as JSON, without progress.")] = False,
) -> None:
    """Train draft heads for a target and put them into its bundle; the target's texts do not change."""
    with shown(is_quiet=as_json, keeps_stages=False) as report:
        # Here, because this loads torch: seconds, in which Ctrl-C may come.
        from outrider.export.distill.heads import HeadOptions, add_heads
        from outrider.export.distill.trainer.progress import Event
        from outrider.export.interruption import Interruption

        options = HeadOptions(
            count=count,
            minutes=5.0 if minutes is None and steps is None else minutes,
            steps=steps,
            tokens=tokens,
            row_length=row_length,
            rate=rate,
            seed=seed,
            heldout=heldout,
            is_chat=chat,
            target_dtype=target_dtype,
            device=device,
            num_threads=threads,
        )
        source = reference_directories().target if model == REFERENCE else model
        with Interruption(lambda _: report(Event("stop", 1.0, "stopping at the next step", is_news=True))) as stop:
            made = add_heads(bundle, source, read_prompts(prompts), options, out=out, report=report, stop=stop)
    if made is None:
        if not as_json:
            say_stopped(Console(stderr=True), keeps_stages=False)
        raise typer.Exit(128 + (stop.signal or 0))
    assert made.manifest.draft_heads is not None
    if as_json:
        typer.echo(json.dumps({"path": str(made.path), **made.manifest.draft_heads.model_dump()}, indent=2))
        return
    Console().print(_table(made.manifest.draft_heads))
    typer.echo(f"Written to {made.path}; serve it with --source heads")


def _table(found: Heads) -> Table:
    """Acceptance by head, on held-out text of the target."""
    table = Table(title=f"{len(found.acceptance)} heads, {found.tested_tokens} tokens held out", title_justify="left")
    for column in ("token", "likeliest accepted", "in chain", "among five"):
        table.add_column(column, justify="right")
    for index, head in enumerate(found.acceptance):
        table.add_row(f"+{index + 2}", f"{head.rate:.3f}", f"{head.in_chain:.3f}", f"{head.top5:.3f}")
    return table
