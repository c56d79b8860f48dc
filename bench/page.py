"""Runs the benches behind docs/results.md, and writes the page, its plot and README's table from their figures.

    make bench                       # python -m bench.page: 16 minutes on two cores of a Xeon
    make bench-full                  # python -m bench.page --full: some hours; goes on where it was ended
    python -m bench.page --draw      # the page again, from docs/results.json

Each part is a bench's own command with `--json`. What it found stays in results/bench, by commit, so a run that was
ended goes on. A part that misses a bound is no reason to leave it out: the page says what was missed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import matplotlib
import typer
from bench.report import machine, median_ratio

from outrider.export.report.card_plots import COLOURS, GREY, INK, drawing

ROOT: Final = Path(__file__).parents[1]
KEPT: Final = ROOT / "results" / "bench"
FIGURES: Final = ROOT / "docs" / "results.json"
PAGE: Final = ROOT / "docs" / "results.md"
PLOT: Final = ROOT / "docs" / "images" / "results.svg"
README: Final = ROOT / "README.md"
_SECTION: Final = re.compile(r"(?<=\n)## Measured\n.*?(?=\n## )", re.DOTALL)
_LITTLE: Final = 1.05
"""A speed-up under this is none."""
_NAMES: Final = {
    "cloud_only": "plain streaming",
    "stop_and_wait": "stop-and-wait",
    "path": "one guess per token",
    "tree": "Outrider",
    "tree_always_wrong": "every guess wrong",
}
_CHANGED: Final = ("git", "diff", "--name-only", "HEAD", "--")
_WRITTEN: Final = (":!docs/results*", ":!README.md", ":!docs/images")
"""What this command writes, which is no part of what it measures."""
_NOT_DRAWN: Final = ("computed", "tree_over_beside", "shares")


@dataclass(frozen=True, slots=True)
class Part:
    """One bench. full: what is added for hours."""

    name: str
    arguments: tuple[str, ...]
    full: tuple[str, ...]

    def command(self, *, is_full: bool) -> list[str]:
        """As a person types it, without the interpreter."""
        return ["-m", *self.arguments, *(self.full if is_full else ())]


PARTS: Final = (
    Part(
        "round trips",
        ("bench.never_slower", "--widen", "350", "--runs", "3", "--prompts", "2", "--max-tokens", "64"),
        ("--widen", "1450", "--runs", "25", "--prompts", "8"),
    ),
    Part(
        "one machine, greedy",
        ("bench.one_machine", "--peers", "openvino_genai", "--others-drafted", "8", "--prompts", "2"),
        ("--runs", "9", "--prompts", "12"),
    ),
    Part(
        "one machine, sampled",
        (
            *("bench.one_machine", "--temperature", "0.8", "--peers", "openvino_genai", "openvino_lookup"),
            *("--drafted", "8", "--others-drafted", "8", "--prompts", "2"),
        ),
        (
            *("--peers", "openvino_genai", "openvino_lookup", "transformers"),
            *("--others-drafted", "3", "5", "8", "12", "--runs", "9", "--prompts", "12"),
        ),
    ),
    Part("sessions", ("bench.load", "--emulate", "40", "0.3", "--runs", "2"), ("--runs", "15")),
    Part(
        "engine",
        ("bench.peers", "--only", "engine", "--widen", "350", "--runs", "3"),
        ("--widen", "1200", "--runs", "15"),
    ),
)


def measure(*, is_full: bool) -> dict[str, Any]:
    """Runs what is not kept of this commit; returns the document of docs/results.json."""
    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    changed = subprocess.run([*_CHANGED, *_WRITTEN], cwd=ROOT, capture_output=True, text=True, check=True)
    if changed.stdout:
        raise SystemExit(f"figures are kept by commit, so commit first what git diff shows:\n{changed.stdout.rstrip()}")
    place = KEPT / f"{commit.stdout.strip()}-{'full' if is_full else 'quick'}"
    place.mkdir(parents=True, exist_ok=True)
    parts: dict[str, Any] = {}
    for number, part in enumerate(PARTS, 1):
        kept, command = place / f"{part.name.replace(', ', '-').replace(' ', '-')}.json", part.command(is_full=is_full)
        if not kept.is_file():
            print(f"{number} of {len(PARTS)}: python {' '.join(command)}", flush=True)
            began_s = time.monotonic()
            found = kept.with_suffix(".part")
            found.unlink(missing_ok=True)  # of a run that was ended
            done = subprocess.run([sys.executable, *command, "--json", str(found)], cwd=ROOT, check=False)
            if not found.is_file():
                raise SystemExit(f"python {' '.join(command)} ended with {done.returncode} and no figures")
            told = {"took_s": round(time.monotonic() - began_s), "figures": json.loads(found.read_text("utf-8"))}
            found.write_text(json.dumps(told), "utf-8")
            found.replace(kept)
        parts[part.name] = {"command": f"python {' '.join(command)}", **json.loads(kept.read_text("utf-8"))}
    for each in parts["round trips"]["figures"]["round_trips"]:
        for name in _NOT_DRAWN:
            each.pop(name, None)
    facts = {"commit": commit.stdout.strip(), "date": datetime.now(UTC).date().isoformat(), "is_full": is_full}
    return {**facts, "machine": machine(), "matplotlib": matplotlib.__version__, "parts": parts}


def step_ms(results: dict[str, Any]) -> float:
    """Of the target, with nothing drafted and no network."""
    first = results["parts"]["round trips"]["figures"]["round_trips"][0]
    server = first["modes"]["cloud_only"]["server"]
    return float(1e3 * server["model_seconds"] / server["steps"])


def speed_ups(results: dict[str, Any], mode: str) -> list[tuple[float, float, float, float]]:
    """Of a mode at each round trip: (round trip in ms, median, least, most of the runs)."""
    places = results["parts"]["round trips"]["figures"]["round_trips"]
    runs = [(each["rtt_ms"], each["modes"][mode]["ratios"]) for each in places if mode in each["modes"]]
    return [(rtt_ms, median(ratios), min(ratios), max(ratios)) for rtt_ms, ratios in runs]


def plot(results: dict[str, Any]) -> str:
    """Speed-up against round trip over step time, as an SVG file for light and dark pages."""
    per = step_ms(results)
    series = (("Outrider", "tree", COLOURS[0]), ("stop-and-wait", "stop_and_wait", COLOURS[1]))
    with drawing(4.4, "speed-up by round trip over step time") as drawn:
        axes = drawn.figure.subplots()
        for label, mode, colour in (*series, ("every guess wrong", "tree_always_wrong", COLOURS[3])):
            points = speed_ups(results, mode)
            at = [rtt_ms / per for rtt_ms, *_ in points]
            axes.fill_between(
                at, [low for *_, low, _ in points], [high for *_, high in points], color=colour, alpha=0.2
            )
            axes.plot(at, [middle for _, middle, *_ in points], "o-", color=colour, markersize=4, label=label)
        axes.axhline(_beside(results), color=GREY, linestyle=(0, (4, 2)), label="draft beside the target, no network")
        axes.axhline(1.0, color=INK, linewidth=1.0, label="plain cloud streaming")
        axes.set(xlabel="round trip / time of a step of the target", ylabel="speed-up, times")
        axes.set_ylim(bottom=0.0)
        axes.grid(visible=True)
        drawn.figure.legend(loc="outside lower left")
    colours = "svg{color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#e6edf3}}"
    return drawn.svg.replace(">", f"><style>{colours}</style>", 1)


def section(results: dict[str, Any]) -> str:
    """README's part."""
    figures, facts = results["parts"]["round trips"]["figures"], results["machine"]
    places = figures["round_trips"]
    num_runs, hits = len(places[0]["modes"]["tree"]["ratios"]), figures["hits"]
    words = (
        f"Speed-up over plain cloud streaming on {facts['cores']} {facts['processor']} cores, one each for cloud and "
        f"agent; reference pair, a step of the widened target takes {step_ms(results):.0f} ms, INT8 draft, T "
        f"{figures['temperature']:g}, first guess right in {100 * hits['1']:.0f} %, one of the first four in "
        f"{100 * hits['4']:.0f} %; texts equal, medians of {num_runs} interleaved runs "
        f"(`make bench{'-full' * results['is_full']}`, [all results](docs/results.md)):"
    )
    rows = (
        ("**Outrider**", "tree", "**{:.2f}x**"),
        ("one guess per token (`--width 1`)", "path", "{:.2f}x"),
        ("always-wrong draft", "tree_always_wrong", "{:.2f}x"),
    )
    head = ["round trip", *(f"{each['rtt_ms']:g} ms" for each in places)]
    lines = [[label, *(form.format(found[1]) for found in speed_ups(results, mode))] for label, mode, form in rows]
    filled = textwrap.fill(words, 119, break_long_words=False, break_on_hyphens=False)
    return f"## Measured\n\n{filled}\n\n{_table(head, lines)}\n"


