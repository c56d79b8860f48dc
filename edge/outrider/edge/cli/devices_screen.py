"""Lists the devices that can draft here: `outrider devices`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from outrider.edge.devices.discovery import (
    RUNTIME_NAMES,
    FoundDevice,
    FoundRuntime,
    ModelRuntime,
    advice,
    find_runtime,
    install_advice,
)
from outrider.models.bundle.manifest import Device
from outrider.models.errors import ConfigError, RuntimeUnavailable
from outrider.models.process.extras import importing

DRAFTS: Final[dict[tuple[ModelRuntime, Device], str]] = {
    ("openvino", "cpu"): "--device cpu",
    ("openvino", "gpu"): "--device gpu",
    ("openvino", "npu"): "--device npu",
    ("onnxruntime", "cpu"): "--device cpu --runtime onnxruntime",
    ("onnxruntime", "gpu"): "--device gpu --runtime onnxruntime",
}
"""Options of `outrider-export draft`, by the draft's runtime and device."""


COLUMNS: Final = ("runtime", "device", "what it is", "outrider-export draft")


def devices(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
    is_profiled: Annotated[
        bool, typer.Option("--profile", help="Measure drafts on every device that may run them; kept for later runs.")
    ] = False,
    draft: Annotated[
        list[Path] | None, typer.Option(help="Draft to profile; repeatable. Default: all that were pulled.")
    ] = None,
    threads: Annotated[int, typer.Option(min=0, help="Threads of the draft; 0 leaves it to the runtime.")] = 0,
) -> None:
    """List the devices that can draft here, with advice for missing ones.

    --profile measures the time of a call by its nodes, and the energy where the system tells it: best first for a step
    and a round trip of 40 ms each.
    """
    if is_profiled:
        with importing("the agent", "edge"):
            from outrider.edge.cli.placing import show_profiles
        show_profiles(draft or [], threads, Console(), as_json=as_json)
        return
    if draft or threads:
        raise ConfigError("--draft and --threads say what --profile measures; add --profile")
    found = [_found(runtime) for runtime in RUNTIME_NAMES]
    if as_json:
        typer.echo(json.dumps(devices_as_json(found), indent=2))
        return
    show_devices(Console(), found)


def _found(runtime: ModelRuntime) -> FoundRuntime:
    try:
        return find_runtime(runtime)
    except RuntimeUnavailable as error:
        return FoundRuntime(runtime, None, (FoundDevice("-", str(error), None),))


def devices_as_json(found: list[FoundRuntime]) -> dict[str, object]:
    """The devices found, and advice for missing ones."""
    return {"runtimes": [each.as_json() for each in found], "missing": _missing(found)}


def show_devices(console: Console, found: list[FoundRuntime]) -> None:
    """Prints the devices found as a table, or as a list where that is too wide; then advice for missing ones."""
    rows = [row for each in found for row in _rows(each)]
    table = Table(*(Column(name, no_wrap=True) for name in COLUMNS), box=None, padding=(0, 2, 0, 0), header_style="dim")
    for row in rows:
        table.add_row(*map(escape, row))
    if Measurement.get(console, console.options.update(width=10_000), table).maximum <= console.width:
        console.print(table, highlight=False)
    else:
        for runtime, device, *details in rows:
            console.print(f"[bold]{escape(runtime)}: {escape(device)}[/bold]", highlight=False)
            for name, detail in zip(COLUMNS[2:], details, strict=True):
                console.print(Padding(Text(f"{name}: {detail}"), (0, 0, 0, 2)))
    for missing in _missing(found):
        console.print(
            f"\n[bold]no {missing['device'].upper()} in {missing['name']}[/bold]: {escape(missing['help'])}",
            highlight=False,
        )


def _rows(found: FoundRuntime) -> Iterator[tuple[str, ...]]:
    """A row of `COLUMNS` per device of a runtime."""
    runtime = f"{RUNTIME_NAMES[found.runtime]} {found.version or ''}".rstrip()
    if found.version is None and not found.devices:
        yield runtime, "-", install_advice(found.runtime), "-"
    for device in found.devices:
        made = DRAFTS.get((found.runtime, device.device)) if device.device is not None else None
        yield runtime, device.name, device.words, made or "no draft is made for it"


def _missing(found: list[FoundRuntime]) -> list[dict[str, str]]:
    """Devices that drafts can be made for and that an installed runtime does not find, with advice."""
    installed = {each.runtime: each for each in found if each.version is not None}
    return [
        {"runtime": runtime, "name": RUNTIME_NAMES[runtime], "device": device, "help": advice(runtime, device)}
        for runtime, device in DRAFTS
        if runtime in installed and not installed[runtime].has(device)
    ]
