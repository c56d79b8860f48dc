"""`outrider devices`: what is here to draft on."""

from __future__ import annotations

import json
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from outrider.edge.devices.discovery import RUNTIME_NAMES, FoundRuntime, ModelRuntime, advice, find_runtime
from outrider.models.manifest import Device

DRAFTS: Final[dict[tuple[ModelRuntime, Device], str]] = {
    ("openvino", "cpu"): "--device cpu",
    ("openvino", "gpu"): "--device gpu",
    ("openvino", "npu"): "--device npu",
    ("onnxruntime", "cpu"): "--device cpu --runtime onnxruntime",
    ("onnxruntime", "gpu"): "--device gpu --runtime onnxruntime",
}
"""What `outrider-export draft` is told, by the runtime and the device that the draft is for."""


def devices(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """List the devices that can draft here, and say what would help where one is missing."""
    found = [find_runtime(runtime) for runtime in RUNTIME_NAMES]
    if as_json:
        typer.echo(json.dumps(devices_as_json(found), indent=2))
        return
    show_devices(Console(), found)


def devices_as_json(found: list[FoundRuntime]) -> dict[str, object]:
    """What was found, and of what was not, what would help."""
    return {"runtimes": [each.as_json() for each in found], "missing": _missing(found)}


def show_devices(console: Console, found: list[FoundRuntime]) -> None:
    """A table of what there is, then a paragraph for each device that is not."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("runtime")
    table.add_column("device", overflow="fold")
    table.add_column("what it is", overflow="fold")
    table.add_column("outrider-export draft", overflow="fold")
    for each in found:
        runtime = f"{RUNTIME_NAMES[each.runtime]} {each.version or ''}".rstrip()
        if each.version is None:
            table.add_row(runtime, "-", escape('not installed; run: pip install "outrider[edge]"'), "-")
        for device in each.devices:
            driver = f", driver {device.driver}" if device.driver else ""
            made = DRAFTS.get((each.runtime, device.device)) if device.device is not None else None
            table.add_row(runtime, device.name, escape(device.full_name + driver), made or "none is made for it")
    console.print(table, highlight=False)
    for missing in _missing(found):
        what = f"no {missing['device'].upper()} in {missing['name']}"
        console.print(f"\n[bold]{what}[/bold]: {escape(missing['help'])}", highlight=False)


def _missing(found: list[FoundRuntime]) -> list[dict[str, str]]:
    """Of runtimes that are installed: devices that drafts are made for and that are not here."""
    installed = {each.runtime: each for each in found if each.version is not None}
    return [
        {"runtime": runtime, "name": RUNTIME_NAMES[runtime], "device": device, "help": advice(runtime, device)}
        for runtime, device in DRAFTS
        if runtime in installed and not installed[runtime].has(device)
    ]
