"""The namespace, the order of the rooms, what importing each part may load, and an edge that installs everywhere."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from outrider.models.process.extras import has_openvino_package

ROOT = Path(__file__).parent.parent
PARTS = ("models", "edge", "cloud", "export")
DISTRIBUTIONS = (*PARTS, "reference")
HEAVY = ("torch", "transformers", "onnx", "onnxruntime", "optimum", "nncf", "ray", "vllm")

# The rooms of each part, top to bottom: a room imports only rooms below it. "" is the part's ground: the modules that
# stand beside the rooms. docs/architecture.md draws the same order.
ROOMS = {
    "export": ("cli", "distill", "make", "check", "convert", "report", "source", ""),
    "edge": (
        "cli",
        "lab",
        "serve",
        "chat",
        "doctor",
        "modes",
        "drafting",
        "retrieval",
        "store",
        "setup",
        "link",
        "devices",
        "",
    ),
    "cloud": ("server", "replicas", "api", "recent", "upstream", "vllm", "engine", "pending", ""),
    "models": (
        *("ingress", "http", "client", "runtimes", "processors", "grammar"),
        *("wire", "bundle", "text", "picks", "process", ""),
    ),
    "reference": ("",),
}
# What a part may import of the others.
BELOW = {
    "export": {"models", "reference"},
    "edge": {"models", "reference"},
    "cloud": {"models"},
    "models": set[str](),
    "reference": set[str](),
}
# Where a module of another part is named, not imported, and why.
NAMED = {
    # `outrider demo`, the default draft of `run` and `outrider-cloud serve reference` start the exporter as a child
    # process through this module; it names the extra that is missing where the exporter is not installed.
    "models/outrider/models/bundle/reference_export.py": ("outrider.export", "outrider.reference"),
    # The laboratory starts a cloud as its users do: as a process.
    "edge/outrider/edge/lab/laboratory.py": ("outrider.cloud.server",),
    # A missing reference pair is a missing package, not a bug.
    "models/outrider/models/process/extras.py": ("outrider.reference",),
}
# Beside the order: what a room must not know although it stands below.
UNKNOWN_TO = {
    "outrider.cloud.api": (
        "outrider.cloud.engine",
        "outrider.cloud.vllm",
        "outrider.cloud.upstream",
        "outrider.cloud.pending",
    ),  # an engine only through the seam
    "outrider.cloud.replicas": (
        "outrider.cloud.engine",
        "outrider.cloud.vllm",
        "outrider.cloud.pending",
    ),
    "outrider.models.http": ("outrider.models.runtimes",),
    "outrider.models.ingress": ("outrider.models.runtimes",),
    # Of the device's rooms only the local endpoint is a server.
    **{
        f"outrider.edge.{room}": ("outrider.models.http", "outrider.models.ingress")
        for room in ("lab", "chat", "modes", "drafting", "retrieval", "link", "devices", "results")
    },
}
SERVERS = ("outrider.cloud", "outrider.export", "outrider.models.http", "starlette", "fastapi", "uvicorn")
"""What a generation on the device does not load."""
HTTP_PACKAGES = {"pydantic", "pydantic_core", "starlette", "outrider"}
"""What `models/http` may import beside the standard library."""


@pytest.mark.parametrize("part", DISTRIBUTIONS)
def test_no_part_claims_the_namespace(part: str) -> None:
    """An __init__.py directly in outrider/ would shadow the other portions (PEP 420)."""
    folder = ROOT / part / "outrider"
    assert [path.name for path in folder.iterdir() if path.name != "__pycache__"] == [part]
    assert (folder / part / "py.typed").is_file()
    allowed = {"README.md"} | ({"pyproject.toml", "LICENSE", "LICENSE-PSF"} if part == "reference" else set[str]())
    assert {path.name for path in (ROOT / part).iterdir() if path.is_file()} == allowed


def sources(part: str) -> list[Path]:
    """All modules of a part."""
    return sorted((ROOT / part / "outrider" / part).rglob("*.py"))


def place(module: str) -> tuple[str, str]:
    """Part and room of a module `outrider.PART...`; a package counts as a room where ROOMS lists it."""
    _, part, *rest = module.split(".")
    return part, rest[0] if rest and rest[0] in ROOMS[part] else ""


def module_name(path: Path) -> str:
    """The dotted name of a source file."""
    parts = path.relative_to(ROOT).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, own: str = "") -> Iterator[str]:
    """Every outrider module that a source file imports: inside functions, for type checkers, relative, by name.

    own: the file's module name, if it is not in the repository.
    """
    own = own or module_name(path)
    package = own if path.name == "__init__.py" else own.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("outrider."))
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            if source.split(".")[0] == "outrider":
                for alias in node.names:
                    full = f"{source}.{alias.name}"
                    yield full if is_module(full) else source
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and is_module(node.value):
            named = NAMED.get(path.relative_to(ROOT).as_posix(), ()) if ROOT in path.parents else ()
            if not node.value.startswith(named):
                yield node.value  # importlib.import_module, python -m, a table of modules


def is_module(name: str) -> bool:
    """Whether `outrider.PART...` is a module or package of this repository."""
    parts = name.split(".")
    if len(parts) < 2 or parts[1] not in DISTRIBUTIONS:
        return False
    base = ROOT.joinpath(parts[1], *parts)
    return base.with_suffix(".py").is_file() or base.is_dir()


@pytest.mark.parametrize("part", DISTRIBUTIONS)
def test_every_folder_of_a_part_is_a_listed_room(part: str) -> None:
    """A new room is put into the order above before anything is in it."""
    packages = {path.parent.name for path in (ROOT / part / "outrider" / part).glob("*/__init__.py")}
    assert packages == {room for room in ROOMS[part] if room}


@pytest.mark.parametrize("part", DISTRIBUTIONS)
def test_a_room_imports_only_what_stands_below_it(part: str) -> None:
    """No import runs back up, and none into a part that is not below."""
    wrong = []
    for path in sources(part):
        own = module_name(path)
        _, room = place(own)
        for other in imports(path):
            other_part, other_room = place(other)
            if other_part != part:
                if other_part not in BELOW[part]:
                    wrong.append(f"{own} imports {other}: {part} must not know {other_part}")
            elif other_room != room and ROOMS[part].index(other_room) < ROOMS[part].index(room):
                wrong.append(f"{own} imports {other}: {other_room or 'the ground'} stands above {room or 'the ground'}")
            for knower, unknown in UNKNOWN_TO.items():
                if own.startswith(knower + ".") and other.startswith(unknown):
                    wrong.append(f"{own} imports {other}: {knower} must not know it")
    assert not wrong, "\n".join(wrong)


def test_the_http_floor_needs_pydantic_and_starlette_only() -> None:
    """A local endpoint on a device takes it without a server framework."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "models/outrider/models/http").glob("*.py")]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    found = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    found += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    assert {name.partition(".")[0] for name in found} - sys.stdlib_module_names <= HTTP_PACKAGES


