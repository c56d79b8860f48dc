"""Bounds what one client can take: requests per second, tokens per minute, open sequences.

Knows clients only as opaque bytes. The engine bounds the rest: prompt length, queue, blocks.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Final

from outrider.models.errors import RequestError
from outrider.models.http.errors import FieldError, Throttled
from outrider.models.process.by_owner import Shares

BURST_S: Final = 2.0
"""A burst may hold the requests of this many seconds."""


MAX_BUCKETS: Final = 65_536
"""Owners whose levels are known at a time: without keys anybody can be many."""


class Buckets:
    """Token buckets by key: each fills by so many units a second, up to its capacity. Any thread may call it.

    Forgets buckets that are full again, and the least recently used beyond `most`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, most: int = MAX_BUCKETS) -> None:
        self._clock = clock
        self._most = most
        self._lock = threading.Lock()
        # Level, when that was, units per second, capacity; the least recently used first.
        self._levels: OrderedDict[Hashable, tuple[float, float, float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._levels)

    def spend(self, key: Hashable, count: float, per_s: float, capacity: float, least: float | None = None) -> float:
        """The bucket's level. Takes `count` units, where that is at least `least`: then the level may fall below 0.

        least: None takes in any case. A negative count gives back. A bucket that was full is full after its limits have
        changed, too.
        """
        with self._lock:
            now = self._clock()
            level, then, _, before = self._levels.get(key, (capacity, now, per_s, capacity))
            level = min(capacity, level + (capacity - before if level >= before else 0.0) + (now - then) * per_s)
            left = min(capacity, level - count) if least is None or level >= least else level
            self._levels[key] = left, now, per_s, capacity
            self._levels.move_to_end(key)
            while self._levels:
                left, then, rate, most = next(iter(self._levels.values()))
                if left + (now - then) * rate < most and len(self._levels) <= self._most:
                    break
                self._levels.popitem(last=False)
            return level


class RateLimiter(Buckets):
    """Requests per second of each owner; `rate_per_s` 0 is no limit."""

    def __init__(self, rate_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._rate_per_s = rate_per_s

    def admit(self, owner: bytes, rate_per_s: float | None = None) -> None:
        """Takes one request from the owner's bucket. rate_per_s: the owner's own; None: as all others.

        Raises RequestError 429 `rate_limited`.
        """
        per_s = self._rate_per_s if rate_per_s is None else rate_per_s
        if not per_s:
            return
        level = self.spend(owner, 1.0, per_s, max(1.0, per_s * BURST_S), 1.0)
        if level < 1.0:
            wait_s = math.ceil((1.0 - level) / per_s)
            raise Throttled(
                "rate_limited", f"more than {per_s:g} requests per second; retry in {wait_s} s", retry_after_s=wait_s
            )


class Pacer(Buckets):
    """Spaces a client's requests: `burst` at once, then `rate_per_s`; the others wait, so that none of many cheap ones
    keeps the event loop from other clients.
    """

    def __init__(self, rate_per_s: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._rate_per_s = rate_per_s
        self._burst = burst

    def wait_s(self, client: bytes, most_s: float) -> float | None:
        """How long the client's next request waits, which is then counted; None, not counted, beyond `most_s`."""
        least = 1.0 - most_s * self._rate_per_s
        level = self.spend(client, 1.0, self._rate_per_s, self._burst, least)
        return max(0.0, 1.0 - level) / self._rate_per_s if level >= least else None


class TokenBudget(Buckets):
    """A bucket of tokens per owner, which fills in a minute. Any thread may call it.

    A request is admitted once its prompt fits what is there, or the bucket is full. Tokens that its text then takes
    may exceed that: the debt is paid before the owner's next request.
    """

    def admit(self, owner: bytes, num_tokens: int, per_minute: int) -> None:
        """Takes a prompt's tokens. Raises RequestError 429 `tokens_exhausted`, and takes none, if it does not fit."""
        least = min(num_tokens, per_minute)
        level = self.spend(owner, num_tokens, per_minute / 60.0, per_minute, least)
        if level < least:
            wait_s = max(1, math.ceil((least - level) * 60.0 / per_minute))
            raise Throttled(
                "tokens_exhausted",
                f"this client has used its {per_minute} tokens per minute; retry in {wait_s} s",
                retry_after_s=wait_s,
            )

    def take(self, owner: bytes, num_tokens: int, per_minute: int) -> None:
        """Takes tokens that a text used, or gives back where `num_tokens` is negative."""
        self.spend(owner, num_tokens, per_minute / 60.0, per_minute)


class Slots:
    """Counts the sequences that each owner has open, at most `max_each`. Lives on one event loop.

    own_limit: an owner's own limit, None for `max_each`.
    """

    def __init__(self, max_each: int, own_limit: Callable[[bytes], int | None] = lambda owner: None) -> None:
        self._max_each = max_each
        self._own_limit = own_limit
        self._taken = Shares[bytes]()
        self._waiting: dict[bytes, deque[asyncio.Future[None]]] = {}

    @property
    def num_taken(self) -> int:
        """Open sequences of all owners."""
        return self._taken.total

    @property
    def num_waiting(self) -> int:
        """Calls of `wait` that have no slot yet."""
        return sum(map(len, self._waiting.values()))

    def taken(self, owner: bytes) -> int:
        """Sequences that the owner has open."""
        return self._taken[owner]

    def limit(self, owner: bytes) -> int:
        """Sequences that the owner may have open."""
        own = self._own_limit(owner)
        return self._max_each if own is None else own

    def take(self, owner: bytes, count: int = 1) -> None:
        """Takes `count` slots. Raises RequestError as `require`, and takes none, when too few are free."""
        self.require(owner, count)
        self._taken.add(owner, count)

    def require(self, owner: bytes, count: int = 1) -> None:
        """Raises RequestError if fewer than `count` slots are free: 429 `too_many_sessions`; 400 for more than all."""
        limit = self.limit(owner)
        if count > limit:
            words = f"n: the request asks for {count} texts; this client may have {limit} open. Send several requests"
            raise FieldError("invalid_parameter", words, param="n")
        if self._taken[owner] + count > limit:
            raise RequestError(
                "too_many_sessions",
                f"this client has {self._taken[owner]} open sequences and the request needs {count} more; at most "
                f"{limit} may be open. End some first",
                status=429,
            )

    @contextmanager
    def hold(self, owner: bytes) -> Iterator[None]:
        """Holds a slot while inside. Raises RequestError as `require`."""
        self.take(owner)
        try:
            yield
        finally:
            self.release(owner)

    async def wait(self, owner: bytes, *, max_waiting: int | None = None) -> None:
        """Takes one slot as soon as one is free; first come, first served within the owner.

        Cancelled, it takes none. Raises RequestError 429 `too_many_sessions` if `max_waiting` others wait already.
        """
        queue = self._waiting.get(owner)
        if queue is None and self._taken[owner] < self.limit(owner):
            self._taken.add(owner)
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
            if not turn.cancelled():
                self.release(owner)  # cancelled after its turn had come
            elif turn in queue:  # `release` drops a cancelled turn too
                queue.remove(turn)
                if not queue:
                    del self._waiting[owner]
            raise

    def release(self, owner: bytes, count: int = 1) -> None:
        """Frees `count` slots; calls that wait take them at once."""
        self._taken.add(owner, -count)
        queue = self._waiting.get(owner)
        while queue and self._taken[owner] < self.limit(owner):
            turn = queue.popleft()
            if not turn.cancelled():
                self._taken.add(owner)
                turn.set_result(None)
        if queue is not None and not queue:
            del self._waiting[owner]


class Turns:
    """At most `max_together` turns at once, one per owner; first come, first served. Lives on one event loop.

    own: who have a turn or are next.
    """

    def __init__(self, max_together: int = 1) -> None:
        self.own = Slots(max_each=1)
        self._free = asyncio.Semaphore(max_together)

    async def take(self, owner: bytes) -> None:
        """Waits for a turn; `release` ends it. Cancelled, it takes none."""
        await self.own.wait(owner)
        try:
            await self._free.acquire()
        except BaseException:
            self.own.release(owner)
            raise

    def release(self, owner: bytes) -> None:
        """Ends the owner's turn."""
        self._free.release()
        self.own.release(owner)
