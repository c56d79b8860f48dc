"""Runs tests/test_cloud_openai.py on vLLM."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests import test_cloud_openai as same
from tests.vllm.serving import SharedEngine, shared_by

server, client = same.server, same.client
globals().update(shared_by(same))


@pytest.fixture(scope="module", autouse=True)
def on_vllm(vllm: SharedEngine) -> Iterator[None]:
    """The module's tests see vLLM's server and the target of transformers."""
    with pytest.MonkeyPatch.context() as patch:
        vllm.patch(same, patch)
        yield
