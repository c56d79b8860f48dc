"""Guesses by prompt lookup: repeats what followed the same tokens before (Saxena 2023, "Prompt Lookup Decoding").

The last resort before no draft at all: no model, little memory. It finds an earlier occurrence of the last few tokens
and copies what followed. It has guesses but no logits, so it is no `SequenceRuntime`. A text of 100,000 tokens is
searched in 0.04 to 0.15 ms.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.models.errors import ConfigError

LONGEST_MATCH: Final = 32
"""Tokens of a suffix that `QuotedText` compares at most."""
_MAX_QUOTED_PLACES: Final = 64
"""Places of one n-gram that `QuotedText` compares at most: the first ones."""
_MAX_PLACES: Final = 4096
"""Places with the last token that are compared: the newest. A text of one token alone would have as many as tokens."""


def places_of(text: NDArray[np.int32], tail: Sequence[int], least: int, most: int) -> tuple[int, NDArray[np.int64]]:
    """Where `text`, [N], has the longest suffix of `tail`, of `least` to `most` tokens.

    Returns its length, and the index after each place, ascending; 0 and nothing where there is none.
    """
    nothing = 0, np.empty(0, np.int64)
    if len(tail) < least or len(text) < least:
        return nothing
    ends = np.flatnonzero(text[least - 1 :] == tail[-1])[-_MAX_PLACES:] + least
    for back in range(2, least + 1):
        ends = ends[text[ends - back] == tail[-back]]
    if not ends.size:
        return nothing
    for matched in range(least, min(most, len(tail))):
        longer = ends[ends > matched]
        longer = longer[text[longer - matched - 1] == tail[-matched - 1]]
        if not longer.size:
            return matched, ends
        ends = longer
    return min(most, len(tail)), ends


class NgramLookup:
    """Proposes by the longest repeated suffix, most recent occurrence first."""

    def __init__(self, *, max_n: int = 4, min_n: int = 2) -> None:
        """Suffixes of `max_n` down to `min_n` tokens are looked up. Raises ConfigError unless 1 <= min_n <= max_n."""
        if not 1 <= min_n <= max_n:
            raise ConfigError(f"min_n is {min_n} and max_n {max_n}; expected 1 <= min_n <= max_n")
        self._min_n, self._max_n = min_n, max_n
        self._tokens: array[int] = array("i")

    @property
    def length(self) -> int:
        """Tokens of the sequence so far."""
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the sequence."""
        self._tokens.extend(tokens)

    def truncate(self, length: int) -> None:
        """Forgets everything from position `length` on; `length` at most the present one."""
        assert 0 <= length <= len(self._tokens), f"truncate to {length} of {len(self._tokens)} tokens"
        del self._tokens[length:]

    def match(self, max_tokens: int) -> tuple[int, list[int]]:
        """The number of tokens of the longest repeated suffix, and what followed its last earlier occurrence; (0, [])
        when nothing repeats.

        A copy that reaches the end of the sequence continues with its own output, so a loop is proposed as a loop.
        """
        if not self._tokens:
            return 0, []
        before = np.frombuffer(self._tokens, np.int32)[:-1]
        matched, ends = places_of(before, self._tokens[-self._max_n :], self._min_n, self._max_n)
        if not matched:
            return 0, []
        end = int(ends[-1])
        copied = self._tokens[end : end + max_tokens].tolist()
        return matched, [copied[index % len(copied)] for index in range(max_tokens)]

    def tail(self, most: int) -> list[int]:
        """The last tokens of the sequence, at most `most`."""
        return self._tokens[max(0, len(self._tokens) - most) :].tolist()


class QuotedText:
    """A text that others may quote, such as a document: finds what follows a suffix in it. Never changes.

    Several sequences can share one. It has an index, because each guess of a draft asks each passage.
    """

    def __init__(self, tokens: Sequence[int], *, max_n: int = 4, min_n: int = 2) -> None:
        """Suffixes of `max_n` down to `min_n` tokens are looked up; of longer matches the tokens are compared."""
        self._tokens = list(tokens)
        self._sizes = range(max_n, min_n - 1, -1)
        self._ends: dict[tuple[int, ...], list[int]] = {}
        for size in self._sizes:
            for end in range(size, len(self._tokens)):
                ends = self._ends.setdefault(tuple(self._tokens[end - size : end]), [])
                if len(ends) < _MAX_QUOTED_PLACES:
                    ends.append(end)

    def __len__(self) -> int:
        return len(self._tokens)

    def match(self, tail: Sequence[int], max_tokens: int) -> tuple[int, list[int]]:
        """The number of last tokens of `tail` that the text has, and what follows them there; (0, []) for none.

        The longest such suffix counts, of at most LONGEST_MATCH tokens; of several places the first.
        """
        for size in self._sizes:
            if size <= len(tail) and (ends := self._ends.get(tuple(tail[len(tail) - size :]))):
                lengths = [self._shared(tail, end) for end in ends]
                longest = max(lengths)
                end = ends[lengths.index(longest)]
                return longest, self._tokens[end : end + max_tokens]
        return 0, []

    def _shared(self, tail: Sequence[int], end: int) -> int:
        most, shared = min(len(tail), end, LONGEST_MATCH), 0
        while shared < most and self._tokens[end - 1 - shared] == tail[-1 - shared]:
            shared += 1
        return shared
