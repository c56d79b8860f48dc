"""`outrider demo`: what it can be told. What it does is `demo_run`'s business, imported when it is wanted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from outrider.edge.draft_flags import DraftDevice, EmulateNpu, Runtime
from outrider.edge.placement import DraftChoice
from outrider.models.errors import RuntimeUnavailable
from outrider.models.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """rtt_ms: round trip of the table; None takes a short one, and tells of others in a second table.

    widen_mb: size of the widened target in FP32, 10^6 bytes; 0 leaves the target as it is. json_path: where the
    figures go. The text of prompt i is drawn with seed + i.
    """

    rtt_ms: float | None
    widen_mb: float
    json_path: Path | None
    num_prompts: int
    max_tokens: int
    params: SamplingParams
    choice: DraftChoice


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
        from outrider.edge.demo_run import run_demo
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
