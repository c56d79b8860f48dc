"""How `outrider demo` looks in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from outrider.edge.cli.demo_options import DemoOptions
from outrider.edge.cli.terminal import DRAFT_STYLE, TokenPrinter
from outrider.edge.lab.comparison import ModeFigures
from outrider.edge.lab.laboratory import CLOUD_ONLY, STOP_AND_WAIT, STREAM, Lab
from outrider.edge.results import OnTokens
from outrider.models.tokenizer import Tokenizer
from outrider.reference import Prompt

NAMES: Final = {CLOUD_ONLY: "cloud-only", STOP_AND_WAIT: "stop-and-wait", STREAM: "stream"}


class DemoScreen:
    """Prints to `console`, in the order of the demonstration."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def show_intro(self, options: DemoOptions) -> None:
        """What will be seen, and what it is worth."""
        self._console.rule("Outrider: a draft here, the target in the cloud, exactly the target's text")
        self._console.print(
            "The bundled pair was trained on the Python standard library. It completes Python source and is no "
            "assistant; its prompts are functions that it was not trained on."
        )
        if options.widen_mb:
            self._console.print(
                f"The target is [bold]widened to {options.widen_mb:,.0f} MB without changing its function[/bold]: its "
                "new neurons are computed and multiplied by zero. A pass then costs what a pass of a model of that "
                "size costs, while text and acceptance are the real pair's. --widen 0 leaves it as it is: then a pass "
                "is so quick that there is little to win.",
                highlight=False,
            )

    def show_lab(self, lab: Lab) -> None:
        """The models and where they run."""
        for role, bundle in (("target", lab.target), ("draft", lab.draft)):
            manifest = bundle.manifest
            widened = f", widened from {manifest.widened.from_parameters / 1e6:.1f}M" if manifest.widened else ""
            self._console.print(
                f"{role}: {manifest.architecture.parameters / 1e6:.1f}M parameters{widened}, {manifest.precision}, "
                f"{manifest.report.size_bytes / 1e6:,.1f} MB, {manifest.runtime}",
                highlight=False,
            )
        self._console.print(f"drafted by: {lab.placement.words}", style="bold", highlight=False)
        for note in lab.placement.notes:
            self._console.print(f"note: {note}", style="yellow", highlight=False)
        self._console.print(f"{lab.cores.note}", highlight=False)

    @contextmanager
    def streaming(self, prompt: Prompt, tokenizer: Tokenizer, ids: Sequence[int]) -> Iterator[OnTokens]:
        """Shows a prompt, and the text that follows it as it arrives."""
        self._console.rule(f"{prompt.file}, line {prompt.line}", style="dim", align="left")
        self._console.print(
            Text.assemble(
                ("the prompt is dim, ", "dim"),
                ("accepted drafts are green", DRAFT_STYLE),
                ", the rest is the target's own\n",
            )
        )
        self._console.print(Text(prompt.text, style="dim"), end="", soft_wrap=True)
        printer = TokenPrinter(self._console, tokenizer.detokenizer(context=ids))
        yield printer
        printer.finish()
        self._console.rule(style="dim")

    @contextmanager
    def counting(self, what: str, total: int) -> Iterator[Callable[[], None]]:
        """A bar that is gone when it is full; call what it gives once a text."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        # Once a second: drawing happens on the agent's core.
        with Progress(*columns, console=self._console, transient=True, refresh_per_second=1) as progress:
            task = progress.add_task(escape(what), total=total)
            yield lambda: progress.advance(task)

    def show_figures(self, figures: Mapping[str, ModeFigures], rtt_ms: float) -> None:
        """The main table."""
        table = Table(
            title=f"Round trip {rtt_ms:g} ms, {figures[CLOUD_ONLY].num_texts} texts, the modes in turn on each",
            title_justify="left",
            box=None,
            padding=(0, 1, 0, 0),
            header_style="dim",
        )
        table.add_column("")
        for name in (
            *("tokens\n/s", "TTFT\nms", "accept-\nance", "tokens\n/pass", "passes\n/token"),
            *("bytes\nup", "bytes\ndown", "speed-\nup", "same\ntext"),
        ):
            table.add_column(name, justify="right")
        for mode, f in figures.items():
            table.add_row(
                NAMES[mode],
                f"{f.tokens_per_s:.1f}",
                f"{f.ttft_ms:.0f}",
                "-" if mode == CLOUD_ONLY else f"{f.acceptance_rate:.2f}",
                f"{f.tokens_per_pass:.2f}",
                f"{f.passes_per_token:.2f}",
                f"{f.bytes_up_per_token:.0f}",
                f"{f.bytes_down_per_token:.0f}",
                f"{f.speed_up:.2f}x",
                "yes" if f.identical else f"not {f.num_different}",
                style="bold" if mode == STREAM else None,
            )
        self._console.print(table)

    def show_sweep(self, sweep: Mapping[float, Mapping[str, ModeFigures]]) -> None:
        """Speed-ups by round trip."""
        table = Table(
            title="Speed-up over cloud-only, by round trip",
            title_justify="left",
            box=None,
            padding=(0, 2, 0, 0),
            header_style="dim",
        )
        table.add_column("")
        for rtt_ms in sweep:
            table.add_column(f"{rtt_ms:g} ms", justify="right")
        for mode in (STOP_AND_WAIT, STREAM):
            values = [f"{figures[mode].speed_up:.2f}x" for figures in sweep.values()]
            table.add_row(NAMES[mode], *values, style="bold" if mode == STREAM else None)
        self._console.print(table)

    def show_close(self, figures: Mapping[str, ModeFigures], lab: Lab) -> None:
        """What the figures are, and are not."""
        self._console.print(
            "tokens/s leaves the prompt's prefill out. Bytes are of bodies, a generated token, the prompt included. "
            "Acceptance: accepted over judged drafted tokens.",
            style="dim",
            highlight=False,
        )
        if lab.placement.is_emulated:
            self._console.print(
                "The NPU was emulated on the CPU: text, acceptance and code are an NPU's, the times are not.",
                style="yellow",
            )
        if any(not f.identical for f in figures.values()):
            self._console.print(
                "A text differs where two tokens score almost alike: batches of other shapes round differently. "
                "`python -m bench.invariant` counts and explains such cases.",
                style="yellow",
            )
