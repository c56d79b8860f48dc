"""Says what `bench.gpu` needs of a machine with nothing to install from, and what of it is missing.

Imports the standard library only: it runs before anything else is there.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PARTS: Final = ("models", "cloud", "edge", "export", "reference")
WHEELS: Final = ".whl"
"""The folder of wheels in the repository's root; everything that can be missing has 8 MB there."""


MAKES_DRAFT: Final = "onnxruntime_genai"
"""The module without which no draft is exported for onnxruntime."""


@dataclass(frozen=True, slots=True)
class Need:
    """A package. wheel: the version to carry where it is missing; None: of the machine itself, and not carried.

    below: the first version that is too new. what: for what it is needed where the rest runs without it.
    """

    name: str
    module: str
    wheel: str | None = None
    below: tuple[int, ...] | None = None
    what: str = ""


NEEDS: Final = (
    Need("torch", "torch"),
    Need("transformers", "transformers"),
    Need("safetensors", "safetensors"),
    Need("tokenizers", "tokenizers"),
    Need("onnxruntime", "onnxruntime"),
    Need("numpy", "numpy"),
    Need("triton", "triton", what="torch's profiler of CUDA kernels"),
    Need("httpx", "httpx", "0.28.1"),
    Need("jinja2", "jinja2", "3.1.6"),
    Need("rich", "rich", "14.3.3"),
    Need("psutil", "psutil", "7.1.3"),
    Need("filelock", "filelock", "3.20.0"),
    Need("packaging", "packaging", "25.0"),
    Need("prometheus-client", "prometheus_client", "0.26.0"),
    Need("click", "click", "8.5.1"),
    Need("typer", "typer", "0.25.1", below=(0, 26)),
    Need("annotated-doc", "annotated_doc", "0.0.7"),
    Need("pydantic", "pydantic", "2.14.3"),
    Need("pydantic-core", "pydantic_core", "2.50.4"),
    Need("annotated-types", "annotated_types", "0.8.0"),
    Need("typing-inspection", "typing_inspection", "0.4.5"),
    Need("platformdirs", "platformdirs", "4.14.7"),
    Need("fastapi", "fastapi", "0.165.0"),
    Need("opentelemetry-api", "opentelemetry", "1.45.2"),  # of fastapi
    Need("starlette", "starlette", "1.10.0"),
    Need("uvicorn", "uvicorn", "0.54.0"),
    Need("httptools", "httptools", "0.9.0"),
    Need("llguidance", "llguidance", "1.9.1", what="JSON in part 4"),
    Need("onnxruntime-genai", MAKES_DRAFT, what="making the draft here; --draft BUNDLE carries one"),
)

_PLATFORMS: Final = (
    "manylinux_2_34",
    "manylinux_2_31",
    "manylinux_2_28",
    "manylinux_2_27",
    "manylinux_2_17",
    "manylinux2014",
)


@dataclass(frozen=True, slots=True)
class Found:
    """A need on this machine. version: what is there. why: what is wrong with it; empty where it is fine."""

    need: Need
    version: str | None
    why: str = ""


def look() -> list[Found]:
    """Imports each package, because one may be there and not load."""
    return [_look(need) for need in NEEDS]


def _look(need: Need) -> Found:
    try:
        found = version(need.name)
        importlib.import_module(need.module)
    except PackageNotFoundError:
        return Found(need, None, "missing")
    except Exception as error:  # a package that does not fit the others may raise anything
        return Found(need, found, f"does not import: {type(error).__name__}: {error}")
    if need.below is not None and _numbers(found) >= need.below:
        return Found(need, found, f"too new; expected below {'.'.join(map(str, need.below))}")
    return Found(need, found)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def is_enough(found: Sequence[Found]) -> bool:
    """Whether the bench can run; what only a part of it needs may be missing."""
    return not any(each.why and not each.need.what for each in found)


def report(found: Sequence[Found]) -> str:
    """One list: what is there, what is missing, and the commands that bring it."""
    there = ", ".join(f"{each.need.name} {each.version}" for each in found if not each.why)
    lines = [f"Python {sys.version.split()[0]}; found: {there}"]
    wrong = [each for each in found if each.why]
    for each in wrong:
        only = f" (only for {each.need.what})" if each.need.what else ""
        lines.append(f"  {each.need.name}: {each.why}{only}")
    carried = [each.need for each in wrong if each.need.wheel]
    if carried:
        lines += ["On a machine with a package index, in the repository's root:", "  " + download(carried)]
        lines += [f"Then carry {WHEELS} along, and begin here with:", "  " + install()]
    alone = [each.need.name for each in wrong if not each.need.wheel and not each.need.what]
    if alone:
        lines.append(f"No wheel of {', '.join(alone)} is carried: choose a machine that has it.")
    return "\n".join(lines)


def download(needs: Sequence[Need] = NEEDS) -> str:
    """The command that makes the folder of wheels, for x86-64 Linux with Python 3.12."""
    platforms = " ".join(f"--platform {name}_x86_64" for name in _PLATFORMS)
    names = " ".join(f"{need.name}=={need.wheel}" for need in needs if need.wheel)
    return (
        "python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "
        f"{platforms} -d {WHEELS} {names}"
    )


def install() -> str:
    """The command that unpacks the wheels on the machine."""
    return (
        "python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target /tmp/site "
        f"{WHEELS}/*.whl && export PYTHONPATH=/tmp/site"
    )


def use_checkout() -> None:
    """Makes the parts of this checkout importable, here and in processes that start later."""
    try:
        importlib.import_module("outrider.models")
    except ModuleNotFoundError:
        added = [str(ROOT), *(str(ROOT / part) for part in PARTS)]
        sys.path[:0] = added
        os.environ["PYTHONPATH"] = os.pathsep.join([*added, *filter(None, [os.environ.get("PYTHONPATH")])])
        importlib.invalidate_caches()
