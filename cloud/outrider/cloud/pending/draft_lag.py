"""Measures how long a device takes to answer a commit: medians, because a shared machine causes outliers."""

from __future__ import annotations

from collections import deque
from statistics import median

from outrider.cloud.pending.policy import ENOUGH_ANSWERS, longest_wait

_EXPECTED_TOKENS = 4  # of a device's first answer, until one has arrived


class DraftLag:
    """How a device answers commits: seconds to the first draft that knows of one, its size, then seconds per token."""

    _RECENT = 9

    def __init__(self, expected_ms: float | None = None) -> None:
        """expected_ms: the device's own hint; the first measured answers outweigh it."""
        self._first: deque[float] = deque(maxlen=self._RECENT)
        self._size: deque[int] = deque(maxlen=self._RECENT)
        self._token_s: deque[float] = deque(maxlen=self._RECENT)
        self._longest: deque[int] = deque(maxlen=self._RECENT)  # of each answer, with later additions
        self._sent: dict[int, float] = {}  # commits not answered yet: base -> when it was sent
        self._answered: tuple[int, float, int] = (-1, 0.0, 0)  # base, when, longest path so far
        self._lags: list[float | None] = []  # as `seconds_until` last computed them; empty: out of date
        self._hits = 2.0
        self._waits = 2.0
        if expected_ms is not None:
            self._first.append(expected_ms / 1e3)
            self._size.append(_EXPECTED_TOKENS)

    def is_awaited(self, base: int) -> bool:
        """Whether a draft that knows of `base` tokens would answer a commit that was recorded."""
        return base in self._sent

    def committed(self, base: int, now: float) -> None:
        """Records that a commit was sent which makes the total `base`."""
        self._sent[base] = now
        while len(self._sent) > 32:
            del self._sent[next(iter(self._sent))]

    def drafted(self, base: int, length: int, now: float) -> bool:
        """Records a draft that knows of `base` committed tokens and guesses `length` more.

        Returns whether it is the first answer to a commit that was recorded.
        """
        sent = self._sent.pop(base, None)
        if sent is not None:
            self._lags = []
            if self._first and self.answer_rate < ENOUGH_ANSWERS:
                # Waiting has stopped. Would this draft have been in time? Otherwise one hiccup would end all waiting.
                self.waited(now - sent <= longest_wait(median(self._first)))
            self._first.append(now - sent)
            self._size.append(length)
            self._longest.append(length)
            self._answered = (base, now, length)
            for older in [b for b in self._sent if b < base]:
                del self._sent[older]
        elif base == self._answered[0] and length > self._answered[2]:
            self._lags = []
            self._token_s.append((now - self._answered[1]) / (length - self._answered[2]))
            self._longest[-1] = length
            self._answered = (base, now, length)
        return sent is not None

    def waited(self, was_answered: bool) -> None:
        """Records a wait that ended, or would have ended, with a draft or without."""
        self._hits = 0.9 * self._hits + was_answered
        self._waits = 0.9 * self._waits + 1.0

    @property
    def last_s(self) -> float:
        """Seconds of the latest answer; only after `drafted` reported one."""
        return self._first[-1]

    @property
    def slow_s(self) -> float:
        """Seconds of the second longest of the recent first answers, as one may be a hiccup; of a lone one, its own."""
        return sorted(self._first)[-2:][0]

    @property
    def answer_rate(self) -> float:
        """Share of waits that a draft ended."""
        return self._hits / self._waits

    @property
    def is_known(self) -> bool:
        """Whether anything is known of how the device answers."""
        return bool(self._first)

    def seconds_until(self, most: int) -> list[float | None]:
        """Seconds from a commit until 1, 2, ... `most` drafted tokens that know of it arrive.

        None while unknown, and for more tokens than the device has lately drafted at once.
        """
        if len(self._lags) < most:
            self._lags = self._measured_lags(most)
        return self._lags[:most]

    def _measured_lags(self, most: int) -> list[float | None]:
        if not self._first:
            return [None] * most
        first_s, size = median(self._first), median(self._size)
        token_s = median(self._token_s) if self._token_s else None
        longest = max(self._longest, default=most)

        def lag_s(count: int) -> float | None:
            if count <= size:
                return first_s
            return None if token_s is None else first_s + (count - size) * token_s

        return [lag_s(count) if count <= longest else None for count in range(1, most + 1)]
