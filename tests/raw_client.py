"""A client that writes its own bytes, and limits of a server that soon end, or do not."""

from __future__ import annotations

import json
import socket
import ssl
from typing import TYPE_CHECKING

from tests.serving import PROMPT, FakeServer
from tests.waiting import TIMEOUT_S

from outrider.models.ingress.connections import ConnectionLimits

if TYPE_CHECKING:
    from tests.fronts import RunningFront

LIVE = b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
SESSION = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}
QUICK = ConnectionLimits(header_s=0.05, body_grace_s=0.05, write_s=0.2, linger_s=0.2, handshake_s=0.05)
ENOUGH = ConnectionLimits(header_s=TIMEOUT_S, body_grace_s=TIMEOUT_S)


def address_of(server: FakeServer | RunningFront) -> tuple[str, int]:
    """Host and port."""
    host, _, port = server.url.rpartition("/")[2].partition(":")
    return host, int(port)


def unread(server: FakeServer, data: bytes) -> socket.socket:
    """A client that has sent this, and reads no answer."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(address_of(server))
    connection.sendall(data)
    return connection


class Raw:
    """A client that writes its own bytes."""

    def __init__(self, server: FakeServer | RunningFront, connection: socket.socket | None = None) -> None:
        self.socket = connection or socket.create_connection(address_of(server), timeout=TIMEOUT_S)
        self._stream = self.socket.makefile("rb")

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Sends; the server may have closed the connection meanwhile."""
        try:
            self.socket.sendall(data)
        except (ConnectionError, ssl.SSLError):
            pass

    def answer(self, data: bytes = b"") -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the next answer; status 0 if the connection is closed. data: sent before."""
        self.send(data)
        try:
            line = self._stream.readline()
            if not line:
                return 0, {}, b""
            headers = {}
            while (header := self._stream.readline()) not in (b"\r\n", b""):
                name, _, value = header.decode().partition(":")
                headers[name.lower()] = value.strip()
            return int(line.split()[1]), headers, self._stream.read(int(headers.get("content-length", 0)))
        except ConnectionError:
            return 0, {}, b""

    def refusal(self, data: bytes = b"") -> tuple[int, str]:
        """Status and code of an answer after which the server closes. data: sent before."""
        status, headers, body = self.answer(data)
        assert (headers["connection"], headers["content-type"]) == ("close", "application/json")
        assert self.is_closed()
        return status, json.loads(body)["error"]["code"]

    def is_closed(self) -> bool:
        """Waits for the server's next byte; True if there is none."""
        try:
            return self._stream.read(1) == b""
        except ConnectionError:
            return True


def post(path: str, body: bytes, *headers: str) -> bytes:
    """A POST of JSON."""
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", *headers]
    if not any(header.startswith(("Content-Length", "Transfer-Encoding")) for header in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def is_well(server: FakeServer) -> bool:
    """Whether the server answers, and holds nothing of those who left."""
    server.wait_until(lambda: len(server.server.table) == 0 and server.is_empty())
    with Raw(server) as raw:
        return raw.answer(LIVE)[0] == 200
