"""What the device knows and what it believes: committed tokens, and the drafted ones that should follow them.

A pure data structure: no clock, no network, no model. Commits may arrive twice or overlap; drafted tokens are dropped
as soon as a commit contradicts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.models.errors import CloudError


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """What one commit did to the belief.

    tokens: the newly known tokens (empty for a duplicate). num_right: how many of them had been drafted rightly.
    num_tested: drafted tokens that the commit judged, the first wrong one included and none after it.
    diverged: a drafted token was wrong, so everything drafted from there on is gone.
    overtaken: the commit went past the end of an otherwise right belief.
    """

    tokens: tuple[int, ...]
    num_right: int
    num_tested: int
    diverged: bool
    overtaken: bool


class Belief:
    """Tokens known committed since the start, and the drafted continuation.

    Invariant: `known` is exactly what the target committed; `drafted` contradicts nothing that is known.
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
        """How many tokens are known committed."""
        return len(self._known)

    @property
    def num_drafted(self) -> int:
        """How far the belief runs ahead."""
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
        """Forgets the drafted tokens: nobody is going to judge them."""
        self._drafted.clear()

    def on_commit(self, base: int, tokens: Sequence[int]) -> CommitOutcome:
        """Takes a commit of `tokens` after `base` others; what is already known is skipped.

        Raises CloudError when the commit leaves a gap or contradicts an earlier one: a verifier that does so has broken
        its promise, and no text may be shown that rests on it.
        """
        overlap = len(self._known) - base
        if overlap < 0:
            raise CloudError(
                f"the cloud committed from token {base}, but only {len(self._known)} are known; a commit was lost"
            )
        if base < 0 or list(tokens[:overlap]) != self._known[base : base + len(tokens)]:
            raise CloudError(f"the cloud's commit at token {base} contradicts what it committed before")
        fresh = tuple(tokens[overlap:])
        num_right = 0
        while num_right < min(len(fresh), len(self._drafted)) and fresh[num_right] == self._drafted[num_right]:
            num_right += 1
        diverged = num_right < min(len(fresh), len(self._drafted))
        overtaken = not diverged and len(fresh) > num_right
        self._known.extend(fresh)
        if diverged:
            self._drafted.clear()
        else:
            del self._drafted[:num_right]
        return CommitOutcome(fresh, num_right, num_right + diverged, diverged, overtaken)
