"""Guesses by prompt lookup: what followed the last tokens where they stood before in the text (`runtimes.ngram`). For
steps for which a device has sent nothing.

The text is copied a piece at a time, so that no long prompt holds up the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from outrider.cloud.pending.sources import DraftSource
from outrider.cloud.pending.trie import PROMPT_KINDS
from outrider.models.runtimes.ngram import NgramLookup

MAX_MATCH: Final = 4
MIN_MATCH: Final = 2
_PIECE: Final = 8192
"""Tokens that a call copies at most: 0.3 ms."""
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

    def propose(self, most: int) -> tuple[list[int], list[int]]:
        """At most `most` tokens that followed the text's last tokens before, and their kinds; nothing without a match,
        or while more of the text is new than a call may copy.

        The longest match of MAX_MATCH tokens down to MIN_MATCH, the newest of these.
        """
        length = self._lookup.length
        self._lookup.extend(self._text[length : length + _PIECE])
        if self._lookup.length < len(self._text):
            return [], []
        matched, copied = self._lookup.match(most)
        return copied, [kind_of(matched + index) for index in range(len(copied))]
