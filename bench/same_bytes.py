"""Checks that the same input gives the same bytes: every recipe twice, each in its own process and cache.

    python -m bench.same_bytes

The second process makes another bundle first, hashes strings with another seed, has another number of threads for the
check, and reads the source from another place. Prints, for each recipe, whether the model's files and the
manifest's digest are the same, and exits 1 if any are not. `manifest.json` itself differs in its measurements, which
are not part of the digest.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from bench.bad_sources import make_sources
from bench.report import write_json
from rich.console import Console
from rich.table import Table

from outrider.export.recipes import RECIPES

_CHILD: Final = """
import json, sys
from outrider.export.make.pipeline import export_model
from outrider.export.recipes import ExportOptions

source, out, threads, *others = sys.argv[1:]
recipe = others[-4:]
def options(role, device, runtime, precision):
    return ExportOptions(role, precision, runtime, device=device, num_threads=int(threads))

if len(others) > 4:
    export_model(others[0], out + "-before", options("draft", "cpu", "openvino", "int8"))
made = export_model(source, out, options(*recipe)).manifest
print(json.dumps({"digest": made.digest, "files": {entry.path: entry.sha256 for entry in made.files}}))
"""


def main(
    only: Annotated[str | None, typer.Option(help="one recipe, such as draft/cpu/openvino/int8")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="also write the figures here")] = None,
) -> None:
    """Exports everything twice."""
    console, table = Console(), Table("recipe", "files", "digest", "differ", title="the same input, twice")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as root:
        first, second = Path(root) / "a" / "model", Path(root) / "elsewhere" / "under another" / "name" / "model"
        make_sources(Path(root) / "sources")
        for (role, device, runtime), precisions in RECIPES.items():
            for copy in (first, second):
                shutil.rmtree(copy, ignore_errors=True)
                shutil.copytree(Path(root) / "sources" / role, copy)
            for precision in precisions:
                recipe = (role, device, runtime, precision)
                if only not in (None, "/".join(recipe)):
                    continue
                once = export(first, recipe, threads=1, seed="1")
                again = export(second, recipe, threads=2, seed="2", before=Path(root) / "sources" / "target")
                differ = sorted(
                    name
                    for name in once["files"].keys() | again["files"].keys()
                    if once["files"].get(name) != again["files"].get(name)
                )
                is_same = once["digest"] == again["digest"]
                rows.append({"recipe": recipe, "is_same_digest": is_same, "differ": differ})
                words = ["[green]same[/green]" if same else "[red]DIFFER[/red]" for same in (not differ, is_same)]
                table.add_row("/".join(recipe), *words, ", ".join(differ))
                console.print("/".join(recipe), *words)
    console.print(table)
    write_json(json_path, {"recipes": rows})
    if not rows or any(row["differ"] or not row["is_same_digest"] for row in rows):
        raise typer.Exit(1)


def export(
    source: Path, recipe: tuple[str, ...], *, threads: int, seed: str, before: Path | None = None
) -> dict[str, Any]:
    """Digest and file hashes of one export, in its own process and cache; `before`: another model, exported first."""
    with tempfile.TemporaryDirectory() as place:
        environment = os.environ | {
            "OUTRIDER_CACHE": f"{place}/cache",
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        others = (str(before),) if before is not None else ()
        command = [sys.executable, "-W", "ignore", "-c", _CHILD, str(source), f"{place}/out", str(threads), *others]
        done = subprocess.run([*command, *recipe], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{'/'.join(recipe)} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    typer.run(main)
