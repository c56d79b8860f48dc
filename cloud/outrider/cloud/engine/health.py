"""Judges whether the engine can work: whether its runtime's steps succeed, and whether one has hung.

A step in which nothing succeeds may be its requests' fault, so the engine then runs one token of its own, a probe. Only
a probe that fails makes the engine unfit, and a step or a probe that succeeds makes it fit again. Knows no runtime.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_PROBE_EVERY_S: Final = 1.0
_HUNG_AFTER_S: Final = 60.0
_HUNG_AFTER_STEPS: Final = 20
_MAX_RAISED: Final = 3
_MAX_PROBES: Final = 10
"""Failed probes in a row after which a runtime whose faults last is given up."""

_log = logging.getLogger("outrider")


class Health:
    """The engine's health. The engine's thread writes; any thread may read `fault` and `is_hung`."""

    def __init__(self, clock: Callable[[], float], *, faults_last: bool = False) -> None:
        """faults_last: as `LastingFaultRuntime`."""
        self._clock = clock
        self._faults_last = faults_last
        self._num_failed = 0  # probes in a row
        self._recent_s: deque[float] = deque(maxlen=64)
        self._hung_at = float("inf")
        self._failure: str | None = None
        self._num_raised = 0
        self._next_probe = 0.0

    @property
    def fault(self) -> str | None:
        """Why the engine cannot work now; None when it can."""
        return "a step hangs in the model's runtime" if self.is_hung else self._failure

    @property
    def is_hung(self) -> bool:
        """Whether the runtime's present call takes more than 60 s and more than 20 times the slowest recent one."""
        return self._clock() > self._hung_at

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around a call of the runtime."""
        started = self._clock()
        self._hung_at = started + max(_HUNG_AFTER_S, _HUNG_AFTER_STEPS * max(self._recent_s, default=0.0))
        try:
            yield
            self._recent_s.append(self._clock() - started)
        finally:
            self._hung_at = float("inf")

    def worked(self) -> None:
        """Notes a step that committed tokens, or a probe that succeeded."""
        if self._failure is not None:
            _log.warning("the engine works again", extra={"event": "engine_recovered"})
        self._failure, self._num_raised, self._num_failed = None, 0, 0

    @property
    def is_lost(self) -> bool:
        """Whether probes have failed so often that only a new process helps."""
        return self._faults_last and self._num_failed >= _MAX_PROBES

    def failed(self, error: BaseException) -> None:
        """Notes a probe that failed."""
        if self._failure is None:
            _log.error(
                "the engine fails (%s): /health/ready answers 503 until a step succeeds",
                type(error).__name__,
                extra={"event": "engine_failed"},
            )
        self._num_failed += 1
        self._failure = f"no step succeeds: {type(error).__name__}"
        self._next_probe = self._clock() + _PROBE_EVERY_S

    def suspect(self, error: BaseException) -> None:
        """Notes a step that raised outside the runtime. Several in a row, without a commit, are a failure."""
        self._num_raised += 1
        if self._num_raised >= _MAX_RAISED:
            self.failed(error)

    def put_off(self) -> None:
        """Notes that a probe was due and could not be run."""
        self._next_probe = self._clock() + _PROBE_EVERY_S

    def seconds_to_probe(self) -> float | None:
        """Seconds until the next probe is due; None when none is needed."""
        return None if self._failure is None else max(0.0, self._next_probe - self._clock())
