"""Pending drafts of one sequence: a trie rooted at the last committed token.

Committing walks down, so whatever is still consistent with the truth stays pending and the rest is forgotten.
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
    """What may follow the last committed token, by the device's guesses."""

    __slots__ = ("_num_nodes", "_root")

    def __init__(self) -> None:
        self._root = _Node()
        self._num_nodes = 0  # upper bound: branches that commits cut off are counted until the trie is empty

    def __bool__(self) -> bool:
        return bool(self._root.children)

    def merge(self, path: Sequence[int], *, prefer: bool) -> None:
        """Adds a path. With `prefer` it becomes the likeliest; otherwise it only fills what has no opinion yet.

        A trie of MAX_NODES takes no more nodes: the rest of the path is dropped, which a draft may always be.
        """
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
        """Commits one token: its subtree is what stays pending."""
        child = self._root.children.get(token)
        if child is None:
            self.clear()
        else:
            self._root = child
            if not child.children:
                self._num_nodes = 0

    def likeliest(self, limit: int) -> list[int]:
        """The likeliest path, at most `limit` tokens."""
        path: list[int] = []
        node = self._root
        while node.best >= 0 and len(path) < limit:
            path.append(node.best)
            node = node.children[node.best]
        return path

    def clear(self) -> None:
        """Forgets everything."""
        self._root = _Node()
        self._num_nodes = 0
