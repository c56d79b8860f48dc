"""Runs tests/test_cloud_errors.py on vLLM: refusals, keys, limits, a full queue."""

from __future__ import annotations

from tests import test_cloud_errors as same
from tests.vllm.serving import shared_by

server, client = same.server, same.client
globals().update(shared_by(same))
