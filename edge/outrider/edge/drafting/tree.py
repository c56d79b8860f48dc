"""Keeps the tree of guesses on the device: which node to expand next, and which to send.

A pure data structure: no clock, no network, no model, no lock. Every node knows the chance that the target reaches it:
the product of the calibrated chances on its way from the last known token.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence

from outrider.edge.drafting.calibration import LOOKUP_RANK, PROVISIONAL_RANK, Guess

_TRUNK = 0.995  # chance of a node that a verifier near by has committed
_WAITING, _BUSY, _EXPANDED = range(3)  # states of a node: to be expanded, being expanded, expanded


class GuessNode:
    """A token: the last known one (the root), or a guess.

    depth: tokens from the root's first position, so it does not change when the root moves. rank, cell: of its
    guess.
    chance: that the target picks it after its parent. reach: that the target gets here. guesses: all that were made of
    what follows it, also those that are no nodes. number: under which it was sent; None: not sent. anchor: depth of the
    known token that it was sent after; between the two, each node's message names its parent's number.
    """

    __slots__ = (
        "anchor",
        "cell",
        "chance",
        "children",
        "depth",
        "epoch",
        "guesses",
        "number",
        "parent",
        "rank",
        "reach",
        "state",
        "token",
    )

    def __init__(self, token: int, depth: int, parent: GuessNode | None, guess: Guess | None, chance: float) -> None:
        self.token = token
        self.depth = depth
        self.parent = parent
        self.rank = guess.rank if guess is not None else 0
        self.cell = guess.cell if guess is not None else 0
        self.chance = chance
        self.reach: float = parent.reach * chance if parent is not None else 1.0
        self.children: dict[int, GuessNode] = {}
        self.guesses: Sequence[Guess] = ()
        self.number: int | None = None
        self.anchor = 0
        self.state = _WAITING
        self.epoch: int = parent.epoch if parent is not None else 0

    def path(self) -> list[int]:
        """The tokens from the root, which is left out, to this node."""
        tokens: list[int] = []
        node: GuessNode | None = self
        while node is not None and node.parent is not None:
            tokens.append(node.token)
            node = node.parent
        tokens.reverse()
        return tokens


class GuessTree:
    """The guesses of what follows the last known token.

    chance: the calibrated chance of a guess's cell. least: guesses less likely to be reached are not kept.
    unsent: nodes that were not sent, parents before their children.
    """

    def __init__(self, chance: Callable[[int], float], least: float = 0.0) -> None:
        self._chance = chance
        self._least = least
        self._count = itertools.count()
        self._epoch = 0
        self.root = GuessNode(-1, 0, None, None, 1.0)
        self._frontier: list[tuple[float, int, GuessNode]] = []  # waiting nodes, the likeliest first
        self.unsent: list[GuessNode] = []  # parents before their children
        self.num_nodes = 0
        self.num_sent = 0  # nodes ever sent: the number of the next one
        self._push(self.root)

    def is_live(self, node: GuessNode) -> bool:
        """Whether the node still follows the last known token."""
        return node.epoch == self._epoch

    # -- growing -----------------------------------------------------------------------------------------------------

    def take_best(self, most: int, floor: float, max_depth: int) -> list[GuessNode]:
        """The waiting nodes that the target most likely reaches, at most `most`, to be expanded now.

        floor: none that is less likely to be reached. max_depth: none whose children would be deeper below the root.
        """
        taken: list[GuessNode] = []
        deepest = self.root.depth + max_depth
        while self._frontier and len(taken) < most and -self._frontier[0][0] >= floor:
            node = heapq.heappop(self._frontier)[2]
            if node.state == _WAITING and node.depth < deepest:
                node.state = _BUSY
                taken.append(node)
        return taken

    def best_reach(self, max_depth: int) -> float:
        """The chance of reaching the node that `take_best` would give first; 0 where it would give none."""
        deepest = self.root.depth + max_depth
        while self._frontier:
            reach, _, node = self._frontier[0]
            if node.state == _WAITING and node.depth < deepest:
                return -reach
            heapq.heappop(self._frontier)  # `replant` brings back one that is only too deep for now
        return 0.0

    def reaches(self, most: int) -> list[float]:
        """The chances of reaching the waiting nodes, the `most` likeliest, falling."""
        return [-entry[0] for entry in heapq.nsmallest(most, self._frontier)]

    def expand(self, node: GuessNode, guesses: Sequence[Guess]) -> list[GuessNode]:
        """Adds guesses of what follows a node that `take_best` gave; returns the new nodes. Nothing if it is dead."""
        if not self.is_live(node):
            return []
        node.state = _EXPANDED
        if guesses:  # else those that another source made stay
            node.guesses = guesses
        return self._add(node, guesses)

    def add_path(self, guesses: Sequence[Guess]) -> None:
        """Adds a path below the root that another source guessed; its nodes still wait to be expanded."""
        node = self.root
        for guess in guesses:
            if guess.token not in node.children:
                if not node.guesses:
                    node.guesses = (guess,)
                self._add(node, (guess,))
                if guess.token not in node.children:
                    return  # too unlikely to be kept
            node = node.children[guess.token]

    def add_trunk(self, tokens: Sequence[int]) -> None:
        """Adds a path below the root that a verifier near by has committed: only its last node waits to be expanded.

        Who reads the drafts goes on from there, so its nodes count as all but certain.
        """
        node, is_changed = self.root, False
        for index, token in enumerate(tokens):
            child = node.children.get(token)
            if child is None:
                child = GuessNode(token, node.depth + 1, node, Guess(token, PROVISIONAL_RANK, 0), _TRUNK)
                node.children[token] = child
                self.unsent.append(child)
                self._push(child)
                self.num_nodes += 1
            elif child.chance < _TRUNK:
                child.chance, is_changed = _TRUNK, True
            if node.state == _WAITING:
                node.state = _EXPANDED
            node = child
            if index == len(tokens) - 1 and node.state == _EXPANDED and not node.guesses and not node.children:
                node.state = _WAITING
                self._push(node)
        if is_changed:
            self._reach_anew(self.root)

    def _add(self, node: GuessNode, guesses: Sequence[Guess]) -> list[GuessNode]:
        added: list[GuessNode] = []
        is_changed = False
        most = 1.0
        for guess in guesses:
            chance = self._chance(guess.cell)
            if guess.rank < LOOKUP_RANK:
                # A score is never likelier than a better one, however few tests say so.
                chance = most = min(most, chance)
            known = node.children.get(guess.token)
            if known is not None:
                is_changed = is_changed or known.chance != chance
                known.rank, known.cell, known.chance = guess.rank, guess.cell, chance
            elif node.reach * chance >= self._least:
                child = GuessNode(guess.token, node.depth + 1, node, guess, chance)
                node.children[guess.token] = child
                self.unsent.append(child)
                self._push(child)
                added.append(child)
        self.num_nodes += len(added)
        if is_changed:  # another source guessed the same: what is below is reached more or less often
            self._reach_anew(node)
        return added

    def _reach_anew(self, node: GuessNode) -> None:
        stack = [node]
        while stack:
            above = stack.pop()
            for child in above.children.values():
                child.reach = above.reach * child.chance
                stack.append(child)
        self._frontier = [(-waiting.reach, order, waiting) for _, order, waiting in self._frontier]
        heapq.heapify(self._frontier)

    def _push(self, node: GuessNode) -> None:
        heapq.heappush(self._frontier, (-node.reach, next(self._count), node))

    # -- commits -----------------------------------------------------------------------------------------------------

    def advance(self, token: int) -> GuessNode | None:
        """Moves the root by a committed token: what is below that guess stays. Returns the guess, if there was one.

        Call `replant` after the last token of a commit.
        """
        child = self.root.children.pop(token, None)
        _uproot(self.root)
        self.root = child if child is not None else GuessNode(token, self.root.depth + 1, None, None, 1.0)
        self.root.parent = None  # else every token of the text would stay in memory
        return child

    def clear(self) -> None:
        """Forgets all guesses."""
        _uproot(self.root)
        self.root.guesses = ()
        self.root.state = _WAITING
        self.replant()

    def replant(self) -> None:
        """Makes anew, after commits, what follows from the root: chances of being reached, who waits, who is unsent."""
        self._epoch += 1
        self._frontier.clear()
        self.unsent.clear()
        self.root.reach = 1.0
        layer = [self.root]
        self.num_nodes = -1
        while layer:
            below: list[GuessNode] = []
            self.num_nodes += len(layer)
            for node in layer:
                node.epoch = self._epoch
                if node.state == _WAITING:
                    self._frontier.append((-node.reach, next(self._count), node))
                if node.number is None and node is not self.root:
                    self.unsent.append(node)
                for child in node.children.values():
                    child.reach = node.reach * child.chance
                    below.append(child)
            layer = below
        heapq.heapify(self._frontier)

    # -- sending -----------------------------------------------------------------------------------------------------

    def take_unsent(self, floor: float, most: int) -> list[GuessNode]:
        """Unsent nodes that are at least `floor` likely to be reached, parents first; they are numbered now."""
        taken: list[GuessNode] = []
        kept: list[GuessNode] = []
        for node in self.unsent:
            parent = node.parent
            assert parent is not None
            is_sendable = parent is self.root or parent.number is not None
            if is_sendable and node.reach >= floor and len(taken) < most:
                node.number = self.num_sent
                node.anchor = parent.depth if parent is self.root else parent.anchor
                self.num_sent += 1
                taken.append(node)
            else:
                kept.append(node)
        self.unsent = kept
        return taken

    @property
    def has_sent(self) -> bool:
        """Whether the server has any guess of the next token."""
        return any(child.number is not None for child in self.root.children.values())

    def unsend(self, lost: Sequence[GuessNode]) -> None:
        """Takes nodes whose message was lost, and all that hang on them, as not sent: the server cannot attach them.

        A lost node may be committed by now: what was sent below it before that hangs on it.
        """
        stack: list[GuessNode] = []
        for node in lost:
            if node.parent is None:  # committed
                stack += (child for child in self.root.children.values() if child.anchor < node.depth)
            elif self.is_live(node):
                stack.append(node)
        while stack:
            node = stack.pop()
            node.number = None
            stack += (child for child in node.children.values() if child.number is not None)
        self.unsent = [node for node in self._below() if node.number is None]

    def renumber(self) -> None:
        """Takes every node as not sent, for a new session."""
        self.num_sent = 0
        self.unsent = list(self._below())
        for node in self.unsent:
            node.number = None

    def _below(self) -> Iterator[GuessNode]:
        """All nodes below the root, parents first."""
        layer = list(self.root.children.values())
        while layer:
            yield from layer
            layer = [child for node in layer for child in node.children.values()]

    # -- the likeliest path ------------------------------------------------------------------------------------------

    def likeliest(self) -> list[GuessNode]:
        """The likeliest path below the root: at each node the likeliest child."""
        path: list[GuessNode] = []
        node = self.root
        while node.children:
            node = max(node.children.values(), key=lambda child: child.chance)
            path.append(node)
        return path


def _uproot(root: GuessNode) -> None:
    """Lets go of what is below: parents and children that have each other would stay until the collector runs."""
    stack = [root]
    while stack:
        node = stack.pop()
        stack += node.children.values()
        node.children.clear()


def look(tree: GuessTree, most: int) -> list[tuple[GuessNode, int]]:
    """At most `most` guesses, those that the target most likely reaches, parents first.

    With each, its parent's place in the list; -1: it follows the last known token.
    """
    order = itertools.count()
    waiting: list[tuple[float, int, GuessNode, int]] = []

    def add(node: GuessNode, place: int) -> None:
        for child in node.children.values():
            heapq.heappush(waiting, (-child.reach, next(order), child, place))

    add(tree.root, -1)
    seen: list[tuple[GuessNode, int]] = []
    while waiting and len(seen) < most:
        _, _, node, parent = heapq.heappop(waiting)
        seen.append((node, parent))
        add(node, len(seen) - 1)
    return seen
