"""Names, encodes and keeps recent texts: an owner's secret, a prompt's digest, a text's bytes, the store in memory.

Whoever reads a store learns the ids of texts, and of prompts nothing that they did not know: digests are keyed by the
owner, and the owner is the hash of an API key, or an address where no keys are needed.
"""

from __future__ import annotations

import hashlib
import hmac
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np

from outrider.models.picks.sampling import SamplingParams
from outrider.models.process.by_owner import Bounds, OwnerStore

MAX_TOKENS: Final = 1 << 14
"""Ids of a text that are kept: the first."""
VERSION: Final = 1
_TAG_BYTES: Final = 8
_SAMPLING_BYTES: Final = 8
_MAC_BYTES: Final = 16
_FIXED_BYTES: Final = 1 + _TAG_BYTES + _SAMPLING_BYTES + _MAC_BYTES
MAX_BYTES: Final = _FIXED_BYTES + 4 * MAX_TOKENS
DEFAULT_S: Final = 600.0
_ENTRY_BYTES: Final = 512
"""Of a text beside its ids."""
BOUNDS: Final = Bounds(max_each=256, max_each_size=8 << 20, max_size=64 << 20)
"""Of a store in memory: texts of an owner, and bytes of an owner and in all."""
MAX_TEXTS: Final = 4096
"""Of all owners; beyond, too, the owner with most bytes loses its oldest."""


@dataclass(frozen=True, slots=True)
class RecentText:
    """The ids that followed a prompt. sampling: digest of the parameters and the seed that picked them."""

    tokens: tuple[int, ...]
    sampling: bytes


@dataclass(frozen=True, slots=True)
class Place:
    """Where a text is kept. owner: digest of target and owner; prompt: of the prompt, keyed by both and the salt."""

    owner: str
    prompt: bytes


class PromptDigest:
    """The digest of a prompt that may go on: of an owner's ids so far."""

    __slots__ = ("_hash", "_owner")

    def __init__(self, target: str, owner: bytes, salt: bytes = b"") -> None:
        """target: the identity of what picks the tokens; another target's texts are never found. salt: divides the
        owner's texts, which still count as one owner's.
        """
        secret = hashlib.blake2b(
            owner, key=hashlib.sha256(target.encode()).digest(), person=b"outrider recent"
        ).digest()
        self._owner = hashlib.blake2b(b"owner", key=secret, digest_size=16).hexdigest()
        own = hashlib.sha256(salt).digest()[: hashlib.blake2b.SALT_SIZE] if salt else b""
        self._hash = hashlib.blake2b(key=secret, digest_size=32, salt=own)

    def with_tokens(self, tokens: Sequence[int]) -> PromptDigest:
        """The digest of these ids after those so far."""
        longer = object.__new__(PromptDigest)
        longer._owner, longer._hash = self._owner, self._hash.copy()
        longer._hash.update(np.asarray(tokens, dtype="<i8").tobytes())
        return longer

    @property
    def place(self) -> Place:
        """Where the text after these ids is kept."""
        return Place(self._owner, self._hash.digest())


def sampling_digest(params: SamplingParams, *others: object) -> bytes:
    """Equal where two requests of one prompt pick the same tokens; a greedy one has no seed.

    others: what else decides the pick, such as processors, by its `repr`.
    """
    facts = "greedy" if params.is_greedy else repr(params)
    if others:
        facts = repr((facts, *others))
    return hashlib.blake2b(facts.encode(), digest_size=_SAMPLING_BYTES).digest()


def encode(place: Place, text: RecentText) -> bytes:
    """version, tag of the prompt, digest of the sampling, ids as uint32 (little endian), keyed checksum."""
    ids = np.asarray(text.tokens[:MAX_TOKENS], dtype="<u4").tobytes()
    body = bytes([VERSION]) + place.prompt[:_TAG_BYTES] + text.sampling + ids
    return body + _checksum(place, body)


def is_of_another_prompt(place: Place, data: bytes) -> bool:
    """Whether the bytes are of another prompt, which shares the slot."""
    return data[:1] == bytes([VERSION]) and data[1 : 1 + _TAG_BYTES] != place.prompt[:_TAG_BYTES]


def decode(place: Place, data: bytes) -> RecentText | None:
    """The text that `encode` wrote for this place; None for anything else."""
    if not _FIXED_BYTES <= len(data) <= MAX_BYTES or (len(data) - _FIXED_BYTES) % 4 or data[0] != VERSION:
        return None
    body, checksum = data[:-_MAC_BYTES], data[-_MAC_BYTES:]
    if not hmac.compare_digest(checksum, _checksum(place, body)):
        return None
    start = 1 + _TAG_BYTES
    ids = np.frombuffer(body, dtype="<u4", offset=start + _SAMPLING_BYTES)
    return RecentText(tuple(ids.tolist()), body[start : start + _SAMPLING_BYTES])


def _checksum(place: Place, body: bytes) -> bytes:
    """Keyed by the prompt's digest, of which a reader of the store has the tag only."""
    return hashlib.blake2b(body, key=place.prompt, digest_size=_MAC_BYTES).digest()


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

    def put(self, place: Place, text: RecentText) -> None:
        """Keeps a text in the place of an earlier one. Any thread; never blocks."""

    def stats(self) -> RecentStats:
        """A snapshot; cheap."""

    def close(self) -> None:
        """Ends what runs in the background."""


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
