"""Defines what the client sends as it is, and counts. Loads no HTTP library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class DraftMessage(NamedTuple):
    """The body of a draft message, and its media type."""

    media_type: str
    body: bytes


@dataclass(slots=True)
class ByteCounts:
    """Bytes between agent and cloud. Bodies include the event stream with its `data:` lines.

    Headers up include the framing of a long request's chunks. Not counted: that of answers (about 6 bytes per chunk),
    TLS and TCP.
    """

    body_up: int = 0
    body_down: int = 0
    headers_up: int = 0
    headers_down: int = 0

    def __add__(self, other: ByteCounts) -> ByteCounts:
        return ByteCounts(
            self.body_up + other.body_up,
            self.body_down + other.body_down,
            self.headers_up + other.headers_up,
            self.headers_down + other.headers_down,
        )

    def __sub__(self, other: ByteCounts) -> ByteCounts:
        return ByteCounts(
            self.body_up - other.body_up,
            self.body_down - other.body_down,
            self.headers_up - other.headers_up,
            self.headers_down - other.headers_down,
        )
