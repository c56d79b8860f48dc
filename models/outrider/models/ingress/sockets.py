"""Opens the socket that a server listens on, and reads its certificate."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from outrider.models.errors import ConfigError

_SHORT: Final = {"commonName": "CN", "organizationName": "O", "organizationalUnitName": "OU", "countryName": "C"}
READY_PREFIX: Final = "OUTRIDER_READY "
"""The line on standard output that says that a server is up begins with this; its URL follows."""


@dataclass(slots=True)
class TlsFiles:
    """PEM files of the certificate chain and its private key. Raises ConfigError if they cannot be used.

    client_ca: certificates of the authorities that clients must show a certificate of; None asks for none. context: the
    settings of new connections.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None
    context: ssl.SSLContext = field(init=False)

    def __post_init__(self) -> None:
        self.reload()

    def reload(self) -> None:
        """Takes what the files hold now; connections that are open keep theirs. Raises ConfigError, and keeps what it
        has. Any thread.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # An empty password: without one OpenSSL would ask at the terminal for that of an encrypted key.
            context.load_cert_chain(self.certificate, self.key, password="")
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(
                f"cannot serve HTTPS with {self.certificate} and {self.key} ({error.strerror or error}); expected a "
                "certificate chain and its private key without a password, both PEM"
            ) from None
        if self.client_ca is not None:
            try:
                context.load_verify_locations(self.client_ca)
            except OSError as error:
                raise ConfigError(
                    f"clients cannot be checked by {self.client_ca} ({error.strerror or error}); expected certificates "
                    "of authorities, PEM"
                ) from None
            context.verify_mode = ssl.CERT_REQUIRED
        self.context = context

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files."""
        own = (self.certificate, self.key)
        return own if self.client_ca is None else (*own, self.client_ca)


@dataclass(frozen=True, slots=True)
class ClientName:
    """Who a verified certificate names.

    shown: the subject as text, for logs; "" without a name. owner: equal for the certificates of one subject of one
    authority, and for no others: the text alone would also be that of another authority's certificate.
    """

    shown: str
    owner: bytes

    @classmethod
    def of(cls, certificate: Mapping[str, Any]) -> ClientName | None:
        """By what `SSLSocket.getpeercert` gives: the subject, or without one the first alternative name."""
        groups = certificate.get("subject", ())
        named = [list(groups)] if groups else list(certificate.get("subjectAltName", ()))[:1]
        if not named:
            return None
        shown = ",".join("+".join(map(_shown_part, group)) for group in reversed(groups))
        identity = json.dumps([certificate.get("issuer", ()), named])  # nothing in a name can end it
        owner = b"subject:" + hashlib.sha256(identity.encode()).hexdigest().encode()
        return cls(shown or ":".join(named[0]), owner)


def _shown_part(part: tuple[str, str]) -> str:
    """A name and its value, escaped as RFC 4514 has it."""
    name, value = part
    escaped = "".join(f"\\{each}" if each in ',+"\\<>;=' else each for each in value).replace("\0", "\\00")
    if escaped.startswith((" ", "#")):
        escaped = "\\" + escaped
    if value.endswith(" ") and len(value) > 1:
        escaped = escaped[:-1] + "\\ "
    return f"{_SHORT.get(name, name)}={escaped}"


def tls_files(certificate: Path | None, key: Path | None, client_ca: Path | None = None) -> TlsFiles | None:
    """The files of the options; None where none is given. Raises ConfigError if one is missing."""
    if certificate is None and key is None:
        if client_ca is not None:
            raise ConfigError("--tls-client-ca needs HTTPS: give --tls-cert and --tls-key")
        return None
    if certificate is None or key is None:
        raise ConfigError("HTTPS needs both --tls-cert and --tls-key")
    return TlsFiles(certificate, key, client_ca)


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
