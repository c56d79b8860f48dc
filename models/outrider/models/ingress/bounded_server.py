"""Runs an ASGI application with uvicorn, behind bounds on connections and requests.

Each connection is counted before anything is spent on it, and the TLS handshake is bounded. asyncio's own servers make
a transport, a protocol and, with TLS, a handshake for every connection before the protocol hears of it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp

from outrider.models.faults import log_fault
from outrider.models.ingress.bounded_http import TOO_MANY, BoundedProtocol, answer_of, refusals
from outrider.models.ingress.connections import ConnectionLimits, ConnectionTable, Ticket, reserve_files
from outrider.models.ingress.sockets import TlsFiles

_log = logging.getLogger("outrider.ingress")

_NO_RESOURCES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_RETRY_S: Final = 0.1
_SHUTDOWN_S: Final = 5.0
"""For the end of TLS, which asyncio would wait 30 s for."""
KEEP_ALIVE_S: Final = 75
"""How long an idle connection stays: a client that pauses should not pay a new handshake."""

_FLUSH_S: Final = 5
"""For the last events of streams to reach their readers."""


class Listener:
    """Accepts on one bound socket until it is closed. Has what uvicorn uses of an asyncio.Server."""

    def __init__(
        self,
        sock: socket.socket,
        table: ConnectionTable,
        make_protocol: Callable[..., BoundedProtocol],
        *,
        tls: TlsFiles | None,
        backlog: int,
    ) -> None:
        self._socket = sock
        self._table = table
        self._make_protocol = make_protocol
        self._tls = tls
        self._opening: set[asyncio.Task[None]] = set()
        self._refusal = None if tls else answer_of(refusals(table.limits)[TOO_MANY])
        self._has_logged = False
        sock.setblocking(False)
        sock.listen(backlog)
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    def close(self) -> None:
        """Accepts no more. Connections that are open stay; handshakes end."""
        self._accepting.cancel()
        for task in self._opening:
            task.cancel()

    async def wait_closed(self) -> None:
        """Returns once nothing is being accepted."""
        await asyncio.gather(self._accepting, *self._opening, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(self._socket)
            except OSError as error:
                if error.errno in _NO_RESOURCES:
                    if not self._has_logged:
                        self._has_logged = True
                        _log.error("cannot accept connections: %s; raise the limit on open files", error.strerror)
                    await asyncio.sleep(_RETRY_S)
                continue  # otherwise the client left before it was accepted
            ticket = self._table.admit(address[0])
            if ticket is None:
                self._turn_away(accepted)
                continue
            task = loop.create_task(self._open(accepted, ticket))
            self._opening.add(task)
            # Here and not in the task: one that is cancelled before it runs gives nothing back.
            task.add_done_callback(partial(self._opened, accepted, ticket))

    async def _open(self, accepted: socket.socket, ticket: Ticket) -> None:
        bounds: dict[str, Any] = {}
        if self._tls is not None:
            bounds = {"ssl_handshake_timeout": self._table.limits.handshake_s, "ssl_shutdown_timeout": _SHUTDOWN_S}
        await asyncio.get_running_loop().connect_accepted_socket(
            partial(self._make_protocol, ticket=ticket),
            accepted,
            ssl=None if self._tls is None else self._tls.context,
            **bounds,
        )

    def _opened(self, accepted: socket.socket, ticket: Ticket, task: asyncio.Task[None]) -> None:
        self._opening.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None and not task.cancelled():
            return
        ticket.release()
        accepted.close()
        if isinstance(error, OSError):  # ssl.SSLError is one; too slow a handshake is one, too
            self._table.note("failed handshakes")
        elif error is not None:
            log_fault(error)

    def _turn_away(self, accepted: socket.socket) -> None:
        with accepted, suppress(OSError):  # it may have left
            if self._refusal is not None:
                accepted.send(self._refusal)  # fits a new connection's buffer


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
        self.tls = tls
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
        protocol = partial(BoundedProtocol, self.config, self.server_state, self.lifespan.state, table=self.table)
        self.servers = [
            Listener(sock, self.table, protocol, tls=self.tls, backlog=self.config.backlog)  # type: ignore[misc]  # has what uvicorn uses of an asyncio.Server
            for sock in sockets
        ]
        self.started = True
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes; deadlines hold to the end."""
        await super().shutdown(sockets)
        self.table.stop()
