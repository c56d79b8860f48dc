"""Keeps what the device knows and believes: committed tokens, and the tree of guesses after them.

A pure data structure: no clock, no network, no model. Commits may arrive twice or overlap; what contradicts them leaves
the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outrider.edge.drafting.calibration import Guess
from outrider.edge.drafting.tree import GuessNode, GuessTree
from outrider.models.errors import CloudError


class Tested(NamedTuple):
    """The guesses of one position, and the token that the target picked there."""

    guesses: Sequence[Guess]
    token: int


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """The effect of one commit on the belief.

    tokens: the newly known tokens (empty for a duplicate). tested: the guesses that they tested. hits: the nodes that
    they went along, from the first token on; so `len(hits)` tokens were guessed in a row.
    """

    tokens: tuple[int, ...]
    tested: tuple[Tested, ...] = ()
    hits: tuple[GuessNode, ...] = ()

    def contradicts_at(self, index: int) -> bool:
        """Whether the token at `index` was not the first guess; also where nothing was guessed of the commit at all."""
        if not self.tested:
            return True
        return index < len(self.tested) and self.tested[index].guesses[0].token != self.tested[index].token


class Belief:
    """The committed tokens that have arrived, and the tree of guesses after them.

    Invariant: `known` is exactly what the target committed, in order; the tree does not contradict it.
    """

    def __init__(self, chance: Callable[[int], float], least: float = 0.0) -> None:
        """As for `GuessTree`."""
        self.known: list[int] = []
        self.tree = GuessTree(chance, least)

    def on_commit(self, base: int, tokens: Sequence[int]) -> CommitOutcome:
        """Takes a commit of `tokens` after `base` others; skips what is already known.

        Raises CloudError when the commit leaves a gap or contradicts an earlier one: no text may be shown after such a
        fault of the server. Call `tree.replant` once the outcome has been learned from.
        """
        overlap = len(self.known) - base
        if overlap < 0:
            raise CloudError(
                f"the cloud committed from token {base}, but only {len(self.known)} have arrived; a commit was lost"
            )
        if base < 0 or list(tokens[:overlap]) != self.known[base : base + len(tokens)]:
            raise CloudError(f"the cloud's commit at token {base} contradicts what it committed before")
        fresh = tuple(tokens[overlap:])
        tested: list[Tested] = []
        hits: list[GuessNode] = []
        for index, token in enumerate(fresh):
            if guesses := self.tree.root.guesses:
                tested.append(Tested(guesses, token))
            node = self.tree.advance(token)
            if node is not None and len(hits) == index:
                hits.append(node)
        self.known.extend(fresh)
        return CommitOutcome(fresh, tuple(tested), tuple(hits))
