"""Builds the wheels, installs each extra for devices into a fresh environment, and checks that it works without torch.

Run by `make wheel`. Everything runs in a temporary directory, isolated from the checkout.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "transformers", "onnx", "optimum", "nncf")
RUNTIMES = {"edge": ("openvino", "onnxruntime"), "edge-onnxruntime": ("onnxruntime", "openvino")}
"""Extra -> the runtime that it installs, and the one that it does not."""

PROOF = """
import importlib.util, pathlib, sys
heavy, there, not_there = {heavy!r}, {there!r}, {not_there!r}
extra = [name for name in (*heavy, not_there, "outrider.reference") if importlib.util.find_spec(name)]
assert not extra, f"this environment must not contain {{extra}}"
assert importlib.util.find_spec(there), f"{{there}} is not installed"
import outrider.edge, outrider.edge.modes.stream, outrider.edge.cli.run, outrider.models.runtimes
where = pathlib.Path(outrider.edge.__file__).resolve()
assert "site-packages" in where.parts, f"outrider is imported from {{where}}, not from the wheel"
loaded = sorted(m for m in sys.modules if m.split(".")[0] in heavy)
assert not loaded, f"importing the edge loaded {{loaded}}"
foreign = sorted(m for m in sys.modules if m.startswith(("outrider.cloud", "outrider.export", "outrider.models.http")))
assert not foreign, f"the edge loaded {{foreign}}"
print("the wheel's edge imports", len(sys.modules), "modules, none of them", ", ".join(heavy))
"""

PAIR_PROOF = """
from outrider.reference import draft_dir, load_prompts, target_dir
assert (target_dir() / "model.safetensors").is_file() and (draft_dir() / "model.safetensors").is_file()
assert len(load_prompts()) >= 200
"""


def run(*command: str | Path, cwd: Path) -> None:
    """Runs a command and shows its output; raises CalledProcessError if it fails."""
    print("$", *command, flush=True)
    subprocess.run([str(part) for part in command], cwd=cwd, check=True)


def build(source: Path, place: Path) -> Path:
    """Builds the wheel of `source` in `place`, and returns it."""
    run(sys.executable, "-m", "build", "--wheel", "--outdir", place, source, cwd=place.parent)
    (wheel,) = place.glob("*.whl")
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    return wheel


def size_mb(folder: Path) -> float:
    """Size of the files below `folder` in MB (10^6 bytes)."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def main() -> None:
    """Runs the job."""
    with tempfile.TemporaryDirectory(prefix="outrider-wheel-") as scratch:
        place = Path(scratch)
        wheel = build(ROOT, place / "dist")
        pair = build(ROOT / "reference", place / "dist-reference")
        for extra, (there, not_there) in RUNTIMES.items():
            home = place / extra
            venv.create(home, with_pip=True)
            bare_mb = size_mb(home)
            scripts = home / ("Scripts" if sys.platform == "win32" else "bin")
            run(scripts / "python", "-m", "pip", "install", "--quiet", f"{wheel}[{extra}]", cwd=place)
            print(f"outrider[{extra}] takes {size_mb(home) - bare_mb:.0f} MB")
            proof = PROOF.format(heavy=HEAVY, there=there, not_there=not_there)
            run(scripts / "python", "-I", "-c", proof, cwd=place)
            run(scripts / "outrider", "--help", cwd=place)
            run(scripts / "outrider", "run", "--help", cwd=place)
        run(scripts / "python", "-m", "pip", "install", "--quiet", pair, cwd=place)
        run(scripts / "python", "-I", "-c", PAIR_PROOF, cwd=place)
        print("wheel job: passed")


if __name__ == "__main__":
    main()
