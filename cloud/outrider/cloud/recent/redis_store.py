"""Keeps recent texts in Redis, for replicas: on a thread of its own, so that no event loop ever waits for a socket.

A request waits `wait_s` for an answer at most, and not at all while another's answer is late. A Redis that is dead or
full of something else is left out, with one warning, until it answers a ping in time; one that is slow, for the time
that its breaker gives it. An owner has a fixed number of slots, chosen by the prompt's digest, and a
share of the calls that wait, so no client can take another's room. Redis ends each text's life by itself.

Late answers decide when it is slow. Each counts, and ten answers in time take one back: so a store is left out after
three late ones in a row, or in the long run where more than one in eleven is late. When it is asked again, the next
late answer leaves it out for twice as long, until twenty answers in time have shown that it has recovered.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from outrider.cloud.recent.store import (
    DEFAULT_S,
    MAX_BYTES,
    VERSION,
    Place,
    RecentCounts,
    RecentStats,
    RecentStore,
    RecentText,
    decode,
    encode,
    is_of_another_prompt,
)
from outrider.models.breaker import Breaker
from outrider.models.errors import ConfigError
from outrider.models.process.by_owner import Shares

SLOTS: Final = 128
"""Texts of an owner; 8 MiB at most."""
_MAX_FINDS: Final = 64
"""Requests that may wait for an answer at a time."""
_MAX_FINDS_EACH: Final = 16
"""Of one owner."""
_MAX_WAITING_BYTES: Final = 8 << 20
"""Of texts that are not written yet."""
_MAX_WAITING_BYTES_EACH: Final = 1 << 20
"""Of one owner."""
_SOCKET_S: Final = 0.5
MAX_PAUSE_S: Final = 60.0
"""For which one that is slow is left out."""
_IDLE_S: Final = 10.0
"""Between two pings of one that is up, where nothing is written."""
_WARN_S: Final = 60.0
"""Between two warnings, at least: a Redis on the edge of the bound comes and goes."""
_CLOSE_S: Final = 5.0
_LATE: Final = 10
"""What a late answer adds, and an answer in time takes one of."""
_LIMIT: Final = 3 * _LATE
_FAULTS: Final = (RedisError, OSError, asyncio.TimeoutError, ValueError)

_log = logging.getLogger("outrider.cloud")


class LateAnswers:
    """Late answers of one store, on one thread."""

    def __init__(self, breaker: Breaker, clock: Callable[[], float] = time.monotonic) -> None:
        self._breaker = breaker
        self._clock = clock
        self._counted_s = float("-inf")
        self._score = 0

    def late(self, began_s: float) -> bool:
        """Counts an answer that is late now; True where the breaker opens for it.

        began_s: when it was asked. Calls that began before the last late answer was counted are of the same burst.
        """
        if began_s < self._counted_s:
            return False
        self._counted_s = self._clock()
        self._score += _LATE
        if self._score < _LIMIT:
            return False
        self._score = _LIMIT - _LATE
        self._breaker.failed()
        return True

    def in_time(self) -> None:
        """Counts an answer in time."""
        self._score = max(0, self._score - 1)
        if self._score == 0:
            self._breaker.succeeded()


class RedisStore(RecentStore):
    """Texts in the Redis at `url`, `max_s` seconds each. Any thread may call it; `find` from any event loop."""

    def __init__(
        self,
        url: str,
        max_s: float = DEFAULT_S,
        *,
        wait_s: float = 0.02,
        retry_s: float = 1.0,
    ) -> None:
        """wait_s: longest wait of a request. retry_s: between two tries of one that is down. Raises ConfigError."""
        try:
            self._redis: Any = Redis.from_url(
                url,
                socket_timeout=_SOCKET_S,
                socket_connect_timeout=_SOCKET_S,
                retry=Retry(NoBackoff(), 0),
                max_connections=_MAX_FINDS + 2,
            )
        except (RedisError, ValueError, TypeError) as error:  # the URL may hold a password: it is not repeated
            raise ConfigError(
                f"--redis is no URL of a Redis ({type(error).__name__}); write redis://HOST:6379/0, or "
                "rediss:// for TLS"
            ) from None
        options = self._redis.connection_pool.connection_kwargs
        self._where = options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
        self._max_ms = max(1, round(max_s * 1e3))
        self._wait_s, self._retry_s = wait_s, retry_s
        self._counts = RecentCounts()
        self._is_up = False
        self._breaker = Breaker(retry_s, max(retry_s, MAX_PAUSE_S))
        self._answers = LateAnswers(self._breaker)
        self._num_late = 0  # calls whose answers are late now
        self._finds = Shares[str](_MAX_FINDS_EACH, _MAX_FINDS)  # that wait
        self._waiting: deque[tuple[str, str, bytes]] = deque()  # owner, key, text
        self._waiting_bytes = Shares[str](_MAX_WAITING_BYTES_EACH, _MAX_WAITING_BYTES)
        self._lock = threading.Lock()
        self._is_closed = self._is_refused = False
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()  # something to write, or to try again
        self._thread = threading.Thread(target=self._run, name="outrider-redis", daemon=True)
        self._thread.start()

    # -- any thread --------------------------------------------------------------------------------------------------

    async def find(self, place: Place) -> RecentText | None:
        """The text kept there, if the answer comes in time."""
        found, asked = None, self._ask(place)
        if asked is not None:
            # Whatever happens to this request, the call goes on: a connection that is being made is not lost.
            await asyncio.wait([asyncio.wrap_future(asked)], timeout=self._wait_s)
            if asked.done() and not asked.cancelled():  # cancelled where the store is being closed
                found = asked.result()
        self._counts.hits += found is not None
        self._counts.misses += found is None
        return found

    def put(self, place: Place, text: RecentText) -> None:
        """Writes a text in the background; drops it where too many wait."""
        data = encode(place, text)
        with self._lock:
            if self._is_up and not self._is_closed and self._waiting_bytes.add(place.owner, len(data)):
                self._waiting.append((place.owner, self._key(place), data))
                self._loop.call_soon_threadsafe(self._changed.set)
            else:
                self._counts.dropped += 1

    def stats(self) -> RecentStats:
        """A snapshot."""
        return RecentStats(self._counts, int(self._is_up))

    def close(self) -> None:
        """Ends the thread; what waits to be written is dropped."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._loop.call_soon_threadsafe(self._changed.set)
        self._thread.join(timeout=_CLOSE_S)

    def _key(self, place: Place) -> str:
        slot = int.from_bytes(place.prompt[-2:], "big") % SLOTS
        return f"outrider:recent:{VERSION}:{place.owner}:{slot}"

    def _ask(self, place: Place) -> Future[RecentText | None] | None:
        """Starts a call on the store's thread; None where it would not be answered."""
        with self._lock:
            if not self._is_up or self._is_closed or self._num_late or not self._finds.add(place.owner):
                return None
            asked = asyncio.run_coroutine_threadsafe(self._get(place), self._loop)
        asked.add_done_callback(lambda _: self._answered(place.owner))
        return asked

    def _answered(self, owner: str) -> None:
        with self._lock:
            self._finds.add(owner, -1)

    # -- the store's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._work())

    async def _work(self) -> None:
        try:
            await self._keep_up()
        finally:
            with self._lock:  # no call may reach a loop that is closed
                self._is_closed, self._is_up = True, False
            await self._redis.aclose()

    async def _keep_up(self) -> None:
        """Connects, writes, and tries again where Redis has failed, until the store is closed."""
        has_warned, warned_at = False, -_WARN_S
        while not self._is_closed:
            if self._is_up:
                await self._write()
                continue
            left_out_s = self._breaker.pause_s
            reason = "too many answers are late" if left_out_s else await self._ping()
            if reason is None:
                if has_warned:
                    _log.info("Redis at %s answers again", self._where)
                self._breaker.passed()
                has_warned, self._is_up = False, True
                continue
            if not has_warned and time.monotonic() - warned_at >= _WARN_S:
                _log.warning("Redis at %s: %s; no earlier texts are used until it answers", self._where, reason)
                has_warned, warned_at = True, time.monotonic()
            self._changed.clear()
            await self._wait(left_out_s or self._retry_s)

    async def _wait(self, seconds: float) -> bool:
        """Waits until something has changed. False if nothing has for so long."""
        try:
            return self._is_closed or await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            return False

    async def _ping(self) -> str | None:
        """Why Redis cannot be used now; None when it can."""
        try:
            await self._redis.ping()  # connects
            began = time.monotonic()
            await self._redis.ping()
            took_s = time.monotonic() - began
        except _FAULTS as error:
            self._counts.failures += 1
            return type(error).__name__
        if took_s > self._wait_s:
            self._counts.failures += 1
            return f"it takes {took_s * 1e3:.0f} ms to answer"
        return None

    async def _get(self, place: Place) -> RecentText | None:
        began = time.monotonic()
        call = asyncio.ensure_future(self._redis.getrange(self._key(place), 0, MAX_BYTES))
        in_time, _ = await asyncio.wait([call], timeout=self._wait_s)
        is_late = not in_time
        self._num_late += is_late
        if is_late and self._answers.late(began):
            self._go_down()
        try:
            data = await call
        except ResponseError:  # something else has the key
            self._counts.rejected += 1
            return None
        except _FAULTS:
            self._failed()
            return None
        finally:
            self._num_late -= is_late
        if is_late:
            self._counts.failures += 1
        else:
            self._answers.in_time()
        if not data or is_of_another_prompt(place, data):
            return None
        text = decode(place, data)
        self._counts.rejected += text is None
        return text

    async def _write(self) -> None:
        """Writes what waits, or waits for something to write."""
        with self._lock:
            entry = self._waiting.popleft() if self._waiting else None
            if entry is None:
                self._changed.clear()
            else:
                self._waiting_bytes.add(entry[0], -len(entry[2]))
        if entry is None:
            return await self._idle()
        try:
            await self._redis.set(*entry[1:], px=self._max_ms)
            self._counts.stored += 1
        except ResponseError as error:  # such as a Redis whose memory is full
            self._counts.dropped += 1
            self._counts.failures += 1
            if not self._is_refused:
                _log.warning("Redis at %s stores nothing: %s", self._where, error)
            self._is_refused = True
        except _FAULTS:
            self._counts.dropped += 1
            self._failed()

    async def _idle(self) -> None:
        """Waits for something to write; asks now and then whether Redis is still there, which no request may tell."""
        if not await self._wait(_IDLE_S):
            try:
                await self._redis.ping()
            except _FAULTS:
                self._failed()

    def _failed(self) -> None:
        self._counts.failures += 1
        self._go_down()

    def _go_down(self) -> None:
        """Leaves Redis out until it answers a ping, and drops what waits to be written."""
        with self._lock:
            self._is_up = False
            self._counts.dropped += len(self._waiting)
            for owner, _, data in self._waiting:
                self._waiting_bytes.add(owner, -len(data))
            self._waiting.clear()
        self._changed.set()
