"""A bare HTTP/1.1 connection: little work for each message, and a client that may leave at any time."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import suppress
from typing import Any, Final, Self
from urllib.parse import urlsplit

from outrider.models.errors import CloudError

JSON: Final = "application/json"
_LENGTH: Final = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


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
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: {self._address.netloc}\r\nContent-Type: {media_type}\r\n"
        return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content

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
