"""What measurements share: their options, their tables, their verdict, and where their numbers come from."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich.console import Console
from rich.table import Table

_PACKAGES: Final = ("openvino", "onnxruntime", "torch", "transformers", "triton")

Options = Mapping[str, Mapping[str, Any]]
"""Options of a command by name, such as `--runs`, each with the arguments of argparse's `add_argument`."""


def option(default: Any = None, help: str | None = None, **more: Any) -> dict[str, Any]:
    """An option of the default's type; a list takes several values, False is a switch."""
    if default is False:
        return {"action": "store_true", "help": help}
    if isinstance(default, list):
        return {"nargs": "+", "type": type(default[0]), "default": default, "help": help, **more}
    typed = {"type": type(default)} if default is not None else {}
    return {**typed, "default": default, "help": help, **more}


TO_JSON: Final[Options] = {"--json": option(type=Path, help="also write the figures here")}


def parser(doc: str | None, options: Options) -> argparse.ArgumentParser:
    """A command with these options. doc: its module's text."""
    cli = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, arguments in options.items():
        cli.add_argument(name, **arguments)
    return cli


def figures_table(title: str, *columns: str, left: Collection[str] = ()) -> Table:
    """A table of numbers. left: columns of words."""
    table = Table(title=title, title_justify="left", box=None)
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right")
    return table


def verdict(console: Console, missed: Sequence[str], path: Path | None, document: Mapping[str, Any]) -> int:
    """Prints the bounds that are missed, writes the numbers, and returns the exit code."""
    for miss in missed:
        console.print(miss, style="red", highlight=False)
    write_json(path, {**document, "misses": missed})
    return 1 if missed else 0


def median_ratio(ours: Sequence[float], others: Sequence[float]) -> float:
    """Of the runs' ratios: of rates that were measured in turn."""
    return median(a / b for a, b in zip(ours, others, strict=True))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    """Processor, cores, Python and the runtimes' versions."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "processor": model or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
        "load_1min": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def write_json(path: Path | None, document: dict[str, Any]) -> None:
    """Writes a document with the machine's facts in front; nothing without a path."""
    if path is not None:
        path.write_text(json.dumps({"machine": machine(), **document}, indent=2) + "\n", encoding="utf-8")