def page(results: dict[str, Any]) -> str:
    """docs/results.md."""
    facts, parts = results["machine"], results["parts"]
    trips = parts["round trips"]["figures"]
    packages = ", ".join(f"{name} {number}" for name, number in facts["packages"].items())
    rows = [
        [
            f"{each['rtt_ms']:g} ms",
            *(
                f"{found['speed_up']:.2f}x ({min(found['ratios']):.2f} to {max(found['ratios']):.2f})"
                for found in each["modes"].values()
            ),
        ]
        for each in trips["round_trips"]
    ]
    differ = sum(found["num_different"] for each in trips["round_trips"] for found in each["modes"].values())
    text = [
        "# Results",
        f"Written by `make bench{'-full' * results['is_full']}` from docs/results.json; not by hand. "
        f"{results['date']}, commit {results['commit']}, {facts['cores']} cores of {facts['processor']}, Python "
        f"{facts['python']}, {packages}. Seeds are fixed: 0, 1, 2, ... by text. What else was measured, on what, and "
        "what was missed: [benchmarks](benchmarks.md).",
        "![Speed-up against round trip over step time: ours, stop-and-wait, every guess wrong](images/results.svg)",
        "## Where it pays, and where not",
        *_sentences(results),
        "## By round trip",
        f"A step of the target takes {step_ms(results):.0f} ms. Medians of the runs' ratios to plain streaming, and "
        f"their range; {differ} texts differ.",
        _table(["round trip", *(_NAMES.get(name, name) for name in trips["round_trips"][0]["modes"])], rows),
        f"The same draft beside the target, with no network: {_beside(results):.2f}x, the best of "
        "fixed depths and of depths by gaps.",
        _of("round trips", results),
        "## On one machine",
        "Draft and target share all cores, as a person who tries it has them. Tokens/s, medians; ratios are medians of "
        "the runs' ratios.",
        *(line for name in ("greedy", "sampled") for line in _one_machine(f"one machine, {name}", results)),
        "## By sessions",
        "Steps of 40 ms and 0.3 ms for each further token, as a large model's on a GPU; no network, and devices whose "
        "drafts are made beforehand, so they cost the verifier nothing. Tokens/s over plain streaming, by the server's "
        "`--policy`; auto is the default.",
        _sessions(parts["sessions"]["figures"]),
        _of("sessions", results),
        "## The engine without drafts",
        _engine(parts["engine"]["figures"]),
        _of("engine", results),
        "## What was missed",
        *(f"* {name}: {miss}" for name, part in parts.items() for miss in part["figures"]["misses"]),
    ]
    if not any(part["figures"]["misses"] for part in parts.values()):
        text.append("No bound of these commands.")
    return re.sub(r"(?m)^(\* .*)\n\n(?=\* )", r"\1\n", "\n\n".join(text)) + "\n"


