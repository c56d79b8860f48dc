"""Speaks HTTP over plain sockets, to the byte, and waits. Standard library only."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

HOST: Final = "127.0.0.1"
OTHER_ADDRESS: Final = "127.0.0.2"
"""Another client's address on this machine: another owner where there are no keys."""


class NotMeasured(Exception):
    """Says why a row could not be measured."""


def is_reached_in(timeout_s: float, is_reached: Callable[[], bool], every_s: float = 0.05) -> bool:
    """Waits until it is reached, at most so long; returns whether it was."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := is_reached()) and time.monotonic() < deadline_s:
        time.sleep(every_s)
    return found


def wait_for(what: str, is_reached: Callable[[], bool], timeout_s: float, every_s: float = 0.05) -> None:
    """Returns once it is reached. what: ends a sentence, such as "run". Raises NotMeasured."""
    if not is_reached_in(timeout_s, is_reached, every_s):
        raise NotMeasured(f"{what} within {timeout_s:g} s")


@dataclass(frozen=True, slots=True)
class Answer:
    """status is 0 where the server closed the connection without an answer, or gave none in time."""

    status: int
    body: bytes
    took_s: float

    @property
    def json(self) -> Any:
        """The body; an empty object where it is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return {}


def connect(port: int, timeout_s: float | None = None) -> socket.socket:
    """A connection whose small messages leave at once."""
    connection = socket.create_connection((HOST, port), timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def request_bytes(
    port: int,
    method: str,
    path: str,
    body: object = None,
    key: str | None = None,
    content_type: str = "application/json",
) -> bytes:
    """A request. body: bytes as they are, anything else as JSON; None: none."""
    content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", f"Host: {HOST}:{port}"]
    if content:
        lines += [f"Content-Type: {content_type}", f"Content-Length: {len(content)}"]
    if key:
        lines.append(f"Authorization: Bearer {key}")
    return "\r\n".join([*lines, "", ""]).encode() + content


def read_answer(connection: socket.socket) -> int:
    """Reads one answer that has a Content-Length, or none and no body; returns its status. Raises OSError.

    Quicker than `http.client`, which would be most of an attacker's work.
    """
    data = b""
    while (end := data.find(b"\r\n\r\n")) < 0:
        data += next_bytes(connection)
    status, *lines = data[:end].lower().split(b"\r\n")
    length = next((int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:")), 0)
    left = end + 4 + length - len(data)
    while left > 0:
        left -= len(next_bytes(connection))
    return int(status.split(b" ")[1])


def values_of(metrics: str, name: str, *labels: str) -> list[float]:
    """The values of a metric, by its text form, that have `labels`: several where replicas are behind a front."""
    lines = (line for line in metrics.splitlines() if line.startswith((f"{name} ", f"{name}{{")))
    return [float(line.rsplit(" ", 1)[1]) for line in lines if all(label in line for label in labels)]


def next_bytes(connection: socket.socket) -> bytes:
    """What comes next. Raises ConnectionResetError at the end."""
    if not (data := connection.recv(65536)):
        raise ConnectionResetError("the server closed the connection in mid-answer")
    return data
