"""Makes this checkout importable, and says what `bench.gpu` needs and this machine lacks.

Imports the standard library only: it runs before anything else is there.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PARTS: Final = ("models", "cloud", "edge", "export", "reference")
MACHINES: Final = ("torch", "transformers", "safetensors", "tokenizers", "onnxruntime", "numpy")
"""What has to be the machine's own; needs.txt has the rest."""


def names() -> list[str]:
    """All packages that have to be there."""
    lines = Path(__file__).with_name("needs.txt").read_text(encoding="utf-8").splitlines()
    return [*MACHINES, *(line.partition("==")[0] for line in lines if "==" in line)]


def missing() -> list[str]:
    """Those that do not import, with the reason: one may be there and not load."""
    found = []
    for name in names():
        try:
            importlib.import_module(name.removesuffix("-api").replace("-", "_"))
        except Exception as error:  # a package that does not fit the others may raise anything
            found.append(f"{name}: {type(error).__name__}: {error}")
    return found


def use_checkout() -> None:
    """Makes the parts of this checkout importable, here and in processes that start later."""
    try:
        importlib.import_module("outrider.models")
    except ModuleNotFoundError:
        added = [str(ROOT), *(str(ROOT / part) for part in PARTS)]
        sys.path[:0] = added
        os.environ["PYTHONPATH"] = os.pathsep.join([*added, *filter(None, [os.environ.get("PYTHONPATH")])])
        importlib.invalidate_caches()
