"""Runs the application: the listening socket, uvicorn's settings, bounds on connections, and an orderly end.

On SIGTERM or SIGINT the server first drains: it goes on listening, so that load balancers see "draining" and devices
can still post drafts, takes no new work, and lets what runs finish for a bounded time; then it closes. A second signal
ends what runs, and its streams say so.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import uvicorn
from fastapi import FastAPI

from outrider.cloud.server.bounded_http import BoundedProtocol
from outrider.cloud.server.connection_limits import ConnectionLimits
from outrider.cloud.server.connections import ConnectionTable, Ticket, reserve_files
from outrider.cloud.server.listener import Listener
from outrider.models.errors import ConfigError

if TYPE_CHECKING:
    from outrider.cloud.api.state import Core

_log = logging.getLogger("outrider.cloud")

KEEP_ALIVE_S: Final = 75
"""How long an idle connection stays: a device that pauses should not pay a new handshake."""

_FLUSH_S: Final = 5
"""For the last events of streams to reach their readers."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of the certificate chain and its private key. Raises ConfigError if they cannot be used."""

    certificate: Path
    key: Path

    def __post_init__(self) -> None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key)
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(
                f"cannot serve HTTPS with {self.certificate} and {self.key} ({error.strerror or error}); expected a "
                "certificate chain and its private key, both PEM"
            ) from None


def open_socket(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one. Raises ConfigError if the address cannot be had."""
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, UnicodeError) as error:  # no such name; not the form of one
        raise ConfigError(f"cannot listen on {host!r}: {getattr(error, 'strerror', error)}") from None
    # The protocol is said outright because asyncio sets TCP_NODELAY only on sockets that say it, and accepted sockets
    # inherit it; without TCP_NODELAY small events wait for acknowledgements.
    sock = socket.socket(info[0], socket.SOCK_STREAM, socket.IPPROTO_TCP)
    if os.name != "nt":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        sock.bind(info[4])
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port, or 0 for a free one"
        ) from None
    return sock


def url_of(sock: socket.socket, *, is_tls: bool) -> str:
    """Where clients reach a bound socket."""
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if is_tls else 'http'}://{shown}:{port}"


class VerifierServer(uvicorn.Server):
    """uvicorn that bounds its clients, and drains the engine before it closes.

    drain_s: how long running sequences may take to finish. limits: of connections and unread requests. on_ready: called
    once the server accepts connections.
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
        self._core: Core = app.state.core
        self._limits = limits or ConnectionLimits(max_body_bytes=self._core.settings.max_body_bytes)
        self._drain_s = drain_s
        self._on_ready = on_ready
        self._num_signals = 0
        super().__init__(_config(app, tls))

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
            Listener(sock, self.table, self._protocol, tls=self.config.ssl, backlog=self.config.backlog)  # type: ignore[misc]  # has what uvicorn uses of an asyncio.Server
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

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins the draining, the second ends what runs, a third does not even wait for that.

        Called by the interpreter, between two steps of the loop.
        """
        self._num_signals += 1
        if self._num_signals == 1:
            _log.info("draining for up to %g s; a second signal ends at once", self._drain_s)
            self.begin_drain(self._drain_s)
        elif self._num_signals == 2:
            self.begin_drain(0.0)
        else:
            self.force_exit = self.should_exit = True

    def begin_drain(self, drain_s: float) -> None:
        """Refuses new work, and closes when what runs has finished or been ended after `drain_s`. From any thread."""
        self._core.is_draining = True
        threading.Thread(target=self._drain, args=(drain_s,), name="outrider-drain", daemon=True).start()

    def _drain(self, drain_s: float) -> None:
        self._core.engine.stop(drain_s=drain_s)
        self.should_exit = True


def _config(app: FastAPI, tls: TlsFiles | None) -> uvicorn.Config:
    options: dict[str, Any] = {}
    if tls is not None:
        options = {"ssl_certfile": tls.certificate, "ssl_keyfile": tls.key}
    return uvicorn.Config(
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
        **options,
    )
