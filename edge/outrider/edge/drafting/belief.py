"""Keeps what the device knows and believes: committed tokens, and the drafted tokens after them.

A pure data structure: no clock, no network, no model. Commits may arrive twice or overlap; a commit that contradicts
drafted tokens drops them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.models.errors import CloudError


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """The effect of one commit on the belief.

    tokens: the newly known tokens (empty for a duplicate). num_matched: how many of them equal the drafted ones.
    num_tested: drafted tokens that the commit tested: up to the first rejected one, and not beyond.
    diverged: a drafted token was rejected, so everything drafted from there on is dropped.
    overtaken: all drafted tokens were accepted, and the commit goes beyond them.
    """

    tokens: tuple[int, ...]
    num_matched: int
    num_tested: int
    diverged: bool
    overtaken: bool


class Belief:
    """The committed tokens that have arrived, and the drafted tokens after them.

    Invariant: `known` is exactly what the target committed; `drafted` does not contradict it.
    """

    def __init__(self) -> None:
        self._known: list[int] = []
        self._drafted: list[int] = []

    @property
    def known(self) -> Sequence[int]:
        """Committed tokens, in order. Do not change it."""
        return self._known

    @property
    def drafted(self) -> Sequence[int]:
        """The drafted tokens that follow the known ones. Do not change it."""
        return self._drafted

    @property
    def num_known(self) -> int:
        """Number of committed tokens."""
        return len(self._known)

    @property
    def num_drafted(self) -> int:
        """Number of drafted tokens."""
        return len(self._drafted)

    def tokens_from(self, start: int) -> list[int]:
        """Known and drafted tokens from index `start` on (0 is the first generated token)."""
        num_known = len(self._known)
        if start >= num_known:
            return self._drafted[start - num_known :]
        return self._known[start:] + self._drafted

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends drafted tokens."""
        self._drafted.extend(tokens)

    def drop_drafted(self) -> None:
        """Forgets the drafted tokens, when no commit will test them."""
        self._drafted.clear()

    def on_commit(self, base: int, tokens: Sequence[int]) -> CommitOutcome:
        """Takes a commit of `tokens` after `base` others; skips what is already known.

        Raises CloudError when the commit leaves a gap or contradicts an earlier one: no text may be shown after such a
        fault of the server.
        """
        overlap = len(self._known) - base
        if overlap < 0:
            raise CloudError(
                f"the cloud committed from token {base}, but only {len(self._known)} have arrived; a commit was lost"
            )
        if base < 0 or list(tokens[:overlap]) != self._known[base : base + len(tokens)]:
            raise CloudError(f"the cloud's commit at token {base} contradicts what it committed before")
        fresh = tuple(tokens[overlap:])
        num_matched = 0
        while num_matched < min(len(fresh), len(self._drafted)) and fresh[num_matched] == self._drafted[num_matched]:
            num_matched += 1
        diverged = num_matched < min(len(fresh), len(self._drafted))
        overtaken = not diverged and len(fresh) > num_matched
        self._known.extend(fresh)
        if diverged:
            self._drafted.clear()
        else:
            del self._drafted[:num_matched]
        return CommitOutcome(fresh, num_matched, num_matched + diverged, diverged, overtaken)
