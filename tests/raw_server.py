"""A server of one raw socket: it writes any bytes, and knows how many of them were taken.

with raw_server(writes(NOT_FOUND)) as server:
    httpx.get(server.url)
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

Reply = Callable[["RawServer", socket.socket], None]


def http_answer(body: bytes = b"", status: str = "200 OK", *headers: str, length: int | None = None) -> bytes:
    """An answer after which the connection closes. length: what it says of the body, in the place of the truth."""
    said = f"content-length: {len(body) if length is None else length}"
    return "\r\n".join([f"HTTP/1.1 {status}", said, "connection: close", *headers, "", ""]).encode() + body


NOT_FOUND = http_answer(status="404 Not Found")


class RawServer:
    """Answers every request on a loopback port by `reply`, which may write for ever; a closed connection ends it."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._open = set[socket.socket]()
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.num_sent = 0
        self.paths = list[str]()
        self.asked = dict[socket.socket, tuple[str, bytes]]()
        """Path and body of the request on each connection."""
        self.is_over = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def num_asked(self) -> int:
        """Requests for tokens; drafts are not counted."""
        return sum(path in ("/v1/sessions", "/v1/verify") for path in self.paths)

    def close(self) -> None:
        self.is_over.set()
        for each in (self._socket, *self._open):
            with ExitStack() as stack:
                stack.callback(each.close)
                try:
                    each.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
        for thread in self._threads:
            thread.join(10.0)
            assert not thread.is_alive()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self._open.add(connection)
            thread = threading.Thread(target=self._serve, args=(connection,))
            thread.start()
            self._threads.append(thread)

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                head = b""
                while b"\r\n\r\n" not in head:
                    if not (data := connection.recv(65536)):
                        return
                    head += data
                path = head.split(b" ")[1].decode()
                self.paths.append(path)
                head, _, body = head.partition(b"\r\n\r\n")
                length = re.search(rb"(?i)content-length: *(\d+)", head)
                while length is not None and len(body) < int(length[1]):
                    body += connection.recv(65536)  # closing with unread data would take back what was sent
                self.asked[connection] = path, body
                self._reply(self, connection)
            except OSError:
                pass  # the agent has left


@contextmanager
def raw_server(reply: Reply) -> Iterator[RawServer]:
    """A raw server, ended at the end."""
    server = RawServer(reply)
    try:
        yield server
    finally:
        server.close()


def writes(data: bytes, forever: bytes = b"") -> Reply:
    """Writes `data`, then `forever` again and again, then closes."""

    def reply(server: RawServer, connection: socket.socket) -> None:
        connection.sendall(data)
        block = forever * max(1, 65536 // len(forever)) if forever else b""
        while block and not server.is_over.is_set():
            connection.sendall(block)
            server.num_sent += len(block)

    return reply


def silent_after(data: bytes, drip: bytes = b"") -> Reply:
    """Writes `data`, then nothing, or a byte of `drip` now and then, and keeps the connection."""

    def reply(server: RawServer, connection: socket.socket) -> None:
        connection.sendall(data)
        while not server.is_over.wait(0.1):
            connection.sendall(drip)

    return reply
