"""Streams the events of a steady session: in frames of one size at a fixed pace, full or not (`wire.steady`)."""

from __future__ import annotations

from outrider.cloud.api.stream import SessionStream
from outrider.models.wire.steady import OPENING_BYTES, comment, down_frame


class SteadyStream(SessionStream):
    """The response of a session whose `open` has `steady`. A frame is never late because of what is in it."""

    def _opening(self) -> bytes:
        event = super()._opening()
        return event + comment(-len(event) % OPENING_BYTES)

    def _begin(self) -> None:
        assert self._opened.steady is not None
        self._size, self._every_s = self._opened.steady.down, self._opened.steady.every_ms / 1e3
        self._due_s = self._written_s
        self._next()

    def _next(self) -> None:
        # A frame that the loop was late for does not come twice as soon.
        self._due_s = max(self._due_s + self._every_s, self._loop.time())
        self._timer = self._loop.call_at(self._due_s, self._frame)

    def _frame(self) -> None:
        if self._sending is None:  # else the client reads too slowly, and gets fewer
            self._start(down_frame(self._backlog, self._size))
            if self._is_last():
                return
        self._next()

    def _write(self, chunk: bytes) -> None:
        self._hold(chunk)

    def _waiting(self) -> bytes:
        return b""
