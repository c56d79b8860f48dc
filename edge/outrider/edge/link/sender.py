"""Sends draft messages, several in flight, and waits for none.

A message repeats the whole belief, so the next one makes up for a lost one; when too many are in flight, only the
newest waiting message has to be sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from outrider.models.errors import OutriderError
from outrider.models.protocol import DraftRequest


class Posts(Protocol):
    """Destination of drafts: `CloudClient`, or a wrapper that injects faults."""

    async def post_drafts(self, session: str, request: DraftRequest) -> None:
        """Delivers one message or raises an OutriderError."""
        ...


class DraftSender:
    """Fire and forget, for one generation. max_in_flight bounds connections and memory.

    on_round_trip: called with the ms that a delivered message took. num_sent: messages sent; num_failed: those not
    delivered.
    """

    def __init__(
        self,
        on_round_trip: Callable[[float], None],
        max_in_flight: int = 8,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._on_round_trip = on_round_trip
        self._max_in_flight = max_in_flight
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._dropped: set[asyncio.Task[None]] = set()  # cancelled, not yet ended
        self._waiting: tuple[Posts, str, DraftRequest] | None = None
        self.num_sent = 0
        self.num_failed = 0

    def send(self, posts: Posts, session: str, request: DraftRequest) -> None:
        """Sends now or, with too many in flight, after the next answer, unless a newer message replaces this one."""
        if len(self._tasks) >= self._max_in_flight:
            self._waiting = (posts, session, request)
            return
        self.num_sent += 1
        task = asyncio.create_task(self._post(posts, session, request))
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def drop(self) -> None:
        """Cancels messages in flight: their session is lost, and they would hold back those of the next."""
        self.num_failed += sum(not task.done() for task in self._tasks)
        self._cancel()

    async def aclose(self) -> None:
        """Cancels messages in flight: the text is over."""
        self._cancel()
        await asyncio.gather(*self._dropped, return_exceptions=True)

    def _cancel(self) -> None:
        self._waiting = None
        for task in self._tasks:
            task.cancel()
        self._dropped |= self._tasks
        self._tasks = set()

    async def _post(self, posts: Posts, session: str, request: DraftRequest) -> None:
        started = self._clock()
        try:
            await posts.post_drafts(session, request)
        except OutriderError:
            # Harmless: only a hint is lost. If the endpoint is gone, the event stream reports it.
            self.num_failed += 1
        else:
            self._on_round_trip((self._clock() - started) * 1e3)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._dropped.discard(task)
        if self._waiting is not None and not task.cancelled():
            waiting, self._waiting = self._waiting, None
            self.send(*waiting)
