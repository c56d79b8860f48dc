"""Checks that an export that fails gives one clear message and leaves its destination unchanged.

    python -m bench.bad_input

Runs the real command lines, each in its own process, on broken sources, full disks and altered bundles, and kills them
in every stage. Prints a table and exits 1 if a message is missing or is a traceback, an exit status is wrong, or the
destination has changed. Full disks are real ones, mounted in memory as root; without root those rows are left out with
a message.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Final

import typer
from bench.bad_sources import DAMAGED_BUNDLES, DAMAGED_SOURCES, make_sources
from bench.report import write_json
from rich.console import Console
from rich.markup import escape
from rich.table import Table

EXPORT: Final = ("-m", "outrider.export.cli")
STAGE_LINE: Final = re.compile(r"draft: (\w+)")
FIRST_WORDS: Final = {
    "reading": "read", "loading": "load", "converting": "convert", "quantizing": "quantize", "checking": "check",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """What was done, the result, and whether it is as expected."""

    what: str
    status: int
    message: str
    is_unchanged: bool
    is_right: bool


@dataclass(frozen=True, slots=True)
class Bench:
    """root: of all files. out: of the good bundles, `draft` and `target`. sources: of their models."""

    root: Path
    out: Path
    sources: Path

    def run(self, what: str, expected: str, *arguments: str, cache: Path | None = None, begun: str = "") -> Row:
        """Runs a command that must fail with `expected` in its message and exit status 2.

        begun: once this stage begins, another thread fills the small disk, and whatever is freed on it.
        """
        before = fingerprint(self.out)
        is_over = threading.Event()
        filler = threading.Thread(target=fill, args=(self.root / "disk", is_over))
        with self.process(*arguments, cache=cache) as process:
            heard = ""
            assert process.stderr is not None
            for line in process.stderr:
                heard += line
                if begun and (match := STAGE_LINE.search(line)) and FIRST_WORDS.get(match[1]) == begun:
                    filler.start()
        is_over.set()
        if filler.ident is not None:
            filler.join()
        message = " ".join(heard.split())
        told = message.partition("error: ")[2]
        is_clear = re.search(expected, told) is not None and "Traceback" not in heard
        is_unchanged = fingerprint(self.out) == before
        return Row(what, process.returncode, told or message, is_unchanged, is_clear and process.returncode == 2)

    @contextmanager
    def process(self, *arguments: str, cache: Path | None = None) -> Iterator[subprocess.Popen[str]]:
        """The running command, its progress and errors on a pipe."""
        environment = os.environ | {
            "OUTRIDER_CACHE": str(cache or self.root / "cache"),
            "PYTHONPATH": os.pathsep.join(sys.path),
            "COLUMNS": "10000",
            "NO_COLOR": "1",
        }
        with subprocess.Popen(
            [sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as process:
            yield process

    def draft(self, source: Path, *more: str, out: Path | None = None) -> tuple[str, ...]:
        """The command that exports a draft over the good one."""
        return (*EXPORT, "draft", str(source), "--out", str(out or self.out / "draft"), "--overwrite", *more)


def main(
    only: Annotated[str | None, typer.Option(help="sources, disks, kills or bundles")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="also write the rows here")] = None,
) -> None:
    """Runs every case once."""
    console = Console()
    parts: dict[str, Callable[[Bench], Iterator[Row]]] = {
        "sources": bad_sources,
        "disks": full_disks,
        "kills": kills,
        "bundles": bad_bundles,
    }
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as root:
        bench = Bench(Path(root), Path(root) / "out", Path(root) / "sources")
        make_sources(bench.sources)
        for role, runtime in (("draft", "openvino"), ("target", "torch")):
            arguments = (str(bench.sources / role), "--out", str(bench.out / role), "--runtime", runtime)
            with bench.process(*EXPORT, role, *arguments, "--precision", "fp32") as process:
                errors = process.stderr.read() if process.stderr is not None else ""
            if process.returncode:
                raise SystemExit(f"the good {role} could not be exported:\n{errors}")
        for name, part in parts.items():
            if only in (None, name):
                for row in part(bench):
                    is_good = row.is_right and row.is_unchanged
                    console.print("[green]right[/green]" if is_good else "[red]WRONG[/red]", escape(row.what))
                    rows.append(row)
    console.print(as_table(rows))
    write_json(json_path, {"rows": [asdict(row) for row in rows]})
    if not rows or not all(row.is_right and row.is_unchanged for row in rows):
        raise typer.Exit(1)


def bad_sources(bench: Bench) -> Iterator[Row]:
    """Broken, inconsistent and mismatched model directories."""
    for what, (damage, expected, *more) in DAMAGED_SOURCES.items():
        source = bench.root / "damaged"
        shutil.rmtree(source, ignore_errors=True)
        shutil.copytree(bench.sources / "draft", source)
        damage(source)
        arguments = bench.draft(source, *more)
        if "pair" in more:
            models = (str(source), str(bench.sources / "target"))
            arguments = (*EXPORT, "pair", *models, "--out", str(bench.out), "--overwrite")
        yield bench.run(what, expected, *arguments)


def full_disks(bench: Bench) -> Iterator[Row]:
    """The disks of destination and cache: too small from the start, or filled by another program meanwhile."""
    if sys.platform != "linux" or os.geteuid() != 0:
        Console().print("[yellow]left out: full disks, which need root on Linux[/yellow]")
        return
    disk, elsewhere = bench.root / "disk", bench.root / "elsewhere"
    disk.mkdir()
    fp16 = ("--precision", "fp16", "--device", "gpu", "--runtime", "openvino")
    for where, after, more in (
        ("destination", "", ()),
        ("destination", "read", ()),
        ("destination", "load", ()),
        ("destination", "convert", ()),
        ("destination", "quantize", ()),
        ("destination", "load", fp16),
        ("cache", "", ()),
        ("cache", "read", ()),
        ("cache", "load", ()),
    ):
        shutil.rmtree(bench.root / "cache", ignore_errors=True)
        with mounted(disk, "32m" if after else "700k"):
            out = (disk if where == "destination" else elsewhere) / "draft"
            cache = disk / "cache" if where == "cache" else None
            arguments = bench.draft(bench.sources / "draft", *more, out=out)
            what = (
                f"the {where}'s disk {f'fills up after {after}' if after else 'is too small'}{', fp16' if more else ''}"
            )
            row = bench.run(what, "disk is full|needs about", *arguments, cache=cache, begun=after)
            left = [path for path in disk.iterdir() if path.name not in ("full", "cache")]
            yield replace(row, is_unchanged=row.is_unchanged and not left and not elsewhere.exists())


def kills(bench: Bench) -> Iterator[Row]:
    """SIGKILL in each stage; then the same export to its end."""
    place = bench.out / "draft"
    shutil.rmtree(bench.root / "cache", ignore_errors=True)
    before = fingerprint(place)
    for stage in ("start", "read", "load", "convert", "quantize"):
        with bench.process(*bench.draft(bench.sources / "draft")) as process:
            assert process.stderr is not None
            lines: list[str] = []
            while stage != "start" or not list(bench.out.glob(".draft.partial-*")):
                if stage != "start":
                    lines.append(process.stderr.readline())
                    match = STAGE_LINE.search(lines[-1])
                    if not lines[-1] or (match and FIRST_WORDS.get(match[1]) == stage):
                        break
            process.send_signal(signal.SIGKILL)
        is_killed = process.returncode == -signal.SIGKILL
        yield Row(f"killed after {stage}", process.returncode, "", fingerprint(place) == before, is_killed)
    with bench.process(*bench.draft(bench.sources / "draft")) as process:
        assert process.stderr is not None
        stages = [FIRST_WORDS.get(match[1], match[1]) for match in STAGE_LINE.finditer(process.stderr.read())]
    names = sorted(path.name for path in bench.out.iterdir())
    work = [path.name for path in (bench.root / "cache" / "work").iterdir() if path.is_dir()]
    is_right = process.returncode == 0 and not {"load", "convert"} & set(stages) and not work
    message = f"stages: {', '.join(stages)}; {len(work)} results left in the cache; beside: {', '.join(names)}"
    is_alone = names == ["draft", "target"] and fingerprint(place) != before
    yield Row("the same export again, not killed", process.returncode, message, is_alone, is_right)


def bad_bundles(bench: Bench) -> Iterator[Row]:
    """Altered bundles, opened by every command that opens bundles."""
    for what, (damage, expected) in DAMAGED_BUNDLES.items():
        for role, command in (
            ("draft", ("-m", "outrider.export.cli", "inspect")),
            ("draft", ("-m", "outrider.edge.cli", "run", "hello", "--cloud", "http://127.0.0.1:9", "--draft")),
            ("target", ("-m", "outrider.cloud.server", "serve")),
        ):
            bundle = bench.root / "altered"
            shutil.rmtree(bundle, ignore_errors=True)
            shutil.copytree(bench.out / role, bundle)
            damage(bundle)
            altered = fingerprint(bundle)
            row = bench.run(f"{what}: {command[1].split('.')[1]} {command[2]}", expected, *command, str(bundle))
            yield replace(row, is_unchanged=fingerprint(bundle) == altered)


@contextmanager
def mounted(disk: Path, size: str) -> Iterator[None]:
    """Mounts a small file system at `disk`."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path, is_over: threading.Event) -> None:
    """Takes all free space, and what the export frees, until the command ends."""
    with (disk / "full").open("ab", buffering=0) as file:
        while not is_over.wait(0.001):
            for size in (1 << 20, 4096):
                with suppress(OSError):  # full
                    while True:
                        file.write(bytes(size))


def fingerprint(directory: Path) -> str:
    """A hash of all names and contents in a directory, without what killed exports left beside it."""
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_file() and ".partial-" not in name and ".lock-" not in name:
            digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def as_table(rows: list[Row]) -> Table:
    """The rows as a table."""
    table = Table("what", "exit", "message", "destination", title="bad input", show_lines=True)
    for row in rows:
        colour = "green" if row.is_right and row.is_unchanged else "red"
        state = "unchanged" if row.is_unchanged else "CHANGED"
        table.add_row(f"[{colour}]{escape(row.what)}[/{colour}]", str(row.status), escape(row.message), state)
    return table


if __name__ == "__main__":
    typer.run(main)
