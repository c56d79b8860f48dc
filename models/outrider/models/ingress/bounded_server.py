"""Runs an ASGI application with uvicorn, behind bounds on connections and requests."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from outrider.models.ingress.bounded_http import BoundedProtocol
from outrider.models.ingress.connection_limits import ConnectionLimits
from outrider.models.ingress.connections import ConnectionTable, Ticket, reserve_files
from outrider.models.ingress.listener import Listener
from outrider.models.ingress.sockets import ServedTls, TlsFiles

_log = logging.getLogger("outrider.ingress")

KEEP_ALIVE_S: Final = 75
"""How long an idle connection stays: a client that pauses should not pay a new handshake."""

_FLUSH_S: Final = 5
"""For the last events of streams to reach their readers."""


class BoundedServer(uvicorn.Server):
    """uvicorn that bounds its clients. Run it with `run(sockets=[...])`.

    limits: of connections and unread requests. on_ready: called once the server accepts connections. Its `tls` can be
    reloaded while it runs.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: ConnectionLimits,
        *,
        tls: TlsFiles | None = None,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._limits = limits
        self._on_ready = on_ready
        self.tls = ServedTls(tls) if tls is not None else None
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                http="httptools",  # BoundedProtocol extends its protocol
                ws="none",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                # Headers are most of what a drafts answer weighs.
                server_header=False,
                date_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=_FLUSH_S,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Opens for business. In place of uvicorn's, whose sockets admit everybody."""
        assert sockets, "run(sockets=[...])"
        await self.lifespan.startup()
        num_allowed = reserve_files(self._limits.max_connections)
        if num_allowed < self._limits.max_connections:
            _log.warning("the limit on open files leaves room for %d connections; raise it for more", num_allowed)
        self.table = ConnectionTable(self._limits, num_allowed=num_allowed)
        self.table.start(asyncio.get_running_loop())
        self.servers = [
            Listener(sock, self.table, self._protocol, tls=self.tls, backlog=self.config.backlog)  # type: ignore[misc]  # has what uvicorn uses of an asyncio.Server
            for sock in sockets
        ]
        self.started = True
        self._on_ready()

    def _protocol(self, ticket: Ticket) -> BoundedProtocol:
        return BoundedProtocol(self.config, self.server_state, self.lifespan.state, table=self.table, ticket=ticket)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes; deadlines hold to the end."""
        await super().shutdown(sockets)
        self.table.stop()
