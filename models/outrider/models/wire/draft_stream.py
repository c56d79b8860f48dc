"""Frames the draft messages of one long request: each is a varint length and the bytes of a tree (`tree_draft`).

Since protocol version 3 the drafts of a text go up one request with a chunked body. Messages are numbered 1, 2, 3, ...
as they come. In a steady session (`steady`) zeros may fill the room between them.
"""

from __future__ import annotations

from typing import Final

from outrider.models.errors import RequestError
from outrider.models.wire.steady import filler_end
from outrider.models.wire.tree_draft import put_varint

DRAFTS_MEDIA_TYPE: Final = "application/vnd.outrider.drafts"
MAX_TREE_BYTES: Final = 6 << 10
"""The longest tree has less. Two bytes of a varint hold more."""


def framed(body: bytes) -> bytes:
    """A message as a part of the long request."""
    message = bytearray()
    put_varint(message, len(body))
    return bytes(message + body)


class MessageReader:
    """Cuts a long request's bytes, however they come, into messages. Keeps the beginning of one message at most.

    is_steady: whether there may be filler between them.
    """

    __slots__ = ("_is_steady", "_rest")

    def __init__(self, is_steady: bool = False) -> None:
        self._rest, self._is_steady = b"", is_steady

    @property
    def is_within(self) -> bool:
        """Whether a message has begun and not ended."""
        return bool(self._rest)

    def end(self) -> None:
        """The body has ended. Raises RequestError `invalid_request` within a message."""
        if self._rest:
            raise RequestError("invalid_request", "the body ends within a draft message; see docs/protocol.md")

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that `data` completes. Raises RequestError: 413 `body_too_large` for a length over
        MAX_TREE_BYTES, `invalid_request` for an empty message.
        """
        if self._rest:
            data, self._rest = self._rest + data, b""
        messages: list[bytes] = []
        at, size = 0, len(data)
        while at < size:
            length, begin = data[at], at + 1
            if length > 127:
                if begin == size:
                    break
                length += (data[begin] << 7) - 128  # 16,383 and more where a third byte would follow
                begin += 1
            if length > MAX_TREE_BYTES:
                raise RequestError(
                    "body_too_large",
                    f"a message has more than {MAX_TREE_BYTES} bytes; send fewer nodes at a time",
                    status=413,
                )
            if not data[at] and self._is_steady:
                at = filler_end(data, begin)
                continue
            if not length:
                raise RequestError("invalid_request", "a message of the long request is empty; see docs/protocol.md")
            if begin + length > size:
                break
            at = begin + length
            messages.append(data[begin:at])
        self._rest = data[at:]
        return messages