def _sentences(results: dict[str, Any]) -> list[str]:
    per, trees = step_ms(results), speed_ups(results, "tree")
    pays = [rtt_ms for rtt_ms, middle, *_ in trees if middle >= _LITTLE]
    wrong, worst_ms = min((middle, rtt_ms) for rtt_ms, middle, *_ in speed_ups(results, "tree_always_wrong"))
    last = f"up to {max(pays):g} ms, {max(pays) / per:.1f} steps" if pays else "at none of the round trips"
    found = [
        f"* It pays {last}: {max(middle for _, middle, *_ in trees):.2f}x at its best, "
        f"{trees[-1][1]:.2f}x at a round trip of {trees[-1][0]:g} ms.",
        f"* With every guess wrong it has {wrong:.2f} of plain streaming at the worst, which is at {worst_ms:g} ms.",
    ]
    sessions = results["parts"]["sessions"]["figures"]
    counts, at = list(sessions["sessions"]), sessions["crossover_sessions"]["auto"]
    where = f"up to {at:.0f} of {counts[-1]}" if at is not None else f"at all of {counts[0]} to {counts[-1]}"
    found.append(f"* With many sessions on one verifier, at steps of 40 ms, it pays {where}.")
    for kind in ("greedy", "sampled"):
        ways = _stream_over(results["parts"][f"one machine, {kind}"]["figures"])
        ways.pop("stream")
        name = min(ways, key=lambda way: ways[way])
        found.append(f"* On one machine, {kind}: {ways[name]:.2f} of the best other way, {name}.")
    return found


