"""Keeps a sequence's pending drafts in a trie rooted at the last committed token.

A commit moves the root down: what is consistent with it stays pending, the rest is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_NODES = 1024


class _Node:
    __slots__ = ("best", "children")

    def __init__(self) -> None:
        self.children: dict[int, _Node] = {}
        self.best = -1  # the child on the likeliest path


class DraftTrie:
    """The device's guesses of what follows the last committed token."""

    __slots__ = ("_likeliest", "_num_nodes", "_root")

    def __init__(self) -> None:
        self._root = _Node()
        self._num_nodes = 0  # upper bound: dropped branches count until the trie is empty
        self._likeliest: tuple[int, list[int]] = (0, [])  # of which limit, the path: asked for twice a step

    def __bool__(self) -> bool:
        return bool(self._root.children)

    def merge(self, path: Sequence[int], *, prefer: bool) -> None:
        """Adds a path. With `prefer` it becomes the likeliest; otherwise only where no path was there before.

        At MAX_NODES nodes the rest of the path is dropped, which is always allowed.
        """
        self._likeliest = (0, [])
        node = self._root
        for token in path:
            child = node.children.get(token)
            if child is None:
                if self._num_nodes >= MAX_NODES:
                    return
                child = node.children[token] = _Node()
                self._num_nodes += 1
            if prefer or node.best < 0:
                node.best = token
            node = child

    def advance(self, token: int) -> None:
        """Commits one token: its subtree stays pending."""
        child = self._root.children.get(token)
        if child is None:
            if self._root.children:
                self.clear()
        else:
            self._likeliest = (0, [])
            self._root = child
            if not child.children:
                self._num_nodes = 0

    def likeliest(self, limit: int) -> list[int]:
        """The likeliest path, at most `limit` tokens."""
        known, path = self._likeliest
        if limit > known:
            path = []
            node = self._root
            while node.best >= 0 and len(path) < limit:
                path.append(node.best)
                node = node.children[node.best]
            self._likeliest = (limit, path)
        return path[:limit]

    def clear(self) -> None:
        """Drops everything."""
        self._likeliest = (0, [])
        self._root = _Node()
        self._num_nodes = 0
