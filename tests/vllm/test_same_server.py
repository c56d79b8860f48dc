"""Runs those tests of tests/test_cloud_server.py on vLLM that need an engine: bytes, metrics, readiness, draining."""

from __future__ import annotations

from tests import test_cloud_server as same
from tests.vllm.serving import only

globals().update(
    only(
        same,
        "test_a_token_costs_less_than_sixty_bytes_down",
        "test_small_answers_have_small_headers",
        "test_metrics_tell_what_happened",
        "test_readiness_tells_the_load",
        "test_draining_lets_running_sessions_finish",
        "test_a_second_signal_ends_what_runs",
    )
)
