"""Bounds the draft messages of a session, and of an owner over all its sessions. Knows no HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from outrider.models.http.limits import Buckets

UNIT_BYTES = 256
"""More than most messages of a device have; parsing and merging take time by size."""
TREE_UNIT_BYTES = 64
"""The same for a tree: its nodes have three or four bytes, and each takes as long as a whole path's tokens."""


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Messages per second of a session and of an owner, and how many may come at once; delay_s: how late the answer to
    a dropped message comes. A message counts as one for each UNIT_BYTES of its body that it has begun; TREE_UNIT_BYTES
    of a tree.

    A device posts once per commit, so 500 times a second at steps of 2 ms, and while it drafts ahead once per 4 ms. An
    owner's budget serves 256 sessions (`--max-sessions`) at steps of 32 ms; it is about half of what the event loop can
    take.
    """

    session_per_s: float = 500.0
    session_burst: float = 250.0
    owner_per_s: float = 8000.0
    owner_burst: float = 4000.0
    delay_s: float = 0.25


class DraftBudget:
    """Token buckets of sessions and owners."""

    def __init__(self, limits: DraftLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self.sessions, self.owners = Buckets(clock), Buckets(clock)

    def spend(
        self, session_id: str, owner: bytes, num_bytes: int = 0, unit_bytes: int = UNIT_BYTES
    ) -> Literal["session", "owner"] | None:
        """Takes a message of `num_bytes` from both buckets and returns None; or names the bucket that is empty.

        A long message may take more than there is: the bucket fills up from below 0 then.
        """
        limits, cost = self._limits, max(1, -(-num_bytes // unit_bytes))
        if self.sessions.spend(session_id, cost, limits.session_per_s, limits.session_burst, 1.0) < 1.0:
            return "session"
        if self.owners.spend(owner, cost, limits.owner_per_s, limits.owner_burst, 1.0) < 1.0:
            self.sessions.spend(session_id, -cost, limits.session_per_s, limits.session_burst)
            return "owner"
        return None
