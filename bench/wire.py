"""Measures bytes on the wire: bodies and headers per generated token, each way, in every mode.

Stream mode must stay under 150 bytes of body up and 60 down per token; exits 1 otherwise. The bytes per token depend on
how many drafts and commits share a message, hence on the round trip and on the target's step; so the target is widened.
Not counted: the framing of chunked bodies (about 6 bytes per chunk), TLS and TCP.

    python -m bench.wire [--widen 700] [--rtt-ms 0 10 50 100] [--json PATH]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import asdict
from pathlib import Path

from bench.report import write_json
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from outrider.edge.lab.comparison import ModeFigures, compare
from outrider.edge.lab.laboratory import CLOUD_ONLY, STREAM, Lab, connected, interleave, open_lab, three_modes
from outrider.edge.results import GenerationRequest
from outrider.export.make.reference_pair import export_reference_pair
from outrider.models.picks.sampling import SamplingParams
from outrider.reference import load_prompts

MAX_UP, MAX_DOWN = 150.0, 60.0


async def measure(lab: Lab, options: argparse.Namespace, console: Console) -> dict[float, dict[str, ModeFigures]]:
    """Bytes of every mode at every round trip."""
    requests = [
        GenerationRequest(
            prompt=lab.encode(prompt.text),
            params=SamplingParams(temperature=options.temperature, seed=seed),
            max_tokens=options.max_tokens,
            ignore_eos=True,
            stop_ids=frozenset(),
            tokenizer=lab.tokenizer.fingerprint,
        )
        for seed, prompt in enumerate(load_prompts(options.prompts))
    ]
    figures: dict[float, dict[str, ModeFigures]] = {}
    with Progress(console=console, transient=True, refresh_per_second=1) as progress:
        task = progress.add_task("texts", total=len(options.rtt_ms) * len(requests) * 3)
        for rtt_ms in options.rtt_ms:
            async with connected(lab.url, lab.cores, rtt_ms) as endpoints:
                modes = three_modes(endpoints, lab.drafter)
                results = await interleave(modes, requests, lambda name, result: progress.advance(task))
            figures[rtt_ms] = compare(results, CLOUD_ONLY)
    return figures


def show(console: Console, figures: dict[float, dict[str, ModeFigures]]) -> None:
    """Prints one row per mode and round trip."""
    table = Table(title="bytes per generated token, the prompt included", title_justify="left", box=None)
    for name in ("RTT ms", "mode", "body up", "body down", "headers up", "headers down", "headers' share", "speed-up"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for rtt_ms, modes in figures.items():
        for name, f in modes.items():
            headers = f.header_bytes_up_per_token + f.header_bytes_down_per_token
            share = headers / (headers + f.bytes_up_per_token + f.bytes_down_per_token)
            table.add_row(
                f"{rtt_ms:g}",
                name,
                f"{f.bytes_up_per_token:.1f}",
                f"{f.bytes_down_per_token:.1f}",
                f"{f.header_bytes_up_per_token:.1f}",
                f"{f.header_bytes_down_per_token:.1f}",
                f"{share:.0%}",
                f"{f.speed_up:.2f}x",
            )
    console.print(table)


def misses(figures: dict[float, dict[str, ModeFigures]]) -> list[str]:
    """Where stream mode's bodies exceed the bounds, in words."""
    found = []
    for rtt_ms, modes in figures.items():
        stream = modes[STREAM]
        for name, value, bound in (
            ("up", stream.bytes_up_per_token, MAX_UP),
            ("down", stream.bytes_down_per_token, MAX_DOWN),
        ):
            if value > bound:
                found.append(f"RTT {rtt_ms:g} ms: {value:.1f} bytes of body {name} per token, at most {bound:g}")
    return found


def main() -> int:
    """The command."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--widen", type=float, default=700.0, help="MB of the widened FP32 target; 0: as it is")
    cli.add_argument("--rtt-ms", type=float, nargs="+", default=[0.0, 10.0, 50.0, 100.0])
    cli.add_argument("--prompts", type=int, default=4)
    cli.add_argument("--max-tokens", type=int, default=96)
    cli.add_argument("--temperature", type=float, default=0.8)
    cli.add_argument("--json", type=Path)
    options = cli.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 110)
    pair = export_reference_pair(widen_mb=options.widen or None)
    with open_lab(pair.target, pair.draft) as lab:
        figures = asyncio.run(measure(lab, options, console))
    show(console, figures)
    found = misses(figures)
    for miss in found:
        console.print(miss, style="red", highlight=False)
    by_rtt = [
        {"rtt_ms": rtt, "modes": {name: asdict(f) for name, f in modes.items()}} for rtt, modes in figures.items()
    ]
    write_json(options.json, {"misses": found, "round_trips": by_rtt})
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
