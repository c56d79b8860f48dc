"""Follows a predicted output (OpenAI's `prediction`) along the text: how much of it the text has, and what is left.

Depends on the text and the prediction only, so two calls with one text count the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class PredictionFollower:
    """Where the text is in its prediction. After a difference they are together again at the next two equal tokens: the
    place of these that is nearest. Each token of the prediction counts once.
    """

    def __init__(self, prediction: Sequence[int]) -> None:
        self._tokens = tuple(prediction)
        self._places: dict[tuple[int, int], list[int]] = {}
        for end in range(2, len(self._tokens) + 1):
            self._places.setdefault((self._tokens[end - 2], self._tokens[end - 1]), []).append(end)
        self._has_come = bytearray(len(self._tokens))
        self._at = 0
        self._is_aligned = True
        self._last: int | None = None

    @property
    def num_accepted(self) -> int:
        """Tokens of the prediction that the text has."""
        return self._has_come.count(1)

    @property
    def num_rejected(self) -> int:
        """Tokens of the prediction that the text does not have."""
        return len(self._tokens) - self.num_accepted

    @property
    def rest(self) -> tuple[int, ...]:
        """What may still come true."""
        return self._tokens[self._at :]

    def push(self, tokens: Sequence[int]) -> None:
        """Takes tokens of the text."""
        for token in tokens:
            if self._is_aligned and self._at < len(self._tokens) and self._tokens[self._at] == token:
                self._has_come[self._at] = 1
                self._at += 1
            else:
                self._is_aligned = False
                if self._last is not None:
                    self._rejoin((self._last, token))
            self._last = token

    def _rejoin(self, last: tuple[int, int]) -> None:
        ends = self._places.get(last)
        if not ends:
            return
        index = bisect_left(ends, self._at)
        near = ends[max(0, index - 1) : index + 1]
        self._at, self._is_aligned = min(near, key=lambda end: abs(end - self._at)), True
        self._has_come[self._at - 2 : self._at] = b"\x01\x01"
