"""Measures what the local endpoint takes: disk, time until ready, memory, and processor time when idle.

    python -m bench.footprint [--install] [--runtime openvino] [--idle-s 30] [--json PATH]

Real processes: `outrider-cloud serve` of the reference target, and `outrider serve` with a draft for each of the two
runtimes. The first start compiles what is kept (Python's own bytecode, a model for a GPU or NPU); the starts after it
count, by their median. With `--install`, each runtime's extra is installed into a fresh environment, from a wheel of
this checkout, and the endpoint runs there; needs a package index. The disk counts all that the installation adds,
bytecode included.

Exits 1 beyond 300 MB of disk, 3 s until ready, 1 % of a core when idle, or memory of the bundle's size plus 300 MB.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

from bench.processes import Program, endpoint_arguments, read_text, started, verifier
from bench.report import write_json
from rich.console import Console
from rich.table import Table

from outrider.export.make.reference_pair import export_reference_pair
from outrider.export.recipes import ExportOptions, RuntimeName

MOST_DISK_MB: Final = 300.0
MOST_START_S: Final = 3.0
MOST_MEMORY_MB: Final = 300.0
"""Beyond the bundle."""
MOST_IDLE: Final = 0.01
EXTRAS: Final[dict[RuntimeName, str]] = {"openvino": "edge", "onnxruntime": "edge-onnxruntime"}
NUM_LARGEST: Final = 12
_BYTECODE: Final = {"PYTHONDONTWRITEBYTECODE": ""}
"""Kept from start to start, as an installation keeps it."""
console = Console(width=130)


@dataclass(slots=True)
class Footprint:
    """What one runtime takes. disk_mb, largest: None and empty without `--install`; largest: MB by package.

    start_s: median; start_cpu_s: processor time of the last start; starts_s: the first, which may compile, and the
    rest. rss_mb: when ready; rss_after_mb: after a text. idle: part of one core.
    """

    runtime: str
    bundle_mb: float
    start_s: float
    start_cpu_s: float
    starts_s: list[float]
    rss_mb: float
    rss_after_mb: float
    idle: float
    disk_mb: float | None = None
    largest: dict[str, float] = field(default_factory=dict)

    def bounds(self) -> dict[str, bool]:
        """Whether each bound is met."""
        return {
            "disk": self.disk_mb is None or self.disk_mb < MOST_DISK_MB,
            "start": self.start_s < MOST_START_S,
            "memory": max(self.rss_mb, self.rss_after_mb) < self.bundle_mb + MOST_MEMORY_MB,
            "idle": self.idle < MOST_IDLE,
        }


def measure(runtime: RuntimeName, options: argparse.Namespace, wheel: Path | None) -> Footprint:
    """One runtime's footprint. wheel: to install."""
    pair = export_reference_pair(draft=ExportOptions("draft", runtime=runtime))
    with ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory()))
        python, disk_mb, largest = sys.executable, None, dict[str, float]()
        if wheel is not None:
            python, disk_mb, largest = install(wheel, EXTRAS[runtime], place / "environment")
        cloud = stack.enter_context(started(verifier(pair.target, place)))
        arguments = ["-m", "outrider.edge.cli", *endpoint_arguments(pair.draft, [cloud.url])]
        starts_s: list[float] = []
        for index in range(options.starts + 1):
            agent = Program(arguments, place / f"agent-{index}.log", environment=_BYTECODE, python=python)
            with started(agent):
                starts_s.append(agent.start_s)
                if index == options.starts:
                    start_cpu_s = agent.cpu_s()
                    rss_mb, idle = agent.rss_mb(), idleness(agent, options.idle_s)
                    text = read_text(agent.url, {"prompt": "def walk(path):", "max_tokens": 200, "seed": 7})
                    if text.error or not text.num_accepted:
                        raise SystemExit(f"{runtime}: the text failed, or nothing was drafted: {text.error}")
                    rss_after_mb = agent.rss_mb()
        bundle_mb = size_mb(pair.draft)
    return Footprint(
        runtime, bundle_mb, median(starts_s[1:]), start_cpu_s, starts_s, rss_mb, rss_after_mb, idle, disk_mb, largest
    )


