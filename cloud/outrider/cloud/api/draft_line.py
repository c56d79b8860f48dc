"""Reads the long request of a session, and acknowledges its messages on the session's stream.

An acknowledgement rides on the next commit, so that a step stays one write for each session; where none comes for a
while it has an event of its own. Knows neither HTTP headers nor owners' keys.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from outrider.models.errors import RequestError
from outrider.models.http.errors import Throttled, error_body
from outrider.models.wire.draft_stream import MessageReader
from outrider.models.wire.steady import SteadyPace

HOLD_S: Final = 0.08
"""For which an acknowledgement waits for a commit to ride on. A device waits 250 ms or two round trips and a step."""
_MOST_PACE: Final = 2.0
_AHEAD_S: Final = 1.0
"""A steady session's request is read at twice its pace at most, and a second of that at once."""
MAX_REFUSED: Final = 64
"""Messages dropped and not yet named on the stream. A device has fewer in flight."""

TakeMessage = Callable[[bytes], bool]
"""Takes one message; false where it was dropped, and is to be sent again. Raises RequestError where it is none."""


class DraftLine:
    """The long request of one session, which has one at most: messages are numbered in it. Lives on one event loop.

    pace: of its frames, in a steady session.
    """

    __slots__ = (
        *("_is_over", "_loop", "_newest_s", "_num", "_reading", "_refused", "_since_s", "_timer"),
        *("pace", "write"),
    )

    def __init__(self, pace: SteadyPace | None = None) -> None:
        self.pace = pace
        self._num = 0  # messages read
        self._newest_s = 0.0  # by the clock that measures; a loop's own may be that of the start of its turn
        self._since_s: float | None = None  # when the oldest was read that is not acknowledged
        self._refused: list[int] = []
        self._timer: asyncio.TimerHandle | None = None
        self._reading: asyncio.Timeout | None = None
        self._is_over = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self.write: Callable[[bytes], None] = lambda event: None
        """Writes to the session's stream, which sets it."""

    # -- the stream's side

    def news(self) -> str:
        """The fields of a commit that acknowledge what no event has yet; "" where there is nothing new."""
        return "" if self._since_s is None else f",{self._fields()}"

    def close(self) -> None:
        """The session has ended: so does the request."""
        self._is_over = True
        self.write = lambda event: None
        if self._timer is not None:
            self._timer.cancel()
        if self._reading is not None:
            assert self._loop is not None
            with suppress(RuntimeError):  # it ends already
                self._reading.reschedule(self._loop.time())

    def _fields(self) -> str:
        assert self._loop is not None
        held_ms = (time.perf_counter() - self._newest_s) * 1e3
        refused, self._refused, self._since_s = self._refused, [], None
        named = f',"refused":[{",".join(map(str, refused))}]' if refused else ""
        return f'"taken":[{self._num},{held_ms:.1f}]{named}'

    def _tell(self, error: RequestError | None = None) -> None:
        """Acknowledges by an event of its own."""
        rest = "" if error is None else f',"error":{error_body(error).model_dump_json(exclude_none=True)}'
        self.write(f'data: {{"type":"taken",{self._fields()}{rest}}}\n\n'.encode())

    def _on_time(self) -> None:
        """Of one timer for many messages: most were acknowledged by a commit meanwhile."""
        self._timer = None
        assert self._loop is not None
        if self._since_s is not None:
            left_s = self._since_s + HOLD_S - self._loop.time()
            if left_s > 0.0:
                self._timer = self._loop.call_later(left_s, self._on_time)
            else:
                self._tell()

    # -- the request's side

    async def read(self, receive: Receive, take: TakeMessage, *, finish_s: float, pause_s: float) -> None:
        """Reads the request to its end, or to the session's. Whatever ends it is also said on the stream.

        finish_s: for a message that has begun. pause_s: for each message that was dropped nothing is read for so long:
        who floods waits, by TCP's own means, and holds no memory here.

        Raises ClientDisconnect, and RequestError: of `take`; 409 `second_long_request`; 408 `request_timeout`; 429
        `rate_limited` for more dropped messages than can be named; 400 `invalid_request` for one that is cut.
        """
        if self._is_over:
            return
        if self._loop is not None:
            raise RequestError(
                "second_long_request", "the session has or had a long request; send single messages", status=409
            )
        self._loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as self._reading:
                await self._read(receive, take, finish_s, pause_s)
        except TimeoutError:
            if not self._is_over:
                raise self._failed(
                    RequestError("request_timeout", "a draft message did not arrive in time", status=408)
                ) from None
        except RequestError as error:
            raise self._failed(error) from None
        finally:
            self._reading = None

    def refuse(self, error: RequestError) -> RequestError:
        """For a request that is refused before it is read; says so on the stream, too."""
        if self._loop is None and not self._is_over:
            self._loop = asyncio.get_running_loop()
            self._newest_s = time.perf_counter()
            self._failed(error)
        return error

    async def _read(self, receive: Receive, take: TakeMessage, finish_s: float, pause_s: float) -> None:
        reader, is_within = MessageReader(is_steady=self.pace is not None), False
        assert self._loop is not None and self._reading is not None
        free_s = self._loop.time()  # when all that was read would have come at the most that is read
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            data = message.get("body", b"")
            bodies = reader.feed(data)
            num_refused = self._take(bodies, take)
            if not message.get("more_body"):
                return reader.end()
            if reader.is_within != is_within or (is_within and bodies):  # another message is unfinished than before
                is_within = reader.is_within
                self._reading.reschedule(self._loop.time() + finish_s if is_within else None)
            if num_refused:
                await asyncio.sleep(num_refused * pause_s)
            elif self.pace is not None:  # filler spends no budget
                took_s = len(data) / self.pace.up * self.pace.every_ms / 1e3 / _MOST_PACE
                free_s = max(free_s, self._loop.time() - _AHEAD_S) + took_s
                await asyncio.sleep(max(0.0, free_s - self._loop.time()))

    def _take(self, bodies: Iterable[bytes], take: TakeMessage) -> int:
        """How many of the messages were dropped."""
        assert self._loop is not None
        num_refused = 0
        for body in bodies:
            is_taken = take(body)
            self._num += 1
            if not is_taken:
                num_refused += 1
                self._refused.append(self._num)
                if len(self._refused) > MAX_REFUSED:
                    raise Throttled("rate_limited", "many more drafts than the budget; send fewer", retry_after_s=1)
            self._newest_s = time.perf_counter()
            if self._since_s is None:
                self._since_s = self._loop.time()
                if self._timer is None:
                    self._timer = self._loop.call_later(HOLD_S, self._on_time)
        return num_refused

    def _failed(self, error: RequestError) -> RequestError:
        if not self._is_over:
            self._tell(error)
            self._is_over = True
        return error
