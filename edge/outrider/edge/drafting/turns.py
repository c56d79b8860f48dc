"""Decides whether device and target take turns: on shared cores each slows the other.

In turns the device drafts a path while the target waits for it, sends it in one message, and rests while the target
verifies. Otherwise both work all the time. Neither side can tell from its own calls whether cores are shared, so both
ways are measured, alone and together: each is tried again at growing intervals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_TRIAL: Final = 8
"""Commits of a trial of the other way."""
_SETTLING: Final = 2
"""Commits after a change that still show the way before."""
_FIRST: Final = 16
"""Commits before the first trial."""
_GAPS: Final = 24, 512
"""Commits between two trials: at first, and at most. Doubles while the trials change nothing; short at first, because
eight commits may mislead.
"""
_CLEAR: Final = 1.03
"""So many times the rate of the way before are needed to change it."""
_HOPELESS: Final = 1.1
"""A trial whose own commits are slower by this at its half ends there."""
_KEEP: Final = 0.98
_WEIGHT: Final = 24.0
"""Commits of both ways together that count for the tokens of each: their number varies much more than their time."""
_NEAR: Final = 0.4
"""Of a step: what the target may rest in a turn where turns are taken before anything was measured."""
_ALIKE: Final = 0.8
"""Of a turn's time: where commits come more often than this, working at the same time is faster."""
_NAMES: Final = "both at once", "turns"


@dataclass(slots=True)
class _Seen:
    """Commits of one way, faded."""

    count: float = 0.0
    tokens: float = 0.0
    ms: float = 0.0

    def add(self, tokens: int, ms: float) -> None:
        """Takes a commit."""
        self.count = _KEEP * self.count + 1.0
        self.tokens = _KEEP * self.tokens + tokens
        self.ms = _KEEP * self.ms + ms

    def halve(self) -> None:
        """Forgets half of it."""
        self.count, self.tokens, self.ms = self.count / 2, self.tokens / 2, self.ms / 2


class Turns:
    """Of one endpoint. obstacle: why turns are not possible, "" where nobody expects them; None: they are.

    is_shared: other texts share the draft: neither way can be measured.
    """

    def __init__(self) -> None:
        self.obstacle: str | None = ""
        self.is_shared = False
        self._are_on = False  # the way chosen
        self._has_begun = self._is_judged = False  # chosen at all; by measured rates
        self._cannot_gain = False
        self._seen = {way: _Seen() for way in (False, True)}
        self._left = 0  # commits of the trial that runs
        self._tried = _Seen()  # its commits
        self._settling = 0
        self._until_trial = _FIRST
        self._gap = _GAPS[0]

    @property
    def are_possible(self) -> bool:
        """Whether the server waits for a device that asks for it, and is on this machine."""
        return self.obstacle is None

    @property
    def now(self) -> bool:
        """Whether to take turns until the next commit."""
        return self.are_possible and self._are_on != (self._left > 0)

    def rate(self, way: bool) -> float:
        """Tokens per ms in turns, or without; 0 where that was not measured."""
        return _rate(self._seen[way], self._seen[not way])

    def words(self, num_turns: int = 0) -> str:
        """Which way was chosen, and why; empty where nobody expects turns. num_turns: that a text has taken."""
        is_shared = self.are_possible and self.is_shared and not num_turns
        obstacle = "several texts share the draft" if is_shared else self.obstacle
        if obstacle is not None:
            return obstacle and f"no turns: {obstacle}"
        if not self._has_begun:
            return "not measured yet"
        way, other = _NAMES[self._are_on], _NAMES[not self._are_on]
        if self._is_judged:
            rate, others = 1e3 * self.rate(self._are_on), 1e3 * self.rate(not self._are_on)
            why = "measured faster" if rate >= others else f"as the other was not {100 * _CLEAR - 100:.0f} % faster"
            return f"{way}, {why}: {rate:.1f} tokens/s, {other} {others:.1f}"
        if self._cannot_gain:
            return f"{way}: commits come in under {_ALIKE:g} of the time of a turn"
        share = f"{'at most' if self._are_on else 'over'} {_NEAR:g} of a step"
        return f"{way} first: drafting and the way take {share}; {other} not compared yet"

    def on_commit(self, num_tokens: int, interval_ms: float, rest_ms: float, step_ms: float) -> None:
        """Takes a commit of drafted tokens. rest_ms: what the target would rest in a turn: drafting, and the way."""
        if not self.are_possible:
            return
        if self.is_shared:
            self._settling = _SETTLING
            return
        if not self._has_begun:
            self._has_begun, self._are_on, self._settling = True, rest_ms <= _NEAR * step_ms, _SETTLING
            return
        if self._settling:
            self._settling -= 1
            return
        way = self.now
        self._seen[way].add(num_tokens, interval_ms)
        if self._left:
            self._left -= 1
            self._tried.add(num_tokens, interval_ms)
            is_hopeless = _HOPELESS * _rate(self._tried, self._seen[not way]) < self.rate(not way)
            if self._left == 0 or (self._left == _TRIAL // 2 and is_hopeless):
                self._left = 0
                self._judge(way)
            return
        self._until_trial -= 1
        commit_ms = self._seen[way].ms / self._seen[way].count
        self._cannot_gain = not way and commit_ms < _ALIKE * (rest_ms + step_ms)
        if self._until_trial <= 0 and not self._cannot_gain:
            self._left, self._settling, self._tried = _TRIAL, _SETTLING, _Seen()
            self._seen[not way].halve()  # it may be out of date

    def _judge(self, tried: bool) -> None:
        self._is_judged = True
        if self.rate(tried) > _CLEAR * self.rate(not tried):
            self._are_on, self._gap = tried, _GAPS[0]
        else:
            self._settling = _SETTLING
            self._gap = min(_GAPS[1], 2 * self._gap)
        self._until_trial = self._gap


def _rate(seen: _Seen, other: _Seen) -> float:
    """Tokens per ms; 0 without commits."""
    if not seen.count:
        return 0.0
    usual = (seen.tokens + other.tokens) / (seen.count + other.count)
    per_commit = (seen.tokens + _WEIGHT * usual) / (seen.count + _WEIGHT)
    return per_commit * seen.count / seen.ms
