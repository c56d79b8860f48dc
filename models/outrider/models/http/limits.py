"""Bounds what one client can take: body size, requests per second, open sequences.

Knows clients only as opaque bytes. The engine bounds the rest: prompt length, queue, blocks.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.models.errors import RequestError
from outrider.models.http.errors import Throttled

BURST_S: Final = 2.0
"""A burst may hold the requests of this many seconds."""


class BodyLimit:
    """ASGI layer that refuses bodies over `max_bytes` with 413: by their Content-Length, or as soon as the chunks
    received exceed it.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "DELETE"):
            return await self._app(scope, receive, send)
        for name, value in scope["headers"]:
            if name == b"content-length" and int(value) > self._max_bytes:
                raise body_too_large(self._max_bytes)
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise body_too_large(self._max_bytes)
            return message

        await self._app(scope, counted, send)


def body_too_large(max_bytes: int) -> RequestError:
    """The error 413 of a body over `max_bytes`."""
    return RequestError("body_too_large", f"the body is larger than {max_bytes} bytes; send less at a time", status=413)


MAX_BUCKETS: Final = 65_536
"""Owners whose rates are known at a time: without keys anybody can be many."""


class RateLimiter:
    """A token bucket per owner; `rate_per_s` 0 is no limit. Forgets buckets that are full again."""

    def __init__(self, rate_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate_per_s = rate_per_s
        self._capacity = max(1.0, rate_per_s * BURST_S)
        self._clock = clock
        # Owner -> level and when that was, the oldest first.
        self._levels: OrderedDict[bytes, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._levels)

    def spend(self, owner: bytes) -> None:
        """Takes one request from the owner's bucket. Raises RequestError 429 `rate_limited`."""
        if not self._rate_per_s:
            return
        now = self._clock()
        self._forget_full(now)
        level, then = self._levels.pop(owner, (self._capacity, now))
        level = min(self._capacity, level + (now - then) * self._rate_per_s)
        is_enough = level >= 1.0
        self._levels[owner] = (level - 1.0 if is_enough else level, now)
        if not is_enough:
            wait_s = math.ceil((1.0 - level) / self._rate_per_s)
            raise Throttled(
                "rate_limited",
                f"more than {self._rate_per_s:g} requests per second; retry in {wait_s} s",
                retry_after_s=wait_s,
            )

    def _forget_full(self, now: float) -> None:
        full_s = self._capacity / self._rate_per_s
        while self._levels:
            _, then = next(iter(self._levels.values()))
            if now - then < full_s and len(self._levels) < MAX_BUCKETS:
                return
            self._levels.popitem(last=False)


class Slots:
    """Counts the sequences that each owner has open, at most `max_each`. Lives on one event loop."""

    def __init__(self, max_each: int) -> None:
        self._max_each = max_each
        self._taken: Counter[bytes] = Counter()
        self._waiting: dict[bytes, deque[asyncio.Future[None]]] = {}

    @property
    def num_taken(self) -> int:
        """Open sequences of all owners."""
        return self._taken.total()

    @property
    def num_waiting(self) -> int:
        """Calls of `wait` that have no slot yet."""
        return sum(map(len, self._waiting.values()))

    def take(self, owner: bytes, count: int = 1) -> None:
        """Takes `count` slots. Raises RequestError 429 `too_many_sessions`, and takes none, when too few are free."""
        if self._taken[owner] + count > self._max_each:
            raise RequestError(
                "too_many_sessions",
                f"this client has {self._taken[owner]} open sequences and the request needs {count} more; at most "
                f"{self._max_each} may be open. End some first",
                status=429,
            )
        self._taken[owner] += count

    async def wait(self, owner: bytes, *, max_waiting: int | None = None) -> None:
        """Takes one slot as soon as one is free; first come, first served within the owner.

        Cancelled, it takes none. Raises RequestError 429 `too_many_sessions` if `max_waiting` others wait already.
        """
        queue = self._waiting.get(owner)
        if queue is None and self._taken[owner] < self._max_each:
            self._taken[owner] += 1
            return
        queue = self._waiting.setdefault(owner, deque())
        if max_waiting is not None and len(queue) >= max_waiting:
            raise RequestError(
                "too_many_sessions",
                f"{len(queue)} calls of this client wait for a free sequence; at most {max_waiting} may. Retry when "
                "some have ended",
                status=429,
            )
        turn = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(owner, turn)
            else:
                self.release(owner)  # cancelled after its turn had come
            raise

    def release(self, owner: bytes, count: int = 1) -> None:
        """Frees `count` slots; calls that wait take them at once."""
        self._taken[owner] -= count
        queue = self._waiting.get(owner)
        while queue and self._taken[owner] < self._max_each:
            turn = queue.popleft()
            if not turn.cancelled():
                self._taken[owner] += 1
                turn.set_result(None)
        if queue is not None and not queue:
            del self._waiting[owner]
        if not self._taken[owner]:
            del self._taken[owner]

    def _forget(self, owner: bytes, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(owner, deque())
        if turn in queue:  # `release` drops a cancelled turn too
            queue.remove(turn)
            if not queue:
                del self._waiting[owner]
