"""Keeps a draft's text beside what its runtime has in the cache, and runs only what is missing.

Knows neither guesses nor logit processors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outrider.models.runtimes.base import SequenceRuntime, num_shared

Logits = NDArray[np.float32]

MAX_BEHIND: Final = 32
"""Tokens by which a branching runtime's sequence may be behind the text. Committed tokens have run as branches already;
to take them over, the last of them runs again.
"""
_FIRST_PIECE: Final = 64
_LEAST_PIECE: Final = 16
_MOST_PIECE: Final = 1024
_PIECE_S: Final = 0.1
"""A long text is read in pieces of about this time: between two of them it can be left."""


class CachedText:
    """A text and a runtime, whose cache holds a beginning of the text, perhaps with a branch after it."""

    def __init__(self, runtime: SequenceRuntime, clock: Callable[[], float] = time.perf_counter) -> None:
        self.tokens: list[int] = []
        self._runtime = runtime
        self._clock = clock
        self._piece = _FIRST_PIECE
        self._cached: list[int] = []
        self._num_agreed = 0  # first tokens of `_cached` that are known to be the text's

    def begin(self, tokens: Sequence[int]) -> None:
        """Starts another text; the cache keeps the beginning that both share."""
        self.tokens = list(tokens)
        self._num_agreed = 0

    def forget(self) -> None:
        """Empties text and cache."""
        self.begin([])
        self._cached = []
        self._runtime.truncate(0)

    def agreed(self) -> int:
        """How many first tokens the cache and the text share."""
        agreed, most = self._num_agreed, min(len(self._cached), len(self.tokens))
        while agreed < most and self._cached[agreed] == self.tokens[agreed]:
            agreed += 1
        self._num_agreed = agreed
        return agreed

    @property
    def is_behind(self) -> bool:
        """Whether more than a piece of the text was not read, and can be."""
        kept = self.agreed()
        if len(self.tokens) - kept <= self._piece:
            return False
        limits = self._runtime.limits
        return len(self.tokens) < limits.max_positions and max(self.tokens[kept:]) < limits.vocab_size

    def read_on(self) -> None:
        """Reads a piece; the next is larger or smaller by the time that this one took."""
        kept = self.agreed()
        self.cut(kept)
        before = self._clock()
        self.append(self.tokens[kept : kept + self._piece])
        took_s = self._clock() - before
        if took_s > 2 * _PIECE_S:
            self._piece = max(_LEAST_PIECE, self._piece // 2)
        elif took_s < _PIECE_S / 2:
            self._piece = min(_MOST_PIECE, self._piece * 2)

    def cut_to_text(self) -> list[int]:
        """Cuts the cache back to a beginning of the text; returns the tokens that it lacks."""
        kept = self.agreed()
        self.cut(kept)
        return self.tokens[kept:]

    def catch_up(self) -> list[int]:
        """Runs all but the last few tokens of the text; returns those, at least one, to be run before any branch."""
        missing = self.cut_to_text()
        if not missing:  # the logits after the last token are gone
            missing = self.tokens[-1:]
            self.cut(len(self.tokens) - 1)
        if len(missing) > MAX_BEHIND:
            self.append(missing[:-1])
            del missing[:-1]
        return missing

    def run(self, branch: Sequence[int]) -> Logits:
        """Logits after a branch of the text: cuts the cache back to where it agrees, and runs the rest."""
        text, cached, kept = self.tokens, self._cached, self.agreed()
        if kept < len(text):
            new = [*text[kept:], *branch]
        else:
            shared = num_shared(branch, cached[kept:])
            kept += shared
            new = list(branch[shared:])
        if not new:  # the logits after the last token are gone; run that token again
            kept -= 1
            new = [cached[kept]]
        self.cut(kept)
        return self.append(new)

    def append(self, tokens: Sequence[int]) -> Logits:
        """Runs tokens behind what is cached; returns the logits after the last."""
        logits = self._runtime.extend(tokens)
        self._cached += tokens
        return logits

    def cut(self, length: int) -> None:
        """Cuts the cache back to its first `length` tokens."""
        if length < len(self._cached):
            self._runtime.truncate(length)
            del self._cached[length:]
            self._num_agreed = min(self._num_agreed, length)