def idleness(agent: Program, seconds: float) -> float:
    """Processor time per second of doing nothing, after what follows a start is over."""
    time.sleep(2.0)
    before_s, began_s = agent.cpu_s(), time.monotonic()
    time.sleep(seconds)
    return (agent.cpu_s() - before_s) / (time.monotonic() - began_s)


@contextmanager
def built_wheel() -> Iterator[Path]:
    """A wheel of this checkout."""
    with TemporaryDirectory() as place:
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", place, "."]
        _run(command)
        yield next(Path(place).glob("outrider-*.whl"))


def install(wheel: Path, extra: str, environment: Path) -> tuple[str, float, dict[str, float]]:
    """Its interpreter, the MB that the installation adds, and the largest packages."""
    _run([sys.executable, "-m", "venv", str(environment)])
    python = environment / "bin" / "python"
    packages = next(environment.glob("lib/python*/site-packages"))
    empty_mb, before = size_mb(environment), {path.name for path in packages.iterdir()}
    _run([str(python), "-m", "pip", "install", "--quiet", f"{wheel}[{extra}]"])
    sizes = {path.name: size_mb(path) for path in packages.iterdir() if path.name not in before}
    largest = dict(sorted(sizes.items(), key=lambda item: -item[1])[:NUM_LARGEST])
    return str(python), size_mb(environment) - empty_mb, largest


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"`{' '.join(command)}` failed: {done.stderr[-600:]}")


def size_mb(path: Path) -> float:
    """Bytes of a file, or of all files below a directory."""
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file() and not each.is_symlink()]
    return sum(each.stat().st_size for each in files) / 1e6


def as_table(found: list[Footprint]) -> Table:
    """One row a runtime."""
    columns = ("runtime", "disk, MB", "ready after, s", "memory, MB", "after a text", "bundle, MB", "idle, of a core")
    table = Table(*columns, title="the local endpoint")
    for each in found:
        met = each.bounds()
        cells = {
            "disk": "-" if each.disk_mb is None else f"{each.disk_mb:.0f}",
            "start": f"{each.start_s:.2f} (first {each.starts_s[0]:.2f}, processor {each.start_cpu_s:.2f})",
            "memory": f"{each.rss_mb:.0f}",
            "after": f"{each.rss_after_mb:.0f}",
            "bundle": f"{each.bundle_mb:.1f}",
            "idle": f"{each.idle:.2%}",
        }
        shown = (f"[red]{cell}[/red]" if not met.get(name, True) else cell for name, cell in cells.items())
        table.add_row(each.runtime, *shown)
    return table


def main() -> int:
    """Measures, prints a table, and returns the exit code."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--install", action="store_true", help="into fresh environments")
    cli.add_argument("--runtime", action="append", choices=tuple(EXTRAS), help="one only; repeat for several")
    cli.add_argument("--starts", type=int, default=3, help="after the first")
    cli.add_argument("--idle-s", type=float, default=30.0)
    cli.add_argument("--json", type=Path)
    options = cli.parse_args()
    found: list[Footprint] = []
    with ExitStack() as stack:
        wheel = stack.enter_context(built_wheel()) if options.install else None
        for runtime in options.runtime or EXTRAS:
            found.append(measure(runtime, options, wheel))
            largest = ", ".join(f"{name} {mb:.0f}" for name, mb in found[-1].largest.items())
            if largest:
                console.print(f"{runtime}: the largest packages, MB: {largest}")
    console.print(as_table(found))
    console.print(
        f"bounds: {MOST_DISK_MB:g} MB of disk, {MOST_START_S:g} s until ready, memory of the bundle plus "
        f"{MOST_MEMORY_MB:g} MB, {MOST_IDLE:.0%} of a core when idle"
    )
    write_json(options.json, {"footprints": [{**asdict(each), "bounds": each.bounds()} for each in found]})
    return 0 if all(all(each.bounds().values()) for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
