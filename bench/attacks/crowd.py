"""Opens many sessions at once and counts their tokens; one thread reads all streams."""

from __future__ import annotations

import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from bench.attacks.exchange import HOST, connect, request_bytes, wait_for


@dataclass(eq=False, slots=True)
class Stream:
    """One session's stream: (time, number of tokens) of each commit, and what the server answered before it."""

    connection: socket.socket
    began_s: float
    commits: list[tuple[float, int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    session: str = ""
    refusal: str = ""
    is_over: bool = False
    unread: bytes = b""

    @property
    def first_token_s(self) -> float | None:
        """Time to the first token."""
        return self.commits[0][0] - self.began_s if self.commits else None

    def take(self, data: bytes, now_s: float) -> None:
        """Notes what was read."""
        if not data:
            self.is_over = True
        pieces = (self.unread + data).split(b"\n\n")
        self.unread = pieces.pop()
        if self.unread.startswith(b"HTTP/1.1 ") and not self.unread.startswith(b"HTTP/1.1 200"):
            self.refusal, self.is_over = self.unread.partition(b"\r\n")[0].decode("latin-1"), True
        for piece in pieces:
            start = piece.find(b"data: ")
            if start < 0:
                continue
            event = json.loads(piece[start + 6 :])
            if event.get("type") == "open":
                self.session = event["session"]
            elif event.get("type") == "end":
                self.is_over = True
            elif event.get("tokens"):
                self.commits.append((now_s, len(event["tokens"])))
                self.tokens += [token["id"] if isinstance(token, dict) else token for token in event["tokens"]]


class Crowd:
    """Sessions of one owner. keeps: a session that ends is opened again, so that as many stay open.

    path: what opens one: the verifier's sessions, or the texts of the local endpoint's page.
    """

    def __init__(
        self,
        port: int,
        *,
        key: str | None = None,
        address: str = HOST,
        keeps: bool = False,
        path: str = "/v1/sessions",
    ) -> None:
        self._port, self._key, self._address, self._keeps, self._path = port, key, address, keeps, path
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._is_closed = False
        self.streams: list[Stream] = []
        self._bodies: dict[Stream, dict[str, Any]] = {}
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def open(self, body: dict[str, Any]) -> Stream:
        """Opens a session and returns at once."""
        began_s = time.perf_counter()
        connection = connect(self._port, address=self._address)
        connection.sendall(request_bytes(self._port, "POST", self._path, json.dumps(body).encode(), self._key))
        stream = Stream(connection, began_s)
        with self._lock:
            self.streams.append(stream)
            self._bodies[stream] = body
            self._selector.register(connection, selectors.EVENT_READ, stream)
        return stream

    def wait(self, is_reached: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until `is_reached`, at most `timeout_s`; returns whether it was."""
        deadline_s = time.perf_counter() + timeout_s
        while not is_reached():
            if time.perf_counter() > deadline_s:
                return False
            time.sleep(0.002)
        return True

    def require(self, what: str, is_reached: Callable[[], bool], timeout_s: float) -> None:
        """Waits until `is_reached`. Raises NotMeasured, which says `what` was not, after `timeout_s`."""
        wait_for(what, is_reached, timeout_s, 0.002)

    def running(self) -> Stream:
        """The crowd's only session, once it has a token. Raises NotMeasured."""
        stream = self.streams[0]
        self.require("the session had no token", lambda: bool(stream.commits), 10.0)
        return stream

    def num_running(self) -> int:
        """Sessions that have a token and have not ended."""
        with self._lock:
            return sum(bool(stream.commits) and not stream.is_over for stream in self.streams)

    def num_commits(self) -> int:
        """Of all sessions so far."""
        with self._lock:
            return sum(len(stream.commits) for stream in self.streams)

    def tokens_per_s(self, duration_s: float) -> float:
        """Tokens of all sessions together in the next `duration_s`, per second."""
        began_s = time.perf_counter()
        time.sleep(duration_s)
        end_s = time.perf_counter()
        with self._lock:
            count = sum(n for stream in self.streams for at, n in stream.commits if began_s <= at < end_s)
        return count / (end_s - began_s)

    def gaps_s(self) -> list[float]:
        """Times between commits of one session, of all sessions."""
        return [after - before for before, after in self.gaps()]

    def gaps(self) -> list[tuple[float, float]]:
        """When each of them began and ended, by perf_counter."""
        with self._lock:
            times = [[at for at, _ in stream.commits] for stream in self.streams]
        return [gap for one in times for gap in pairwise(one)]

    def close(self) -> None:
        """Closes every stream, which ends the sessions."""
        self._is_closed = True
        self._thread.join()
        for stream in self.streams:
            stream.connection.close()
        self._selector.close()

    def _read(self) -> None:
        while not self._is_closed:
            with self._lock:
                ready = self._selector.select(0)
            if not ready:
                time.sleep(0.0005)
            for key, _ in ready:
                self._read_one(key.data)

    def _read_one(self, stream: Stream) -> None:
        try:
            data = stream.connection.recv(65536)
        except OSError:
            data = b""
        with self._lock:
            stream.take(data, time.perf_counter())
            if stream.is_over:
                self._selector.unregister(stream.connection)
                stream.connection.close()
        if stream.is_over and self._keeps and not stream.refusal and not self._is_closed:
            with suppress(OSError):  # refused: the crowd is smaller then
                self.open(self._bodies[stream])


@contextmanager
def crowd_of(port: int, bodies: list[dict[str, Any]], **options: Any) -> Iterator[Crowd]:
    """A crowd with these sessions open."""
    crowd = Crowd(port, **options)
    try:
        for body in bodies:
            crowd.open(body)
        yield crowd
    finally:
        crowd.close()


def first_token_s(port: int, body: dict[str, Any], cap_s: float, **options: Any) -> float | None:
    """A newcomer's time to its first token; None where it takes longer than `cap_s`."""
    with crowd_of(port, [body | {"max_tokens": 1}], **options) as crowd:
        stream = crowd.streams[0]
        crowd.wait(lambda: bool(stream.commits) or stream.is_over, cap_s)
        return stream.first_token_s
