"""Makes README's picture: a real `outrider run` against the widened reference target, as an SVG of its terminal.

    python -m bench.picture

Writes docs/run.svg: the text in the colours of the terminal (accepted drafted tokens green), then the summary.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console

from outrider.edge.cli.exporter import export_reference_pair
from outrider.edge.cli.run import run_once
from outrider.edge.cli.run_options import RunOptions
from outrider.edge.devices.placement import AS_BUNDLED
from outrider.edge.lab.cores import plan_cores, running_on
from outrider.edge.lab.laboratory import cloud_process

PICTURE = Path(__file__).parents[1] / "docs/run.svg"
PROMPT = "def walk(path):"
WIDTH = 96


def main() -> None:
    """Generates the text and writes the picture."""
    pair, cores = export_reference_pair(AS_BUNDLED), plan_cores()
    console = Console(record=True, width=WIDTH, force_terminal=True, color_system="truecolor", file=io.StringIO())
    with cloud_process(pair.target, cores.cloud) as url, running_on(cores.agent):
        options = RunOptions(
            prompt=PROMPT, draft=[str(pair.draft)], cloud=[url], temperature=0.5, seed=7, max_tokens=100, threads=1
        )
        run_once(options, Console(file=io.StringIO()), Console(file=io.StringIO()))  # warms everything up
        console.print(f'$ outrider run "{PROMPT}" --temperature 0.5 --seed 7', style="bold", highlight=False)
        run_once(options, console, console)
    svg = console.export_svg(title="outrider run: accepted drafted tokens are green, the target's own are plain")
    # rich names fonts on a public server; the reader's own monospace font does as well.
    PICTURE.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL), encoding="utf-8")
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main()
