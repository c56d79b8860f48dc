"""Sends the drafts of one session up one long request (`wire/draft_stream`), and takes their acknowledgements.

httpx shows no answer before the request's body ends, so acknowledgements come down the session's own stream. Where none
comes in time (a proxy may wait for the end of a body, or refuse one in chunks), the request is given up: what was not
acknowledged counts as lost, and the rest of the text goes in single messages. In a steady session it begins at once,
and goes in frames (`wire/steady`). Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, NamedTuple

from outrider.models.client.errors import EndpointLost, ProtocolBroken
from outrider.models.client.messages import ByteCounts
from outrider.models.errors import OutriderError
from outrider.models.wire.draft_stream import framed
from outrider.models.wire.protocol import Commit, Taken
from outrider.models.wire.steady import SteadyPace

LEAST_WAIT_S: Final = 0.25
_LATE_S: Final = 0.05
"""A timer that is later than this waits as long again: the loop stood still, and the answer may be there unread."""
_READY_S: Final = 0.002
_END: Final = len(b"0\r\n\r\n")


_now_s: Final = time.perf_counter
"""For what is measured. A loop's own time may be that of the start of its turn, as uvloop's is."""


class _Sent(NamedTuple):
    """A message that is not acknowledged. posted_s: when it was handed over."""

    number: int
    posted_s: float
    arrived: asyncio.Future[float]


class LongRequest:
    """The long request of one session. Belongs to one event loop.

    start: called at the first message with the body, in pieces; returns once the answer is there, raises OutriderError.
    wire: counts bytes. rtt_s, step_s: what is known of a round trip and of the server's step; both are followed.
    on_unusable: called where the way to the server seems to pass no such request, with whether it was refused, or else
    nothing was acknowledged while the session's stream went on. pace: of a steady session's frames.
    """

    def __init__(
        self,
        url: str,
        start: Callable[[AsyncIterator[bytes]], Coroutine[Any, Any, object]],
        wire: ByteCounts,
        *,
        rtt_s: float,
        step_s: float,
        on_unusable: Callable[[bool], None],
        pace: SteadyPace | None = None,
    ) -> None:
        self._url = url
        self._start = start
        self._wire = wire
        self._rtt_s, self._step_s = rtt_s, step_s
        self._on_unusable = on_unusable
        self._loop = asyncio.get_running_loop()
        self._unsent = bytearray()
        self._wake = asyncio.Event()
        self._num = 0
        self.num_taken = 0
        """Messages that were acknowledged."""
        self._waiting: deque[_Sent] = deque()
        self._sent_s: dict[int, float] = {}  # when the last message of a piece went, by its number
        self._began_s = self._heard_s = float("inf")  # first message; newest event of the session's stream
        self._timer: asyncio.TimerHandle | None = None
        self._is_ending = False
        self.task: asyncio.Task[None] | None = None
        """Runs from the first message to the request's end."""
        self.is_open = True
        """Whether it takes messages; false once it has failed or ended."""
        self.pace = pace
        self._gone: deque[tuple[int, int]] = deque()  # messages in frames: where each ends in all bytes, its number
        self._num_framed = self._num_posted = 0  # bytes
        self.on_frame: Callable[[], None] = lambda: None
        """In a steady session: called when there is room for a message, which the poster may hand over at once."""
        self.has_room = pace is None
        """Whether a message would go now."""
        if pace is not None:
            self.task = self._loop.create_task(self._run())

    async def post(self, body: bytes) -> float:
        """Sends a message; returns once it is acknowledged, with the ms for which that was held back.

        Raises EndpointLost where the message was dropped, or may not have arrived.
        """
        if not self.is_open:
            raise EndpointLost(f"{self._url}: the long request of a steady session has failed")
        if self.task is None:
            self.task = self._loop.create_task(self._run())
        self._num += 1
        self._unsent += (message := framed(body))
        if self.pace is not None:
            self.has_room = False
            self._num_posted += len(message)
            self._gone.append((self._num_posted, self._num))
        sent = _Sent(self._num, _now_s(), self._loop.create_future())
        self._waiting.append(sent)
        self._wake.set()
        try:
            return await sent.arrived
        finally:
            del sent  # else its error, whose traceback has this frame, would have itself

    def follow(self, event: Commit | Taken) -> None:
        """Takes what an event of the session's stream says. Raises ProtocolBroken where that cannot be."""
        self._heard_s = _now_s()
        if isinstance(event, Commit) and event.step_ms is not None:
            self._step_s = event.step_ms / 1e3
        if event.taken is None:
            return
        num, held_ms = event.taken
        if not self.num_taken <= num <= self._num or not 0.0 <= held_ms < float("inf"):
            raise ProtocolBroken(
                self._url, f"it acknowledges {num} draft messages; expected {self.num_taken} to {self._num}"
            )
        self.num_taken = num
        self._acknowledge(num, held_ms / 1e3, frozenset(event.refused))
        if isinstance(event, Taken) and event.error is not None:
            self._close(EndpointLost(f"{self._url}: {event.error.code}: the server ended the long request"))
            self._is_ending = True
            self._wake.set()

    def end(self, *, is_cut: bool = False) -> None:
        """The session is over: ends the body, which the server answers. is_cut: ends the request at once."""
        self._is_ending = True
        self._close(EndpointLost(f"{self._url}: unknown_session: it is over"))
        if is_cut and self.task is not None:
            self.task.cancel()
        self._wake.set()

    def _fail(self, error: OutriderError) -> None:
        """The request has failed, or is given up."""
        if not self.is_open:
            return
        is_refused = not isinstance(error, EndpointLost) or error.status is not None
        if (
            self.pace is None
            and not self.num_taken
            and (is_refused or self._began_s + self._rtt_s < self._heard_s < float("inf"))
        ):
            self._on_unusable(is_refused)
        self._close(error)
        # Frames go on, so that nobody sees that drafts do not.
        if self.pace is None and self.task is not None and self.task is not asyncio.current_task():
            self.task.cancel()

    def _close(self, error: OutriderError) -> None:
        self.is_open = False
        if self._timer is not None:
            self._timer.cancel()
        while self._waiting:
            self._settle(self._waiting.popleft(), error)

    @staticmethod
    def _settle(sent: _Sent, result: float | OutriderError) -> None:
        if sent.arrived.done():
            return  # its poster was cancelled
        if isinstance(result, float):
            sent.arrived.set_result(result)
        else:
            sent.arrived.set_exception(result)

    def _acknowledge(self, num: int, held_s: float, refused: frozenset[int]) -> None:
        now_s, sent_s = _now_s(), 0.0
        for number in [each for each in self._sent_s if each <= num]:
            sent_s = self._sent_s.pop(number)
        if sent_s:  # the last message of a piece; of others only the piece's time would be known
            self._rtt_s = max(0.9 * self._rtt_s, now_s - sent_s - held_s)
        rtt_s = max(0.0, now_s - sent_s - held_s) if sent_s else self._rtt_s
        while self._waiting and self._waiting[0].number <= num:
            sent = self._waiting.popleft()
            if sent.number in refused:
                self._settle(sent, EndpointLost(f"{self._url}: the message was over the budget of drafts", status=429))
            else:
                self._settle(sent, (now_s - sent.posted_s - rtt_s) * 1e3)

    async def _run(self) -> None:
        try:
            await self._start(self._pieces() if self.pace is None else self._frames(self.pace))
        except OutriderError as error:
            self._fail(error)
        else:
            self._fail(EndpointLost(f"{self._url}: the server ended the long request"))

    async def _pieces(self) -> AsyncIterator[bytes]:
        """All that waits, in one write each time."""
        while True:
            if self._unsent:
                piece, self._unsent = bytes(self._unsent), bytearray()
                self._count(len(piece))
                self._went(self._num)
                yield piece
            elif self._is_ending:
                self._wire.headers_up += _END
                return
            else:
                self._wake.clear()
                await self._wake.wait()

    async def _frames(self, pace: SteadyPace) -> AsyncIterator[bytes]:
        """One after the other, full or not."""
        due_s = self._loop.time()
        while not self._is_ending:
            await self._until(due_s - _READY_S)  # what is in a frame does not delay it
            if not self._unsent and self.is_open and not self._is_ending:
                self.has_room = True
                self.on_frame()
                await asyncio.sleep(0)  # for what has just been handed over to arrive here
                self.has_room = False
            await self._until(due_s)
            piece = bytes(self._unsent[: pace.up])
            del self._unsent[: pace.up]
            self._num_framed += len(piece)
            number = 0
            while self._gone and self._gone[0][0] <= self._num_framed:
                number = self._gone.popleft()[1]
            if number:
                self._went(number)
            self._count(pace.up)
            yield piece.ljust(pace.up, b"\x00")
            due_s = max(due_s + pace.every_ms / 1e3, self._loop.time())
        self._wire.headers_up += _END

    async def _until(self, due_s: float) -> None:
        """Or until the request ends."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(due_s):
                while not self._is_ending:
                    self._wake.clear()
                    await self._wake.wait()

    def _count(self, num_bytes: int) -> None:
        self._wire.body_up += num_bytes
        self._wire.headers_up += len(f"{num_bytes:x}\r\n\r\n")

    def _went(self, number: int) -> None:
        """The last message of a piece is on its way."""
        self._sent_s[number] = now_s = _now_s()
        self._began_s = min(self._began_s, now_s)
        if self._timer is None and self.is_open:
            self._arm()

    def _wait_s(self) -> float:
        """For an acknowledgement; in frames it may wait for a commit, and for a frame in each direction."""
        paced_s = 0.0 if self.pace is None else LEAST_WAIT_S + 2.0 * self.pace.every_ms / 1e3
        return max(LEAST_WAIT_S, 2.0 * self._rtt_s + self._step_s) + paced_s

    def _arm(self) -> None:
        """Looks when the oldest piece that is not acknowledged is due."""
        due_s = next(iter(self._sent_s.values())) + self._wait_s()
        self._timer = self._loop.call_later(max(0.0, due_s - _now_s()), self._look, due_s)

    def _look(self, due_s: float) -> None:
        self._timer = None
        if not self._sent_s or not self.is_open:
            return
        now_s = _now_s()
        if now_s < next(iter(self._sent_s.values())) + self._wait_s():
            self._arm()
        elif now_s - due_s > _LATE_S:
            self._timer = self._loop.call_later(_LATE_S, self._look, now_s + _LATE_S)
        else:
            self._fail(EndpointLost(f"{self._url}: no draft message of the long request was acknowledged in time"))
