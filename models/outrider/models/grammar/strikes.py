"""Bounds what one client's grammars may take of the thread that compiles, and of engines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Final

MAX_STRIKES: Final = 3
STRIKE_S: Final = 60.0
"""After so many grammars that took too long, within this time, a client's are refused."""
MAX_CLIENTS: Final = 4
"""Clients behind one owner that may wait, or take too long, as one alone may: a cascade's middle has many."""

Client = tuple[Hashable, bytes]
"""An owner, and the salt that it sent for one of its clients: salts are not secret, so they divide an owner only."""


class Strikes:
    """Who has sent grammars that took too long, and until when nothing of theirs is compiled. Any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._of: dict[Hashable, list[float]] = {}
        self._lock = threading.Lock()

    def add(self, client: Client) -> None:
        """One more."""
        with self._lock:
            now = self._clock()
            for each in [each for each, times in self._of.items() if now - times[-1] >= STRIKE_S]:
                del self._of[each]
            for key, limit in limits_of(client, MAX_STRIKES):
                self._of[key] = [*self._of.get(key, [])[1 - limit :], now]

    def seconds_left(self, client: Client) -> float:
        """Until a client's grammars are compiled again; at most 0 where they are."""
        with self._lock:
            found = [(self._of.get(key, []), limit) for key, limit in limits_of(client, MAX_STRIKES)]
            ends = [times[0] + STRIKE_S for times, limit in found if len(times) >= limit]
            return max(ends) - self._clock() if ends else 0.0


def limits_of(client: Client, limit: int) -> tuple[tuple[Hashable, int], tuple[Hashable, int]]:
    """What counts for a client: its own, and its owner's, which may have some clients' worth."""
    return (client, limit), ((client[0],), limit * MAX_CLIENTS)
