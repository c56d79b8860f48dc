"""Opens the socket that a server listens on, and reads its certificate."""

from __future__ import annotations

import os
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outrider.models.errors import ConfigError

READY_PREFIX: Final = "OUTRIDER_READY "
"""The line on standard output that says that a server is up begins with this; its URL follows."""


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


def tls_files(certificate: Path | None, key: Path | None) -> TlsFiles | None:
    """The files of the options; None where neither is given. Raises ConfigError if one is missing."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ConfigError("HTTPS needs both --tls-cert and --tls-key")
    return TlsFiles(certificate, key)


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
