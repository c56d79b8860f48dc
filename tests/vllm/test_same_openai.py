"""Runs tests/test_cloud_openai.py on vLLM."""

from __future__ import annotations

from tests import test_cloud_openai as same
from tests.vllm.serving import shared_by

globals().update(shared_by(same))
