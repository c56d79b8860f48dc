"""`outrider demo`: what it can be told. What it does is `demo_run`'s business, imported when it is wanted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from outrider.edge.cli.demo_options import DemoOptions
from outrider.edge.cli.draft_flags import DraftDevice, EmulateNpu, Runtime
from outrider.edge.devices.placement import DraftChoice
from outrider.models.errors import RuntimeUnavailable
from outrider.models.sampling import SamplingParams


def demo(
    rtt_ms: Annotated[
        float | None,
        typer.Option(min=0.0, max=60_000.0, help="Round trip between device and cloud; unset: 10, then others too."),
    ] = None,
    widen: Annotated[
        float,
        typer.Option(min=0.0, help="Widen the target to so many MB without changing its function; 0: as it is."),
    ] = 700.0,
    json: Annotated[Path | None, typer.Option(help="Write the figures here.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="How many texts.")] = 6,
    max_tokens: Annotated[int, typer.Option(min=2, max=512, help="Tokens of a text.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy; greedy text of so small a model loops.")] = 0.8,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same texts.")] = 0,
    draft_device: DraftDevice = None,
    runtime: Runtime = None,
    emulate_npu: EmulateNpu = False,
) -> None:
    """See everything work on this machine: export, cloud, agent, and how the modes compare."""
    options = DemoOptions(
        rtt_ms,
        widen,
        json,
        prompts,
        max_tokens,
        SamplingParams(temperature=temperature, seed=seed),
        DraftChoice(runtime, draft_device, emulate_npu),
    )
    try:
        from outrider.edge.cli.demo_run import run_demo
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    run_demo(options, Console())


def _missing(error: ModuleNotFoundError) -> Exception:
    if error.name is None or error.name.startswith("outrider"):
        return error  # a bug of ours, not a missing package
    return RuntimeUnavailable(
        f"the demo exports, serves and drafts on this machine, and needs the package {error.name!r}, which is not "
        'installed; run: pip install "outrider[all]"'
    )
