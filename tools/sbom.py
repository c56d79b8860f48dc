"""Writes the list of an environment's packages as CycloneDX JSON, and refuses one that names this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def site_packages(python: Path) -> Path:
    """Where the environment of an interpreter has its packages."""
    question = "import sysconfig; print(sysconfig.get_path('purelib'))"
    answer = subprocess.run([str(python), "-I", "-c", question], capture_output=True, text=True, check=True)
    return Path(answer.stdout.strip())


def write_sbom(python: Path, path: Path, private: Iterable[Path], epoch_s: int) -> int:
    """Writes the list for the environment of the interpreter `python` to `path`; its number of packages.

    private: directories that may not occur in it. epoch_s: its time stamp, Unix time; equal inputs give equal bytes.
    Raises ValueError for a list that names a private directory or a file.
    """
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", "--sv", "1.6"]
    command += ["--pyproject", str(ROOT / "pyproject.toml"), "--output-file", str(path), str(python)]
    subprocess.run(command, check=True, env=os.environ | {"SOURCE_DATE_EPOCH": str(epoch_s)})
    text = path.read_text(encoding="utf-8")
    require_no_paths(text, private)
    document: dict[str, Any] = json.loads(text)
    return len(document["components"])


def require_no_paths(text: str, private: Iterable[Path]) -> None:
    """Raises ValueError if the list names a file's URL or one of the directories."""
    for each in ("file:", *(str(place) for place in private)):
        if each in text:
            where = text.index(each)
            raise ValueError(f"the package list names this machine: ...{text[max(0, where - 60) : where + 80]!r}")
