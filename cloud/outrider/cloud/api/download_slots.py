"""Holds what may be downloaded, and bounds how many downloads run."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outrider.models.errors import RequestError
from outrider.models.http.errors import Throttled
from outrider.models.wire.protocol import OfferedDraft, OfferedFile

_RETRY_S: Final = 5


@dataclass(frozen=True, slots=True)
class DraftFiles:
    """A draft that is offered, and where it lies. files: by path, `manifest.json` among them."""

    entry: OfferedDraft
    root: Path
    files: Mapping[str, OfferedFile]


@dataclass(frozen=True, slots=True)
class DownloadLimits:
    """Bounds on downloads. max_each, max_all: at a time, of one owner and in all.

    grace_s, min_rate: after grace_s a download must have run at min_rate bytes per second, or it is cut: it occupies a
    place. A device resumes it. refusal_s: a download that finds no place is refused so late, or a client could keep the
    server busy with refusals.
    """

    max_each: int = 4
    max_all: int = 32
    grace_s: float = 30.0
    min_rate: float = 4096.0
    refusal_s: float = 1.0


class DownloadSlots:
    """The downloads that run."""

    def __init__(self, limits: DownloadLimits) -> None:
        self._limits = limits
        self._taken: Counter[bytes] = Counter()

    @property
    def num_taken(self) -> int:
        """Slots of all owners."""
        return self._taken.total()

    @asynccontextmanager
    async def place(self, owner: bytes) -> AsyncIterator[None]:
        """Holds a place. Raises RequestError 429 or 503 `too_many_downloads` where none is free, after `refusal_s`."""
        try:
            self._require_free(owner)
        except RequestError:
            await asyncio.sleep(self._limits.refusal_s)
            raise
        self._taken[owner] += 1
        try:
            yield
        finally:
            self._taken[owner] -= 1
            if not self._taken[owner]:
                del self._taken[owner]

    def _require_free(self, owner: bytes) -> None:
        limits = self._limits
        if self._taken[owner] >= limits.max_each:
            raise Throttled(
                "too_many_downloads",
                f"this client has {self._taken[owner]} downloads; at most {limits.max_each} may run. Retry when one "
                "has ended",
                retry_after_s=_RETRY_S,
            )
        if self.num_taken >= limits.max_all:
            raise RequestError(
                "too_many_downloads",
                f"{limits.max_all} downloads run, which is the most that this server allows; retry later",
                status=503,
            )
