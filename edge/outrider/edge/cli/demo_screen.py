"""Shows `outrider demo` in a terminal, down to 60 columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from outrider.edge.cli.command_options import DemoOptions
from outrider.edge.cli.terminal import DRAFT_STYLE, TokenPrinter
from outrider.edge.lab.comparison import ModeFigures, TimePlan
from outrider.edge.lab.laboratory import CLOUD_ONLY, STOP_AND_WAIT, STREAM, Lab
from outrider.edge.results import OnTokens
from outrider.models.counted import counted
from outrider.models.process.command_line import print_line
from outrider.models.text.tokenizer import Tokenizer
from outrider.models.visible import visible
from outrider.reference import Prompt

NAMES: Final = {CLOUD_ONLY: "cloud-only", STOP_AND_WAIT: "stop-and-wait", STREAM: "stream"}


@dataclass(frozen=True, slots=True)
class DemoScreen:
    """Prints to `console`, in the order of the demonstration."""

    console: Console

    def show_intro(self, options: DemoOptions) -> None:
        """Introduces the demo and its limits."""
        self.console.rule("Outrider: a draft here, the target in the cloud")
        self.console.print(
            "The reference pair was trained on the Python standard library. It completes Python source; it is not a "
            "chat model. Its prompts here are functions that it was not trained on."
        )
        if options.widen:
            self.console.print(
                f"The target is [bold]widened to {options.widen:,.0f} MB without changing its text[/bold]: its new "
                "neurons are computed and multiplied by zero, so a step takes as long as one of a model of that size. "
                "--widen 0 leaves it as it is; then a step is so short that drafting hardly pays.",
                highlight=False,
            )
        self.console.print(
            "The first time, the pair is exported in one to three minutes; then it comes from the cache. The demo "
            f"itself takes about {options.max_seconds:.0f} s at most.",
            highlight=False,
        )

    def show_lab(self, lab: Lab) -> None:
        """The models and where they run."""
        for role, manifest in (("target", lab.target.manifest), ("draft", lab.draft.manifest)):
            widened = f", widened from {manifest.widened.from_parameters / 1e6:.1f}M" if manifest.widened else ""
            print_line(
                self.console,
                f"{role}: {manifest.architecture.parameters / 1e6:.1f}M parameters{widened}, {manifest.precision}, "
                f"{manifest.report.size_bytes / 1e6:,.1f} MB, {manifest.runtime}",
            )
        print_line(self.console, f"drafted by: {lab.placement.words}", "bold")
        for note in lab.placement.notes:
            print_line(self.console, f"note: {note}", "yellow")
        print_line(self.console, f"{lab.cores.note}")

    @contextmanager
    def streaming(self, prompt: Prompt, tokenizer: Tokenizer, ids: Sequence[int]) -> Iterator[OnTokens]:
        """Shows a prompt, and the text that follows it as it arrives."""
        self.console.rule(Text(visible(f"{prompt.file}, line {prompt.line}")), style="dim", align="left")
        self.console.print(
            Text.assemble(
                ("the prompt is dim, ", "dim"),
                ("accepted drafts are green", DRAFT_STYLE),
                ", the rest is the target's own\n",
            )
        )
        self.console.print(Text(visible(prompt.text), style="dim"), end="", soft_wrap=True)
        printer = TokenPrinter(self.console, tokenizer.detokenizer(context=ids), end="\n")
        yield printer
        printer.finish()
        self.console.rule(style="dim")

    @contextmanager
    def counting(self, what: str, total: int) -> Iterator[Callable[[], None]]:
        """A bar that disappears when it is full; gives a function to call after each text."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        # Once a second: drawing happens on the agent's core.
        with Progress(*columns, console=self.console, transient=True, refresh_per_second=1) as progress:
            task = progress.add_task(escape(what), total=total)
            yield lambda: progress.advance(task)

    def show_plan(self, plan: TimePlan, left_out: Sequence[str], max_seconds: float) -> None:
        """What will be measured, and what does not fit into the time."""
        *first, last = (f"{rtt_ms:g}" for rtt_ms in plan.rtts_ms)
        trips = f"round trips of {', '.join(first)} and {last} ms" if first else f"a round trip of {last} ms"
        print_line(
            self.console,
            f"Measures {counted(plan.num_texts, 'text')} of {plan.max_tokens} tokens at {trips}, in three modes in "
            f"turn: about {plan.seconds:.0f} s.",
        )
        if left_out:
            print_line(
                self.console,
                f"{max_seconds:.0f} s are too short for {' and '.join(left_out)}; --max-seconds "
                f"{2 * max_seconds:.0f} measures more.",
                "yellow",
            )

    def show_figures(self, figures: Mapping[str, ModeFigures], rtt_ms: float) -> None:
        """The main table, a column per mode."""
        num_texts = figures[CLOUD_ONLY].num_texts
        table = _table(f"Round trip {rtt_ms:g} ms, {num_texts} text{'s' if num_texts > 1 else ''}, the modes in turn")
        for mode in figures:
            table.add_column(NAMES[mode], justify="right", style="bold" if mode == STREAM else None, no_wrap=True)
        for name, show in ROWS.items():
            table.add_row(name, *(show(mode, each) for mode, each in figures.items()))
        self.console.print(table, "")

    def show_sweep(self, sweep: Mapping[float, Mapping[str, ModeFigures]]) -> None:
        """Speed-ups by round trip."""
        table = _table("Speed-up over cloud-only, by round trip")
        for rtt_ms in sweep:
            table.add_column(f"{rtt_ms:g} ms", justify="right", no_wrap=True)
        for mode in (STOP_AND_WAIT, STREAM):
            values = [_times(figures[mode].speed_up) for figures in sweep.values()]
            table.add_row(NAMES[mode], *values, style="bold" if mode == STREAM else None)
        self.console.print(table, "")

    def show_close(self, figures: Mapping[str, ModeFigures], lab: Lab, skipped: str | None, load: str | None) -> None:
        """Explains the figures and their limits. skipped: what was planned and not measured."""
        self.console.print(
            "tokens/s leaves out the prompt. From accepted drafts: share of the text. Bytes are of bodies, prompt "
            "included. docs/glossary.md explains every figure.",
            style="dim",
            highlight=False,
        )
        if (note := short_round_trip_note(figures)) is not None:
            self.console.print(note, style="dim", highlight=False)
        if any(not math.isfinite(f.tokens_per_s) for f in figures.values()):
            self.console.print("-: too short to measure a rate. Raise --max-tokens.", style="dim", highlight=False)
        if skipped is not None:
            print_line(self.console, f"Not measured: {skipped}.", "yellow")
        if load is not None:
            print_line(self.console, load, "yellow")
        if lab.placement.is_emulated:
            self.console.print(
                "The NPU was emulated on the CPU: text, acceptance and code are an NPU's, the times are not.",
                style="yellow",
            )
        if any(not f.identical for f in figures.values()):
            self.console.print(
                "A text differs where two tokens score almost alike: batches of other shapes round differently. "
                "`python -m bench.invariant` counts and explains such cases.",
                style="yellow",
            )


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    return table


