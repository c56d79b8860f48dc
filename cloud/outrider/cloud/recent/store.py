"""Keeps recent texts in this process, and defines what every store of them does."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from outrider.cloud.recent.texts import MAX_TOKENS, Place, RecentText
from outrider.models.process.by_owner import Bounds, OwnerStore

DEFAULT_S: Final = 600.0
_ENTRY_BYTES: Final = 512
"""Of a text beside its ids."""
BOUNDS: Final = Bounds(max_each=256, max_each_size=8 << 20, max_size=64 << 20)
"""Of a store in memory: texts of an owner, and bytes of an owner and in all."""
MAX_TEXTS: Final = 4096
"""Of all owners; beyond, too, the owner with most bytes loses its oldest."""


def _shown(text: str, default: Any = 0) -> Any:
    """A field with the text that /metrics shows for it."""
    return field(default=default, metadata={"help": text})


@dataclass(slots=True)
class RecentCounts:
    """Counters since the start; each is one of /metrics."""

    hits: int = _shown("Requests that were drafted from an earlier text after the same prompt.")
    misses: int = _shown("Requests whose prompt had no earlier text, or none in time.")
    stored: int = _shown("Texts that were kept.")
    dropped: int = _shown("Texts that were not kept: too many at once, or the store was down.")
    rejected: int = _shown("Texts of the store that failed their check.")
    failures: int = _shown("Calls of the store that failed or were late.")


@dataclass(frozen=True, slots=True)
class RecentStats:
    """A snapshot for /metrics: counters, and gauges. None: not known here."""

    counts: RecentCounts
    up: int = _shown("1 while the store of recent texts answers, else 0.", 1)
    texts: int | None = _shown("Texts in this process.", None)
    bytes: int | None = _shown("Memory of the texts in this process, bytes.", None)


class RecentStore(Protocol):
    """Recent texts. No method raises for a fault of the store."""

    async def find(self, place: Place) -> RecentText | None:
        """The text kept there; None without one, or where the answer takes too long."""
        ...

    def put(self, place: Place, text: RecentText) -> None:
        """Keeps a text in the place of an earlier one. Any thread; never blocks."""
        ...

    def stats(self) -> RecentStats:
        """A snapshot; cheap."""
        ...

    def close(self) -> None:
        """Ends what runs in the background."""
        ...


class MemoryStore(RecentStore):
    """Texts in this process, `max_s` seconds each. Any thread may call it."""

    def __init__(
        self,
        max_s: float = DEFAULT_S,
        bounds: Bounds = BOUNDS,
        max_texts: int = MAX_TEXTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._texts: OwnerStore[str, bytes, tuple[array[int], bytes]] = OwnerStore(bounds, max_s, clock)
        self._max_texts = max_texts
        self._counts = RecentCounts()
        self._lock = threading.Lock()

    async def find(self, place: Place) -> RecentText | None:
        """The text kept there."""
        with self._lock:
            self._texts.pop_old()
            found = self._texts.get(place.owner, place.prompt)
            self._counts.hits += found is not None
            self._counts.misses += found is None
        return RecentText(tuple(found[0]), found[1]) if found is not None else None

    def put(self, place: Place, text: RecentText) -> None:
        """Keeps a text."""
        tokens = array("I", text.tokens[:MAX_TOKENS])
        size = _ENTRY_BYTES + len(tokens) * tokens.itemsize
        with self._lock:
            self._texts.pop_old()
            self._texts.put(place.owner, place.prompt, (tokens, text.sampling), size)
            while len(self._texts) > self._max_texts:
                self._texts.pop_from_most()
            self._counts.stored += 1

    def stats(self) -> RecentStats:
        """A snapshot."""
        with self._lock:
            self._texts.pop_old()
            return RecentStats(self._counts, 1, len(self._texts), self._texts.size)

    def close(self) -> None:
        """Forgets all texts."""
        with self._lock:
            self._texts.clear()
