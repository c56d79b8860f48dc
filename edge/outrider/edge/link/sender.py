"""Sends draft messages, several in flight, and waits for none. Whether they go one by one or up one long request is the
client's choice (`VerifierClient.post_drafts`).

A message carries only nodes that no other carries, so a lost one is reported and the nodes are sent again. While too
many are in flight, nothing is sent: what would have been is in the next message.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from outrider.models.client.messages import DraftMessage
from outrider.models.errors import OutriderError


class Posts(Protocol):
    """Destination of drafts: `VerifierClient`, or a wrapper that injects faults."""

    async def post_drafts(self, session: str, message: DraftMessage) -> float | None:
        """Delivers one message or raises an OutriderError. The ms for which its acknowledgement was held back."""


class DraftSender:
    """Fire and forget, for one generation. max_in_flight bounds connections and memory, and may be changed.

    on_round_trip: called with the ms that a delivered message took, less those for which the server held its answer.
    on_free: called when a message may be sent again. num_sent: messages sent; num_failed: those not delivered.
    """

    def __init__(
        self,
        on_round_trip: Callable[[float], None],
        max_in_flight: int = 8,
        clock: Callable[[], float] = time.perf_counter,
        on_free: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_round_trip = on_round_trip
        self._on_free = on_free
        self.max_in_flight = max_in_flight
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._dropped: set[asyncio.Task[None]] = set()  # cancelled, not yet ended
        self._was_full = False
        self.num_sent = 0
        self.num_failed = 0

    @property
    def is_free(self) -> bool:
        """Whether a message may be sent now; if not, `on_free` is called later."""
        self._was_full = self._was_full or len(self._tasks) >= self.max_in_flight
        return len(self._tasks) < self.max_in_flight

    def send(
        self, posts: Posts, session: str, message: DraftMessage, on_lost: Callable[[], None] = lambda: None
    ) -> None:
        """Sends now; `is_free` must be true. on_lost: called if the message does not arrive, unless it was dropped."""
        assert self.is_free, "too many messages are in flight"
        self.num_sent += 1
        task = asyncio.create_task(self._post(posts, session, message, on_lost))
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def drop(self) -> None:
        """Cancels messages in flight: their session is lost, and they would hold back those of the next."""
        self.num_failed += sum(not task.done() for task in self._tasks)
        self._cancel()

    async def aclose(self) -> None:
        """Cancels messages in flight: the text is over."""
        self._cancel()
        self._on_free = lambda: None  # the text's, which has this
        await asyncio.gather(*self._dropped, return_exceptions=True)

    def _cancel(self) -> None:
        self._was_full = False
        for task in self._tasks:
            task.cancel()
        self._dropped |= self._tasks
        self._tasks = set()

    async def _post(self, posts: Posts, session: str, message: DraftMessage, on_lost: Callable[[], None]) -> None:
        started = self._clock()
        try:
            held_ms = await posts.post_drafts(session, message) or 0.0
        except OutriderError:
            # Harmless: only hints are lost. If the endpoint is gone, the event stream reports it.
            self.num_failed += 1
            on_lost()
        else:
            self._on_round_trip((self._clock() - started) * 1e3 - held_ms)

    def _done(self, task: asyncio.Task[None]) -> None:
        is_own = task in self._tasks
        self._tasks.discard(task)
        self._dropped.discard(task)
        if is_own and self._was_full and not task.cancelled():
            self._was_full = False
            self._on_free()
