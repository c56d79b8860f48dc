"""Shows the likeliest part of a tree of guesses, for a screen."""

from __future__ import annotations

import heapq
import itertools
from typing import NamedTuple

from outrider.edge.drafting.tree import GuessNode, GuessTree


class SeenGuess(NamedTuple):
    """A guess. parent: its place in the list; -1: after the last known token. chance, reach, rank: as `GuessNode`."""

    token: int
    parent: int
    chance: float
    reach: float
    rank: int
    is_sent: bool


def look(tree: GuessTree, most: int) -> list[SeenGuess]:
    """At most `most` guesses, those that the target most likely reaches, parents first."""
    order = itertools.count()
    waiting: list[tuple[float, int, GuessNode, int]] = []

    def add(node: GuessNode, place: int) -> None:
        for child in node.children.values():
            heapq.heappush(waiting, (-child.reach, next(order), child, place))

    add(tree.root, -1)
    seen: list[SeenGuess] = []
    while waiting and len(seen) < most:
        _, _, node, parent = heapq.heappop(waiting)
        seen.append(SeenGuess(node.token, parent, node.chance, node.reach, node.rank, node.number is not None))
        add(node, len(seen) - 1)
    return seen
