"""Names and encodes recent texts: an owner's secret, a prompt's digest, the bytes of a text.

Whoever reads a store learns the ids of texts, and of prompts nothing that they did not know: digests are keyed by the
owner, and the owner is the hash of an API key, or an address where no keys are needed.
"""

from __future__ import annotations

import hashlib
import hmac
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from outrider.models.picks.sampling import SamplingParams

MAX_TOKENS: Final = 1 << 14
"""Ids of a text that are kept: the first."""
VERSION: Final = 1
_TAG_BYTES: Final = 8
_SAMPLING_BYTES: Final = 8
_MAC_BYTES: Final = 16
_FIXED_BYTES: Final = 1 + _TAG_BYTES + _SAMPLING_BYTES + _MAC_BYTES
MAX_BYTES: Final = _FIXED_BYTES + 4 * MAX_TOKENS


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
    ids = array("I", text.tokens[:MAX_TOKENS])
    body = bytes([VERSION]) + place.prompt[:_TAG_BYTES] + text.sampling + np.asarray(ids, dtype="<u4").tobytes()
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
