"""Counts connections, in all and by client, and closes those that have run out of time.

Knows no HTTP: `bounded_http` tells what a connection waits for, `bounded_server` asks whether there is room for
another.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from outrider.models.hosts import client_network, is_loopback
from outrider.models.process.by_owner import Shares
from outrider.models.wire.protocol import MAX_BODY_BYTES


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds on connections and on requests that are still arriving. Times in seconds.

    max_connections: open at once. max_per_client: of one client address (of a /64, for IPv6). The default has room for
    the 256 sessions that one key may open, with a stream and a connection for drafts each.

    max_header_bytes, max_headers: of the request line and headers together. max_url_bytes: decoding and matching a
    longer URL would hold the event loop for milliseconds. header_s: from a request's first byte, or from the
    connection's start, to the end of its headers.

    max_body_bytes: of one body that no route reads; the application bounds the others. max_client_bodies, max_bodies:
    how many times that may be held of bodies that are still arriving, of one client and in all. body_grace_s,
    min_body_rate: after body_grace_s a body must have arrived at min_body_rate bytes per second. Not a time for the
    whole body: a megabyte over a slow mobile network takes minutes, and what is held meanwhile is bounded.

    max_pipelined: requests of one connection that may wait for the answer to the one before. write_s: how long a client
    may leave a full write buffer (64 KiB; 512 KiB with TLS) or the rest of a closing connection unread. linger_s: how
    long a refused client may go on sending before it is cut off. handshake_s: for TLS.
    """

    max_connections: int = 2048
    max_per_client: int = 640
    max_header_bytes: int = 32 << 10
    max_headers: int = 100
    max_url_bytes: int = 4 << 10
    header_s: float = 10.0
    max_body_bytes: int = MAX_BODY_BYTES
    body_grace_s: float = 10.0
    min_body_rate: float = 1024.0
    max_client_bodies: int = 32
    max_bodies: int = 256
    max_pipelined: int = 16
    write_s: float = 60.0
    linger_s: float = 2.0
    handshake_s: float = 10.0

    @property
    def sweep_s(self) -> float:
        """How often deadlines are checked."""
        return min(1.0, min(self.header_s, self.body_grace_s, self.write_s, self.linger_s) / 4)


_log = logging.getLogger("outrider.ingress")

_FOR_THE_MACHINE: Final = 128
"""One of so many connections is kept for the machine itself: probes in a container, which restart a server that does
not answer.
"""
_OTHER_FILES: Final = 64
"""Files that a server has open beside its connections: the model, logs, the event loop."""

_LOG_EVERY_S: Final = 10.0


def reserve_files(num_connections: int) -> int:
    """How many of `num_connections` the process may have open. Raises its soft limit on open files where it can."""
    if sys.platform == "win32":
        return num_connections
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_connections + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return num_connections
    raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    except (OSError, ValueError):  # a sandbox may forbid it
        raised = soft
    return max(1, min(num_connections, raised - _OTHER_FILES))


Check = Callable[[float, float], None]
"""Closes a connection if one of its deadlines has passed. Takes the time, and for how long the event loop stood still,
so that no client could have been heard: that does not count.
"""


class Ticket:
    """An admitted connection's place. `release` gives it back, once however often it is called."""

    __slots__ = ("_client", "_held", "_table")

    def __init__(self, table: ConnectionTable, client: str) -> None:
        self._table = table
        self._client: str | None = client
        self._held = 0

    def hold(self, num_bytes: int) -> bool:
        """Notes that `num_bytes` of an unfinished body are held. False if that is more than the client may hold."""
        if self._client is None or num_bytes == self._held:
            return True
        if is_within := self._table.body_bytes.add(self._client, num_bytes - self._held):
            self._held = num_bytes
        return is_within

    def release(self) -> None:
        """The connection is closed."""
        if self._client is not None:
            self.hold(0)
            self._table.by_client.add(self._client, -1)
            self._client = None


class ConnectionTable:
    """The open connections of one server. Belongs to one event loop."""

    def __init__(self, limits: ConnectionLimits, *, num_allowed: int | None = None) -> None:
        """num_allowed: connections that the process may open, if that is fewer than `limits` says."""
        self.limits = limits
        self._max = limits.max_connections if num_allowed is None else num_allowed
        self.by_client = Shares[str](limits.max_per_client, self._max)
        self.body_bytes = Shares[str](
            limits.max_client_bodies * limits.max_body_bytes, limits.max_bodies * limits.max_body_bytes
        )
        """Of bodies that are still arriving, by client."""
        self.checks: set[Check] = set()
        """Of the connections that are open."""
        self._closed_early: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        self._logged_s = float("-inf")

    def __len__(self) -> int:
        return self.by_client.total

    def admit(self, host: str) -> Ticket | None:
        """A place for a connection from `host`; None if there is none."""
        client = client_network(host)
        kept = 0 if is_loopback(host) or is_loopback(client) else self._max // _FOR_THE_MACHINE
        is_full = len(self) >= self._max - kept
        if not is_full and self.by_client.add(client, 1):
            return Ticket(self, client)
        self.note("too many connections" if is_full else "too many connections of one client")
        return None

    def note(self, cause: str) -> None:
        """Counts a connection that the server closed or refused for `cause`; the log sums them up."""
        self._closed_early[cause] += 1

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begins to check deadlines. One timer for all connections: one per request would cost each of them two calls
        of the event loop.
        """
        self._arm(loop, loop.time())

    def stop(self) -> None:
        """Ends the checks."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _arm(self, loop: asyncio.AbstractEventLoop, now: float) -> None:
        due = now + self.limits.sweep_s
        self._timer = loop.call_at(due, self._sweep, loop, due)

    def _sweep(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        now = loop.time()
        late_s = now - due
        if late_s < self.limits.sweep_s:
            late_s = 0.0
        for check in list(self.checks):
            check(now, late_s)
        if self._closed_early and now - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now
            causes = ", ".join(f"{count} for {cause}" for cause, count in self._closed_early.most_common())
            self._closed_early.clear()
            _log.warning("connections closed or refused: %s", causes)
        self._arm(loop, now)
