"""Remembers which branches of a sequence have run, token by token, and which slot holds each token's keys and values.

For runtimes whose caches are one row a sequence: a slot holds one token's keys and values, which are copied to a row
when a branch that goes through the token runs. Knows slot numbers only: no model, no cache.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class BranchNode:
    """A token of a branch. used: the last call that ended in it or in a descendant."""

    token: int
    slot: int
    parent: BranchNode | None
    used: int
    children: dict[int, BranchNode] = field(default_factory=dict)


class BranchNodes:
    """The branches that go on from a sequence's end, as a tree."""

    def __init__(self, max_kept: int) -> None:
        """max_kept: tokens that are kept from one call to the next; the ones used longest ago are forgotten."""
        self._max_kept = max_kept
        self._roots: dict[int, BranchNode] = {}
        self._free: list[int] = []  # used before, the last one first: its memory is there already
        self._num_touched = 0
        self._call = 0

    def __len__(self) -> int:
        """Tokens whose keys and values are kept."""
        return self._num_touched - len(self._free)

    def next_call(self) -> None:
        """Begins a call: forgets the leaves used longest ago, if there are more than `max_kept` nodes."""
        self._call += 1
        if len(self) <= self._max_kept:
            return
        leaves = [(node.used, i, node) for i, node in enumerate(self._nodes()) if not node.children]
        heapq.heapify(leaves)
        while len(self) > self._max_kept:
            used, order, leaf = heapq.heappop(leaves)
            del (leaf.parent.children if leaf.parent else self._roots)[leaf.token]
            self._free.append(leaf.slot)
            if leaf.parent and not leaf.parent.children:
                leaf.parent.used = max(leaf.parent.used, used)
                heapq.heappush(leaves, (leaf.parent.used, order, leaf.parent))

    def path(self, branch: Sequence[int]) -> list[BranchNode]:
        """The kept nodes of a branch, from its first token on."""
        found: list[BranchNode] = []
        children = self._roots
        for token in branch:
            node = children.get(token)
            if node is None:
                break
            found.append(node)
            children = node.children
        if found:
            found[-1].used = self._call
        return found

    def add(self, parent: BranchNode | None, token: int) -> BranchNode:
        """A new node behind `parent` (None: the sequence), with a slot of its own."""
        if self._free:
            slot = self._free.pop()
        else:
            slot = self._num_touched
            self._num_touched += 1
        node = BranchNode(token, slot, parent, self._call)
        (parent.children if parent else self._roots)[token] = node
        return node

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """The sequence grows by `tokens`: returns the slots of those that are kept, which are free from now on.

        Branches that do not go on from the new end are forgotten.
        """
        slots = []
        for token in tokens:
            node = self._roots.pop(token, None)
            self._drop(self._roots.values())
            self._roots = {}
            if node is None:
                break
            slots.append(node.slot)
            self._free.append(node.slot)
            self._roots = node.children
        for root in self._roots.values():
            root.parent = None
        return slots

    def forget(self) -> None:
        """Forgets all branches."""
        self._drop(self._roots.values())
        self._roots = {}

    def _drop(self, nodes: Iterable[BranchNode]) -> None:
        waiting = list(nodes)
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            self._free.append(node.slot)

    def _nodes(self) -> Iterator[BranchNode]:
        waiting = list(self._roots.values())
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            yield node
