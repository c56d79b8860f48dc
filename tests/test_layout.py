"""The namespace's shape, and what importing each part may load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARTS = ("models", "edge", "cloud", "export")
HEAVY = ("torch", "transformers", "onnx", "onnxruntime", "optimum", "nncf", "ray")


@pytest.mark.parametrize("part", PARTS)
def test_no_part_claims_the_namespace(part: str) -> None:
    """An __init__.py directly in outrider/ would shadow the other three portions (PEP 420)."""
    folder = ROOT / part / "outrider"
    assert [path.name for path in folder.iterdir() if path.name != "__pycache__"] == [part]
    assert (folder / part / "py.typed").is_file()
    assert sorted(path.name for path in (ROOT / part).iterdir() if path.is_file()) == ["README.md"]


def loaded_by(statement: str) -> set[str]:
    """Names of all modules that a fresh interpreter has after `statement`."""
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import outrider.edge, outrider.edge.agent, outrider.edge.cli, outrider.edge.run",
        "import outrider.models.sampling, outrider.models.bundle, outrider.models.runtimes",
        "import outrider.cloud.protocol",
        "import outrider.cloud.cli",
        "import outrider.export.cli",
    ],
)
def test_importing_loads_no_model_library(statement: str) -> None:
    """The edge never loads torch; the others only once they are asked to do something with it."""
    modules = loaded_by(statement)
    assert not {module.partition(".")[0] for module in modules} & set(HEAVY)


def test_the_edge_knows_nothing_of_cloud_but_the_protocol_and_nothing_of_export() -> None:
    """Imports go one way."""
    modules = loaded_by("import outrider.edge.agent, outrider.edge.stop_and_wait, outrider.edge.cli, outrider.edge.run")
    assert {m for m in modules if m.startswith("outrider.cloud.")} == {"outrider.cloud.protocol"}
    assert not any(m.startswith("outrider.export") for m in modules)


def test_models_and_cloud_import_neither_edge_nor_each_other_backwards() -> None:
    """models knows none of the parts above it; cloud knows neither edge nor export."""
    below = loaded_by("import outrider.models.bundle, outrider.models.runtimes.fake, outrider.models.acceptance")
    assert not any(m.startswith(("outrider.edge", "outrider.cloud", "outrider.export")) for m in below)
    server = loaded_by("import outrider.cloud.serve")
    assert not any(m.startswith(("outrider.edge", "outrider.export")) for m in server)
