"""Runs `outrider demo`: export (once), cloud, agent, comparison. Export and cloud run as child processes."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Final

from rich.console import Console

from outrider.edge.cli.command_options import DemoOptions
from outrider.edge.cli.demo_screen import DemoScreen
from outrider.edge.cli.draft_source import export_reference_pair
from outrider.edge.devices.placement import require_asked_device
from outrider.edge.lab.child_process import EndingOnSignals
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
from outrider.edge.results import GenerationRequest, GenerationResult
from outrider.models.process.machine_load import MachineLoad
from outrider.reference import load_prompts

MAIN_RTT_MS: Final = 10.0
RTTS_MS: Final = (0.0, MAIN_RTT_MS, 50.0, 100.0)
"""Round trips that are measured where none is asked for."""
KEPT_MS: Final = (0.0, MAIN_RTT_MS, 100.0)
"""Of these, the ones that are measured however slow the machine is."""
WARM_UP: Final = 8
"""Tokens that each mode generates before at each round trip: connections, and estimates kept from text to text."""
TRIAL: Final = 24
"""Tokens from which the time of a text is estimated."""

Sweep = dict[float, dict[str, ModeFigures]]


@dataclass(slots=True)
class Measured:
    """What the demo measured, by round trip in ms. left_out: what did not fit into the time, in words, and was
    announced; or was skipped because the machine became slower. load: warning about other processes.
    """

    rtt_ms: float
    sweep: Sweep
    left_out: list[str]
    load: str | None

    @property
    def figures(self) -> dict[str, ModeFigures]:
        """Those of the main round trip."""
        return self.sweep[self.rtt_ms]


def run_demo(options: DemoOptions, console: Console) -> None:
    """Runs the demo. Raises OutriderError; however it ends, no process is left behind."""
    make_options(options.width)  # wrong options are found before minutes go into an export
    require_asked_device(options.choice)
    screen = DemoScreen(console)
    screen.show_intro(options)
    with EndingOnSignals() as signals:
        pair = export_reference_pair(options.choice, options.widen)
        ends_at = time.monotonic() + options.max_seconds  # starting the cloud is part of it
        with open_lab(pair.target, pair.draft, options.choice, ALONE) as lab:
            measured = signals.run(_measure(options, lab, screen, ends_at))
    if options.json is not None:
        document = json.dumps(report(lab, measured), indent=2, allow_nan=False)
        options.json.write_text(document + "\n", encoding="utf-8")
        console.print(f"wrote {options.json}", style="dim", highlight=False, markup=False, soft_wrap=True)


async def _measure(options: DemoOptions, lab: Lab, screen: DemoScreen, ends_at: float) -> Measured:
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
    screen.show_lab(lab)
    with MachineLoad() as load:
        async with connected(lab.url, lab.cores, rtt_ms) as endpoints:
            modes = three_modes(endpoints, lab.drafter, _tree(options))
            # Shown, not counted: it also warms everything up.
            with screen.streaming(prompts[0], lab.tokenizer, requests[0].prompt) as on_tokens:
                await modes[STREAM].generate(requests[0], on_tokens)
            trial = replace(requests[0], max_tokens=min(TRIAL, options.max_tokens), ignore_eos=True)
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
        left_out = _left_out(options, plan, len(requests))
        screen.show_plan(plan, left_out, options.max_seconds)
        results = await _texts(options, lab, plan, requests, screen, ends_at)
    num_texts = len(results[rtt_ms][CLOUD_ONLY])
    if num_texts < plan.num_texts:
        left_out.append(
            f"{plan.num_texts - num_texts} of the {plan.num_texts} texts planned: the machine became slower"
        )
    sweep = {each_ms: compare(found, CLOUD_ONLY) for each_ms, found in results.items()}
    measured = Measured(rtt_ms, sweep, left_out, load.warning())
    screen.show_figures(measured.figures, rtt_ms)
    if len(sweep) > 1:
        screen.show_sweep(sweep)
    screen.show_close(measured.figures, lab, left_out[-1] if num_texts < plan.num_texts else None, measured.load)
    return measured


def _left_out(options: DemoOptions, plan: TimePlan, num_texts: int) -> list[str]:
    left_out = []
    if plan.num_texts < num_texts:
        left_out.append(f"{num_texts - plan.num_texts} of {num_texts} texts")
    if plan.max_tokens < options.max_tokens:
        left_out.append(f"{options.max_tokens - plan.max_tokens} of {options.max_tokens} tokens per text")
    if options.rtt_ms is None and (without := set(RTTS_MS) - set(plan.rtts_ms)):
        left_out.append(f"the round trip of {' and '.join(f'{each:g}' for each in sorted(without))} ms")
    return left_out


def _tree(options: DemoOptions) -> AgentOptions:
    return make_options(options.width, options.effort, is_looked_up=options.lookup is not False)


async def _texts(
    options: DemoOptions,
    lab: Lab,
    plan: TimePlan,
    requests: Sequence[GenerationRequest],
    screen: DemoScreen,
    ends_at: float,
) -> dict[float, dict[str, list[GenerationResult]]]:
    """Each text at every round trip and in every mode in turn, then the next: what the machine does hits all alike."""
    async with AsyncExitStack() as stack:
        agents: dict[tuple[float, str], Agent] = {}
        for rtt_ms in plan.rtts_ms:
            endpoints = await stack.enter_async_context(connected(lab.url, lab.cores, rtt_ms))
            modes = three_modes(endpoints, lab.drafter, _tree(options))
            agents |= {(rtt_ms, name): mode for name, mode in modes.items()}
        planned = [replace(each, max_tokens=plan.max_tokens) for each in requests[: plan.num_texts]]
        for agent in agents.values():
            await agent.generate(replace(planned[0], max_tokens=min(WARM_UP, plan.max_tokens)))
        began = [time.monotonic()]

        def has_time() -> bool:
            began.append(time.monotonic())
            longest_s = max(after - before for before, after in pairwise(began))
            return began[-1] + longest_s <= ends_at

        with screen.counting("measuring", len(agents) * len(planned)) as count:
            results = await interleave(agents, planned, lambda key, result: count(), has_time)
    found: dict[float, dict[str, list[GenerationResult]]] = {}
    for (rtt_ms, name), texts in results.items():
        found.setdefault(rtt_ms, {})[name] = texts
    return found


def report(lab: Lab, measured: Measured) -> dict[str, object]:
    """The document that --json writes."""
    pair: dict[str, object] = {"tokenizer": lab.tokenizer.fingerprint}
    for role, manifest in (("target", lab.target.manifest), ("draft", lab.draft.manifest)):
        pair[role] = {
            "name": manifest.name,
            "parameters": manifest.architecture.parameters,
            "precision": manifest.precision,
            "runtime": manifest.runtime,
            "size_bytes": manifest.report.size_bytes,
            "widened_from_parameters": manifest.widened.from_parameters if manifest.widened else None,
        }
    modes: dict[str, object] = {}
    for name, values in measured.figures.items():
        by_rtt = {f"{rtt_ms:g}": _rounded(at[name].speed_up) for rtt_ms, at in measured.sweep.items()}
        rounded = {key: _rounded(value) for key, value in asdict(values).items()}
        modes[name] = rounded | ({"speed_up_by_rtt_ms": by_rtt} if len(by_rtt) > 1 else {})
    return {
        "pair": pair | {"drafted_by": lab.placement.as_json(), "cores": lab.cores.note},
        "rtt_ms": measured.rtt_ms,
        "modes": modes,
        "left_out": measured.left_out,
        "machine_load": measured.load,
    }


def _rounded(value: float) -> float | None:
    """Four decimals; None for NaN, which JSON lacks: the texts were too short for such a number."""
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else None
    return value
