"""Defines the options that choose a draft and what it drafts: the same for every command that drafts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

import typer

from outrider.edge.devices.placement import DraftRuntime
from outrider.edge.drafting.depth import Effort
from outrider.edge.drafting.price import BYTES_PER_TOKEN
from outrider.models.errors import ConfigError

LOOKUP: Final = "--lookup or --no-lookup"

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
Lookup = Annotated[
    bool | None,
    typer.Option("--lookup/--no-lookup", help="Also copy earlier passages of the text.", show_default="lookup"),
]


def refuse_idle(reason: str, given: Mapping[str, bool]) -> None:
    """Raises ConfigError for options that were given and have no effect, by name. reason: why they have none."""
    if names := [name for name, is_given in given.items() if is_given]:
        raise ConfigError(f"{reason}, so {' and '.join(names)} would have no effect; leave {_it(names)} out")


def refuse_idle_tree(width: str, draft_bytes: float, lookup: bool | None, runtime: str | None) -> None:
    """Raises ConfigError for options of a drafted tree that have no effect beside one another."""
    is_bytes, is_lookup = draft_bytes != BYTES_PER_TOKEN, lookup is not None
    if width == "1":
        refuse_idle("--width 1 drafts a single path", {"--draft-bytes": is_bytes, LOOKUP: is_lookup})
    if runtime == "ngram":
        refuse_idle("with --runtime ngram nothing but lookup drafts", {LOOKUP: is_lookup})


def _it(names: list[str]) -> str:
    return "it" if len(names) == 1 else "them"
