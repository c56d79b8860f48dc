"""Splits a text into a draft's own tokens, where the text comes as token ids of a target with another tokenizer.

The text grows id by id and branches, and must not be split anew each time. So it is cut into pieces at places where a
tokenizer splits in any case: before a space that follows something else. Each piece is split alone. What was cut off
stays (`Cut`); only the piece at the end (`tail`) changes with what follows. Cuts depend on the text alone, not on how
it came, so a text that was cut back and went on is split like one that was read in one go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Final, NamedTuple

from outrider.models.text.tokenizer import Tokenizer

_BLANKS: Final = b" \t\r\n"
_LONGEST_TAIL: Final = 192
"""Bytes after which a text without spaces is cut all the same, at two thirds."""
_CACHED_SPLITS: Final = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Draft tokens of a text that nothing which follows changes: those before, and those of the latest piece.

    length: of all. key: a hash of all, equal for equal ones. at_start: no text came yet.
    """

    before: Cut | None
    tokens: tuple[int, ...]
    at_start: bool
    length: int = field(init=False)
    key: int = field(init=False)

    def __post_init__(self) -> None:
        length, key = (self.before.length, self.before.key) if self.before is not None else (0, 0)
        object.__setattr__(self, "length", length + len(self.tokens))
        object.__setattr__(self, "key", (key_after(key, self.tokens) or (key,))[-1])

    def since(self, start: int) -> list[int]:
        """The tokens from number `start` on."""
        pieces, cut = list[tuple[int, ...]](), self
        while cut.length > start:
            pieces.append(cut.tokens)
            if cut.before is None:
                break
            cut = cut.before
        found = [token for piece in reversed(pieces) for token in piece]
        return found[len(found) - (self.length - start) :]


def key_after(key: int, tokens: Sequence[int]) -> tuple[int, ...]:
    """The key after each of some tokens that follow those of a key."""
    return tuple(accumulate(tokens, lambda before, token: hash((before, token)), initial=key))[1:]


def common_cut(one: Cut, other: Cut) -> Cut:
    """The longest beginning that both have. Both are of one `DraftText`, so they share its beginning."""
    while one.key != other.key or one.length != other.length:
        if one.before is not None and (one.length >= other.length or other.before is None):
            one = one.before
        else:
            assert other.before is not None, "texts of different drafts"
            other = other.before
    return one


@dataclass(frozen=True, slots=True)
class Place:
    """The end of a text: what is cut off, and the bytes after it. last: the target's last id; -1 if it is no text."""

    cut: Cut
    tail: bytes = b""
    last: int = -1


class Split(NamedTuple):
    """Draft tokens of a tail, and the bytes of it up to the end of each. Fewer than the tail has where it ends inside a
    character.
    """

    tokens: tuple[int, ...]
    ends: tuple[int, ...]

    def until(self, end: int) -> Split:
        """The tokens that end there or before."""
        count = sum(each <= end for each in self.ends)
        return Split(self.tokens[:count], self.ends[:count])


class DraftText:
    """Reads a target's ids as a draft would read their text. A pure function of the ids; safe to share.

    spelled: each id's bytes. special: the draft's tokens in place of an id, for those that are no text.
    """

    def __init__(self, draft: Tokenizer, spelled: Sequence[bytes], special: dict[int, tuple[int, ...]]) -> None:
        self._spelled = spelled
        self._special = special
        self._bytes_of, self._encode = draft.token_bytes, draft.further.encode
        self._prefix_of = draft.further.prefix_of
        self._byte_tokens = {
            byte: token
            for token in range(draft.size)
            if len(spelling := draft.token_bytes(token)) == 1 and (byte := spelling[0]) >= 0x80
        }
        self.split = lru_cache(_CACHED_SPLITS)(self._split)
        self.begin = Place(Cut(None, _before_text(draft), at_start=True))
        """Before any text."""

    def advance(self, place: Place, token: int) -> Place:
        """The place after a further id of the target."""
        instead = self._special.get(token)
        if instead is not None:
            return Place(Cut(self._cut_off(place.cut, place.tail), instead, at_start=False)) if instead else place
        cut, tail = place.cut, place.tail + self._spelled[token]
        while end := _end_of_piece(tail):
            cut, tail = self._cut_off(cut, tail[:end]), tail[end:]
        return Place(cut, tail, token)

    def _cut_off(self, cut: Cut, piece: bytes) -> Cut:
        return Cut(cut, self.split(piece, cut.at_start).tokens, at_start=False) if piece else cut

    def _split(self, tail: bytes, at_start: bool) -> Split:
        tokens, ends, done = list[int](), list[int](), 0
        if at_start and (prefix := self._prefix_of(tail.decode(errors="replace")).encode()):
            tail, done = prefix + tail, -len(prefix)
        rest = tail
        while rest:
            text, num_bytes = _first_text(rest)
            if num_bytes:
                ids = self._encode(text)
                spelled = [self._bytes_of(token) for token in ids]
                tokens += ids
                if b"".join(spelled) == rest[:num_bytes]:
                    for each in spelled:
                        done += len(each)
                        ends.append(done)
                else:  # a normalizer has changed the text, so only the end of all is known
                    done += num_bytes
                    ends += [done] * len(ids)
                rest = rest[num_bytes:]
            if not rest or _is_begun(rest):
                break
            if (token := self._byte_tokens.get(rest[0])) is not None:
                tokens.append(token)
                ends.append(done + 1)
            done += 1
            rest = rest[1:]
        return Split(tuple(tokens), tuple(max(0, end) for end in ends))


def _end_of_piece(tail: bytes) -> int:
    """Where the first piece of a tail ends, if that is decided; 0: not yet."""
    place = tail.find(b" ", 1)
    while place > 0 and tail[place - 1] in _BLANKS:
        place = tail.find(b" ", place + 1)
    if 0 < place < _LONGEST_TAIL:
        return place
    if len(tail) < _LONGEST_TAIL:
        return 0
    place = _LONGEST_TAIL * 2 // 3
    while place > 1 and tail[place] & 0xC0 == 0x80:  # not inside a character
        place -= 1
    return place


def _first_text(data: bytes) -> tuple[str, int]:
    """The UTF-8 text at the beginning of some bytes, and how many bytes it has."""
    try:
        return data.decode(), len(data)
    except UnicodeDecodeError as error:
        return data[: error.start].decode(), error.start


def _is_begun(data: bytes) -> bool:
    """Whether bytes that are no text may be the beginning of one character."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return False


def _before_text(draft: Tokenizer) -> tuple[int, ...]:
    """The special tokens that a draft puts before a text; what it puts behind one is left out."""
    alone, prompt = draft.encode("a", add_special_tokens=False), draft.encode("a")
    starts = (start for start in range(len(prompt)) if prompt[start : start + len(alone)] == alone)
    return tuple(prompt[: next(starts, 0)])
