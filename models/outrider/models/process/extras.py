"""Names the pip command for a package that is not installed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from platform import machine as this_machine

from outrider.models.errors import RuntimeUnavailable
from outrider.models.process.interrupts import QuietInterrupt

OWN_DISTRIBUTIONS = frozenset({"outrider.reference"})
"""Packages of ours that are installed on their own; any other module of ours that is missing is a bug."""


def has_openvino_package(platform: str = sys.platform, machine: str | None = None) -> bool:
    """Whether OpenVINO has a package for this system: none for Windows on ARM, nor for Macs with an Intel processor.

    The markers of `pyproject.toml` say the same. platform: as `sys.platform`; machine: as `platform.machine()`.
    """
    kind = (machine or this_machine()).lower()
    return kind in {"linux": ("x86_64", "aarch64"), "win32": ("amd64",), "darwin": ("arm64",)}.get(platform, ())


def no_openvino_advice() -> str:
    """What a system without an OpenVINO package drafts with: the end of a sentence that begins "OpenVINO is"."""
    return (
        f"not made for this system ({sys.platform} on {this_machine()}); draft with ONNX Runtime (`outrider-export "
        "draft MODEL --runtime onnxruntime`) or with --runtime ngram"
    )


def missing_extra(error: ModuleNotFoundError, what: str, extra: str) -> Exception:
    """The exception for an import that failed: RuntimeUnavailable with the command that installs the package.

    what: who needs it, such as "serving". extra: the extra of `outrider` that brings it. A missing module of our own
    is a bug, and stays the error that it is.
    """
    name = error.name
    if name is None or (name.partition(".")[0] == "outrider" and name not in OWN_DISTRIBUTIONS):
        return error
    return _unavailable(name, what, extra)


def require_packages(names: Iterable[str], what: str, extra: str) -> None:
    """Raises RuntimeUnavailable for the first of these packages that is not installed; imports none of them."""
    for name in names:
        if not is_installed(name):
            raise _unavailable(name, what, extra)


@contextmanager
def importing(what: str, extra: str) -> Iterator[None]:
    """Guards the imports of a command: a missing package names its pip command, Ctrl-C ends without a traceback."""
    try:
        with QuietInterrupt():
            yield
    except ModuleNotFoundError as error:
        raise missing_extra(error, what, extra) from None


def is_installed(name: str) -> bool:
    """Whether a package could be imported; imports nothing but the packages that it is in."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of a submodule whose package is missing
        return False
    except ValueError:  # blocked or half loaded: `sys.modules` has it without a spec
        return False


def _unavailable(name: str, what: str, extra: str) -> RuntimeUnavailable:
    if name == "openvino" and not has_openvino_package():
        return RuntimeUnavailable(f"{what} needs OpenVINO, which is {no_openvino_advice()}")
    return RuntimeUnavailable(
        f'{what} needs the package {name!r}, which is not installed; run: pip install "outrider[{extra}]"'
    )
