"""Says which tokens of a draft write what the ids of a target with another tokenizer do.

A draft's token counts for the id that writes the same bytes. Where there is none, it counts for the id with the longest
beginning of them: a draft that goes on with " functions" goes on with " function". Special tokens are matched by their
spelling, else by their role; those that the draft does not have are read as the text that they are spelled as.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.models.errors import TokenizerError
from outrider.models.text.draft_text import DraftText
from outrider.models.text.tokenizer import Tokenizer

Indices = NDArray[np.int64]

_CACHED: Final = 512
_CACHED_MEANT: Final = 1 << 14
MAX_IDS: Final = 1 << 21
"""The largest vocabulary known has 262,144; a file of a few bytes may name an id of 4 billion."""


class Pairs(NamedTuple):
    """Tokens of a draft, ascending, and the id that each counts for: [n] int64 both. Each token is there once."""

    ids: Indices
    tokens: Indices


class VocabularyMap:
    """The map between two vocabularies. Changes nothing after it is made; safe to share between threads.

    num_ids: of the target. num_tokens: of the draft. text: reads the target's ids as the draft's tokens. spelled: the
    bytes of each token. token_of: [num_ids] int64, the token that writes exactly what an id does; num_tokens where
    there is none. id_of: [num_tokens] int64, the id that a token counts for; -1 for none. ends: special ids, and the
    tokens that count for each. Raises TokenizerError for more than two million ids.
    """

    def __init__(self, target: Tokenizer, draft: Tokenizer) -> None:
        self._encode = target.further.encode
        for each in (target, draft):
            if each.size > MAX_IDS:
                raise TokenizerError(
                    f"the tokenizer of {each.name} has ids up to {each.size}; at most {MAX_IDS} are mapped"
                )
        self.num_ids, self.num_tokens = target.size, draft.size
        special = _special(target, draft)
        by_id = [b"" if index in special else target.token_bytes(index) for index in range(target.size)]
        self.text = DraftText(draft, by_id, special)
        self._by_id = by_id
        self._ids = _by_bytes(target, by_id)
        self.spelled = [b"" if token in draft.special_ids else draft.token_bytes(token) for token in range(draft.size)]
        tokens = _by_bytes(draft, self.spelled)
        self._target_order, self._draft_order = sorted(self._ids), sorted(tokens)
        self._tokens = [tokens[each] for each in self._draft_order]
        self._longest = max(map(len, self._draft_order), default=0)
        self.pairs = lru_cache(_CACHED)(self._pairs)
        self.joined = lru_cache(_CACHED)(self._joined)
        self.meant = lru_cache(_CACHED_MEANT)(self._meant)
        every = self._pairs(b"")
        self.id_of = np.full(self.num_tokens, -1, np.int64)
        self.id_of[every.tokens] = every.ids
        self.token_of = np.full(self.num_ids, self.num_tokens, np.int64)
        for index, token in zip(*(column.tolist() for column in every), strict=True):
            if self.spelled[token] == by_id[index]:
                self.token_of[index] = token
        self.ends = list(_ends(target, draft, special))
        for index, token in reversed(self.ends):
            self.token_of[index] = token
        for common in (b" ", b"\n"):  # tens of milliseconds, which the first text would wait for
            self.pairs(common)
            self.joined(self._ids.get(common, -1))

    def covered(self, ids: Sequence[int]) -> float:
        """The share of these ids that one token of the draft writes."""
        return float(np.mean(self.token_of[np.asarray(ids)] < self.num_tokens)) if len(ids) else 0.0

    def forget(self) -> None:
        """Forgets pieces of the texts that were read. They are found again where other texts run."""
        for kept in (self.text.split, self.meant, self.pairs):
            kept.cache_clear()

    def begins(self, rest: bytes) -> bool:
        """Whether a token of the draft begins with these bytes, and has more."""
        if len(rest) >= self._longest:
            return False
        place = bisect_left(self._draft_order, rest)
        if place < len(self._draft_order) and self._draft_order[place] == rest:
            place += 1
        return place < len(self._draft_order) and self._draft_order[place].startswith(rest)

    def _pairs(self, rest: bytes) -> Pairs:
        """The tokens that begin with some bytes and go on, and the ids that they write after these."""
        found: dict[int, int] = {}
        for place in _beginning_with(self._draft_order, rest):
            new = self._draft_order[place][len(rest) :]
            for length in range(len(new), 0, -1):
                if (index := self._ids.get(new[:length])) is not None:
                    found[self._tokens[place]] = index
                    break
        return _columns(found)

    def goes_on(self, written: bytes) -> bool:
        """Whether ids begin with these bytes and go on; not asked of nothing."""
        place = bisect_left(self._target_order, written)
        if place < len(self._target_order) and self._target_order[place] == written:
            place += 1
        return bool(written) and place < len(self._target_order) and self._target_order[place].startswith(written)

    def _meant(self, written: bytes, token: int) -> int:
        """The id that the target begins with where `written` and then a token's text come; -1 if it has no more than
        `written`.
        """
        both = written + self.spelled[token]
        try:
            found = self._encode(both.decode())[0]
        except UnicodeDecodeError:  # inside a character no tokenizer can be asked
            found = next((self._ids[both[:size]] for size in range(len(both), 0, -1) if both[:size] in self._ids), -1)
        return found if found >= 0 and len(self._by_id[found]) > len(written) else -1

    def _joined(self, last: int) -> Indices:
        """The ids that do not follow an id: the target has one for the bytes of both, and would have taken that."""
        rest = self._by_id[last] if last >= 0 else b""
        both = (self._target_order[place] for place in (_beginning_with(self._target_order, rest) if rest else ()))
        found = (self._ids.get(each[len(rest) :]) for each in both)
        return np.array([index for index in found if index is not None], np.int64)


def _beginning_with(spelled: Sequence[bytes], beginning: bytes) -> range:
    """The places of those that begin so, in a sorted sequence."""
    first = bisect_left(spelled, beginning)
    last = bisect_left(spelled, beginning + b"\xff" * 4, first) if beginning else len(spelled)
    while last < len(spelled) and spelled[last].startswith(beginning):
        last += 1
    return range(first, last)


def _columns(found: Mapping[int, int]) -> Pairs:
    """From ids by tokens."""
    tokens = sorted(found)
    return Pairs(np.array([found[token] for token in tokens], np.int64), np.array(tokens, np.int64))


def _by_bytes(tokenizer: Tokenizer, spelled: Sequence[bytes]) -> dict[bytes, int]:
    """The ids of ordinary tokens by their bytes. Of two that write the same, the one that is not a byte's stand-in."""
    found: dict[bytes, int] = {}
    for index, each in enumerate(spelled):
        if each and not (each in found and (tokenizer.token(index) or "").startswith("<0x")):
            found[each] = index
    return found


def _ends(target: Tokenizer, draft: Tokenizer, special: Mapping[int, tuple[int, ...]]) -> Iterator[tuple[int, int]]:
    """Special ids, and the tokens that count for each: for an end without its like, every end that the draft has."""
    for index, instead in special.items():
        has_role = index in target.eos_token_ids and draft.token_id(target.token(index) or "") is None
        for token in draft.eos_token_ids if has_role else instead:
            yield index, token


def _special(target: Tokenizer, draft: Tokenizer) -> dict[int, tuple[int, ...]]:
    """The draft's tokens in place of the target's special ids: the same spelling, else the same role."""
    found: dict[int, tuple[int, ...]] = {}
    for index in target.special_ids:
        same = draft.token_id(target.token(index) or "")
        if index == target.bos_token_id and target.begins_with_bos and index not in target.eos_token_ids:
            found[index] = ()  # the draft's text has its own beginning
        elif same is not None:
            found[index] = (same,)
        elif index in target.eos_token_ids and draft.eos_token_ids:
            found[index] = draft.eos_token_ids[:1]
    return found
