"""Defines the options that choose a draft and what it drafts: the same for every command that drafts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Final

import click
import typer
from click.core import ParameterSource

from outrider.edge.devices.placement import AS_BUNDLED, DraftChoice, DraftRuntime
from outrider.edge.devices.power import OnBattery
from outrider.edge.drafting.depth import Effort
from outrider.edge.store.auto import AUTO
from outrider.models.bundle.reference_export import REFERENCE
from outrider.models.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

LOOKUP: Final = "--lookup or --no-lookup"

TREE: Final = ("width", "lookup")
"""Options of drafted trees."""
DRAFTS: Final = (
    *("runtime", "draft_device", "emulate_npu"),
    *TREE,
    *("on_battery", "depth", "effort", "threads"),
)
"""Options that have no effect where nothing drafts."""

_DRAFT_HELP: Final = (
    f"Draft bundle; '{REFERENCE}': the reference draft; '{AUTO}': the pulled draft that fits the verifier's target, or "
    f"else '{REFERENCE}'."
)


class DraftPath(click.types.StringParamType):
    """A bundle's path, or a word for one. In a variable, several are separated as in PATH."""

    name = "text"
    envvar_list_splitter = os.pathsep


Drafts = Annotated[
    list[str],
    typer.Option(
        "--draft",
        envvar="OUTRIDER_DRAFT",
        click_type=DraftPath(),
        help=f"{_DRAFT_HELP} Repeat it for drafts to choose from: the fastest here is taken.",
    ),
]
BatteryWork = Annotated[
    OnBattery,
    typer.Option("--on-battery", help="What is drafted on battery, or when the processor is hot: half or all of it."),
]
DraftDevice = Annotated[
    str | None,
    typer.Option(
        metavar="[cpu|gpu|npu|gpu.N]",
        help="What the draft runs on, gpu.1 for the second GPU; or ONNX Runtime's execution provider by full name, or "
        "prefer-npu. Default: the device that its bundle was made for.",
    ),
]
Runtime = Annotated[
    DraftRuntime | None,
    typer.Option(help="What drafts; default: the bundle's runtime. ngram copies earlier passages of the text."),
]
EmulateNpu = Annotated[bool, typer.Option("--emulate-npu", help="Run the NPU path on the CPU, to try it; slow.")]
Depth = Annotated[str, typer.Option(help="How far to draft ahead: auto, threshold or a number, 0 to 64.")]
Width = Annotated[str, typer.Option(help="Guesses per token: auto, or 1 to 8; 1 drafts a single path.")]
HowMuch = Annotated[Effort, typer.Option(help="How much the device drafts; low saves energy.")]
Lookup = Annotated[
    bool | None,
    typer.Option("--lookup/--no-lookup", help="Also copy earlier passages of the text.", show_default="lookup"),
]
Threads = Annotated[int, typer.Option(min=0, help="Threads of the draft; 0 leaves it to the runtime.")]
OfflineOk = Annotated[
    bool,
    typer.Option("--offline-ok", help="Where no cloud answers, let the draft write alone, marked as unverified."),
]


REMOVED_DRAFTING: Final = {
    "--draft-bytes": "A device sends 150 bytes of drafts per token of the text at most; with --width 1 about 10.",
    "--provider": "Give the execution provider's name to --draft-device.",
    "--patience-ms": "The target chooses how long it waits for a draft, by its step times.",
    "--tls-client-key": "Put the key into the file of --tls-client-cert, after the certificates.",
}
"""What to do in place of options that there were once."""


def is_typed(parameter: str) -> bool:
    """Whether the option stands on the command line: a value from the environment or the file is for every run.

    True outside of a command, where options are values.
    """
    context = click.get_current_context(silent=True)
    source = context.get_parameter_source(parameter) if context is not None else None
    return source in (None, ParameterSource.COMMANDLINE)


def draft_choice(runtime: DraftRuntime | None, draft_device: str | None, emulate_npu: bool) -> DraftChoice:
    """The choice that these options make. Raises ConfigError where typed ones contradict each other.

    A configured one that contradicts a typed one gives way.
    """
    try:
        return _choice(runtime, draft_device, emulate_npu)
    except ConfigError:
        typed = _choice(
            runtime if is_typed("runtime") else None,
            draft_device if is_typed("draft_device") else None,
            emulate_npu and is_typed("emulate_npu"),
        )
        if typed == AS_BUNDLED:
            raise
        return typed


def _choice(runtime: DraftRuntime | None, device: str | None, emulate_npu: bool) -> DraftChoice:
    if device is not None and (device == "prefer-npu" or device.endswith("ExecutionProvider")):
        return DraftChoice(runtime, None, emulate_npu, device)
    return DraftChoice(runtime, device, emulate_npu)


def given(options: DataclassInstance, *parameters: str) -> dict[str, bool]:
    """Whether each of these fields differs from its default, by the option's name."""
    defaults = {each.name: each.default for each in fields(options)}
    return {
        LOOKUP if name == "lookup" else f"--{name.replace('_', '-')}": getattr(options, name) != defaults[name]
        for name in parameters
    }


def refuse_idle(reason: str, given: Mapping[str, bool]) -> None:
    """Raises ConfigError for options that were typed and have no effect, by name. reason: why they have none."""
    if names := [name for name, is_given in given.items() if is_given and is_typed(_parameter(name))]:
        raise ConfigError(f"{reason}, so {' and '.join(names)} would have no effect; leave {_it(names)} out")


def refuse_idle_effort(depth: str, effort: Effort) -> None:
    """Raises ConfigError for an effort that has no effect beside the depth."""
    if depth != "auto":
        refuse_idle(f"--depth {depth} does not depend on times", {"--effort": effort is not Effort.NORMAL})


def refuse_idle_tree(width: str, lookup: bool | None, runtime: str | None) -> None:
    """Raises ConfigError for options of a drafted tree that have no effect beside one another."""
    if width == "1":
        refuse_idle("--width 1 drafts a single path", {LOOKUP: lookup is not None})
    if runtime == "ngram":
        refuse_idle("with --runtime ngram nothing but lookup drafts", {LOOKUP: lookup is not None})


def _parameter(name: str) -> str:
    return name.split()[0].removeprefix("--").replace("-", "_")


def _it(names: list[str]) -> str:
    return "it" if len(names) == 1 else "them"
