"""Keeps which text each numbered node of a device stands for, in the server, where the tree itself is not.

So a tree message of which no node is of use is answered as stale, as the embedded engine does. One sequence's; one
thread at a time calls it. Bounded as the trie is: older numbers are forgotten, and what is below a node that is not
known may always be of use.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final

from outrider.cloud.pending.trie import MAX_NUMBERS
from outrider.models.wire.tree_draft import ROOT, TreeDraft

_DEAD: Final = -1


class NumberedNodes:
    """Where nodes are. generated: the committed tokens; it grows elsewhere."""

    def __init__(self, generated: Sequence[int]) -> None:
        self._generated = generated
        # By number: tokens generated up to and including the node, its token, and its parent's number.
        self._nodes: dict[int, tuple[int, int, int]] = {}
        self._dead: set[int] = set()
        self._right: set[int] = set()  # on the committed text

    def add(self, message: TreeDraft) -> None:
        """Adds the nodes whose parents are known."""
        nodes = self._nodes
        for number, (token, parent) in enumerate(
            zip(message.tokens, message.parents, strict=True), start=message.first
        ):
            if parent == ROOT:
                nodes[number] = (message.base + 1, token, ROOT)
            elif parent in self._dead:
                self._dead.add(number)
                nodes[number] = (_DEAD, token, parent)
            elif parent in nodes:
                nodes[number] = (nodes[parent][0] + 1, token, parent)
        for oldest in list(islice(nodes, max(0, len(nodes) - MAX_NUMBERS))):
            del nodes[oldest]
            self._dead.discard(oldest)
            self._right.discard(oldest)

    def position_of(self, number: int) -> int | None:
        """Tokens generated up to and including a node; negative if the commits contradict it, None if it is unknown."""
        found = self._nodes.get(number)
        if found is None:
            return None
        position = found[0]
        num_committed = len(self._generated)
        path: list[int] = []
        while number != ROOT and number not in self._right:  # up to what was judged before
            node = self._nodes.get(number)
            if node is None:
                break  # forgotten: it was right when its children came, or nothing is known
            at, token, parent = node
            path.append(number)
            if number in self._dead or (at <= num_committed and self._generated[at - 1] != token):
                self._dead.update(path)
                return _DEAD
            number = parent
        self._right.update(each for each in path if self._nodes[each][0] <= num_committed)
        return position
