"""Gives turns at something scarce: one per owner at a time, so that owners share it evenly."""

from __future__ import annotations

import asyncio
from collections import Counter


class Turns:
    """At most `max_together` turns at once, one per owner; first come, first served. Lives on one event loop."""

    def __init__(self, max_together: int = 1) -> None:
        self._free = asyncio.Semaphore(max_together)
        self._own: dict[bytes, asyncio.Lock] = {}
        self._num_users: Counter[bytes] = Counter()

    @property
    def is_unused(self) -> bool:
        """Whether nobody has a turn or waits for one."""
        return not self._own and not self._num_users

    async def take(self, owner: bytes) -> None:
        """Waits for a turn; `release` ends it. Cancelled, it takes none."""
        self._num_users[owner] += 1
        own = self._own.setdefault(owner, asyncio.Lock())
        has_own = False
        try:
            await own.acquire()
            has_own = True
            await self._free.acquire()
        except BaseException:
            if has_own:
                own.release()
            self._forget(owner)
            raise

    def release(self, owner: bytes) -> None:
        """Ends the owner's turn."""
        self._free.release()
        self._own[owner].release()
        self._forget(owner)

    def _forget(self, owner: bytes) -> None:
        self._num_users[owner] -= 1
        if not self._num_users[owner]:
            del self._num_users[owner], self._own[owner]