def _number(value: float, digits: int) -> str:
    """A dash for NaN: the text was too short for this number."""
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"


def _times(value: float) -> str:
    return f"{_number(value, 2)}x" if math.isfinite(value) else "-"


ROWS: Final[dict[str, Callable[[str, ModeFigures], str]]] = {
    "speed-up": lambda mode, f: _times(f.speed_up),
    "tokens/s": lambda mode, f: _number(f.tokens_per_s, 1),
    "from accepted drafts": lambda mode, f: "-" if mode == CLOUD_ONLY else f"{f.accepted_share:.0%}".replace("%", " %"),
    "tokens per target pass": lambda mode, f: f"{f.tokens_per_pass:.2f}",
    "first token, ms": lambda mode, f: _number(f.ttft_ms, 0),
    "bytes up per token": lambda mode, f: f"{f.bytes_up_per_token:.0f}",
    "bytes down per token": lambda mode, f: f"{f.bytes_down_per_token:.0f}",
    "same text": lambda mode, f: "yes" if f.identical else f"{f.num_different} not",
}
"""Rows of the main table, and how each shows a mode's figures. They fit into 60 columns."""


def short_round_trip_note(figures: Mapping[str, ModeFigures]) -> str | None:
    """Explains a lead of stop-and-wait, where it has one."""
    if not figures[STOP_AND_WAIT].speed_up > figures[STREAM].speed_up:  # also where one cannot be known
        return None
    return (
        "Stop-and-wait leads here: this round trip is short beside a step of the target, so waiting costs little and "
        "fills each step. Stream mode is for longer round trips."
    )
