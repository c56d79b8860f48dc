"""Runs `outrider demo`: export (once), cloud, agent, comparison. Export and cloud run as child processes.

What it shows fits a terminal of 60 columns.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from outrider.edge.cli.command_options import DemoOptions
from outrider.edge.cli.draft_source import export_reference_pair
from outrider.edge.cli.terminal import DRAFT_STYLE, TokenPrinter
from outrider.edge.devices.placement import require_asked_device
from outrider.edge.lab.comparison import ModeFigures, TextTime, TimePlan, compare, plan_texts
from outrider.edge.lab.laboratory import (
    ALONE,
    CLOUD_ONLY,
    STOP_AND_WAIT,
    STREAM,
    Lab,
    connected,
    interleave,
    open_lab,
    three_modes,
)
from outrider.edge.modes.assemble import Agent, make_options
from outrider.edge.modes.stream import AgentOptions
from outrider.edge.results import GenerationRequest, GenerationResult, OnTokens
from outrider.models.counted import counted
from outrider.models.process.command_line import print_line
from outrider.models.process.machine_load import MachineLoad
from outrider.models.text.tokenizer import Tokenizer
from outrider.models.visible import visible
from outrider.reference import Prompt, load_prompts

MAIN_RTT_MS: Final = 10.0
RTTS_MS: Final = (0.0, MAIN_RTT_MS, 50.0, 100.0)
"""Round trips that are measured where none is asked for."""
KEPT_MS: Final = (0.0, MAIN_RTT_MS, 100.0)
"""Of these, the ones that are measured however slow the machine is."""
WARM_UP: Final = 8
"""Tokens that each mode generates before at each round trip: connections, and estimates kept from text to text."""
TRIAL: Final = 24
"""Tokens from which the time of a text is estimated."""


def run_demo(options: DemoOptions, console: Console) -> None:
    """Runs the demo. Raises OutriderError; however it ends, no process is left behind."""
    make_options(options.width)  # wrong options are found before minutes go into an export
    require_asked_device(options.choice)
    show_intro(console, options)
    pair = export_reference_pair(options.choice, options.widen)
    ends_at = time.monotonic() + options.max_seconds  # starting the cloud is part of it
    with open_lab(pair.target, pair.draft, options.choice, ALONE) as lab:
        document = asyncio.run(_measure(options, lab, console, ends_at))
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        console.print(f"wrote {options.json}", style="dim", highlight=False, markup=False, soft_wrap=True)


async def _measure(options: DemoOptions, lab: Lab, console: Console, ends_at: float) -> dict[str, object]:
    """Shows everything; returns the document that --json writes."""
    prompts = load_prompts(options.prompts)
    requests = [
        GenerationRequest(
            prompt=lab.encode(prompt.text),
            params=replace(options.params, seed=options.params.seed + i),
            max_tokens=options.max_tokens,
            stop_ids=frozenset(lab.target.manifest.eos_token_ids),
            tokenizer=lab.tokenizer.fingerprint,
        )
        for i, prompt in enumerate(prompts)
    ]
    rtt_ms = MAIN_RTT_MS if options.rtt_ms is None else options.rtt_ms
    show_lab(console, lab)
    with MachineLoad() as load:
        async with connected(lab.url, lab.cores, rtt_ms) as endpoints:
            modes = three_modes(endpoints, lab.drafter, _tree(options))
            # Shown, not counted: it also warms everything up.
            with streaming(console, prompts[0], lab.tokenizer, requests[0].prompt) as on_tokens:
                await modes[STREAM].generate(requests[0], on_tokens)
            trial = replace(requests[0], max_tokens=min(TRIAL, options.max_tokens), stop_ids=None, ignore_eos=True)
            times = [TextTime.of(await modes[name].generate(trial), rtt_ms) for name in (CLOUD_ONLY, STOP_AND_WAIT)]
        plan = plan_texts(
            [*times, times[0]],  # drafting is hardly slower than cloud-only, however long the round trip
            RTTS_MS if options.rtt_ms is None else (rtt_ms,),
            KEPT_MS if options.rtt_ms is None else (rtt_ms,),
            len(requests),
            options.max_tokens,
            WARM_UP,
            ends_at - time.monotonic(),
        )
        left_out = list(_left_out(options, plan, len(requests)))
        show_plan(console, plan, left_out, options.max_seconds)
        results = await _texts(options, lab, plan, requests, console, ends_at)
    num_texts = len(results[rtt_ms][CLOUD_ONLY])
    if num_texts < plan.num_texts:
        left_out.append(
            f"{plan.num_texts - num_texts} of the {plan.num_texts} texts planned: the machine became slower"
        )
    sweep = {each_ms: compare(found, CLOUD_ONLY) for each_ms, found in results.items()}
    busy = load.warning()
    show_figures(console, sweep[rtt_ms], rtt_ms)
    if len(sweep) > 1:
        show_sweep(console, sweep)
    show_close(console, sweep[rtt_ms], lab, left_out[-1] if num_texts < plan.num_texts else None, busy)
    return {
        "pair": describe_pair(lab),
        "rtt_ms": rtt_ms,
        "modes": _modes(sweep, rtt_ms),
        "left_out": left_out,
        "machine_load": busy,
    }


def _left_out(options: DemoOptions, plan: TimePlan, num_texts: int) -> Iterator[str]:
    if plan.num_texts < num_texts:
        yield f"{num_texts - plan.num_texts} of {num_texts} texts"
    if plan.max_tokens < options.max_tokens:
        yield f"{options.max_tokens - plan.max_tokens} of {options.max_tokens} tokens per text"
    if options.rtt_ms is None and (without := set(RTTS_MS) - set(plan.rtts_ms)):
        yield f"the round trip of {' and '.join(f'{each:g}' for each in sorted(without))} ms"


def _tree(options: DemoOptions) -> AgentOptions:
    return make_options(options.width, options.effort, is_looked_up=options.lookup is not False)


async def _texts(
    options: DemoOptions,
    lab: Lab,
    plan: TimePlan,
    requests: Sequence[GenerationRequest],
    console: Console,
    ends_at: float,
) -> dict[float, dict[str, list[GenerationResult]]]:
    """Each text at every round trip and in every mode in turn, then the next: what the machine does hits all alike."""
    async with AsyncExitStack() as stack:
        agents: dict[tuple[float, str], Agent] = {}
        for rtt_ms in plan.rtts_ms:
            endpoints = await stack.enter_async_context(connected(lab.url, lab.cores, rtt_ms))
            for name, mode in three_modes(endpoints, lab.drafter, _tree(options)).items():
                agents[rtt_ms, name] = mode
        planned = [replace(each, max_tokens=plan.max_tokens) for each in requests[: plan.num_texts]]
        for agent in agents.values():
            await agent.generate(replace(planned[0], max_tokens=min(WARM_UP, plan.max_tokens)))
        began = [time.monotonic()]

        def has_time() -> bool:
            began.append(time.monotonic())
            longest_s = max(after - before for before, after in pairwise(began))
            return began[-1] + longest_s <= ends_at

        with counting(console, "measuring", len(agents) * len(planned)) as count:
            results = await interleave(agents, planned, lambda key, result: count(), has_time)
    found: dict[float, dict[str, list[GenerationResult]]] = {}
    for (rtt_ms, name), texts in results.items():
        found.setdefault(rtt_ms, {})[name] = texts
    return found


def describe_pair(lab: Lab) -> dict[str, object]:
    """Facts of the two models, from their manifests, and of what drafts."""
    pair: dict[str, object] = {}
    for role, manifest in (("target", lab.target.manifest), ("draft", lab.draft.manifest)):
        pair[role] = {
            "name": manifest.name,
            "parameters": manifest.architecture.parameters,
            "precision": manifest.precision,
            "runtime": manifest.runtime,
            "size_bytes": manifest.report.size_bytes,
            "widened_from_parameters": manifest.widened.from_parameters if manifest.widened else None,
        }
    return pair | {
        "tokenizer": lab.tokenizer.fingerprint,
        "drafted_by": lab.placement.as_json(),
        "cores": lab.cores.note,
    }


def _modes(sweep: Mapping[float, Mapping[str, ModeFigures]], rtt_ms: float) -> dict[str, object]:
    modes: dict[str, object] = {}
    for name, values in sweep[rtt_ms].items():
        by_rtt = {f"{each_ms:g}": _rounded(at[name].speed_up) for each_ms, at in sweep.items()}
        rounded = {key: _rounded(value) for key, value in asdict(values).items()}
        modes[name] = rounded | ({"speed_up_by_rtt_ms": by_rtt} if len(by_rtt) > 1 else {})
    return modes


def _rounded(value: float) -> float | None:
    """Four decimals; None for NaN, which JSON lacks: the texts were too short for such a number."""
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else None
    return value


NAMES: Final = {CLOUD_ONLY: "cloud-only", STOP_AND_WAIT: "stop-and-wait", STREAM: "stream"}


def show_intro(console: Console, options: DemoOptions) -> None:
    """Introduces the demo and its limits."""
    console.rule("Outrider: a draft here, the target in the cloud")
    console.print(
        "The reference pair was trained on the Python standard library. It completes Python source; it is not a "
        "chat model. Its prompts here are functions that it was not trained on."
    )
    if options.widen:
        console.print(
            f"The target is [bold]widened to {options.widen:,.0f} MB without changing its text[/bold]: its new "
            "neurons are computed and multiplied by zero, so a step takes as long as one of a model of that size. "
            "--widen 0 leaves it as it is; then a step is so short that drafting hardly pays.",
            highlight=False,
        )
    console.print(
        "The first time, the pair is exported in one to three minutes; then it comes from the cache. The demo "
        f"itself takes about {options.max_seconds:.0f} s at most.",
        highlight=False,
    )


def show_lab(console: Console, lab: Lab) -> None:
    """The models and where they run."""
    for role, manifest in (("target", lab.target.manifest), ("draft", lab.draft.manifest)):
        widened = f", widened from {manifest.widened.from_parameters / 1e6:.1f}M" if manifest.widened else ""
        print_line(
            console,
            f"{role}: {manifest.architecture.parameters / 1e6:.1f}M parameters{widened}, {manifest.precision}, "
            f"{manifest.report.size_bytes / 1e6:,.1f} MB, {manifest.runtime}",
        )
    print_line(console, f"drafted by: {lab.placement.words}", "bold")
    for note in lab.placement.notes:
        print_line(console, f"note: {note}", "yellow")
    print_line(console, f"{lab.cores.note}")


@contextmanager
def streaming(console: Console, prompt: Prompt, tokenizer: Tokenizer, ids: Sequence[int]) -> Iterator[OnTokens]:
    """Shows a prompt, and the text that follows it as it arrives."""
    console.rule(Text(visible(f"{prompt.file}, line {prompt.line}")), style="dim", align="left")
    console.print(
        Text.assemble(
            ("the prompt is dim, ", "dim"),
            ("accepted drafts are green", DRAFT_STYLE),
            ", the rest is the target's own\n",
        )
    )
    console.print(Text(visible(prompt.text), style="dim"), end="", soft_wrap=True)
    printer = TokenPrinter(console, tokenizer.detokenizer(context=ids), end="\n")
    yield printer
    printer.finish()
    console.rule(style="dim")


@contextmanager
def counting(console: Console, what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar that disappears when it is full; gives a function to call after each text."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Once a second: drawing happens on the agent's core.
    with Progress(*columns, console=console, transient=True, refresh_per_second=1) as progress:
        task = progress.add_task(escape(what), total=total)
        yield lambda: progress.advance(task)


def show_plan(console: Console, plan: TimePlan, left_out: Sequence[str], max_seconds: float) -> None:
    """What will be measured, and what does not fit into the time."""
    *first, last = (f"{rtt_ms:g}" for rtt_ms in plan.rtts_ms)
    trips = f"round trips of {', '.join(first)} and {last} ms" if first else f"a round trip of {last} ms"
    print_line(
        console,
        f"Measures {counted(plan.num_texts, 'text')} of {plan.max_tokens} tokens at {trips}, in three modes in "
        f"turn: about {plan.seconds:.0f} s.",
    )
    if left_out:
        print_line(
            console,
            f"{max_seconds:.0f} s are too short for {' and '.join(left_out)}; --max-seconds "
            f"{2 * max_seconds:.0f} measures more.",
            "yellow",
        )


def show_figures(console: Console, figures: Mapping[str, ModeFigures], rtt_ms: float) -> None:
    """The main table, a column per mode."""
    num_texts = counted(figures[CLOUD_ONLY].num_texts, "text")
    columns = (
        Column(NAMES[mode], justify="right", style="bold" if mode == STREAM else "", no_wrap=True) for mode in figures
    )
    table = _table(f"Round trip {rtt_ms:g} ms, {num_texts}, the modes in turn", columns)
    for name, show in ROWS.items():
        table.add_row(name, *(show(mode, each) for mode, each in figures.items()))
    console.print(table, "")


def show_sweep(console: Console, sweep: Mapping[float, Mapping[str, ModeFigures]]) -> None:
    """Speed-ups by round trip."""
    table = _table(
        "Speed-up over cloud-only, by round trip",
        (Column(f"{rtt_ms:g} ms", justify="right", no_wrap=True) for rtt_ms in sweep),
    )
    for mode in (STOP_AND_WAIT, STREAM):
        values = [_times(figures[mode].speed_up) for figures in sweep.values()]
        table.add_row(NAMES[mode], *values, style="bold" if mode == STREAM else None)
    console.print(table, "")


def show_close(
    console: Console, figures: Mapping[str, ModeFigures], lab: Lab, skipped: str | None, load: str | None
) -> None:
    """Explains the figures and their limits. skipped: what was planned and not measured."""
    console.print(
        "tokens/s leaves out the prompt. From accepted drafts: share of the text. Bytes are of bodies, prompt "
        "included. docs/glossary.md explains every figure.",
        style="dim",
        highlight=False,
    )
    if (note := short_round_trip_note(figures)) is not None:
        console.print(note, style="dim", highlight=False)
    if any(not math.isfinite(f.tokens_per_s) for f in figures.values()):
        console.print("-: too short to measure a rate. Raise --max-tokens.", style="dim", highlight=False)
    if skipped is not None:
        print_line(console, f"Not measured: {skipped}.", "yellow")
    if load is not None:
        print_line(console, load, "yellow")
    if lab.placement.is_emulated:
        console.print(
            "The NPU was emulated on the CPU: text, acceptance and code are an NPU's, the times are not.",
            style="yellow",
        )
    if any(not f.identical for f in figures.values()):
        console.print(
            "A text differs where two tokens score almost alike: batches of other shapes round differently. "
            "`python -m bench.invariant` counts and explains such cases.",
            style="yellow",
        )


def _table(title: str, columns: Iterable[Column]) -> Table:
    return Table(
        Column(no_wrap=True),
        *columns,
        title=title,
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
        header_style="dim",
    )


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
