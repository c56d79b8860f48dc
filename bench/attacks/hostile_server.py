"""Plays a server that attacks its agents: with terminal escapes, and with answers of any size."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from bench.attacks.exchange import HOST

_STREAM: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
MAX_SENT: Final = 512 << 20


@dataclass(frozen=True, slots=True)
class Ways:
    """What it sends to open a session (the bytes, then `more` again and again, up to 512 MiB), and for readiness.

    others: for GET and POST of these paths, the same. answer: makes the bytes for a session from the request's body.
    """

    session: bytes
    more: bytes = b""
    ready: bytes | None = None
    others: Mapping[str, tuple[bytes, bytes]] = field(default_factory=dict)
    answer: Callable[[Any], bytes] | None = None


class HostileServer:
    """Answers every request as `ways` says. paths: what was asked for."""

    def __init__(self) -> None:
        self.ways = Ways(b"")
        self.num_sessions = 0
        self.paths: list[str] = []
        self._socket = socket.create_server((HOST, 0))
        self.url = f"http://{HOST}:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stops listening."""
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with suppress(OSError, ValueError), connection:
            head = _head(connection)
            ways, path = self.ways, head.split(b" ")[1].decode("latin-1")
            self.paths.append(path)
            if path == "/v1/sessions":
                self.num_sessions += 1
                first = ways.session if ways.answer is None else ways.answer(_body(connection, head))
                _send_all(connection, first, ways.more)
            elif path in ways.others:
                _send_all(connection, *ways.others[path])
            elif b"/health/ready" in head:
                connection.sendall(self.ways.ready or as_answer({"status": "ready", "model": "m"}))
            else:
                connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")
            # The agent's end first: what it has not read yet would be lost by a reset.
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(5.0)
            while connection.recv(65536):
                time.sleep(0)


def _send_all(connection: socket.socket, first: bytes, more: bytes) -> None:
    connection.sendall(first)
    sent = 0
    while more and sent < MAX_SENT:
        connection.sendall(more)
        sent += len(more)


def _body(connection: socket.socket, head: bytes) -> Any:
    head, _, body = head.partition(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in head.lower().splitlines() if line.startswith(b"content-length:")]
    while len(body) < int(lengths[0]):
        body += connection.recv(65536)
    return json.loads(body)


def _head(connection: socket.socket) -> bytes:
    data = b""
    connection.settimeout(30.0)
    while b"\r\n\r\n" not in data:
        more = connection.recv(65536)
        if not more:
            raise ConnectionResetError
        data += more
    return data


@contextmanager
def hostile_server() -> Iterator[HostileServer]:
    """A server that ends with the context."""
    server = HostileServer()
    try:
        yield server
    finally:
        server.close()


def as_answer(body: Any, status: str = "200 OK") -> bytes:
    """A plain JSON answer."""
    content = json.dumps(body, ensure_ascii=False).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
    return (head + "Connection: close\r\n\r\n").encode() + content


def as_stream(*events: Any) -> bytes:
    """An event stream's head and its first events."""
    encode: Callable[[Any], str] = lambda event: json.dumps(event, ensure_ascii=False)  # noqa: E731
    return _STREAM + b"".join(b"data: " + encode(event).encode() + b"\n\n" for event in events)
