"""Checks Python, and that the installed packages are of versions that fit together."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Final

from outrider.edge.doctor.findings import Finding, fault, ok, warning

DISTRIBUTION: Final = "outrider"
LEAST_PYTHON: Final = (3, 11)
CLASHES: Final = (("onnxruntime", "onnxruntime-gpu"), ("onnxruntime", "onnxruntime-directml"))
"""Packages that write the same files: the one that was installed last works, or neither."""
EXTRAS: Final = ("edge", "edge-onnxruntime")


def check_python() -> Iterator[Finding]:
    """The interpreter's version."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < LEAST_PYTHON:
        yield fault("Python", f"{version}; expected 3.11 or newer", "install a newer Python")
    else:
        yield ok("Python", f"{version} at {sys.executable}")


def check_packages(distribution: str = DISTRIBUTION) -> Iterator[Finding]:
    """Every package that the device needs, against the versions that this release names."""
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:
        yield warning(
            "packages", "the package packaging is missing, so versions are unchecked", "pip install packaging"
        )
        return
    try:
        needed = [Requirement(text) for text in metadata.requires(distribution) or ()]
        own = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        yield fault("packages", f"{distribution} is not installed as a package", 'pip install "outrider[edge]"')
        return
    num_right, wrong = 0, False
    for extra in ("", *EXTRAS):
        for each in needed:
            is_base = each.marker is None or each.marker.evaluate({"extra": ""})
            if (extra == "") != is_base or (each.marker is not None and not each.marker.evaluate({"extra": extra})):
                continue
            found = _version(each.name)
            if found is not None and each.specifier.contains(found, prereleases=True):
                num_right += 1
                continue
            bracket = f"[{extra}]" if extra else ""
            if found is None and each.name in ("openvino", "onnxruntime"):
                continue  # one runtime is enough; the runtimes' own check says which is missing
            wrong = True
            state = "is not installed" if found is None else f"is {found}"
            yield fault(
                "packages", f"{each.name} {state}; expected {each.specifier}", f'pip install "{distribution}{bracket}"'
            )
    for one, other in CLASHES:
        if _version(one) is not None and _version(other) is not None:
            wrong = True
            yield warning(
                "packages",
                f"{one} and {other} are both installed and overwrite each other",
                f"pip uninstall {one} {other}, then install one of them",
            )
    if not wrong:
        yield ok("packages", f"{distribution} {own}; {num_right} requirements are met")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
