"""Waits for what goes on beside a test, and runs what a test awaits."""

from __future__ import annotations

import asyncio
import selectors
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

TIMEOUT_S = 30.0
HANG_S = 60.0
"""For one coroutine: only a hang takes as long."""

Result = TypeVar("Result")


def run(scenario: Coroutine[Any, Any, Result]) -> Result:
    """Runs it on an event loop of its own."""
    return asyncio.run(asyncio.wait_for(scenario, HANG_S))


def wait_until(is_so: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    """Returns once `is_so()` is true; fails the test after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.002)


class EmulatedLoop(asyncio.SelectorEventLoop):
    """A loop on a clock of its own, `now_s`. Where nothing is to be done the next timer is due at once."""

    def __init__(self) -> None:
        self.now_s = 0.0
        loop = self

        class Selector(selectors.SelectSelector):
            def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
                loop.now_s += max(0.0, timeout or 0.0)
                return super().select(0.0)

        super().__init__(Selector())

    def time(self) -> float:
        """Seconds that have passed."""
        return self.now_s


def lets_other_threads_run(work: Callable[[], object], attempts: int = 200) -> bool:
    """Whether another thread makes progress during one of so many calls, though none is forced to release the GIL."""
    counter, is_over = 0, threading.Event()

    def count() -> None:
        nonlocal counter
        while not is_over.is_set():
            counter += 1
            time.sleep(0)  # returns the GIL to a waiting call

    worker, interval = threading.Thread(target=count), sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        worker.start()
        for _ in range(attempts):
            before = counter
            work()
            if counter > before:
                return True
        return False
    finally:
        sys.setswitchinterval(interval)
        is_over.set()
        worker.join()
