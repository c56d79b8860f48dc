"""Keeps the pending drafts of a rule that judges by probabilities: one path, each token with its evidence.

A position has one sample: the first that arrives after a given text counts, and a later one for the same position is
dropped with all that hangs on it, whatever its token. So nobody can send samples until one is accepted, and no resend
changes what was drawn. `outrider.models.rejection` has the argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

from outrider.cloud.pending.trie import GONE, MAX_NUMBERS, MAX_ORPHANS, UNHINTED, DraftTrie, Node
from outrider.models.rejection import Evidence
from outrider.models.tree_draft import ROOT, TreeDraft

MAX_SAMPLES: Final = 128
"""Pending tokens of a sequence: each holds a distribution."""


class SampleTrie(DraftTrie):
    """A trie without branches."""

    __slots__ = ("_held", "_num_held")

    def __init__(self) -> None:
        super().__init__()
        # Nodes whose parent has not arrived, by its number, by their own: token, evidence.
        self._held: dict[int, dict[int, tuple[int, Evidence]]] = {}
        self._num_held = 0

    def evidence(self, count: int) -> list[Evidence]:
        """Of the first `count` tokens of the path."""
        found: list[Evidence] = []
        node = self.root.best
        while node is not None and len(found) < count:
            assert node.evidence is not None
            found.append(node.evidence)
            node = node.best
        return found

    def merge_samples(self, path: Sequence[int], evidence: Iterable[Evidence]) -> None:
        """Adds a path that follows the last committed token."""
        node = self.root
        for token, each in zip(path, evidence, strict=True):
            node = self._child(node, token, each, ())

    def merge_tree(self, message: TreeDraft, committed: Sequence[int]) -> int:
        """Adds numbered nodes with evidence; else as `DraftTrie.merge_tree`."""
        root, deepest = self.root, 0
        base_node = root if message.base == root.position else Node(ROOT, message.base, UNHINTED)
        nodes = zip(message.tokens, message.parents, message.evidence, strict=True)
        for number, (token, parent_number, evidence) in enumerate(nodes, start=message.first):
            parent = base_node if parent_number == ROOT else self._numbers.get(parent_number)
            if parent is None:
                self._keep(parent_number, number, token, evidence)
                continue
            # What waited for this number hangs on it, and so on.
            arrived = [(number, self._child(parent, token, evidence, committed))]
            while arrived:
                own, node = arrived.pop()
                self._numbers[own] = node
                deepest = max(deepest, node.position)
                waiting = self._held.pop(own, {})
                self._num_held -= len(waiting)
                arrived += [
                    (each, self._child(node, its_token, its_evidence, committed))
                    for each, (its_token, its_evidence) in waiting.items()
                ]
        if len(self._numbers) > MAX_NUMBERS:
            for oldest in list(islice(self._numbers, len(self._numbers) - MAX_NUMBERS)):
                del self._numbers[oldest]
        return deepest

    def _child(self, parent: Node, token: int, evidence: Evidence, committed: Sequence[int]) -> Node:
        """The child of a node; GONE where the position has another sample, and where there is no room."""
        if parent.position < self.root.position:
            return self.compared(parent.position, token, committed)
        if parent.position == self.root.position:
            parent = self.root
        if parent.children:
            return parent.children.get(token, GONE)
        if self.num_nodes >= MAX_SAMPLES:
            return GONE
        child = self._attach(parent, token, UNHINTED)
        child.evidence = evidence
        return child

    def _keep(self, parent: int, number: int, token: int, evidence: Evidence) -> None:
        siblings = self._held.setdefault(parent, {})
        if number not in siblings:
            siblings[number] = token, evidence
            self._num_held += 1
        while self._num_held > min(MAX_ORPHANS, MAX_SAMPLES):
            self._num_held -= len(self._held.pop(next(iter(self._held))))
