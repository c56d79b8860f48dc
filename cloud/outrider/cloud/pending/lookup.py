"""Guesses by lookup (`runtimes.ngram`): in the text itself, and in an earlier text after the same prompt.

Prompt lookup guesses what followed the last tokens where they stood before, for steps for which a device has sent
nothing. An earlier text is followed from its first token on: guesses that it is repeated, position by position. After a
divergence it is rejoined by the last tokens. A wrong text costs what its learned rate lets it cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from outrider.cloud.pending.sources import DraftSource
from outrider.cloud.pending.trie import EARLIER_KINDS, PREDICTED_KINDS, PROMPT_KINDS, REPEATED
from outrider.models.runtimes.ngram import NgramLookup, places_of

MAX_MATCH: Final = 4
MIN_MATCH: Final = 2
_PIECE: Final = 8192
"""Tokens that a call copies at most, 0.3 ms: so no long prompt holds up the engine."""
_MARKS_FOR_PAIR: Final = 4
"""At least: so one pair in four seems to have stood before by chance, and is searched for."""
_HASH: Final = 40503
_FEW: Final = 32
"""Pairs that are marked one by one."""
_LONG_MATCHES: Final = (4, 8)
"""A match of more tokens than these is one kind further."""


def kind_of(matched: int) -> int:
    """The kind of a node that repeats the text after `matched` equal tokens."""
    if matched <= _LONG_MATCHES[0]:
        return matched - MIN_MATCH
    return 3 if matched <= _LONG_MATCHES[1] else PROMPT_KINDS[-1]


class PromptLookup(DraftSource):
    """Looks up continuations in one sequence's own text, which only grows. text: read, never changed."""

    kinds = PROMPT_KINDS

    def __init__(self, text: Sequence[int]) -> None:
        self._text = text
        self._lookup = NgramLookup(max_n=MAX_MATCH, min_n=MIN_MATCH)
        self._pairs = _Pairs()

    def propose(self, most: int) -> tuple[list[int], list[int]]:
        """At most `most` tokens that followed the text's last tokens before, and their kinds; nothing without a match,
        or while more of the text is new than a call may copy.

        The longest match of MAX_MATCH tokens down to MIN_MATCH, the newest of these.
        """
        length = self._lookup.length
        self._lookup.extend(self._text[length : length + _PIECE])
        if self._lookup.length < len(self._text) or not self._pairs.may_repeat(self._text):
            return [], []
        matched, copied = self._lookup.match(most)
        return copied, [kind_of(matched + index) for index in range(len(copied))]


assert MIN_MATCH == 2, "a match has the last pair of tokens"


class _Pairs:
    """The pairs of tokens that a text has, as marks by their hash: they tell that a last pair never stood before."""

    def __init__(self) -> None:
        self._marks = bytearray()
        self._num = 0  # pairs that are marked

    def may_repeat(self, text: Sequence[int]) -> bool:
        """Whether the text's last pair may have stood in it before. The text only grows."""
        last = len(text) - 2  # pairs before the last one
        if last < 1:
            return False
        if _MARKS_FOR_PAIR * last > len(self._marks):
            self._marks, self._num = bytearray(1 << (2 * _MARKS_FOR_PAIR * last).bit_length()), 0
        marks, mask = self._marks, len(self._marks) - 1
        if last - self._num > _FEW:
            tokens = np.array(text[self._num : min(last, self._num + _PIECE) + 1], np.int64)
            np.frombuffer(marks, np.uint8)[(tokens[:-1] * _HASH + tokens[1:]) & mask] = 1
            self._num += len(tokens) - 1
            if self._num < last:
                return True  # nothing is known before all of it is marked
        for at in range(self._num, last):
            marks[(text[at] * _HASH + text[at + 1]) & mask] = 1
        self._num = last
        return bool(marks[(text[last] * _HASH + text[last + 1]) & mask])


MAX_TOKENS: Final = 1 << 14
"""Tokens of an earlier text that are used: the first. The search for a place to rejoin takes 20 us."""
_LONG_RUNS: Final = (4, 16)
"""An agreement of more tokens than these is one kind further."""


def kind_after(run: int, kinds: range = EARLIER_KINDS) -> int:
    """The kind of a node that continues an earlier text after `run` equal tokens."""
    return kinds[sum(run > longest for longest in _LONG_RUNS)]


assert len(EARLIER_KINDS) == len(PREDICTED_KINDS) == len(_LONG_RUNS) + 1


class RecentTextSource(DraftSource):
    """An earlier text, and where the present one is in it.

    committed: the sequence's tokens; read, never changed, only grows. is_repeat: the earlier text was picked with the
    same sampling parameters and seed, so the present one is equal until rounding makes a difference. kinds: of its
    nodes; PREDICTED_KINDS for a text that the request brought as its prediction.
    """

    rivals_device = True

    def __init__(
        self, tokens: Sequence[int], committed: Sequence[int], *, is_repeat: bool, kinds: range = EARLIER_KINDS
    ) -> None:
        self._tokens = list(tokens[:MAX_TOKENS])
        self._array = np.array(self._tokens, np.int32)
        self._committed = committed
        self._num_seen = 0  # tokens of `committed`
        self._at = 0  # where the next token is expected
        self._run = 0  # tokens that agreed up to there
        self._is_aligned = True
        self.goes_first = is_repeat
        self.kinds = kinds

    def propose(self, most: int) -> tuple[list[int], list[int]]:
        """At most `most` tokens that follow here in the earlier text, and their kinds; nothing where it is left."""
        self._follow()
        if not self._is_aligned or most <= 0:
            return [], []
        tokens = self._tokens[self._at : self._at + most]
        if self.goes_first:
            return tokens, [REPEATED] * len(tokens)
        return tokens, [kind_after(self._run + index, self.kinds) for index in range(len(tokens))]

    def _follow(self) -> None:
        """Compares what was committed since the last call."""
        for token in self._committed[self._num_seen :]:
            self._num_seen += 1
            if self._is_aligned and self._at < len(self._tokens) and self._tokens[self._at] == token:
                self._run += 1
            elif self._at < len(self._tokens) or not self._is_aligned:
                self._is_aligned = self.goes_first = False
                self._run = 0
            self._at += 1
        if not self._is_aligned:
            self._rejoin()

    def _rejoin(self) -> None:
        """Finds the last tokens in the earlier text: the longest match, of these the nearest to the present place."""
        last = self._committed[max(0, self._num_seen - MAX_MATCH) : self._num_seen]
        matched, ends = places_of(self._array, last, MIN_MATCH, MAX_MATCH)
        if not matched:
            return
        self._at = int(ends[np.abs(ends - self._at).argmin()])
        self._run, self._is_aligned = matched, True
