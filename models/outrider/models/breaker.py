"""Leaves out what has failed, and allows one trial after a pause: a circuit breaker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Breaker:
    """Closed at first. A failure opens it for a pause, which doubles with each further failure. Thread-safe.

    After the pause it is half-open: one trial is allowed, whose success closes it. `passed` is a trial that only looks,
    so the next failure still counts as a further one; `succeeded` is real work, and forgets all failures. is_open: it
    has failed, and no trial has succeeded since.
    """

    def __init__(
        self, first_pause_s: float = 1.0, max_pause_s: float = 30.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._first_pause_s = first_pause_s
        self._max_pause_s = max_pause_s
        self._clock = clock
        self._lock = threading.Lock()
        self._num_failures = 0
        self.is_open = self._is_tried = False
        self._due_at = 0.0

    @property
    def pause_s(self) -> float:
        """Until a trial is allowed; 0 while it is closed."""
        return max(0.0, self._due_at - self._clock()) if self.is_open else 0.0

    def allows(self) -> bool:
        """Whether it may be used now. While it is open, true once per pause: that use is the trial."""
        with self._lock:
            if not self.is_open:
                return True
            now = self._clock()
            if now < self._due_at:
                return False
            self._due_at, self._is_tried = now + self._pause(), True
            return True

    def failed(self) -> bool:
        """Opens it; after a trial, for a longer pause. Further failures of what was used before it opened are one.

        Returns whether what failed is to be made anew: after 2, 4, 8, ... failures in a row, as that may take long.
        """
        with self._lock:
            if self.is_open and not self._is_tried:
                return False
            self._num_failures += 1
            self.is_open, self._is_tried = True, False
            self._due_at = self._clock() + self._pause()
            return self._num_failures > 1 and self._num_failures.bit_count() == 1

    def passed(self) -> None:
        """Closes it after a trial that did no work."""
        with self._lock:
            self.is_open = self._is_tried = False

    def succeeded(self) -> None:
        """Closes it and forgets all failures."""
        with self._lock:
            self.is_open = self._is_tried = False
            self._num_failures = 0

    def _pause(self) -> float:
        doublings = min(max(0, self._num_failures - 1), 32)  # a float holds no more than 1023
        return min(self._max_pause_s, self._first_pause_s * 2.0**doublings)
