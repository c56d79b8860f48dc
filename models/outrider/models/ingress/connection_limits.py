"""States what the server takes of a connection before a route runs."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.models.wire.protocol import MAX_BODY_BYTES


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds on connections and on requests that are still arriving. Times in seconds.

    max_connections: open at once. max_per_client: of one client address (of a /64, for IPv6). The default has room for
    the 256 sessions that one key may open, with a stream and a connection for drafts each.

    max_header_bytes, max_headers: of the request line and headers together. header_s: from a request's first byte, or
    from the connection's start, to the end of its headers.

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
