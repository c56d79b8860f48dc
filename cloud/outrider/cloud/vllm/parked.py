"""Keeps the token ids of finished /v1/verify passes and sessions by a hash, for the request that continues them.

Only ids are kept: their keys and values may still be in vLLM's prefix cache, and are computed again if they are not.
Each owner has its own. Any thread may call it.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import threading
from array import array
from collections.abc import Callable, Sequence
from typing import Final

from outrider.models.process.by_owner import Bounds, OwnerStore

_OWNERS_AT_MOST: Final = 8
"""Owners that may keep as many prefixes as they are allowed to; beyond, who keeps most loses its oldest."""


class KeptPrefixes:
    """At most `max_each` prefixes of an owner, for `max_s` seconds each, and `max_tokens` ids of all."""

    def __init__(
        self, max_each: int, clock: Callable[[], float], *, max_s: float = math.inf, max_tokens: int = 1 << 24
    ) -> None:
        bounds = Bounds(max_each, max_each * _OWNERS_AT_MOST, max_size=max_tokens)
        self._kept: OwnerStore[bytes, str, array[int]] = OwnerStore(bounds, max_s, clock)
        self._salt = secrets.token_bytes(16)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, owner: bytes, tokens: Sequence[int], kept_as: Callable[[str], str] = str) -> str:
        """Keeps the tokens of a text; returns the hash for what continues it.

        kept_as: as `Asker.name_of`: gives the name for `find`.
        """
        ids = array("i", tokens)
        prefix_hash = hashlib.blake2b(ids.tobytes(), digest_size=32, key=self._salt, salt=_salt(owner)).hexdigest()
        with self._lock:
            self._kept.pop_old()
            self._kept.put(owner, kept_as(prefix_hash), ids, len(ids))
        return prefix_hash

    def release_old(self) -> None:
        """Forgets what is too old. Call it now and then: an idle server keeps no texts."""
        with self._lock:
            self._kept.pop_old()

    def find(self, owner: bytes, name: str) -> Sequence[int] | None:
        """An owner's kept text, which stays kept; None when it is not here, or too old."""
        with self._lock:
            return self._kept.get(owner, name)


def _salt(owner: bytes) -> bytes:
    return hashlib.sha256(owner).digest()[:16]