@pytest.mark.parametrize(
    "line",
    [
        "import outrider.edge.cli.run",
        "import outrider.edge.cli.run as run",
        "from outrider.edge.cli import run",
        "from outrider.edge.cli.run import run_once",
        "def f():\n    from outrider.edge.cli import run",
        "from ..cli import run",
        "from ..cli.run import run_once",
        "import importlib\nimportlib.import_module('outrider.edge.cli.run')",
        "__import__('outrider.edge.cli.run')",
        "COMMAND = ['-m', 'outrider.edge.cli.run']",
    ],
)
def test_every_way_to_import_is_seen(line: str, tmp_path: Path) -> None:
    """The reader of imports misses none of them."""
    path = tmp_path / "worker.py"
    path.write_text(line, encoding="utf-8")
    assert list(imports(path, "outrider.edge.drafting.worker")) == ["outrider.edge.cli.run"]


@pytest.mark.parametrize("part", DISTRIBUTIONS)
def test_no_imports_go_in_a_circle(part: str) -> None:
    """Modules of a part can be put into an order in which each imports earlier ones only."""
    # A package's __init__ names its own modules; importing a module of it runs it first, which is no circle.
    waiting = {module_name(path): {*imports(path)} - {module_name(path)} for path in sources(part)}
    while ready := {name for name, needed in waiting.items() if not needed & waiting.keys()}:
        waiting = {name: needed for name, needed in waiting.items() if name not in ready}
    assert not waiting, f"in a circle: {sorted(waiting)}"


