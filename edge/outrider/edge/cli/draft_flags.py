"""Defines the options that choose a draft and what it drafts: the same for every command that drafts."""

from __future__ import annotations

from typing import Annotated

import typer

from outrider.edge.devices.placement import DraftRuntime
from outrider.edge.drafting.depth import Effort

DraftDevice = Annotated[
    str | None,
    typer.Option(
        metavar="[cpu|gpu|npu|gpu.N]",
        help="What the draft runs on, gpu.1 for the second GPU; default: the device that its bundle was made for.",
    ),
]
Runtime = Annotated[
    DraftRuntime | None,
    typer.Option(help="What drafts; default: the bundle's runtime. ngram copies earlier passages of the text."),
]
EmulateNpu = Annotated[bool, typer.Option("--emulate-npu", help="Run the NPU path on the CPU, to try it; slow.")]
Provider = Annotated[
    str | None,
    typer.Option(help="ONNX Runtime's execution provider by full name, or prefer-npu; in place of --draft-device."),
]
Width = Annotated[str, typer.Option(help="Guesses per token: auto, or 1 to 8; 1 drafts a single path.")]
HowMuch = Annotated[Effort, typer.Option(help="How much the device drafts; low saves energy.")]
DraftBytes = Annotated[float, typer.Option(min=1.0, help="Bytes of drafts sent per token of the text, at most.")]
Lookup = Annotated[bool, typer.Option("--lookup/--no-lookup", help="Also copy earlier passages of the text.")]
