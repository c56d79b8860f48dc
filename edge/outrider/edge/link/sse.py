"""Parses server-sent events as a session uses them: one `data:` line per event, then a blank line."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.models.errors import CloudError
from outrider.models.protocol import SessionEvent, parse_event


class EventParser:
    """Turns the bytes of an event stream, cut anywhere, into events. Comment lines (keep-alives) are skipped."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[SessionEvent]:
        """Yields the events that `data` completes. Raises CloudError for anything that is not a session's event."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                try:
                    yield parse_event(line[5:])
                except ValueError as e:
                    raise CloudError(
                        f"the cloud sent {line[:80]!r}, which is not an event of this protocol; compare the versions"
                    ) from e