def test_every_path_in_a_home_directory_is_expanded_in_one_place() -> None:
    """pathlib's own way ends in a RuntimeError, which no command takes for a mistake of its user's."""
    found = {path.name for part in PARTS for path in sources(part) if "expanduser" in path.read_text(encoding="utf-8")}
    assert found == {"cache_folder.py"}


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        ("edge, edge.modes.stream, edge.modes.stop_and_wait, edge.cli.main, edge.cli.run", SERVERS),
        ("models.picks.sampling, models.bundle.bundle, models.runtimes, models.runtimes.ngram", ("openvino",)),
        ("models.wire.protocol", ()),
        ("cloud.server.main", ()),
        ("cloud.server.serve", ("outrider.edge", "outrider.export", "outrider.reference")),
        ("cloud.server.replicated, cloud.replicas.replica", ()),  # Ray, once it starts
        ("export.cli.main", ()),
    ],
)
def test_what_importing_loads(modules: str, unwanted: tuple[str, ...]) -> None:
    """No model library: the edge never loads torch, the others once they are asked to do something with it. A
    generation on the device needs no server, and a server neither edge nor exporter, also for what runs at its start.
    """
    code = f"import outrider.{modules.replace(', ', ', outrider.')}, sys\nprint('\\n'.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = run.stdout.split()
    assert not {module.partition(".")[0] for module in loaded} & set(HEAVY)
    assert not [module for module in loaded if f"{module}.".startswith(tuple(f"{each}." for each in unwanted))]


SYSTEMS = {
    ("linux", "x86_64"): ("openvino", "1.31.1"),
    ("linux", "aarch64"): ("openvino", "1.31.1"),
    ("win32", "AMD64"): ("openvino", "1.31.1"),
    ("win32", "ARM64"): ("onnxruntime", "1.31.1"),
    ("darwin", "arm64"): ("openvino", "1.31.1"),
    ("darwin", "x86_64"): ("onnxruntime", "1.23.2"),
    ("linux", "riscv64"): (None, None),
}
"""System -> the runtime that `edge` installs, and the ONNX Runtime that there is a package of.

As the package index had them for these versions. No marker knows a Linux system's C library: on ARM, OpenVINO needs
glibc 2.35.
"""
EVERYWHERE = {"httpx", "truststore", "prompt-toolkit", "starlette", "uvicorn", "httptools", "llguidance"}
"""What `edge` installs on each. httptools and llguidance have a package for each, also for Windows on ARM."""


def installed(extra: str, platform: str, machine: str, python: str = "3.12") -> dict[str, str]:
    """The packages of an extra on a system, with their versions."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = table["tool"]["hatch"]["metadata"]["hooks"]["custom"]["optional-dependencies"]
    system = {"sys_platform": platform, "platform_machine": machine, "python_version": python}
    found = map(Requirement, extras[extra])
    chosen = [each for each in found if each.marker is None or each.marker.evaluate(system)]
    assert len({each.name for each in chosen}) == len(chosen), "two requirements for one package"
    return {each.name: str(each.specifier) for each in chosen}


@pytest.mark.parametrize(("platform", "machine"), SYSTEMS)
def test_every_system_gets_a_runtime_that_has_a_package_there(platform: str, machine: str) -> None:
    """OpenVINO where there is one, else ONNX Runtime, else neither; what link, chat and endpoint need everywhere."""
    runtime, version = SYSTEMS[platform, machine]
    edge, onnx, cloud = (installed(extra, platform, machine) for extra in ("edge", "edge-onnxruntime", "cloud"))
    assert set(edge) == EVERYWHERE | ({runtime} if runtime else set())
    assert ("openvino" in cloud) == ("openvino" in edge) == has_openvino_package(platform, machine)
    assert onnx.get("onnxruntime") == (f"=={version}" if version else None)
    assert edge.get("onnxruntime") in (None, onnx.get("onnxruntime"))


def test_a_python_without_a_package_still_drafts_with_lookup() -> None:
    """ONNX Runtime 1.23.2 has none for Python 3.14."""
    assert set(installed("edge", "darwin", "x86_64", "3.14")) == EVERYWHERE
