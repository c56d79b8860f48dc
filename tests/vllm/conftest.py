"""Tests of vLLM's engine: `make test-vllm` runs them in an environment of their own. Elsewhere none is collected."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec

import pytest

collect_ignore_glob: list[str] = [] if find_spec("vllm") else ["test_*.py"]

if find_spec("vllm"):
    # Its plug-in imports it at the end otherwise, deep in calls, where Python 3.11 may fail to compile it.
    import hypothesis  # noqa: F401
    from tests.serving import FakeServer
    from tests.vllm.serving import IS_CUDA, SharedEngine

    if IS_CUDA:
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # else vLLM's attention rounds float32 to TF32
    elif "OUTRIDER_INTERPRET" not in os.environ:
        collect_ignore_glob += ["test_v2.py"]


WARNINGS = (
    *("DeprecationWarning", "FutureWarning", "UserWarning", "ResourceWarning"),
    "pytest.PytestUnraisableExceptionWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """vLLM and what it imports warn of their own deprecations; ours stay errors."""
    for item in items:
        if "tests/vllm/" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings(*(f"default::{kind}" for kind in WARNINGS)))


def pytest_sessionfinish() -> None:
    """Collects what vLLM leaves open: reported at exit, it would fail a run whose tests have passed."""
    gc.unfreeze()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    """One vLLM with a random model of 300 tokens, for all tests of the HTTP API."""
    with closing(SharedEngine(tmp_path_factory.mktemp("vllm"))) as shared:
        yield shared


@pytest.fixture(scope="module")
def server(vllm: SharedEngine) -> Iterator[FakeServer]:
    """As tests/conftest.py has one of the fake engine."""
    with vllm.serve() as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def on_vllm(request: pytest.FixtureRequest) -> Iterator[None]:
    """A module that runs the tests of another, `same`, sees vLLM's server and the target of transformers there."""
    with pytest.MonkeyPatch.context() as patch:
        if same := getattr(request.module, "same", None):
            request.getfixturevalue("vllm").patch(same, patch)
        yield
