"""Runs an engine on a thread of its own, so that model calls never block an event loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from outrider.cloud.engine.config import EngineConfig
from outrider.cloud.engine.engine import Engine
from outrider.cloud.seam import EngineStats, GenerateRequest, Sink
from outrider.models.errors import RequestError
from outrider.models.faults import log_fault
from outrider.models.runtimes.base import BatchRuntime

_LOOK_S: Final = 1.0
"""How often the thread is looked at: does it hang."""
_DEAD_AFTER: Final = 60
"""Looks in a row at a step that hangs, after which the engine is given up. Counted: time in which
the process itself stood still is no hang."""


class EngineThread(Engine):
    """An engine on its own thread, on which sinks run. Any thread may call any method.

    `calibrate` comes before `start`, and `close` after `stop`.
    """

    def __init__(
        self,
        runtime: BatchRuntime,
        config: EngineConfig | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(runtime, config, clock=clock)
        self._wake = threading.Event()
        self._is_idle = threading.Event()
        self._is_draining = False
        self._is_stopping = False
        self._death: str | None = None
        self._on_death: Callable[[str], None] | None = None
        self._num_hung = 0
        self._has_ended = threading.Event()
        self._watch = threading.Thread(target=self._watch_thread, name="outrider-engine-watch", daemon=True)
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)

    def start(self) -> None:
        """Starts the thread. Call it once."""
        self._thread.start()
        self._watch.start()

    def wake(self) -> None:
        """Ends the thread's wait."""
        if not self._wake.is_set():  # if it is, the inbox has yet to be read; setting it again takes a lock
            self._wake.set()

    def on_death(self, act: Callable[[str], None]) -> None:
        """As `ServingEngine.on_death`: the thread has ended, a step hangs for two minutes, or a runtime is lost."""
        with self._gate:
            self._on_death, death = act, self._death
        if death is not None:
            act(death)

    def stop(self, *, drain_s: float = 0.0) -> None:
        """Refuses new work, lets running sequences finish for up to `drain_s` seconds, then ends the rest. Blocking.

        A thread whose step hangs is left behind: nothing can interrupt it, and it ends with the process.
        """
        with self._gate:
            self._is_draining = True
        deadline = time.monotonic() + drain_s
        while self.has_work and (left_s := deadline - time.monotonic()) > 0:
            self._is_idle.wait(left_s)
            self._is_idle.clear()
        self._is_stopping = True
        while self._thread.is_alive() and not self.health.is_hung:
            self._wake.set()
            self._thread.join(timeout=_LOOK_S)
        self._has_ended.set()

    def submit(self, request: GenerateRequest, sink: Sink) -> int:
        """As `Engine.submit`; also raises RequestError `shutting_down`, and `engine_failed` if nothing would answer."""
        with self._gate:  # otherwise a request could arrive after the engine's last look at its inbox
            if self._is_draining:
                raise RequestError("shutting_down", "the server is shutting down; use another server", status=503)
            if self._death is not None or self.health.is_hung:
                raise RequestError("engine_failed", "the server's engine has failed; use another server", status=503)
            return super().submit(request, sink)

    def fault(self) -> str | None:
        """Why the engine cannot work now; None when it can."""
        return self._death or self.health.fault

    def stats(self) -> EngineStats:
        """As `Engine.stats`."""
        return replace(super().stats(), failed=int(self.fault() is not None))

    def _run(self) -> None:
        try:
            while not self._is_stopping and self._death is None:
                self._step_or_reset()
                if self.health.is_lost:
                    self._die(f"{self.health.fault}, again and again")
            self.shut_down()
        except BaseException as error:
            log_fault(error)
            self._die(f"the engine's thread has ended: {type(error).__name__}", error)
        self._is_idle.set()  # a `stop` that still waits can return

    def _watch_thread(self) -> None:
        while not self._has_ended.wait(_LOOK_S) and self._death is None:
            self._look()

    def _look(self) -> None:
        """Gives the engine up after so many looks at a step that hangs."""
        self._num_hung = self._num_hung + 1 if self.health.is_hung else 0
        if self._num_hung >= _DEAD_AFTER:
            self._die("a step hangs in the model's runtime")

    def _step_or_reset(self) -> None:
        """Runs a step, and waits if there is nothing to do after it."""
        self._wake.clear()  # before the inbox is read: later arrivals end the wait below
        try:
            delay_s = self.step()
        except BaseException as error:  # a bug of ours must not hang every client
            self.reset(error)
            delay_s = 0.0
        if not self.has_work:
            self._is_idle.set()
        if delay_s != 0.0:
            self._wake.wait(timeout=delay_s)

    def _die(self, why: str, error: BaseException | None = None) -> None:
        """Refuses new work for good, and ends what is open. error: that of the engine's own thread."""
        with self._gate:
            if self._death is not None:
                return
            self._death, act = why, self._on_death
        if error is None:
            self.abandon()
        else:
            try:
                self.reset(error)
            except BaseException as again:  # `reset` has notified every sink before it raises
                log_fault(again)
        if act is not None:
            act(why)
