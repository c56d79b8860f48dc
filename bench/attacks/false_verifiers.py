"""Stands in a verifier's place: a server that attacks its agents with terminal escapes and answers of any size, and a
relay that is slow on chosen paths, and counts what passes at a time.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from bench.attacks.exchange import HOST, connect
from tests.raw_server import RawServer

_STREAM: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
MAX_SENT: Final = 512 << 20


Answers = Mapping[str, tuple[bytes, bytes]]
"""By path: the bytes, and those that follow again and again."""


@dataclass(frozen=True, slots=True)
class Ways:
    """What it sends to open a session (the bytes, then `more` again and again, up to 512 MiB), and for readiness.

    others: for GET and POST of these paths, the same. answer: makes the bytes for a session from the request's body.
    """

    session: bytes
    more: bytes = b""
    ready: bytes | None = None
    others: Answers = field(default_factory=dict)
    answer: Callable[[Any], bytes] | None = None


class HostileServer(RawServer):
    """Answers every request as `ways` says."""

    def __init__(self) -> None:
        self.ways = Ways(b"")
        super().__init__(_answer)

    def sent_to(self, path: str, body: bytes) -> tuple[bytes, bytes]:
        """The answer's first bytes, and those that follow without end."""
        ways = self.ways
        if path == "/v1/sessions":
            return (ways.session if ways.answer is None else ways.answer(json.loads(body))), ways.more
        if path.startswith("/health/ready"):
            return ways.ready or as_answer({"status": "ready", "model": "m"}), b""
        return ways.others.get(path, (b"HTTP/1.1 204 No Content\r\n\r\n", b""))


def _answer(server: RawServer, connection: socket.socket) -> None:
    assert isinstance(server, HostileServer)
    first, more = server.sent_to(*server.asked[connection])
    connection.sendall(first)
    sent = 0
    while more and sent < MAX_SENT:
        connection.sendall(more)
        sent += len(more)
    # The agent's end first: what it has not read yet would be lost by a reset.
    connection.shutdown(socket.SHUT_WR)
    connection.settimeout(5.0)
    while connection.recv(65536):
        pass


def hostile_server() -> closing[HostileServer]:
    """A server that ends with the context."""
    return closing(HostileServer())


def as_answer(body: Any, status: str = "200 OK") -> bytes:
    """A plain JSON answer."""
    content = json.dumps(body, ensure_ascii=False).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
    return (head + "Connection: close\r\n\r\n").encode() + content


def as_stream(*events: Any) -> bytes:
    """An event stream's head and its first events."""
    return _STREAM + b"".join(b"data: %s\n\n" % json.dumps(event, ensure_ascii=False).encode() for event in events)


class Relay(ThreadingHTTPServer):
    """Listens on a port of its own. Set `delays`: path -> seconds before the request is passed on."""

    request_queue_size = 1024

    def __init__(self, port: int) -> None:
        super().__init__((HOST, 0), _PassingOn)
        self.delays: Mapping[str, float] = {}
        self.at_once: Counter[str] = Counter()
        self.most_at_once: Counter[str] = Counter()
        self.upstream_port = port
        self.url = f"http://{HOST}:{self.server_port}"
        self.lock = threading.Lock()
        self.connections: set[socket.socket] = set()

    def close_connections(self) -> None:
        """Ends all of them."""
        with self.lock:
            for connection in self.connections:
                _end(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections that break are no news."""


class _PassingOn(BaseHTTPRequestHandler):
    server: Relay
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        """Connects to the verifier, whose bytes go back as they come."""
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._upstream = connect(self.server.upstream_port)
        with self.server.lock:
            self.server.connections |= {self.connection, self._upstream}
        self._back = threading.Thread(target=_pump, args=(self._upstream, self.connection), daemon=True)
        self._back.start()

    def pass_on(self) -> None:
        """Any method."""
        server, path = self.server, self.path
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        with server.lock:
            server.at_once[path] += 1
            server.most_at_once[path] = max(server.most_at_once[path], server.at_once[path])
        time.sleep(server.delays.get(path, 0.0))
        with server.lock:
            server.at_once[path] -= 1
        fields = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        self._upstream.sendall(f"{self.requestline}\r\n{fields}\r\n".encode("latin-1") + body)

    do_GET = do_POST = do_DELETE = pass_on

    def finish(self) -> None:
        """Ends both connections."""
        with self.server.lock:
            self.server.connections -= {self.connection, self._upstream}
        for each in (self.connection, self._upstream):
            _end(each)
        self._back.join()
        self._upstream.close()
        super().finish()

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


def _end(connection: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    with suppress(OSError):
        connection.shutdown(how)


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    _end(target, socket.SHUT_WR)


@contextmanager
def relay_to(port: int) -> Iterator[Relay]:
    """A relay that ends with the context."""
    with Relay(port) as relay:
        threading.Thread(target=relay.serve_forever, daemon=True).start()
        try:
            yield relay
        finally:
            relay.shutdown()
            relay.close_connections()
