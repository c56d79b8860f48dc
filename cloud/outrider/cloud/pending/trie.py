"""Keeps a sequence's pending drafts in a trie rooted at the last committed token.

A commit moves the root down (`follow`): what is consistent with it stays pending, the rest is dropped later (`settle`).
A device may number the nodes that it sends (`wire.tree_draft`): the trie keeps where the recent numbers are, pending,
committed or dropped, so that a later message goes on below any of them. Merging is idempotent, and does not depend on
the order in which messages arrive. No function recurses, and each node is merged once and dropped once: a client cannot
make either dear.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Final

from outrider.models.wire.tree_draft import CHANCES, ROOT, TreeDraft

MAX_NODES: Final = 1024
"""Pending nodes of a sequence."""
MAX_NUMBERS: Final = 1024
"""Numbered nodes, pending or not, that a later message may go on from: the newest."""
MAX_ORPHANS: Final = 256
"""Nodes that wait for their parent to arrive."""

# A node's kind says what its chance is estimated from: for a source of the verifier's own, how sure that source is;
# nothing (the path form); the level that the device gave it; or a repetition of the same request. Of siblings, the one
# of the highest kind is the likeliest unless `prefer` says otherwise: a device knows more than a lookup, and a
# repetition repeats.
PROMPT_KINDS: Final = range(5)
"""Prompt lookup, by the length of the text that matched."""
EARLIER_KINDS: Final = range(5, 8)
"""An earlier text after the same prompt, by the length that agreed."""
PREDICTED_KINDS: Final = range(8, 11)
"""A text that the request brought as its prediction, likewise."""
HEAD_KINDS: Final = range(11, 12)
"""Heads of the target's own, through vLLM."""
NUM_LOOKUP_KINDS: Final = HEAD_KINDS.stop
"""Kinds below this come from a source of the verifier's own."""
UNHINTED: Final = NUM_LOOKUP_KINDS
LEVELS: Final = UNHINTED + 1
"""The kind of level 0; the others follow."""
REPEATED: Final = LEVELS + len(CHANCES)
"""The kind of an earlier text that the same request got, while this one repeats it."""
NUM_KINDS: Final = REPEATED + 1

_DROPPED: Final = -1


def is_looked_up(kind: int) -> bool:
    """Whether a node comes from a source of the verifier's own, not from the device."""
    return kind < NUM_LOOKUP_KINDS or kind == REPEATED


@dataclass(slots=True, eq=False)
class PendingNode:
    """A guess. position: tokens generated up to and including it; negative once it is dropped.

    children: by token; None without any. best: the likeliest of them.
    """

    token: int
    position: int
    kind: int
    children: dict[int, PendingNode] | None = None
    best: PendingNode | None = None


GONE: Final = PendingNode(ROOT, _DROPPED, UNHINTED)
"""Stands for every node that contradicts the commits, or for which there was no room."""


