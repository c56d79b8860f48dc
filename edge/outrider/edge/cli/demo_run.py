"""What `outrider demo` does: export (once), cloud, agent, comparison.

Export and cloud are used as their users use them: the one as a library that may be missing, the other as a process.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from outrider.edge.cli.demo_options import DemoOptions
from outrider.edge.cli.demo_screen import DemoScreen
from outrider.edge.devices.placement import require_asked_device
from outrider.edge.lab.child_process import ending_on_signals
from outrider.edge.lab.comparison import ModeFigures, compare
from outrider.edge.lab.laboratory import CLOUD_ONLY, STREAM, Lab, connected, interleave, open_lab, three_modes
from outrider.edge.results import GenerationRequest
from outrider.models.errors import RuntimeUnavailable
from outrider.models.manifest import StaticShapes
from outrider.reference import load_prompts

MAIN_RTT_MS = 10.0
OTHER_RTTS_MS = (0.0, 50.0, 100.0)
"""Round trips of the second table, and with `NUM_OTHER` texts each: enough to see which way it goes."""
NUM_OTHER = 2

NPU_SHAPES = StaticShapes(prompt_len=128, response_len=576)
"""What the demo's own texts need: prompts of up to 120 tokens and texts of up to 512."""

Sweep = dict[float, dict[str, ModeFigures]]


def run_demo(options: DemoOptions, console: Console) -> None:
    """The whole demonstration. Raises OutriderError; whatever happens, no process is left behind."""
    require_asked_device(options.choice)  # before minutes go into an export for it
    screen = DemoScreen(console)
    screen.show_intro(options)
    with ending_on_signals():
        target, draft = _export(options)
        with open_lab(target, draft, options.choice) as lab:
            figures, sweep = asyncio.run(_measure(options, lab, screen))
    if options.json_path is not None:
        document = report(options, lab, figures, sweep)
        options.json_path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        console.print(f"wrote {options.json_path}", style="dim", highlight=False)


def _export(options: DemoOptions) -> tuple[Path, Path]:
    """The pair's bundles (target, draft), from the cache or made now, with progress on standard error."""
    try:
        from outrider.export.cli.display import show_progress
        from outrider.export.make.reference_pair import export_reference_pair
    except ModuleNotFoundError as error:
        raise RuntimeUnavailable(
            f"the demo exports the bundled pair first, which needs the package {error.name!r}; run: "
            'pip install "outrider[all]"'
        ) from None
    asked = options.choice
    device = asked.wanted_device or "cpu"
    with show_progress(is_quiet=False) as progress:
        pair = export_reference_pair(
            widen_mb=options.widen_mb or None,
            draft_device=device,
            draft_runtime=None if asked.runtime == "ngram" else asked.runtime,
            draft_shapes=NPU_SHAPES if device == "npu" else None,
            progress=progress,
        )
    return pair.target, pair.draft


async def _measure(options: DemoOptions, lab: Lab, screen: DemoScreen) -> tuple[dict[str, ModeFigures], Sweep]:
    prompts = load_prompts(options.num_prompts)
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
    async with connected(lab.url, lab.cores, rtt_ms) as endpoints:
        agent = (await three_modes(endpoints, lab.drafter))[STREAM]
        # Shown, not counted: it also warms everything up.
        with screen.streaming(prompts[0], lab.tokenizer, requests[0].prompt) as on_tokens:
            await agent.generate(requests[0], on_tokens)
    figures = await _compare_at(lab, rtt_ms, requests, screen)
    screen.show_figures(figures, rtt_ms)
    sweep: Sweep = {}
    if options.rtt_ms is None:
        for other in OTHER_RTTS_MS:
            sweep[other] = await _compare_at(lab, other, requests[:NUM_OTHER], screen)
        sweep[rtt_ms] = figures
        screen.show_sweep(dict(sorted(sweep.items())))
    screen.show_close(figures, lab)
    return figures, sweep


async def _compare_at(
    lab: Lab, rtt_ms: float, requests: Sequence[GenerationRequest], screen: DemoScreen
) -> dict[str, ModeFigures]:
    async with connected(lab.url, lab.cores, rtt_ms) as endpoints:
        modes = await three_modes(endpoints, lab.drafter)
        for mode in modes.values():  # connections, and the estimates that an agent keeps from text to text
            await mode.generate(replace(requests[0], max_tokens=min(8, requests[0].max_tokens)))
        with screen.counting(f"round trip {rtt_ms:g} ms", len(modes) * len(requests)) as count:
            results = await interleave(modes, requests, lambda name, result: count())
    return compare(results, CLOUD_ONLY)


def report(
    options: DemoOptions, lab: Lab, figures: dict[str, ModeFigures], sweep: Sweep
) -> dict[str, dict[str, object] | float]:
    """The document that --json writes."""
    modes: dict[str, object] = {}
    for name, values in figures.items():
        by_rtt = {f"{rtt_ms:g}": round(at[name].speed_up, 3) for rtt_ms, at in sorted(sweep.items())}
        rounded = {key: _rounded(value) for key, value in asdict(values).items()}
        modes[name] = rounded | ({"speed_up_by_rtt_ms": by_rtt} if by_rtt else {})
    return {
        "pair": describe_pair(lab) | {"drafted_by": lab.placement.as_json(), "cores": lab.cores.note},
        "rtt_ms": MAIN_RTT_MS if options.rtt_ms is None else options.rtt_ms,
        "modes": modes,
    }


def _rounded(value: float) -> float:
    """Four decimals; JSON has no NaN, and a text too short to have a rate has none."""
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else 0.0
    return value


def describe_pair(lab: Lab) -> dict[str, object]:
    """What the two models are, from their manifests."""
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
