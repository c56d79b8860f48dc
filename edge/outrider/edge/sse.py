"""Server-sent events, the part that a session uses: one `data:` line an event, a blank line after it."""

from __future__ import annotations

import json
from collections.abc import Iterator

from outrider.cloud.protocol import Commit, SessionEnd, SessionOpen
from outrider.models.errors import CloudError

Event = SessionOpen | Commit | SessionEnd
_EVENTS: dict[str, type[SessionOpen] | type[Commit] | type[SessionEnd]] = {
    "open": SessionOpen,
    "commit": Commit,
    "end": SessionEnd,
}


class EventParser:
    """Turns the bytes of an event stream, cut anywhere, into events. Comment lines (keep-alives) are skipped."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Event]:
        """Yields the events that `data` completes. Raises CloudError for what is not an event of a session."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield parse_event(line[5:])


def parse_event(data: bytes) -> Event:
    """One event's JSON; commits, by far the most, come without a `type`. Types of newer servers are refused."""
    try:
        fields = json.loads(data)
        return _EVENTS[fields.get("type", "commit")].model_validate(fields)
    except (ValueError, KeyError, AttributeError) as e:
        raise CloudError(
            f"the cloud sent {data[:80]!r}, which is not an event of this protocol; compare the versions"
        ) from e
