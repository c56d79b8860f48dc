"""Parses server-sent events as a session uses them: one `data:` line per event, then a blank line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from outrider.models.client.errors import ProtocolBroken
from outrider.models.protocol import SessionEvent, parse_event

MAX_LINE_BYTES: Final = 1 << 18
"""A commit is a few hundred bytes; `open` repeats the request's stop ids."""
MAX_IDLE_BYTES: Final = 1 << 20
"""Of comments and blank lines between two events: a keep-alive of 3 bytes every 5 s takes 20 days for that."""


class EventParser:
    """Turns the bytes of an event stream, cut anywhere, into events. Comment lines (keep-alives) are skipped.

    Keeps at most one unfinished line, of at most `MAX_LINE_BYTES`. url: the server, for errors.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._rest = bytearray()
        self._num_idle = 0

    def feed(self, data: bytes) -> Iterator[SessionEvent]:
        """Yields the events that `data` completes. Raises ProtocolBroken for anything that is not a session's event."""
        lines: list[bytes] = []
        self._rest += data
        if b"\n" in data:
            *lines, rest = bytes(self._rest).split(b"\n")
            self._rest = bytearray(rest)
        if max(map(len, [self._rest, *lines])) > MAX_LINE_BYTES:
            raise ProtocolBroken(self._url, f"a line of its stream has more than {MAX_LINE_BYTES} bytes")
        for line in lines:
            self._num_idle += len(line) + 1
            if self._num_idle > MAX_IDLE_BYTES:
                raise ProtocolBroken(self._url, f"it sent more than {MAX_IDLE_BYTES} bytes without an event")
            if line.startswith(b"data:"):
                try:
                    event = parse_event(line[5:])
                except (ValueError, RecursionError) as e:
                    raise ProtocolBroken(self._url, f"it sent {line[:80]!r}, which is not an event") from e
                self._num_idle = 0
                yield event
