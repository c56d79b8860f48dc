"""The command line's words for what drafts: the same for every command that drafts."""

from __future__ import annotations

from typing import Annotated

import typer

from outrider.edge.devices.placement import DraftRuntime
from outrider.models.manifest import Device

DraftDevice = Annotated[
    Device | None,
    typer.Option(help="What the draft runs on; the device that its bundle was made for if not given."),
]
Runtime = Annotated[
    DraftRuntime | None,
    typer.Option(help="What drafts; the bundle's own runtime if not given. ngram repeats what the text said before."),
]
EmulateNpu = Annotated[
    bool, typer.Option("--emulate-npu", help="Run the NPU path on the CPU: to try it, not to be quick.")
]
Provider = Annotated[
    str | None,
    typer.Option(help="ONNX Runtime's execution provider by its full name, or prefer-npu; in place of --draft-device."),
]
