"""Stands in a verifier's place: a server that attacks its agents with terminal escapes and answers of any size, and a
relay that is slow on chosen paths, and counts what passes at a time.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import uvicorn
from bench.attacks.exchange import HOST
from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from tests.raw_server import RawServer

from outrider.models.ingress.sockets import open_socket, url_of

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


class Relay:
    """Passes requests on. Set `delays`: path -> seconds before one is passed on. most_at_once: of such, by path."""

    def __init__(self, port: int) -> None:
        self.url = ""
        self.delays: Mapping[str, float] = {}
        self.most_at_once: Counter[str] = Counter()
        self._at_once: Counter[str] = Counter()
        self._client = httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=None, limits=httpx.Limits())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        request, path = Request(scope, receive), scope["path"]
        self._at_once[path] += 1
        self.most_at_once[path] = max(self.most_at_once[path], self._at_once[path])
        await asyncio.sleep(self.delays.get(path, 0.0))
        self._at_once[path] -= 1
        body = request.stream() if scope["method"] == "POST" else None
        url = httpx.URL(path=path, query=scope["query_string"])
        asked = self._client.build_request(scope["method"], url, headers=request.headers.raw, content=body)
        with suppress(httpx.HTTPError, ClientDisconnect):  # connections that break are no news
            answer = await self._client.send(asked, stream=True)
            given = StreamingResponse(answer.aiter_raw(), answer.status_code, answer.headers)
            try:
                await given(scope, receive, send)
            finally:
                await answer.aclose()


@contextmanager
def relay_to(port: int) -> Iterator[Relay]:
    """A relay that ends with the context."""
    relay = Relay(port)
    server = uvicorn.Server(uvicorn.Config(relay, lifespan="off", log_level="critical", timeout_graceful_shutdown=1))
    with open_socket(HOST, 0) as sock:
        relay.url = url_of(sock, is_tls=False)
        thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
        thread.start()
        try:
            yield relay
        finally:
            server.should_exit = True
            thread.join()
