"""Hands what happens to a call's texts to the one that answers it. Everything on one event loop."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

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
