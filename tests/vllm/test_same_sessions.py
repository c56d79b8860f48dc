"""Runs tests/test_cloud_sessions.py on vLLM."""

from __future__ import annotations

from tests import test_cloud_sessions as same
from tests.vllm.serving import shared_by

globals().update(shared_by(same))
