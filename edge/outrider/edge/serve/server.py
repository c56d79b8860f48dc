"""Runs the local endpoint with an orderly end.

The first signal lets texts in work finish for a bounded time, the second ends them, and their streams say so.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Final

from outrider.edge.serve.app import create_local_app
from outrider.edge.serve.state import LocalCore
from outrider.edge.serve.upstream import look_at
from outrider.models.errors import OutriderError
from outrider.models.ingress.bounded_server import BoundedServer
from outrider.models.ingress.connection_limits import ConnectionLimits
from outrider.models.ingress.sockets import TlsFiles
from outrider.models.visible import visible

_log = logging.getLogger("outrider.serve")

LOOK_S: Final = 2.0
"""How long the start waits for a verifier."""


class LocalServer(BoundedServer):
    """Serves `core`, and closes it at the end. drain_s: how long texts may take to finish."""

    def __init__(
        self,
        core: LocalCore,
        *,
        drain_s: float,
        limits: ConnectionLimits | None = None,
        tls: TlsFiles | None = None,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._core = core
        self._drain_s = drain_s
        self._num_signals = 0
        self._look: asyncio.Task[None] | None = None
        self._ends_at: float | None = None
        limits = limits or ConnectionLimits(max_body_bytes=core.settings.max_body_bytes)
        super().__init__(create_local_app(core), limits, tls=tls, on_ready=on_ready)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Opens for business, after a look at the verifier. Raises TokenizerMismatch where it is not the draft's.

        A verifier that does not answer soon is looked at while texts are served.
        """
        look = self._look = asyncio.create_task(look_at(self._core.upstream))
        try:
            await asyncio.wait([look], timeout=LOOK_S)
            if look.done():
                look.result()
            else:
                _log.warning("no verifier has answered in %g s; it is still looked for", LOOK_S)
                look.add_done_callback(_note_end)
        except BaseException:
            look.cancel()
            await self._core.aclose()
            raise
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins the draining, the second ends what runs."""
        self._num_signals += 1
        if self._num_signals == 1 and self._core.places.total:
            _log.info("waiting up to %g s for texts in work; a second signal ends them", self._drain_s)
        self.begin_drain(self._drain_s if self._num_signals == 1 else 0.0)

    def begin_drain(self, drain_s: float) -> None:
        """Refuses new work, and closes when texts have finished or been ended after `drain_s`. From any thread."""
        self._core.is_draining = True
        self._ends_at = time.monotonic() + drain_s

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn every 0.1 s; true ends the server."""
        if self._ends_at is not None and (not self._core.places.total or time.monotonic() >= self._ends_at):
            for task in self._core.tasks:
                task.cancel()  # their streams end with an error
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes connections, texts and the draft."""
        if self._look is not None:
            self._look.cancel()
        await super().shutdown(sockets)
        await self._core.aclose()


def _note_end(look: asyncio.Task[None]) -> None:
    """Logs what a look has found that ended after the start: requests get the same error."""
    if look.cancelled() or (error := look.exception()) is None:
        return
    if not isinstance(error, OutriderError):
        look.get_loop().call_exception_handler({"message": "the look at the verifiers failed", "exception": error})
        return
    _log.error("%s", visible(str(error)))
