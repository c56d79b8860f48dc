"""Bare HTTP/1.1, to the byte: little work for each message, clients that may leave at any time, and waiting."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Self
from urllib.parse import urlsplit

from outrider.models.errors import CloudError

JSON: Final = "application/json"
_LENGTH: Final = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
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
    content_type: str = JSON,
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


class Wire:
    """A connection to the server at a URL, open while its context is. address: the client's own, if not any."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def __init__(self, url: str, address: str | None = None) -> None:
        self._address, self._own = urlsplit(url), (address, 0) if address else None

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()

    async def open(self) -> None:
        """Connects, also again."""
        host, port = self._address.hostname, self._address.port
        self.reader, self.writer = await asyncio.open_connection(host, port, local_addr=self._own)

    async def leave(self, by_reset: bool = False) -> None:
        """Closes, or resets."""
        if by_reset:
            self.writer.transport.abort()
        else:
            self.writer.close()
        with suppress(OSError):
            await self.writer.wait_closed()

    def request(self, method: str, path: str, body: object = None, media_type: str = JSON) -> bytes:
        """The bytes of a request. body: bytes as they are, anything else as JSON."""
        return request_bytes(self._address.port or 80, method, path, body, content_type=media_type)

    async def send(self, data: bytes) -> None:
        """Sends bytes."""
        self.writer.write(data)
        await self.writer.drain()

    async def post(self, path: str, body: object, media_type: str = JSON) -> None:
        """Sends a POST."""
        await self.send(self.request("POST", path, body, media_type))

    async def answer(self) -> tuple[bytes, bytes]:
        """Head and body of an answer that has a Content-Length, or no body."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(head)
        return head, await self.reader.readexactly(int(length[1])) if length else b""

    async def event(self) -> dict[str, Any] | None:
        """The next event of a stream; None at its end. Raises CloudError for an answer that is an error."""
        while line := await self.reader.readline():
            if line.startswith(b"data: {"):
                found: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
                return found
            if line.startswith(b"data: [DONE]"):
                return None
            if line.startswith(b"HTTP/1.1 ") and b" 200 " not in line:
                raise CloudError(f"the server answered {line.decode().strip()}")
        return None


@dataclass(frozen=True, slots=True)
class Completion:
    """A streamed completion: its pieces of text and when each came, in seconds from the start, and its tokens."""

    pieces: tuple[str, ...]
    num_tokens: int
    arrival_s: tuple[float, ...]


async def complete(url: str, body: Mapping[str, Any], began_s: float) -> Completion:
    """Streams one to its end. began_s: the start, by perf_counter. Raises CloudError."""
    pieces, arrival_s, num_tokens = list[str](), list[float](), 0
    async with Wire(url) as wire:
        await wire.post("/v1/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})
        while (event := await wire.event()) is not None:
            if "error" in event:
                raise CloudError(f"the server ended a stream: {event['error']}")
            num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
            if text := "".join(choice["text"] for choice in event["choices"]):
                pieces.append(text)
                arrival_s.append(time.perf_counter() - began_s)
    return Completion(tuple(pieces), num_tokens, tuple(arrival_s))