class DraftTrie:
    """Guesses of what follows the last committed token."""

    __slots__ = ("_num_orphans", "_numbers", "_orphans", "num_looked_up", "num_nodes", "passed", "root")

    def __init__(self) -> None:
        self.root = PendingNode(ROOT, 0, UNHINTED)
        # Nodes that commits have left and the token after each, until `settle`: they hold what is to be dropped, which
        # is counted until then.
        self.passed: list[tuple[PendingNode, int]] = []
        self.num_nodes = 0
        self.num_looked_up = 0  # of these
        self._numbers: dict[int, PendingNode] = {}
        # By their parents' numbers, by their own: token, kind.
        self._orphans: dict[int, dict[int, tuple[int, int]]] = {}
        self._num_orphans = 0

    def __bool__(self) -> bool:
        return bool(self.root.children)

    @property
    def has_device_nodes(self) -> bool:
        """Whether anything is pending that the device sent."""
        if not self.num_looked_up:
            return bool(self.root.children)
        if not self.passed:
            return self.num_nodes > self.num_looked_up
        below = [self.root.children or {}]
        for children in below:  # grows meanwhile
            for node in children.values():
                if not is_looked_up(node.kind):
                    return True
                below.append(node.children or {})
        return False

    def merge(self, path: Sequence[int], kinds: Iterable[int] = repeat(UNHINTED), *, prefer: bool = False) -> None:
        """Adds a path. With `prefer` it becomes the likeliest; otherwise only where nothing of its kind, or of a higher
        one, is there.

        kinds: of its nodes. At MAX_NODES nodes the rest of the path is dropped, which is always allowed.
        """
        node = self.root
        for token, kind in zip(path, kinds, strict=False):
            child = self._attach(node, token, kind)
            if child is GONE:
                return
            if prefer:
                node.best = child
            node = child

    def prefer(self, path: Sequence[int]) -> None:
        """Makes a pending path the likeliest, as far as it is pending; until the device sends other nodes there."""
        node = self.root
        for token in path:
            child = node.children.get(token) if node.children is not None else None
            if child is None:
                break
            node.best = node = child

    def merge_tree(self, message: TreeDraft, committed: Sequence[int]) -> int:
        """Adds a device's numbered nodes. Returns the position of its deepest node; 0 if none is pending or committed.

        committed: the tokens generated so far; `message.base` of them at most were known to the device. All that was
        passed has to be settled.
        """
        numbers, deepest = self._numbers, 0
        base_node = PendingNode(ROOT, message.base, UNHINTED)
        nodes = zip(message.tokens, message.parents, message.levels, strict=True)
        for number, (token, parent_number, level) in enumerate(nodes, start=message.first):
            parent = base_node if parent_number == ROOT else numbers.get(parent_number)
            if parent is None:
                self._hold(parent_number, number, token, level + LEVELS)
                continue
            child = numbers[number] = self._place(parent, token, level + LEVELS, committed)
            if child.position > deepest:
                deepest = child.position
            if number in self._orphans:
                deepest = max(deepest, self._adopt(number, committed))
        if len(numbers) > MAX_NUMBERS:
            for oldest in list(islice(numbers, len(numbers) - MAX_NUMBERS)):
                del numbers[oldest]
        return deepest

    def _attach(self, parent: PendingNode, token: int, kind: int) -> PendingNode:
        """The child of a pending node or of the root, made if it is not there; GONE if there is no room."""
        children = parent.children
        if children is None:
            children = parent.children = {}
        child = children.get(token)
        if child is None:
            if self.num_nodes >= MAX_NODES:
                return GONE
            child = children[token] = PendingNode(token, parent.position + 1, kind)
            self.num_nodes += 1
            self.num_looked_up += is_looked_up(kind)
        elif kind > child.kind:
            self.num_looked_up += is_looked_up(kind) - is_looked_up(child.kind)
            child.kind = kind
        best = parent.best
        if best is None or child.kind > best.kind:
            parent.best = child
        return child

    def _place(self, parent: PendingNode, token: int, kind: int, committed: Sequence[int]) -> PendingNode:
        """The child of any node: made below a pending one, compared with the text below a committed one."""
        position, root = parent.position, self.root
        if position >= root.position:
            return self._attach(parent if position > root.position else root, token, kind)
        if position < 0 or committed[position] != token:
            return GONE
        return root if position + 1 == root.position else PendingNode(token, position + 1, UNHINTED)

    def _hold(self, parent: int, number: int, token: int, kind: int) -> None:
        siblings = self._orphans.setdefault(parent, {})
        self._num_orphans += number not in siblings
        siblings[number] = token, kind
        while self._num_orphans > MAX_ORPHANS:
            self._num_orphans -= len(self._orphans.pop(next(iter(self._orphans))))

    def _adopt(self, number: int, committed: Sequence[int]) -> int:
        """Merges what waited for a node, and what waited for that, and so on. Returns the deepest position."""
        arrived, deepest = [number], 0
        while arrived:
            parent_number = arrived.pop()
            waiting = self._orphans.pop(parent_number, None)
            if waiting is None:
                continue
            self._num_orphans -= len(waiting)
            parent = self._numbers[parent_number]
            for own, (token, kind) in waiting.items():
                child = self._numbers[own] = self._place(parent, token, kind, committed)
                deepest = max(deepest, child.position)
                arrived.append(own)
        return deepest

    def follow(self, tokens: Sequence[int]) -> int:
        """Commits tokens: the subtree of the last one stays pending; nothing is dropped before `settle`.

        Returns how many of them, the last left out, were looked up.
        """
        node, passed, num_looked_up = self.root, self.passed, 0
        last = len(passed) + len(tokens)
        for token in tokens:
            passed.append((node, token))
            children = node.children
            child = children.get(token) if children is not None else None
            if child is None:
                node = PendingNode(token, node.position + 1, UNHINTED)
            else:
                node = child
                if is_looked_up(child.kind) and len(passed) < last:
                    num_looked_up += 1
        self.root = node
        return num_looked_up

    def settle(self) -> None:
        """Drops what the tokens followed contradict."""
        for node, token in self.passed:
            children = node.children
            if children is None:
                continue
            new = children.pop(token, None)
            node.children = node.best = None
            if new is not None:
                self.num_nodes -= 1
                self.num_looked_up -= is_looked_up(new.kind)
            if children:
                self._drop(children)
        self.passed.clear()

    def clear(self) -> None:
        """Drops all that is pending."""
        children = self.root.children
        if children:
            self.root.children = self.root.best = None
            self._drop(children)

    def _drop(self, children: dict[int, PendingNode]) -> None:
        """Drops subtrees: each node once."""
        stack = [children]
        num_looked_up = num_nodes = 0
        for siblings in stack:  # grows meanwhile
            num_nodes += len(siblings)
            for node in siblings.values():
                node.position = _DROPPED
                num_looked_up += is_looked_up(node.kind)
                below = node.children
                if below is not None:
                    stack.append(below)
                    node.children = node.best = None
        self.num_nodes -= num_nodes
        self.num_looked_up -= num_looked_up

    def likeliest(self, limit: int) -> list[int]:
        """The likeliest path, at most `limit` tokens."""
        path: list[int] = []
        node = self.root.best
        while node is not None and len(path) < limit:
            path.append(node.token)
            node = node.best
        return path

    def likeliest_of_device(self, limit: int) -> list[int]:
        """The likeliest path, as far as the device sent it."""
        if not self.num_looked_up:
            return self.likeliest(limit)
        return [node.token for node in self.path_of_device(limit)]

    def path_of_device(self, limit: int, start: PendingNode | None = None) -> list[PendingNode]:
        """The nodes of that path. Where a looked-up node is preferred to the device's, it follows the device's.

        start: the node that it begins behind, if it is not the root.
        """
        path: list[PendingNode] = []
        node = _device_child(start or self.root)
        while node is not None and len(path) < limit:
            path.append(node)
            node = _device_child(node)
        return path


def _device_child(parent: PendingNode) -> PendingNode | None:
    """The likeliest child that the device sent."""
    best = parent.best
    if best is None or not is_looked_up(best.kind):
        return best
    own = [child for child in (parent.children or {}).values() if not is_looked_up(child.kind)]
    return max(own, key=lambda child: child.kind, default=None)
