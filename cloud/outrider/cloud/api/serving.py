"""Runs the application with an orderly end.

On SIGTERM or SIGINT the server first drains: it goes on listening, so that load balancers see "draining" and devices
can still post drafts, takes no new work, and lets what runs finish for a bounded time; then it closes. A second signal
ends what runs, and its streams say so.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from types import FrameType

from fastapi import FastAPI

from outrider.cloud.api.state import Core
from outrider.models.ingress.bounded_server import BoundedServer
from outrider.models.ingress.connections import ConnectionLimits
from outrider.models.ingress.sockets import TlsFiles

_log = logging.getLogger("outrider.cloud")


class VerifierServer(BoundedServer):
    """Drains the engine before it closes.

    drain_s: how long running sequences may take to finish. limits, tls, on_ready: as for BoundedServer.
    """

    def __init__(
        self,
        app: FastAPI,
        *,
        drain_s: float,
        tls: TlsFiles | None = None,
        limits: ConnectionLimits | None = None,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self.core: Core = app.state.core
        self.drain_s = drain_s
        self._num_signals = 0
        self.failure: str | None = None
        limits = limits or ConnectionLimits(max_body_bytes=self.core.settings.max_body_bytes)
        super().__init__(app, limits, tls=tls, on_ready=on_ready)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins the draining, the second ends what runs, a third does not even wait for that.

        Called by the interpreter, between two steps of the loop.
        """
        self._num_signals += 1
        if self._num_signals == 1:
            words = "draining for up to %g s; a second signal ends at once"
            _log.info(words, self.drain_s, extra={"event": "drain"})
            self.begin_drain(self.drain_s)
        elif self._num_signals == 2:
            self.begin_drain(0.0)
        else:
            self.force_exit = self.should_exit = True

    def fail(self, why: str) -> None:
        """Closes because the engine has failed for good: `failure` says why. What was open has got its error.

        From any thread.
        """
        self.failure = why
        self.core.is_dead = True
        self.begin_drain(0.0)

    def begin_drain(self, drain_s: float) -> None:
        """Refuses new work, and closes when what runs has finished or been ended after `drain_s`. From any thread."""
        self.core.is_draining = True
        threading.Thread(target=self._drain, args=(drain_s,), name="outrider-drain", daemon=True).start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes connections, then the threads that made token ids for them."""
        await super().shutdown(sockets)
        self.core.workers.close()

    def _drain(self, drain_s: float) -> None:
        self.core.engine.stop(drain_s=drain_s)
        self.should_exit = True
