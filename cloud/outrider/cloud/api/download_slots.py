"""Holds what may be downloaded, and bounds how many downloads run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from outrider.models.errors import RequestError
from outrider.models.http.errors import Throttled
from outrider.models.process.by_owner import Shares
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


class DownloadSlots(Shares[bytes]):
    """The downloads that run."""

    def __init__(self, limits: DownloadLimits) -> None:
        super().__init__(limits.max_each, limits.max_all)
        self._refusal_s = limits.refusal_s

    @asynccontextmanager
    async def place(self, owner: bytes) -> AsyncIterator[None]:
        """Holds a place. Raises RequestError 429 or 503 `too_many_downloads` where none is free, after `refusal_s`."""
        if not self.add(owner):
            await asyncio.sleep(self._refusal_s)
            raise self._refusal(owner)
        try:
            yield
        finally:
            self.add(owner, -1)

    def _refusal(self, owner: bytes) -> RequestError:
        if self[owner] >= self.max_each:
            return Throttled(
                "too_many_downloads",
                f"this client has {self[owner]} downloads; at most {self.max_each} may run. Retry when one has ended",
                retry_after_s=_RETRY_S,
            )
        return RequestError(
            "too_many_downloads",
            f"{self.max_all} downloads run, which is the most that this server allows; retry later",
            status=503,
        )
