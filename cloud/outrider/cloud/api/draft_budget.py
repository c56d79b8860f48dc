"""Bounds the draft messages of a session, and of an owner over all its sessions. Knows no HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Literal

_FEW = 1024
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
        self._clock = clock
        self._sessions = _Buckets(limits.session_per_s, limits.session_burst)
        self._owners = _Buckets(limits.owner_per_s, limits.owner_burst)

    @property
    def num_buckets(self) -> int:
        """Buckets in memory."""
        return len(self._sessions) + len(self._owners)

    def spend(
        self, session_id: str, owner: bytes, num_bytes: int = 0, unit_bytes: int = UNIT_BYTES
    ) -> Literal["session", "owner"] | None:
        """Takes a message of `num_bytes` from both buckets and returns None; or names the bucket that is empty.

        A long message may take more than there is: the bucket fills up from below 0 then.
        """
        now = self._clock()
        if self._sessions.level(session_id, now) < 1.0:
            return "session"
        if self._owners.level(owner, now) < 1.0:
            return "owner"
        cost = max(1, -(-num_bytes // unit_bytes))
        self._sessions.take(session_id, cost)
        self._owners.take(owner, cost)
        return None


class _Buckets:
    """Buckets by key. One that is full again is no different from none, so it is dropped now and then."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._levels: dict[Hashable, list[float]] = {}  # level, and when that was
        self._many = _FEW

    def __len__(self) -> int:
        return len(self._levels)

    def level(self, key: Hashable, now: float) -> float:
        """How many messages the bucket holds now."""
        bucket = self._levels.get(key)
        if bucket is None:
            if len(self._levels) >= self._many:
                self._drop_full(now)
            bucket = self._levels[key] = [self._burst, now]
        else:
            bucket[0] = min(self._burst, bucket[0] + (now - bucket[1]) * self._per_s)
            bucket[1] = now
        return bucket[0]

    def take(self, key: Hashable, cost: int) -> None:
        """Takes as much as `cost` messages; call it after `level`."""
        self._levels[key][0] -= cost

    def _drop_full(self, now: float) -> None:
        self._levels = {
            key: bucket
            for key, bucket in self._levels.items()
            if bucket[0] + (now - bucket[1]) * self._per_s < self._burst
        }
        self._many = max(_FEW, 2 * len(self._levels))
