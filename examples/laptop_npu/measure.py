"""Times drafting with each bundle on its own device, so that the draft goes where it is fastest.

    python measure.py bundles/npu bundles/cpu

Drafts as a session does: a prompt, then runs of a few tokens of which some are accepted. What it cannot know is the
target: whether either is quick enough shows in `outrider run --compare`.
"""

from __future__ import annotations

import sys
import time
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from outrider.edge.cli.option_groups import EmulateNpu
from outrider.edge.devices.placement import AS_BUNDLED, DraftChoice
from outrider.edge.drafting.drafter import Drafter
from outrider.edge.modes.assemble import open_draft_bundle, open_drafter
from outrider.models.errors import ConfigError, OutriderError
from outrider.models.picks.sampling import SamplingParams

TEXT = "def median(values):\n    ordered = sorted(values)\n    middle = len(ordered) // 2\n    return ordered[middle]\n"
RUN = 4
ACCEPTED = 2
WIDTH = 4  # guesses per token


def draft_path(drafter: Drafter) -> list[int]:
    """The draft's own picks after the text, token by token; fewer than RUN where it holds no more."""
    drafted: list[int] = []
    while len(drafted) < RUN:
        (guesses,) = drafter.guess([drafted], WIDTH)
        if not guesses:
            break
        drafted.append(guesses[0].token)
    return drafted


def measure(
    bundles: Annotated[list[Path], typer.Argument(help="Draft bundles, one a device.")],
    emulate_npu: EmulateNpu = False,
    runs: Annotated[int, typer.Option(min=3, help="Runs of four tokens that are timed.")] = 40,
    threads: Annotated[int, typer.Option(min=0, help="Threads on the CPU; 0 leaves it to the runtime.")] = 0,
) -> None:
    """Print for each bundle what a drafted token takes, and which is the fastest."""
    console = Console()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("bundle", "drafted by"):
        table.add_column(name, overflow="fold")
    for name in ("start s", "prompt ms", "token ms"):
        table.add_column(name, justify="right")
    took: dict[str, float] = {}
    for path in bundles:
        bundle = open_draft_bundle(path)
        is_emulated = emulate_npu and bundle.manifest.device == "npu"
        began = time.perf_counter()
        opened = open_drafter(bundle, DraftChoice(emulate_npu=True) if is_emulated else AS_BUNDLED, threads)
        start_s = time.perf_counter() - began
        with closing(opened.drafter) as drafter:
            prompt = bundle.tokenizer().encode(TEXT)
            began = time.perf_counter()
            drafter.begin(prompt, SamplingParams())
            drafter.guess([[]], WIDTH)
            prompt_ms = (time.perf_counter() - began) * 1e3
            tokens_ms = []
            for _ in range(runs):
                began = time.perf_counter()
                drafted = draft_path(drafter)
                if len(drafted) < RUN:
                    break  # the draft holds no more tokens
                tokens_ms.append((time.perf_counter() - began) * 1e3 / RUN)
                drafter.extend(drafted[:ACCEPTED])
        if len(tokens_ms) < 2:
            raise ConfigError(
                f"{path} holds {opened.placement.max_positions} tokens, too few to time; export it longer"
            )
        token_ms = median(tokens_ms[1:])  # the first run warms up
        row = (str(path), opened.placement.words)
        table.add_row(*map(escape, row), f"{start_s:.1f}", f"{prompt_ms:.1f}", f"{token_ms:.2f}")
        took[f"{path} ({opened.placement.words})"] = token_ms
    console.print(table)
    console.print(f"fastest: {escape(min(took, key=lambda name: took[name]))}", style="bold", highlight=False)
    if emulate_npu:
        console.print("An emulated NPU computes on the CPU: its times say nothing of an NPU.", style="yellow")


if __name__ == "__main__":
    try:
        typer.run(measure)
    except OutriderError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
