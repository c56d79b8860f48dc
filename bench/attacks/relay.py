"""Passes an agent's requests on to a verifier: away when told, slow on chosen paths, and counts what passes."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from bench.attacks.exchange import HOST


class Relay:
    """Listens on a port of its own. Set `delays` (path -> seconds before the request is passed on) and `is_away`."""

    def __init__(self, port: int) -> None:
        self.delays: Mapping[str, float] = {}
        self.seen: Counter[str] = Counter()
        self.at_once: Counter[str] = Counter()
        self.most_at_once: Counter[str] = Counter()
        self._port = port
        self._is_away = False
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._socket = socket.create_server((HOST, 0), backlog=1024)
        self.url = f"http://{HOST}:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def is_away(self) -> bool:
        """Whether every connection is cut, and new ones at once."""
        return self._is_away

    @is_away.setter
    def is_away(self, is_away: bool) -> None:
        self._is_away = is_away
        if is_away:
            with self._lock:
                cut = list(self._connections)
            for connection in cut:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stops listening and cuts all connections."""
        self._socket.close()
        self.is_away = True

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            if self._is_away:
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection, socket.create_connection((HOST, self._port)) as upstream:
            for each in (connection, upstream):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._connections |= {connection, upstream}
            back = threading.Thread(target=_pump, args=(upstream, connection), daemon=True)
            back.start()
            try:
                self._pass_on(connection, upstream)
            finally:
                with self._lock:
                    self._connections -= {connection, upstream}
                for each in (connection, upstream):
                    with suppress(OSError):
                        each.shutdown(socket.SHUT_RDWR)
                back.join()

    def _pass_on(self, connection: socket.socket, upstream: socket.socket) -> None:
        unread = b""
        while True:
            while b"\r\n\r\n" not in unread:
                if not (more := connection.recv(65536)):
                    return
                unread += more
            head, _, unread = unread.partition(b"\r\n\r\n")
            line, *fields = head.split(b"\r\n")
            length = next((int(f.split(b":")[1]) for f in fields if f.lower().startswith(b"content-length:")), 0)
            while len(unread) < length:
                if not (more := connection.recv(65536)):
                    return
                unread += more
            body, unread = unread[:length], unread[length:]
            path = line.split(b" ")[1].decode("latin-1")
            with self._lock:
                self.seen[path] += 1
                self.at_once[path] += 1
                self.most_at_once[path] = max(self.most_at_once[path], self.at_once[path])
            time.sleep(self.delays.get(path, 0.0))
            with self._lock:
                self.at_once[path] -= 1
            upstream.sendall(head + b"\r\n\r\n" + body)


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)


@contextmanager
def relay_to(port: int) -> Iterator[Relay]:
    """A relay that ends with the context."""
    relay = Relay(port)
    try:
        yield relay
    finally:
        relay.close()
