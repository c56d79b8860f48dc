"""Builds the wheels, installs each extra for devices into a fresh environment, and checks that it works without torch.

Run by `make wheel`. Everything runs in a temporary directory, isolated from the checkout. `--keep DIR` copies what was
tested there, for a release.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from email import message_from_string
from email.message import Message
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


def run(*command: str | Path, cwd: Path, **variables: str) -> None:
    """Runs a command with these environment variables and shows its output; raises CalledProcessError if it fails."""
    print("$", *(f"{name}={value}" for name, value in variables.items()), *command, flush=True)
    subprocess.run([str(part) for part in command], cwd=cwd, check=True, env=os.environ | variables)


def build(source: Path, place: Path, *options: str, **variables: str) -> Path:
    """Builds `source` in `place`, and returns the wheel."""
    run(sys.executable, "-m", "build", *options, "--outdir", place, source, cwd=place.parent, **variables)
    (wheel,) = place.glob("*.whl")
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    return wheel


def metadata(wheel: Path) -> Message:
    """Core metadata of a wheel."""
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_string(files.read(name).decode())


def pair_requirements(wheel: Path) -> set[str]:
    """Requirements of a wheel that name the reference pair, without the extra that they are for."""
    requirements: list[str] = metadata(wheel).get_all("Requires-Dist", [])
    return {text.partition(";")[0].strip() for text in requirements if text.startswith("outrider-reference")}


def check_requirements(clone: Path, release: Path) -> None:
    """A clone requires the reference pair beside it; a release requires it by version, and no path at all."""
    assert pair_requirements(clone) == {f"outrider-reference @ {(ROOT / 'reference').as_uri()}"}
    assert pair_requirements(release) == {f"outrider-reference=={metadata(release)['Version']}"}
    assert "file:" not in "".join(metadata(release).get_all("Requires-Dist", []))


def check_licences(wheel: Path, *names: str) -> None:
    """The wheel contains these licence files, unabridged."""
    assert set(metadata(wheel).get_all("License-File", [])) == set(names)
    source = ROOT / "reference" if wheel.name.startswith("outrider_reference") else ROOT
    with zipfile.ZipFile(wheel) as files:
        for name in names:
            (member,) = (path for path in files.namelist() if path.endswith(f".dist-info/licenses/{name}"))
            assert files.read(member) == (source / name).read_bytes() != b"", name


def size_mb(folder: Path) -> float:
    """Size of the files below `folder` in MB (10^6 bytes)."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def main() -> None:
    """Runs the job."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--keep", type=Path, help="directory for the wheels and source archives that passed")
    keep: Path | None = parser.parse_args().keep
    with tempfile.TemporaryDirectory(prefix="outrider-wheel-") as scratch:
        place = Path(scratch)
        wheel = build(ROOT, place / "dist", OUTRIDER_RELEASE="1")  # the sdist, and the wheel from it
        pair = build(ROOT / "reference", place / "dist-reference")
        check_requirements(build(ROOT, place / "dist-clone", "--wheel"), wheel)
        check_licences(wheel, "LICENSE")
        check_licences(pair, "LICENSE", "LICENSE-PSF")
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
        if keep is not None:
            for path in (*wheel.parent.iterdir(), *pair.parent.iterdir()):
                shutil.copy2(path, keep)
        print("wheel job: passed")


if __name__ == "__main__":
    main()
