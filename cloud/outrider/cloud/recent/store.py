"""Keeps recent texts in this process, and defines what every store of them does."""

from __future__ import annotations

import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from outrider.cloud.recent.texts import MAX_TOKENS, Place, RecentText

DEFAULT_S: Final = 600.0
_ENTRY_BYTES: Final = 512
"""Of a text beside its ids."""


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


@dataclass(frozen=True, slots=True)
class RecentLimits:
    """Bounds on a store in memory, for each owner and for all."""

    max_each: int = 256
    max_each_bytes: int = 8 << 20
    max_texts: int = 4096
    max_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class _Kept:
    since: float
    tokens: array[int]
    sampling: bytes

    @property
    def num_bytes(self) -> int:
        return _ENTRY_BYTES + len(self.tokens) * self.tokens.itemsize


@dataclass(slots=True)
class _Owner:
    texts: OrderedDict[bytes, _Kept] = field(default_factory=OrderedDict)  # oldest first
    num_bytes: int = 0


class MemoryStore(RecentStore):
    """Texts in this process, `max_s` seconds each. Where there are too many, the owner with most loses its oldest.

    Any thread may call it.
    """

    def __init__(
        self,
        max_s: float = DEFAULT_S,
        limits: RecentLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_s = max_s
        self._limits = limits or RecentLimits()
        self._clock = clock
        self._owners: dict[str, _Owner] = {}
        self._num_texts = self._num_bytes = 0
        self._sweep_at = 0.0
        self._counts = RecentCounts()
        self._lock = threading.Lock()

    async def find(self, place: Place) -> RecentText | None:
        """The text kept there."""
        with self._lock:
            self._sweep()
            owner = self._owners.get(place.owner)
            found = owner.texts.get(place.prompt) if owner is not None else None
            if found is None or self._is_old(found):
                self._counts.misses += 1
                return None
            self._counts.hits += 1
        return RecentText(tuple(found.tokens), found.sampling)

    def put(self, place: Place, text: RecentText) -> None:
        """Keeps a text."""
        limits = self._limits
        kept = _Kept(self._clock(), array("I", text.tokens[:MAX_TOKENS]), text.sampling)
        with self._lock:
            self._sweep()
            self._remove(place.owner, place.prompt)
            owner = self._owners.setdefault(place.owner, _Owner())
            owner.texts[place.prompt] = kept
            self._count(owner, kept, 1)
            self._counts.stored += 1
            while len(owner.texts) > limits.max_each or owner.num_bytes > limits.max_each_bytes:
                self._remove(place.owner, next(iter(owner.texts)))
            while self._num_texts > limits.max_texts or self._num_bytes > limits.max_bytes:
                name, largest = max(self._owners.items(), key=lambda item: item[1].num_bytes)
                self._remove(name, next(iter(largest.texts)))

    def stats(self) -> RecentStats:
        """A snapshot."""
        with self._lock:
            self._sweep()
            return RecentStats(self._counts, 1, self._num_texts, self._num_bytes)

    def close(self) -> None:
        """Forgets all texts."""
        with self._lock:
            self._owners.clear()
            self._num_texts = self._num_bytes = 0

    def _is_old(self, kept: _Kept) -> bool:
        return self._clock() - kept.since >= self._max_s

    def _sweep(self) -> None:
        """Removes what is too old, at most once in a tenth of its time."""
        if self._clock() < self._sweep_at:
            return
        self._sweep_at = self._clock() + self._max_s / 10
        for name, owner in list(self._owners.items()):
            while owner.texts:
                prompt, kept = next(iter(owner.texts.items()))
                if not self._is_old(kept):
                    break
                self._remove(name, prompt)

    def _count(self, owner: _Owner, kept: _Kept, sign: int) -> None:
        owner.num_bytes += sign * kept.num_bytes
        self._num_bytes += sign * kept.num_bytes
        self._num_texts += sign

    def _remove(self, name: str, prompt: bytes) -> None:
        owner = self._owners.get(name)
        found = owner.texts.pop(prompt, None) if owner is not None else None
        if owner is None or found is None:
            return
        self._count(owner, found, -1)
        if not owner.texts:
            del self._owners[name]