def _beside(results: dict[str, Any]) -> float:
    """The speed-up of the draft beside the target."""
    speeds = results["parts"]["round trips"]["figures"]["beside"]["speed_ups"]
    return float(max(median(ratios) for ratios in speeds.values()))


def _stream_over(figures: dict[str, Any]) -> dict[str, float]:
    """Of each way: the median of the runs' ratios."""
    ways = figures["ways"]
    return {name: median_ratio(ways["stream"]["rates"], each["rates"]) for name, each in ways.items()}


def _one_machine(name: str, results: dict[str, Any]) -> list[str]:
    figures = results["parts"][name]["figures"]
    ways, over = figures["ways"], _stream_over(figures)
    rows = [[way, f"{median(each['rates']):.1f}", f"{over[way]:.2f}"] for way, each in ways.items()]
    head, likely = [name.split(", ")[1], "tokens/s", "stream over it"], ""
    if all(each["nats"] is not None for each in ways.values()):  # it samples
        head.append("nats")
        rows = [[*row, f"{each['nats']:.2f}"] for row, each in zip(rows, ways.values(), strict=True)]
        likely = (
            "*nats*: the mean log-probability of a token under the target: a text of another distribution has less."
        )
    failed = (f"* {way} fails: {' '.join(error.split())}" for way, error in figures.get("failed", {}).items())
    return [_table(head, rows), *filter(None, (likely,)), *failed, _of(name, results)]


def _sessions(figures: dict[str, Any]) -> str:
    modes = list(next(iter(figures["sessions"].values())))
    rows = [
        [count, *(f"{found[mode]['speed_up']:.2f}x" for mode in modes)] for count, found in figures["sessions"].items()
    ]
    return _table(["sessions", *modes], rows)


def _engine(figures: dict[str, Any]) -> str:
    rows = [[each["name"], f"{each['ratio']:.3f}"] for each in figures["comparisons"]]
    return _table(["tokens/s, 16 greedy sequences", "ratio"], rows)


def _of(name: str, results: dict[str, Any]) -> str:
    part = results["parts"][name]
    return f"`{part['command']}`: {part['took_s'] / 60:.1f} minutes."


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return (
        "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
        .replace("| --- ", "|---")
        .replace("--- |", "---|")
    )


def write(results: dict[str, Any]) -> None:
    """Page, plot and README's table."""
    PAGE.write_text(page(results), "utf-8")
    PLOT.write_text(plot(results), "utf-8")
    README.write_text(_SECTION.sub(lambda _: section(results), README.read_text("utf-8")), "utf-8")


def main(
    full: Annotated[bool, typer.Option("--full", help="more runs and texts: hours")] = False,
    draw: Annotated[bool, typer.Option("--draw", help="run nothing, write the page from docs/results.json")] = False,
) -> None:
    """Runs what is not kept, and writes docs/results.json and what is made of it."""
    if not draw:
        FIGURES.write_text(json.dumps(measure(is_full=full), indent=1) + "\n", "utf-8")
    write(json.loads(FIGURES.read_text("utf-8")))


if __name__ == "__main__":
    typer.run(main)
