"""Guesses by prompt lookup: repeats what followed the same tokens before (Saxena 2023, "Prompt Lookup Decoding").

The last resort before no draft at all: no model, little memory, microseconds per call. It finds an earlier occurrence
of the last few tokens and copies what followed. It has guesses but no logits, so it is no `SequenceRuntime`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from outrider.models.errors import ConfigError

LONGEST_MATCH: Final = 32
"""Tokens of a suffix that `QuotedText` compares at most."""
_MAX_PLACES: Final = 64
"""Places of one n-gram that `QuotedText` compares at most: the first ones."""


class NgramLookup:
    """Proposes by the longest repeated suffix, most recent occurrence first.

    An index of every n-gram's end positions grows and shrinks with the sequence: O(max_n - min_n + 1) per token either
    way, whatever the sequence's length.
    """

    def __init__(self, *, max_n: int = 4, min_n: int = 2) -> None:
        """Suffixes of `max_n` down to `min_n` tokens are looked up. Raises ConfigError unless 1 <= min_n <= max_n."""
        if not 1 <= min_n <= max_n:
            raise ConfigError(f"min_n is {min_n} and max_n {max_n}; expected 1 <= min_n <= max_n")
        self._sizes = range(max_n, min_n - 1, -1)
        self._tokens: list[int] = []
        self._ends: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)  # ascending: a stack

    @property
    def length(self) -> int:
        """Tokens of the sequence so far."""
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the sequence."""
        for token in tokens:
            self._tokens.append(token)
            for ngram in self._suffixes():
                self._ends[ngram].append(len(self._tokens))

    def truncate(self, length: int) -> None:
        """Forgets everything from position `length` on; `length` at most the present one."""
        assert 0 <= length <= len(self._tokens), f"truncate to {length} of {len(self._tokens)} tokens"
        while len(self._tokens) > length:
            for ngram in self._suffixes():
                ends = self._ends[ngram]
                ends.pop()
                if not ends:
                    del self._ends[ngram]
            self._tokens.pop()

    def propose(self, max_tokens: int) -> list[int]:
        """What followed the last earlier occurrence of the longest repeated suffix; [] when nothing repeats.

        A copy that reaches the end of the sequence continues with its own output, so a loop is proposed as a loop.
        """
        return self.match(max_tokens)[1]

    def match(self, max_tokens: int) -> tuple[int, list[int]]:
        """The same, and before it the number of tokens of that suffix (0 when nothing repeats)."""
        for ngram in self._suffixes():
            ends = self._ends[ngram]
            if len(ends) > 1:  # the last one is the suffix itself
                period = len(self._tokens) - ends[-2]
                copied = self._tokens[ends[-2] : ends[-2] + max_tokens]
                return len(ngram), [copied[i % period] for i in range(max_tokens)]
        return 0, []

    def tail(self, most: int) -> list[int]:
        """The last tokens of the sequence, at most `most`."""
        return self._tokens[max(0, len(self._tokens) - most) :]

    def _suffixes(self) -> list[tuple[int, ...]]:
        """The sequence's last n tokens, for each n, the longest first."""
        length = len(self._tokens)
        return [tuple(self._tokens[length - n :]) for n in self._sizes if n <= length]


class QuotedText:
    """A text that others may quote, such as a document: finds what follows a suffix in it. Never changes.

    Several sequences can share one.
    """

    def __init__(self, tokens: Sequence[int], *, max_n: int = 4, min_n: int = 2) -> None:
        """Suffixes of `max_n` down to `min_n` tokens are looked up; of longer matches the tokens are compared."""
        self._tokens = list(tokens)
        self._sizes = range(max_n, min_n - 1, -1)
        self._ends: dict[tuple[int, ...], list[int]] = {}
        for size in self._sizes:
            for end in range(size, len(self._tokens)):
                ends = self._ends.setdefault(tuple(self._tokens[end - size : end]), [])
                if len(ends) < _MAX_PLACES:
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
