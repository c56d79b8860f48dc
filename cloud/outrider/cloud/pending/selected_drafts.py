"""Names the drafted tokens that a sequence verifies in a step: a line, or a part of its tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outrider.models.picks.rejection import Evidence


class SelectedDrafts(NamedTuple):
    """Drafted tokens, parents before their children, the likeliest path first. A tuple: one is made for each
    sequence between two steps.

    parents: for each token the index of its parent in `tokens`; -1: it follows the last committed token. A line is
    -1, 0, 1, ... evidence: of each token, where the rule needs it; then they are a line.
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    evidence: Sequence[Evidence] = ()

    @classmethod
    def line(cls, tokens: Sequence[int], evidence: Sequence[Evidence] = ()) -> SelectedDrafts:
        """One path."""
        return cls(tokens, range(-1, len(tokens) - 1), evidence)

    def first(self, count: int) -> SelectedDrafts:
        """The first `count` of them."""
        count = max(0, count)
        return SelectedDrafts(self.tokens[:count], self.parents[:count], self.evidence[:count])

    def after(self, nodes: Sequence[int]) -> Sequence[int]:
        """The tokens that follow the last of `nodes`, a path of indices; without nodes, those at the root."""
        last = nodes[-1] if nodes else -1
        if last == len(self.tokens) - 1:
            return ()
        if isinstance(self.parents, range):  # a line
            return (self.tokens[last + 1],)
        return [token for token, parent in zip(self.tokens, self.parents, strict=True) if parent == last]

    @property
    def is_line(self) -> bool:
        """Whether each token follows the one before it."""
        parents = self.parents
        return isinstance(parents, range) or all(parent == index - 1 for index, parent in enumerate(parents))


NOTHING = SelectedDrafts()
