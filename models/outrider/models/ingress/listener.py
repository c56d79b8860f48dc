"""Accepts connections: counts each before anything is spent on it, and bounds the TLS handshake.

asyncio's own servers make a transport, a protocol and, with TLS, a handshake for every connection before the protocol
hears of it.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from functools import partial
from typing import Any, Final

from outrider.models.faults import log_fault
from outrider.models.ingress.connections import ConnectionTable, MakeProtocol, Ticket
from outrider.models.ingress.refusals import too_many_connections
from outrider.models.ingress.sockets import ServedTls

_log = logging.getLogger("outrider.ingress")

_NO_RESOURCES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_RETRY_S: Final = 0.1
_SHUTDOWN_S: Final = 5.0
"""For the end of TLS, which asyncio would wait 30 s for."""


class Listener:
    """Accepts on one bound socket until it is closed. Has what uvicorn uses of an asyncio.Server."""

    def __init__(
        self,
        sock: socket.socket,
        table: ConnectionTable,
        make_protocol: MakeProtocol,
        *,
        tls: ServedTls | None,
        backlog: int,
    ) -> None:
        self._socket = sock
        self._table = table
        self._make_protocol = make_protocol
        self._tls = tls
        self._opening: set[asyncio.Task[None]] = set()
        self._refusal = None if tls else too_many_connections()
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
            lambda: self._make_protocol(ticket),
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
        try:
            if self._refusal is not None:
                accepted.send(self._refusal)  # fits a new connection's buffer
        except OSError:
            pass  # it has left
        accepted.close()
