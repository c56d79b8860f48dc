"""Guesses by prompt lookup: what followed the last tokens where they stood before in the text (Saxena 2023, "Prompt
Lookup Decoding"). For steps for which a device has sent nothing.

The search is vectorized over an array of the text's tokens, which grows as the text does: a text of 100,000 tokens is
searched in 0.04 to 0.15 ms. The array is filled a piece at a time, so that no long prompt holds up the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.cloud.pending.trie import PROMPT_KINDS

MAX_MATCH: Final = 4
MIN_MATCH: Final = 2
_PIECE: Final = 8192
"""Tokens that a call copies at most: 0.3 ms."""
_MAX_PLACES: Final = 4096
"""Places with the last token that are compared: the newest. A text of one token alone would have as many as tokens."""
_LONG_MATCHES: Final = (4, 8)
"""A match of more tokens than these is one kind further."""


def kind_of(matched: int) -> int:
    """The kind of a node that repeats the text after `matched` equal tokens."""
    if matched <= _LONG_MATCHES[0]:
        return matched - MIN_MATCH
    return 3 if matched <= _LONG_MATCHES[1] else PROMPT_KINDS[-1]


class PromptLookup:
    """Looks up continuations in one sequence's own text, which only grows. text: read, never changed."""

    kinds = PROMPT_KINDS
    goes_first = False
    rivals_device = False

    def __init__(self, text: Sequence[int]) -> None:
        self._text = text
        self._array: NDArray[np.int32] = np.empty(0, np.int32)
        self._length = 0

    def propose(self, most: int) -> tuple[list[int], list[int]]:
        """At most `most` tokens that followed the text's last tokens before, and their kinds; nothing without a match.

        The longest match of MAX_MATCH tokens down to MIN_MATCH, the newest of these. A copy that reaches the text's end
        goes on with itself, so a loop is proposed as a loop.
        """
        if not self._is_complete():
            return [], []
        text, length = self._array[: self._length], self._length
        if length <= MIN_MATCH or most <= 0:
            return [], []
        # Ends of earlier places that have the last two tokens.
        ends = np.flatnonzero(text[1:-1] == text[-1])[-_MAX_PLACES:] + 2
        ends = ends[text[ends - 2] == text[-2]]
        if not ends.size:
            return [], []
        matched = MIN_MATCH
        while matched < MAX_MATCH and matched < length - 1:
            longer = ends[ends > matched]
            longer = longer[text[longer - matched - 1] == text[-matched - 1]]
            if not longer.size:
                break
            ends, matched = longer, matched + 1
        end = int(ends[-1])
        copied = text[end : end + most].tolist()
        period = length - end
        if len(copied) < most:
            copied = [copied[i % period] for i in range(most)]
        return copied, [kind_of(matched + i) for i in range(most)]

    def _is_complete(self) -> bool:
        """Copies new tokens; False while there are more than a call may copy."""
        wanted = len(self._text)
        if wanted > self._array.size:
            grown = np.empty(max(1024, 2 * wanted), np.int32)
            grown[: self._length] = self._array[: self._length]
            self._array = grown
        end = min(wanted, self._length + _PIECE)
        self._array[self._length : end] = self._text[self._length : end]
        self._length = end
        return end == wanted
