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
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

_OWNERS_AT_MOST: Final = 8
"""Owners that may keep as many prefixes as they are allowed to; beyond, who keeps most loses its oldest."""


class KeptPrefixes:
    """At most `max_each` prefixes of an owner, for `max_s` seconds each, and `max_tokens` ids of all."""

    def __init__(
        self, max_each: int, clock: Callable[[], float], *, max_s: float = math.inf, max_tokens: int = 1 << 24
    ) -> None:
        self._max_each, self._max_s, self._max_tokens = max_each, max_s, max_tokens
        self._clock = clock
        self._salt = secrets.token_bytes(16)
        self._kept: OrderedDict[tuple[bytes, str], tuple[float, array[int]]] = OrderedDict()
        self._num_of: dict[bytes, int] = {}
        self._tokens_of: dict[bytes, int] = {}
        self._num_tokens = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, owner: bytes, tokens: Sequence[int], kept_as: Callable[[str], str] = str) -> str:
        """Keeps the tokens of a text; returns the hash for what continues it.

        kept_as: as `GenerateRequest.kept_as`: gives the name for `find`.
        """
        ids = array("i", tokens)
        prefix_hash = hashlib.blake2b(ids.tobytes(), digest_size=32, key=self._salt, salt=_salt(owner)).hexdigest()
        name = kept_as(prefix_hash)
        with self._lock:
            self._pop((owner, name))
            self._kept[owner, name] = self._clock(), ids
            self._num_of[owner] = self._num_of.get(owner, 0) + 1
            self._tokens_of[owner] = self._tokens_of.get(owner, 0) + len(ids)
            self._num_tokens += len(ids)
            self._pop_old()
            if self._num_of[owner] > self._max_each:
                self._pop_oldest(owner)
            while len(self._kept) > self._max_each * _OWNERS_AT_MOST:
                self._pop_oldest(max(self._num_of, key=self._num_of.__getitem__))
            while len(self._kept) > 1 and self._num_tokens > self._max_tokens:
                self._pop_oldest(max(self._tokens_of, key=self._tokens_of.__getitem__))
        return prefix_hash

    def release_old(self) -> None:
        """Forgets what is too old. Call it now and then: an idle server keeps no texts."""
        with self._lock:
            self._pop_old()

    def _pop_old(self) -> None:
        now = self._clock()
        while self._kept:
            key, (since, _) = next(iter(self._kept.items()))  # the oldest
            if now - since < self._max_s:
                return
            self._pop(key)

    def _pop_oldest(self, owner: bytes) -> None:
        self._pop(next(key for key in self._kept if key[0] == owner))

    def find(self, owner: bytes, name: str) -> Sequence[int] | None:
        """An owner's kept text, which stays kept; None when it is not here, or too old."""
        with self._lock:
            found = self._kept.get((owner, name))
            if found is None:
                return None
            since, ids = found
            if self._clock() - since >= self._max_s:
                self._pop((owner, name))
                return None
            return ids

    def _pop(self, key: tuple[bytes, str]) -> None:
        found = self._kept.pop(key, None)
        if found is not None:
            self._num_tokens -= len(found[1])
            self._num_of[key[0]] -= 1
            self._tokens_of[key[0]] -= len(found[1])
            if not self._num_of[key[0]]:
                del self._num_of[key[0]], self._tokens_of[key[0]]


def _salt(owner: bytes) -> bytes:
    return hashlib.sha256(owner).digest()[:16]
