"""Bounds what one client can take: body size, requests per second, tokens per minute, open sequences.

Knows clients only as opaque bytes. The engine bounds the rest: prompt length, queue, blocks.
"""

from __future__ import annotations

import asyncio
import math
import threading
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
        self._others: dict[float, RateLimiter] = {}  # by rate: key files name few
        # Owner -> level and when that was, the oldest first.
        self._levels: OrderedDict[bytes, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._levels)

    def spend(self, owner: bytes, rate_per_s: float | None = None) -> None:
        """Takes one request from the owner's bucket. rate_per_s: the owner's own; None: as all others.

        Raises RequestError 429 `rate_limited`.
        """
        if rate_per_s is not None and rate_per_s != self._rate_per_s:
            if rate_per_s not in self._others:
                self._others[rate_per_s] = RateLimiter(rate_per_s, self._clock)
            return self._others[rate_per_s].spend(owner)
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


class Pacer:
    """Spaces a client's requests: `burst` at once, then `rate_per_s`; the others wait, so that none of many cheap ones
    keeps the event loop from other clients. Forgets clients that could send a full burst again.

    The generic cell rate algorithm (ITU-T I.371): a client has the time at which all of its requests are paid.
    """

    def __init__(self, rate_per_s: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._gap_s = 1.0 / rate_per_s
        self._burst_s = burst / rate_per_s
        self._clock = clock
        self._paid_at_s: OrderedDict[bytes, float] = OrderedDict()  # the least recently seen first

    def __len__(self) -> int:
        return len(self._paid_at_s)

    def wait_s(self, client: bytes, most_s: float) -> float | None:
        """How long the client's next request waits, which is then counted; None, not counted, beyond `most_s`."""
        now = self._clock()
        while self._paid_at_s and (next(iter(self._paid_at_s.values())) <= now or len(self._paid_at_s) > MAX_BUCKETS):
            self._paid_at_s.popitem(last=False)
        paid_at_s = max(now, self._paid_at_s.pop(client, now)) + self._gap_s
        wait_s = max(0.0, paid_at_s - now - self._burst_s)
        is_counted = wait_s <= most_s
        self._paid_at_s[client] = paid_at_s if is_counted else paid_at_s - self._gap_s
        return wait_s if is_counted else None


class TokenBudget:
    """A bucket of tokens per owner, which fills in a minute. Any thread may call it.

    A request is admitted once its prompt fits what is there, or the bucket is full. Tokens that its text then takes
    may exceed that: the debt is paid before the owner's next request. Forgets buckets that are full again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # Owner -> level, when that was, tokens per minute; the least recently used first.
        self._levels: OrderedDict[bytes, tuple[float, float, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._levels)

    def admit(self, owner: bytes, num_tokens: int, per_minute: int) -> None:
        """Takes a prompt's tokens. Raises RequestError 429 `tokens_exhausted`, and takes none, if it does not fit."""
        with self._lock:
            now = self._clock()
            level = self._level(owner, now, per_minute)
            missing = min(num_tokens, per_minute) - level
            self._put(owner, level if missing > 0 else level - num_tokens, now, per_minute)
        if missing > 0:
            wait_s = max(1, math.ceil(missing * 60.0 / per_minute))
            raise Throttled(
                "tokens_exhausted",
                f"this client has used its {per_minute} tokens per minute; retry in {wait_s} s",
                retry_after_s=wait_s,
            )

    def take(self, owner: bytes, num_tokens: int, per_minute: int) -> None:
        """Takes tokens that a text used, or gives back where `num_tokens` is negative."""
        with self._lock:
            now = self._clock()
            level = self._level(owner, now, per_minute) - num_tokens
            self._put(owner, min(float(per_minute), level), now, per_minute)

    def _level(self, owner: bytes, now: float, per_minute: int) -> float:
        level, then, capacity = self._levels.get(owner, (float(per_minute), now, per_minute))
        level += per_minute - capacity if level >= capacity else 0  # a new limit starts full where the old one was
        return min(float(per_minute), level + (now - then) * per_minute / 60.0)

    def _put(self, owner: bytes, level: float, now: float, per_minute: int) -> None:
        self._levels[owner] = (level, now, per_minute)
        self._levels.move_to_end(owner)
        while self._levels:
            level, then, capacity = next(iter(self._levels.values()))
            if level + (now - then) * capacity / 60.0 < capacity and len(self._levels) <= MAX_BUCKETS:
                return
            self._levels.popitem(last=False)


class Slots:
    """Counts the sequences that each owner has open, at most `max_each`. Lives on one event loop.

    own_limit: an owner's own limit, None for `max_each`.
    """

    def __init__(self, max_each: int, own_limit: Callable[[bytes], int | None] = lambda owner: None) -> None:
        self._max_each = max_each
        self._own_limit = own_limit
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

    def limit(self, owner: bytes) -> int:
        """Sequences that the owner may have open."""
        own = self._own_limit(owner)
        return self._max_each if own is None else own

    def take(self, owner: bytes, count: int = 1) -> None:
        """Takes `count` slots. Raises RequestError 429 `too_many_sessions`, and takes none, when too few are free."""
        limit = self.limit(owner)
        if self._taken[owner] + count > limit:
            raise RequestError(
                "too_many_sessions",
                f"this client has {self._taken[owner]} open sequences and the request needs {count} more; at most "
                f"{limit} may be open. End some first",
                status=429,
            )
        self._taken[owner] += count

    async def wait(self, owner: bytes, *, max_waiting: int | None = None) -> None:
        """Takes one slot as soon as one is free; first come, first served within the owner.

        Cancelled, it takes none. Raises RequestError 429 `too_many_sessions` if `max_waiting` others wait already.
        """
        queue = self._waiting.get(owner)
        if queue is None and self._taken[owner] < self.limit(owner):
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
        while queue and self._taken[owner] < self.limit(owner):
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
