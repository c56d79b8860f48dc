"""Waits for what goes on beside a test."""

from __future__ import annotations

import time
from collections.abc import Callable

TIMEOUT_S = 30.0


def wait_until(is_so: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    """Returns once `is_so()` is true; fails the test after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.002)
