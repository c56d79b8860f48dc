"""Carries events from the engine's thread to the event loop, with one wake-up for many events.

The engine calls a sink once per sequence and step. Waking the loop each time would cost a system call and a thread
switch on a core that the model may be using. So events are queued, and the loop is woken once for all that wait.

A mailbox hands its events to a reader that waits in `take`, or, once per wake-up, to the function given to `listen`: an
event stream then writes them without a switch of tasks.

A mailbox is emptied as events come, also while its client reads nothing: what then waits is text, and bounded by the
streams.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from outrider.cloud.seam import Event, Sink
from outrider.models.http.sse import Inbox

Delivery = tuple[int, Event]


class Bridge:
    """Carries events from any thread to the mailboxes of one event loop."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Mailbox, int, Event]] = deque()
        self._is_armed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def mailbox(self) -> Mailbox:
        """A new mailbox. Read it on the running loop, which must be the same at every call."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return Mailbox(self)

    def post(self, mailbox: Mailbox, tag: int, event: Event) -> None:
        """Called on the engine's thread: never blocks, never raises."""
        self._queue.append((mailbox, tag, event))
        # Safe without a lock: `_deliver` disarms before it empties the queue, so an event that finds the bridge armed
        # is still ahead of that emptying.
        if not self._is_armed:
            self._is_armed = True
            assert self._loop is not None
            with suppress(RuntimeError):  # the loop is closed: no reader is left
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_armed = False
        filled: dict[Mailbox, None] = {}
        while self._queue:
            mailbox, tag, event = self._queue.popleft()
            mailbox.add((tag, event))
            filled[mailbox] = None
        for mailbox in filled:
            mailbox.poke()


class Mailbox(Inbox[Delivery]):
    """The events of a request's sequences, in order, each with the tag of its sink."""

    __slots__ = ("_bridge", "_listener")

    def __init__(self, bridge: Bridge) -> None:
        super().__init__()
        self._bridge = bridge
        self._listener: Callable[[list[Delivery]], None] | None = None

    def sink(self, tag: int = 0) -> Sink:
        """A sink whose events arrive here with `tag`."""
        return partial(self._bridge.post, self, tag)

    def listen(self, listener: Callable[[list[Delivery]], None]) -> None:
        """Hands over what has arrived, and from now on what arrives, all of a wake-up in one call on the loop.

        `listener` must not raise. It is called no more once the mailbox is closed, and nobody may call `take`.
        """
        self._listener = listener
        self.poke()

    def close(self) -> None:
        """The reader is gone, and with it the listener."""
        self._listener = None
        super().close()

    def poke(self) -> None:
        """Hands events to the listener, or lets a waiting `take` return, with nothing if there is nothing."""
        if self._listener is not None:
            if self._items and not self.is_closed:
                items, self._items = self._items, []
                self._listener(items)
        else:
            super().poke()
