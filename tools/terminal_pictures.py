"""Makes pictures of the terminal: a real `outrider run` and a real `outrider chat`, the target widened.

    python -m tools.terminal_pictures

Writes docs/run.svg and docs/chat.svg: texts in the colours of the terminal (accepted drafted tokens green, accepted
alternatives cyan), then what the commands say about them. The reference pair has no chat template: a copy of its target
gets one, and goes on with Python whatever it is asked.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.changed_bundle import TURNS, change_bundle
from rich.console import Console

from outrider.edge.cli.chat import chat_here
from outrider.edge.cli.command_options import ChatOptions
from outrider.edge.cli.draft_source import export_reference_pair
from outrider.edge.cli.line_editor import PROMPT as TYPES
from outrider.edge.cli.run import run_once
from outrider.edge.cli.run_options import RunOptions
from outrider.edge.devices.placement import AS_BUNDLED
from outrider.edge.lab.cores import CorePlan, plan_cores, running_on
from outrider.edge.lab.laboratory import cloud_process

DOCS = Path(__file__).parents[1] / "docs"
PROMPT = "def walk(path):"
TYPED = ("def walk(path):", "def join(path, *paths):", "/stats")
WIDTH = 96


class ShownReader:
    """Types these messages, and shows them as a terminal does."""

    is_typed = True

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rest = list(TYPED)

    async def read(self) -> str | None:
        """The next message."""
        if not self._rest:
            return None
        message = self._rest.pop(0)
        self._console.print(f"{TYPES}{message}", style="bold", highlight=False, markup=False)
        return message


def main() -> None:
    """Generates the texts and writes the pictures."""
    pair, cores = export_reference_pair(AS_BUNDLED), plan_cores()
    picture_run(pair.target, pair.draft, cores)
    with TemporaryDirectory() as place:
        picture_chat(change_bundle(pair.target, Path(place) / "target", template=TURNS).path, pair.draft, cores)


def picture_run(target: Path, draft: Path, cores: CorePlan) -> None:
    """One text and its summary."""
    console = _terminal()
    with cloud_process(target, cores.cloud) as url, running_on(cores.agent):
        options = RunOptions(
            prompt=PROMPT, draft=[str(draft)], cloud=[url], temperature=0.5, seed=7, max_tokens=100, threads=1
        )
        run_once(options, Console(file=io.StringIO()), Console(file=io.StringIO()))  # warms everything up
        console.print(f'$ outrider run "{PROMPT}" --temperature 0.5 --seed 7', style="bold", highlight=False)
        run_once(options, console, console)
    _write(console, "run.svg", "outrider run: accepted drafted tokens are green, the target's own are plain")


def picture_chat(target: Path, draft: Path, cores: CorePlan) -> None:
    """Two turns, and what /stats says of them."""
    console = _terminal()
    with cloud_process(target, cores.cloud) as url, running_on(cores.agent):
        options = ChatOptions(draft=[str(draft)], cloud=[url], temperature=0.5, seed=7, max_tokens=60, threads=1)
        console.print("$ outrider chat --temperature 0.5 --seed 7 --max-tokens 60", style="bold", highlight=False)
        chat_here(options, console, console, reader=ShownReader(console))
    _write(console, "chat.svg", "outrider chat: drafted tokens green, alternatives cyan, the target's own plain")


def _terminal() -> Console:
    return Console(record=True, width=WIDTH, force_terminal=True, color_system="truecolor", file=io.StringIO())


def _write(console: Console, name: str, title: str) -> None:
    svg = console.export_svg(title=title)
    # rich names fonts on a public server; the reader's own monospace font does as well.
    (DOCS / name).write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL), encoding="utf-8")
    print(f"wrote docs/{name}")


if __name__ == "__main__":
    main()
