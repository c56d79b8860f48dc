"""Runs `outrider-export distill`: its options, its progress and what was measured."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from outrider.export.cli.display import figure_table, plain, say_stopped
from outrider.export.distill.options import DistillOptions, TargetDtype, TrainingDevice
from outrider.export.make.pair import named_source
from outrider.export.progress import Event, Report
from outrider.models.bundle.reference_export import REFERENCE
from outrider.models.errors import ConfigError

if TYPE_CHECKING:
    from outrider.export.distill.distill import DistillResult

SameTokenizer = Annotated[
    bool, typer.Option("--same-tokenizer", help="Refuse a draft with another tokenizer than the target's.")
]


def distill(
    draft: Annotated[str, typer.Argument(help=f"Draft to improve: directory, hub id, or '{REFERENCE}'.")],
    target: Annotated[str, typer.Argument(help=f"Its target: likewise, or '{REFERENCE}'.")],
    prompts: Annotated[
        Path, typer.Option(help="Prompts like those it will serve: JSON list, JSONL, or text with one prompt per line.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Directory of the new draft.")] = Path("distilled"),
    heldout: Annotated[
        str, typer.Option(help="Share of the prompts held out to measure with, or a file of such prompts.")
    ] = "0.1",
    minutes: Annotated[float | None, typer.Option(help="Minutes of training; 30 without --steps.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps in place of minutes: reproducible.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens that the target writes to train on.")] = 500_000,
    row_length: Annotated[
        int, typer.Option(help="Tokens per row; of longer prompts the last half of that is kept.")
    ] = 256,
    rate: Annotated[float, typer.Option(help="Peak learning rate, as for AdamW.")] = 3e-4,
    seed: Annotated[int, typer.Option(help="Seed of the split, the text and the order.")] = 0,
    temperatures: Annotated[
        str, typer.Option(help="Temperatures to train at; text is sampled between the lowest and the highest.")
    ] = "0.5,0.8,1.0",
    kl: Annotated[float, typer.Option("--kl", help="Weight of the forward KL divergence.")] = 1.0,
    match: Annotated[
        float,
        typer.Option(
            help="Weight of the match probability, which replaces KL in the course of training; 0: KL throughout."
        ),
    ] = 2.0,
    cross_entropy: Annotated[float, typer.Option(help="Weight of the cross-entropy of the target's tokens.")] = 0.1,
    chat: Annotated[bool, typer.Option("--chat", help="Prompts are user messages: apply the chat template.")] = False,
    target_dtype: Annotated[TargetDtype, typer.Option(help="Precision of the target in memory.")] = "bf16",
    device: Annotated[
        TrainingDevice, typer.Option(help="Device that trains; auto takes CUDA if there is one.")
    ] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0 leaves it to torch.")] = 0,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Compile the training step.")] = True,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Continue an interrupted run of the same inputs.")
    ] = True,
    work: Annotated[
        Path | None, typer.Option(help="Directory of the state, outside of --out; the target's text stays there.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier distilled draft.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Write the draft even if its acceptance fell.")] = False,
    same_tokenizer: SameTokenizer = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON, without progress.")] = False,
) -> None:
    """Fine-tune a draft on its target's own continuations of your prompts."""
    options = DistillOptions(
        heldout=_heldout(heldout),
        minutes=minutes,
        steps=steps,
        tokens=tokens,
        row_length=row_length,
        rate=rate,
        seed=seed,
        temperatures=_temperatures(temperatures),
        kl=kl,
        match=match,
        cross_entropy=cross_entropy,
        is_chat=chat,
        target_dtype=target_dtype,
        device=device,
        num_threads=threads,
        is_compiled=compiled,
        resume=resume,
        work=work,
        overwrite=overwrite,
        force=force,
        same_tokenizer=same_tokenizer,
    )
    with shown(is_quiet=as_json) as report:
        # Here, because this loads torch: seconds, in which Ctrl-C may come.
        from outrider.export.distill.distill import distill_draft

        models = (named_source(draft, "draft"), named_source(target, "target"))
        result = distill_draft(*models, prompts, out, options, report)
    _print(result, as_json=as_json)
    if result.signal is not None:
        raise typer.Exit(128 + result.signal)
    if result.path is None:
        raise typer.Exit(1)  # a script that needs the draft must stop here


def _heldout(text: str) -> float | Path:
    try:
        return float(text)
    except ValueError:
        return Path(text)


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--temperatures is {text!r}; expected numbers separated by commas, such as 0.5,0.8,1.0"
        ) from None


@contextlib.contextmanager
def shown(*, is_quiet: bool, keeps_stages: bool = True) -> Iterator[Report]:
    """A report that shows a bar for the present stage and leaves a line for what is news."""
    # The console keeps the present sys.stderr: quiet_upstream redirects it while upstream runs.
    console = Console(file=sys.stderr)
    if is_quiet:
        yield lambda event: None
        return
    bar = Progress(
        TextColumn("{task.fields[stage]}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task("", total=1.0, stage="")

        def report(event: Event) -> None:
            if bar.tasks[0].fields["stage"] != event.stage:
                bar.reset(task, stage=event.stage)
            bar.update(task, completed=event.share, description=plain(event.text))
            if event.is_news:
                console.print(f"  {event.stage:>10}  {plain(event.text)}", highlight=False, soft_wrap=True)

        try:
            yield report
        except KeyboardInterrupt:
            bar.stop()
            say_stopped(console, keeps_stages=keeps_stages)
            raise


def _print(result: DistillResult, *, as_json: bool) -> None:
    if as_json:
        path = str(result.path) if result.path else None
        whole = {"status": result.status, "path": path, "message": result.message, **(result.record or {})}
        typer.echo(json.dumps(whole, indent=2))
        return
    if result.record is not None:
        Console().print(_card(result.record))
    is_good = result.status == "written" and result.record is not None and result.record["verdict"] == "better"
    color = "green" if is_good else "yellow"
    console = Console(stderr=result.status == "stopped")
    console.print(f"[{color}]{plain(result.message)}[/{color}]", highlight=False, soft_wrap=True)


def _card(record: dict[str, Any]) -> Table:
    """Acceptance and divergence before and after, on held-out prompts."""
    heldout = record["heldout"]
    title = f"{record['draft']['name']} distilled on {record['target']['name']}, {heldout['prompts']} prompts held out"
    table = figure_table(plain(title), "before", "after", "change", first="")
    for before, after in zip(heldout["before"]["acceptance"], heldout["after"]["acceptance"], strict=True):
        temperature = f"{before['temperature']:g}"
        change = heldout["change"][temperature]
        table.add_row(
            f"acceptance, T {temperature}",
            f"{before['in_chain']:.3f} ± {before['error']:.3f}",
            f"{after['in_chain']:.3f} ± {after['error']:.3f}",
            f"{change['rise']:+.3f} ± {change['error']:.3f}",
        )
        was, is_now = before["tokens_per_pass"], after["tokens_per_pass"]
        table.add_row(f"tokens per pass, T {temperature}", f"{was:.2f}", f"{is_now:.2f}", f"{is_now - was:+.2f}")
    is_mapped = record["tokenizer_fingerprint"] != record["target_tokenizer_fingerprint"]
    figure = "cross-entropy in nats" if is_mapped else "KL in nats"
    for index, temperature in enumerate(heldout["before"]["temperatures"]):
        was, is_now = heldout["before"]["kl"][index], heldout["after"]["kl"][index]
        table.add_row(f"{figure}, T {temperature:g}", f"{was:.3f}", f"{is_now:.3f}", f"{is_now - was:+.3f}")
    return table
