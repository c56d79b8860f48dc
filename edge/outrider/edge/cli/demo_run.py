"""Runs `outrider demo`: export (once), cloud, agent, comparison. Export and cloud run as child processes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from rich.console import Console

from outrider.edge.cli.demo_options import DemoOptions
from outrider.edge.cli.demo_screen import DemoScreen
from outrider.edge.cli.exporter import export_reference_pair
from outrider.edge.devices.placement import require_asked_device
from outrider.edge.lab.child_process import EndingOnSignals
from outrider.edge.lab.comparison import ModeFigures, compare
from outrider.edge.lab.laboratory import ALONE, CLOUD_ONLY, STREAM, Lab, connected, interleave, open_lab, three_modes
from outrider.edge.lab.time_budget import Pace, TimeBudget
from outrider.edge.modes.assemble import make_options
from outrider.edge.modes.stream import AgentOptions
from outrider.edge.results import GenerationRequest, GenerationResult
from outrider.models.machine_load import MachineLoad
from outrider.reference import load_prompts

MAIN_RTT_MS = 10.0
OTHER_RTTS_MS = (0.0, 50.0, 100.0)
"""Round trips of the second table, with `NUM_OTHER` texts each: enough to show the trend."""
NUM_OTHER = 2
MAIN_SHARE = 0.6
"""Share of the time for the first table where there is a second."""

Sweep = dict[float, dict[str, ModeFigures]]


@dataclass(slots=True)
class Measured:
    """What the demo measured. left_out: what was skipped for lack of time. load: warning about other processes."""

    figures: dict[str, ModeFigures]
    sweep: Sweep = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    load: str | None = None


def run_demo(options: DemoOptions, console: Console) -> None:
    """Runs the demo. Raises OutriderError; however it ends, no process is left behind."""
    make_options(options.width)  # wrong options are found before minutes go into an export
    require_asked_device(options.choice)
    screen = DemoScreen(console)
    screen.show_intro(options)
    with EndingOnSignals() as signals:
        pair = export_reference_pair(options.choice, options.widen)
        with open_lab(pair.target, pair.draft, options.choice, ALONE) as lab:
            measured = signals.run(_measure(options, lab, screen))
    if options.json is not None:
        document = report(options, lab, measured)
        options.json.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        console.print(f"wrote {options.json}", style="dim", highlight=False, markup=False, soft_wrap=True)


async def _measure(options: DemoOptions, lab: Lab, screen: DemoScreen) -> Measured:
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
    has_sweep = options.rtt_ms is None
    screen.show_lab(lab)
    budget, load = TimeBudget(options.max_seconds), MachineLoad()
    with load:
        async with connected(lab.url, lab.cores, rtt_ms) as endpoints:
            agent = three_modes(endpoints, lab.drafter, _tree(options))[STREAM]
            # Shown, not counted: it also warms everything up.
            with screen.streaming(prompts[0], lab.tokenizer, requests[0].prompt) as on_tokens:
                await agent.generate(requests[0], on_tokens)
        pace = Pace(budget.part(MAIN_SHARE) if has_sweep else budget)
        figures = await _compare_at(options, lab, rtt_ms, requests, screen, pace)
        measured = Measured(figures)
        if (num_texts := figures[CLOUD_ONLY].num_texts) < len(requests):
            measured.left_out.append(f"{len(requests) - num_texts} of {len(requests)} texts")
        screen.show_figures(figures, rtt_ms)
        if has_sweep:
            await _sweep(options, lab, requests[:NUM_OTHER], screen, measured, budget, pace.longest_s)
            measured.sweep[rtt_ms] = figures
    measured.load = load.warning()
    if has_sweep:
        screen.show_sweep(dict(sorted(measured.sweep.items())))
    screen.show_close(measured.figures, lab, options, measured.left_out, measured.load)
    return measured


def _tree(options: DemoOptions) -> AgentOptions:
    return make_options(options.width, options.effort, options.draft_bytes, options.lookup is not False)


async def _sweep(
    options: DemoOptions,
    lab: Lab,
    requests: Sequence[GenerationRequest],
    screen: DemoScreen,
    measured: Measured,
    budget: TimeBudget,
    expected_s: float,
) -> None:
    """The other round trips, each in an equal part of the time that is left. expected_s: time of a text."""
    skipped = []
    for index, rtt_ms in enumerate(OTHER_RTTS_MS):
        pace = Pace(budget.part(1 / (len(OTHER_RTTS_MS) - index)), expected_s)
        if pace.has_time():
            measured.sweep[rtt_ms] = await _compare_at(options, lab, rtt_ms, requests, screen, pace)
        else:
            skipped.append(f"{rtt_ms:g} ms")
    if skipped:
        measured.left_out.append(f"the round trip{'s' if len(skipped) > 1 else ''} of {', '.join(skipped)}")


async def _compare_at(
    options: DemoOptions,
    lab: Lab,
    rtt_ms: float,
    requests: Sequence[GenerationRequest],
    screen: DemoScreen,
    pace: Pace,
) -> dict[str, ModeFigures]:
    async with connected(lab.url, lab.cores, rtt_ms) as endpoints:
        modes = three_modes(endpoints, lab.drafter, _tree(options))
        for mode in modes.values():  # connections, and the estimates that an agent keeps from text to text
            await mode.generate(replace(requests[0], max_tokens=min(8, requests[0].max_tokens)))
        with screen.counting(f"round trip {rtt_ms:g} ms", len(modes) * len(requests)) as count:
            num_done = 0

            def done(name: str, result: GenerationResult) -> None:
                nonlocal num_done
                num_done += 1
                count()
                if num_done % len(modes) == 0:
                    pace.item_done()

            results = await interleave(modes, requests, done, pace.has_time)
    return compare(results, CLOUD_ONLY)


def report(options: DemoOptions, lab: Lab, measured: Measured) -> dict[str, object]:
    """The document that --json writes."""
    modes: dict[str, object] = {}
    for name, values in measured.figures.items():
        by_rtt = {f"{rtt_ms:g}": _rounded(at[name].speed_up) for rtt_ms, at in sorted(measured.sweep.items())}
        rounded = {key: _rounded(value) for key, value in asdict(values).items()}
        modes[name] = rounded | ({"speed_up_by_rtt_ms": by_rtt} if by_rtt else {})
    return {
        "pair": describe_pair(lab) | {"drafted_by": lab.placement.as_json(), "cores": lab.cores.note},
        "rtt_ms": MAIN_RTT_MS if options.rtt_ms is None else options.rtt_ms,
        "modes": modes,
        "left_out": measured.left_out,
        "machine_load": measured.load,
    }


def _rounded(value: float) -> float | None:
    """Four decimals; None for NaN, which JSON lacks: the texts were too short for such a number."""
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else None
    return value


def describe_pair(lab: Lab) -> dict[str, object]:
    """Facts of the two models, from their manifests."""
    pair: dict[str, object] = {}
    for role, bundle in (("target", lab.target), ("draft", lab.draft)):
        manifest = bundle.manifest
        pair[role] = {
            "name": manifest.name,
            "parameters": manifest.architecture.parameters,
            "precision": manifest.precision,
            "runtime": manifest.runtime,
            "size_bytes": manifest.report.size_bytes,
            "widened_from_parameters": manifest.widened.from_parameters if manifest.widened else None,
        }
    return pair | {"tokenizer": lab.tokenizer.fingerprint}
