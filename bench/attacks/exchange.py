"""Speaks HTTP over plain sockets: requests to the byte, from a chosen address, with any header; and waits."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

HOST: Final = "127.0.0.1"
OTHER_ADDRESS: Final = "127.0.0.2"
"""Another client's address on this machine: another owner where there are no keys."""


class NotMeasured(Exception):
    """Says why a row could not be measured."""


def wait_for(what: str, is_reached: Callable[[], bool], timeout_s: float, every_s: float = 0.05) -> None:
    """Returns once it is reached. what: ends a sentence, such as "run". Raises NotMeasured."""
    deadline_s = time.monotonic() + timeout_s
    while not is_reached():
        if time.monotonic() > deadline_s:
            raise NotMeasured(f"{what} within {timeout_s:g} s")
        time.sleep(every_s)


@dataclass(frozen=True, slots=True)
class Answer:
    """status is 0 where the server closed the connection without an answer."""

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


def ask(
    port: int,
    method: str,
    path: str,
    body: object = None,
    *,
    key: str | None = None,
    address: str = HOST,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
) -> Answer:
    """One request on a connection of its own. body: bytes as they are, anything else as JSON.

    address: the client's own. Raises TimeoutError.
    """
    content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    sent = {"Content-Type": "application/json"} if content is not None else {}
    sent |= {"Authorization": f"Bearer {key}"} if key else {}
    sent |= headers or {}
    began_s = time.perf_counter()
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout_s, source_address=(address, 0))
    try:
        connection.request(method, path, content, sent)
        response = connection.getresponse()
        return Answer(response.status, response.read(), time.perf_counter() - began_s)
    except (http.client.HTTPException, ConnectionError):
        return Answer(0, b"", time.perf_counter() - began_s)
    finally:
        connection.close()


def connect(port: int, timeout_s: float | None = None, address: str = HOST) -> socket.socket:
    """A connection whose small messages leave at once."""
    connection = socket.create_connection((HOST, port), timeout_s, source_address=(address, 0))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def request_bytes(
    port: int,
    method: str,
    path: str,
    body: bytes = b"",
    key: str | None = None,
    content_type: str = "application/json",
) -> bytes:
    """The same request as bytes."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {HOST}:{port}"]
    if body:
        lines += [f"Content-Type: {content_type}", f"Content-Length: {len(body)}"]
    if key:
        lines.append(f"Authorization: Bearer {key}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def read_answer(connection: socket.socket) -> int:
    """Reads one answer that has a Content-Length, or none and no body; returns its status. Raises OSError."""
    head = b""
    while b"\r\n\r\n" not in head:
        head += _received(connection)
    head, _, body = head.partition(b"\r\n\r\n")
    status, *lines = head.lower().split(b"\r\n")
    length = next((int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:")), 0)
    left = length - len(body)
    while left > 0:
        left -= len(_received(connection))
    return int(status.split(b" ")[1])


def answer_status(port: int, request: bytes, timeout_s: float = 30.0) -> int:
    """The status of the answer; 0 without one."""
    try:
        with socket.create_connection((HOST, port), timeout_s) as connection:
            connection.sendall(request)
            return read_answer(connection)
    except OSError:
        return 0


def values_of(metrics: str, name: str, *labels: str) -> list[float]:
    """The values of a metric, by its text form, that have `labels`: several where replicas are behind a front."""
    lines = (line for line in metrics.splitlines() if line.startswith((f"{name} ", f"{name}{{")))
    return [float(line.rsplit(" ", 1)[1]) for line in lines if all(label in line for label in labels)]


def _received(connection: socket.socket) -> bytes:
    data = connection.recv(65536)
    if not data:
        raise ConnectionResetError("the server closed the connection in mid-answer")
    return data
