"""Bounds what each owner has and what all have: of something scarce, and of what is kept for them.

Knows owners as opaque values. Nothing here is thread-safe.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from operator import itemgetter
from typing import Final, Generic, TypeVar

Owner = TypeVar("Owner", bound=Hashable)
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_STALE_AT_MOST: Final = 64
"""Ranks that are out of date, beside as many as there are owners."""


class Shares(Generic[Owner]):
    """How much each owner has of something, and all together. An owner that has nothing takes no memory."""

    def __init__(self, max_each: float = math.inf, max_all: float = math.inf) -> None:
        """max_each, max_all: what an owner and all may have."""
        self.max_each, self.max_all = max_each, max_all
        self.total = 0
        self._of: dict[Owner, int] = {}

    def __getitem__(self, owner: Owner) -> int:
        return self._of.get(owner, 0)

    def __len__(self) -> int:
        """Owners that have something."""
        return len(self._of)

    def add(self, owner: Owner, amount: int = 1) -> bool:
        """Counts what the owner takes, or gives back where it is negative. False, and counts nothing, if too much."""
        has = self[owner] + amount
        if amount > 0 and (has > self.max_each or self.total + amount > self.max_all):
            return False
        self.total += amount
        self._of[owner] = has
        if not has:
            del self._of[owner]
        return True


class _RankedShares(Shares[Owner]):
    """Shares without bounds, that know who has most; O(log n)."""

    def __init__(self) -> None:
        super().__init__()
        self._ranks: list[tuple[int, int, Owner]] = []  # a heap of what owners have, negated; some are out of date
        self._order = itertools.count()

    def add(self, owner: Owner, amount: int = 1) -> bool:
        super().add(owner, amount)
        if len(self._ranks) > 2 * len(self._of) + _STALE_AT_MOST:
            self._ranks = [(-has, next(self._order), each) for each, has in self._of.items()]
            heapq.heapify(self._ranks)
        elif owner in self._of:
            heapq.heappush(self._ranks, (-self._of[owner], next(self._order), owner))
        return True

    def most(self) -> Owner:
        """Who has most; of several, who had so much first. Somebody must have something."""
        while self[self._ranks[0][2]] != -self._ranks[0][0]:
            heapq.heappop(self._ranks)
        return self._ranks[0][2]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Values that a store keeps of an owner and of all, and the sum of their sizes."""

    max_each: float = math.inf
    max_all: float = math.inf
    max_each_size: float = math.inf
    max_size: float = math.inf


class OwnerStore(Generic[Owner, K, V]):
    """Values of owners by key, each with a size, for `max_s` seconds each.

    An owner with too many loses its oldest. Where all together have too many, the owner with most loses its oldest; so
    nobody can push out another's by leaving more. O(log n) per value.
    """

    def __init__(
        self, bounds: Bounds | None = None, max_s: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bounds = bounds or Bounds()
        self._max_s = max_s
        self._clock = clock
        self._counts, self._sizes = _RankedShares[Owner](), _RankedShares[Owner]()
        self._of: dict[Owner, OrderedDict[K, tuple[V, int]]] = {}  # values and sizes, the oldest first
        self._since: OrderedDict[tuple[Owner, K], float] = OrderedDict()  # the oldest first

    def __len__(self) -> int:
        return len(self._since)

    @property
    def size(self) -> int:
        """Sum of all sizes."""
        return self._sizes.total

    def get(self, owner: Owner, key: K) -> V | None:
        """The value, which stays; None where there is none, or it is too old."""
        if (owner, key) not in self._since or self._is_old(self._since[owner, key]):
            return None
        return self._of[owner][key][0]

    def put(self, owner: Owner, key: K, value: V, size: int = 1, since: float | None = None) -> list[V]:
        """Keeps a value as the owner's newest, in the place of an earlier one; returns what gives way, maybe itself.

        since: from when it counts as kept; None: now. An earlier time than that of the newest value takes O(n).
        """
        self.pop(owner, key)
        since = self._clock() if since is None else since
        latest = next(reversed(self._since.values()), since)
        self._since[owner, key] = since
        if since < latest:
            self._since = OrderedDict(sorted(self._since.items(), key=itemgetter(1)))
        self._of.setdefault(owner, OrderedDict())[key] = value, size
        self._counts.add(owner)
        self._sizes.add(owner, size)
        gone: list[V] = []
        bounds = self._bounds
        for shares, max_each, max_all in (
            (self._counts, bounds.max_each, bounds.max_all),
            (self._sizes, bounds.max_each_size, bounds.max_size),
        ):
            while shares[owner] > max_each:
                gone.append(self._pop_oldest(owner))
            while shares.total > max_all:
                gone.append(self._pop_oldest(shares.most()))
        return gone

    def pop(self, owner: Owner, key: K) -> V | None:
        """Takes a value out, also one that is too old; None where there is none."""
        return self._pop(owner, key) if (owner, key) in self._since else None

    def pop_from_most(self) -> V:
        """Takes out the oldest value of who has most, by size. The store must not be empty."""
        return self._pop_oldest(self._sizes.most())

    def pop_old(self) -> list[V]:
        """Takes out what is too old."""
        old: list[V] = []
        while self._since and self._is_old(next(iter(self._since.values()))):
            old.append(self._pop(*next(iter(self._since))))
        return old

    def clear(self) -> None:
        """Forgets everything."""
        while self._since:
            self._pop(*next(iter(self._since)))

    def _is_old(self, since: float) -> bool:
        return self._clock() - since >= self._max_s

    def _pop_oldest(self, owner: Owner) -> V:
        return self._pop(owner, next(iter(self._of[owner])))

    def _pop(self, owner: Owner, key: K) -> V:
        del self._since[owner, key]
        own = self._of[owner]
        value, size = own.pop(key)
        if not own:
            del self._of[owner]
        self._counts.add(owner, -1)
        self._sizes.add(owner, -size)
        return value
