"""Builds the wheel, installs `outrider[edge]` from it into a fresh environment, and proves that it works without torch.

Run by `make wheel`. The sources are out of reach: everything runs in a temporary directory, isolated from the checkout.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "transformers", "onnx", "optimum", "nncf")

PROOF = f"""
import importlib.util, pathlib, sys
missing = [name for name in {HEAVY!r} if importlib.util.find_spec(name)]
assert not missing, f"this environment is meant to be without {{missing}}"
import outrider.edge, outrider.edge.modes.stream, outrider.edge.cli.main, outrider.models.runtimes
where = pathlib.Path(outrider.edge.__file__).resolve()
assert "site-packages" in where.parts, f"outrider comes from {{where}}, not from the wheel"
loaded = sorted(m for m in sys.modules if m.split(".")[0] in {HEAVY!r})
assert not loaded, f"importing the edge loaded {{loaded}}"
foreign = sorted(m for m in sys.modules if m.startswith(("outrider.cloud.", "outrider.export")))
assert foreign == ["outrider.models.protocol"], f"the edge loaded {{foreign}}"
from outrider.reference import draft_dir, load_prompts, target_dir
assert (target_dir() / "model.safetensors").is_file() and (draft_dir() / "model.safetensors").is_file()
assert len(load_prompts()) >= 200
print("the wheel's edge imports", len(sys.modules), "modules, none of them", ", ".join({HEAVY!r}))
"""


def run(*command: str | Path, cwd: Path) -> None:
    """Runs a command, its output shown; SystemExit if it fails."""
    print("$", *command, flush=True)
    subprocess.run([str(part) for part in command], cwd=cwd, check=True)


def main() -> None:
    """The whole job."""
    with tempfile.TemporaryDirectory(prefix="outrider-wheel-") as scratch:
        place = Path(scratch)
        run(sys.executable, "-m", "build", "--wheel", "--outdir", place / "dist", ROOT, cwd=place)
        (wheel,) = (place / "dist").glob("*.whl")
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
        venv.create(place / "venv", with_pip=True)
        scripts = place / "venv" / ("Scripts" if sys.platform == "win32" else "bin")
        run(scripts / "python", "-m", "pip", "install", "--quiet", f"{wheel}[edge]", cwd=place)
        run(scripts / "python", "-I", "-c", PROOF, cwd=place)
        run(scripts / "outrider", "--help", cwd=place)
        run(scripts / "outrider", "run", "--help", cwd=place)
        print("wheel job: passed")


if __name__ == "__main__":
    main()
