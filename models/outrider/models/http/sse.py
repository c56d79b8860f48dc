"""Streams server-sent events: the bytes of an event, the inbox that a stream waits on, and the response that sends
events until the client leaves. Everything on one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, Generic, TypeVar

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Item = TypeVar("Item")


class Inbox(Generic[Item]):
    """Items in order; `take` waits for them."""

    __slots__ = ("_items", "_waiter", "is_closed")

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._waiter: asyncio.Future[None] | None = None
        self.is_closed = False

    def add(self, item: Item) -> None:
        """Adds an item. Call `poke` when the last one is in."""
        self._items.append(item)

    def put(self, item: Item) -> None:
        """Adds an item and hands it over."""
        self._items.append(item)
        self.poke()

    def poke(self) -> None:
        """Lets a waiting `take` return, with nothing if there is nothing."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """The reader is gone: `take` returns at once from now on."""
        self.is_closed = True
        self.poke()

    async def take(self) -> list[Item]:
        """Everything that has arrived; waits until there is something. Empty after a poke or when closed."""
        if not self._items and not self.is_closed:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items, self._items = self._items, []
        return items


KEEP_ALIVE: Final = b":\n\n"
"""A comment: readers skip it, proxies keep the connection, and a vanished client is noticed."""

HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),  # some clients take text for Latin-1 where nothing is said
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]
"""Of every event stream's response."""
MOST_WAITING: Final = 1 << 20
"""Bytes of a stream that wait for its client: no client has the server hold more of its own accord."""


Reader = Inbox[Any]
"""What the chunks of a stream wait on."""


def encode(message: BaseModel) -> bytes:
    """A message as an event; fields that are None are left out."""
    return b"data: %s\n\n" % message.model_dump_json(exclude_none=True).encode()


class EventStream(Response):
    """Streams what `chunks` yields until it ends or the client leaves.

    When the client leaves, `reader` is closed, on which `chunks` waits. `on_close` is called once in any case. After
    `keep_alive_s` without a write the reader is poked; `chunks` should then yield KEEP_ALIVE: nothing is silent longer.
    hold: takes the bytes that wait for the client beyond MOST_WAITING, and gives back negative ones; where it returns
    False, the stream is cut.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        reader: Reader,
        on_close: Callable[[], None],
        *,
        keep_alive_s: float,
        hold: Callable[[int], bool] = lambda num_bytes: num_bytes <= 0,
    ) -> None:
        self._chunks = chunks
        self._hold = hold
        self._num_waiting = self._num_held = 0
        self._reader = reader
        self._on_close = on_close
        self._keep_alive_s = keep_alive_s
        self.status_code = 200
        self.background = None
        self.raw_headers = list(HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        waiting = Inbox[bytes]()
        taking = asyncio.get_running_loop().create_task(self._take(waiting, asyncio.current_task()))
        self._written()
        self._arm(self._keep_alive_s)
        try:
            async with closed_on_disconnect(self._reader, receive):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                while chunks := await waiting.take():
                    for chunk in chunks:
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
                        self._written()
                        self._count(-len(chunk))
                await taking  # raises what `chunks` did
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            taking.cancel()
            self._timer.cancel()
            self._count(-self._num_waiting)
            self._on_close()

    async def _take(self, waiting: Inbox[bytes], writer: asyncio.Task[None] | None) -> None:
        """Takes chunks as they come, also while the client does not read: events in the reader would be larger, and
        after a minute their chunks a second's work at once.
        """
        assert writer is not None
        try:
            async for chunk in self._chunks:
                if not self._count(len(chunk)):
                    writer.cancel()  # the server then closes the connection
                    return
                waiting.put(chunk)
        finally:
            waiting.close()

    def _count(self, num_bytes: int) -> bool:
        """Of those that wait. False for too many."""
        self._num_waiting += num_bytes
        held = max(0, self._num_waiting - MOST_WAITING)
        if held != self._num_held:
            if not self._hold(held - self._num_held):
                return False
            self._num_held = held
        return True

    def _written(self) -> None:
        self._written_s = asyncio.get_running_loop().time()

    def _arm(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        left_s = self._written_s + self._keep_alive_s - asyncio.get_running_loop().time()
        if left_s <= 0.0:
            self._reader.poke()
            left_s = self._keep_alive_s
        self._arm(left_s)


async def until_gone(receive: Receive) -> None:
    """Returns when the client has left, or the response is complete. The request's body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def closed_on_disconnect(reader: Reader, receive: Receive) -> AsyncIterator[None]:
    """Closes `reader` if the client leaves while inside. The request's body must have been read before."""

    async def watch() -> None:
        await until_gone(receive)
        reader.close()

    watcher = asyncio.get_running_loop().create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
