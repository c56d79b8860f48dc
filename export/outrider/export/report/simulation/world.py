"""Plays the two sides of a tree simulation: a device that drafts a tree, a server that chooses nodes to verify.

`Times` and `Plan` are its settings. Times in ms. A node is a guess; `is_true` says whether it is the target's pick
after the target's own text, which neither side looks at before the pick is made.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from outrider.export.report.simulation.ranks import MISSED, Ranks


class Form(StrEnum):
    """What a step verifies: the likeliest path of the tree, or any part of it (tree attention)."""

    LINE = "line"
    TREE = "tree"


@dataclass(frozen=True, slots=True)
class Times:
    """step_ms: of the target; extra_ms: what a verified node adds. draft_ms: of a draft call that expands one node.

    A draft call expands up to nodes_per_call nodes; each further one adds the share `call_extra` of draft_ms.
    """

    step_ms: float
    extra_ms: float
    draft_ms: float
    nodes_per_call: int = 1
    call_extra: float = 0.1


@dataclass(frozen=True, slots=True)
class Plan:
    """How the tree is drafted, sent and verified.

    width: guesses per position, 1 to MOST_GUESSES; budget: nodes of the device's tree at most.
    floor: no node is expanded that is less likely to be reached. bytes_per_token: the device raises the floor so that
    it sends so many; None: as many as come.
    patience_ms: how long the server waits where nothing is pending; None: the better of none and one that suits.
    message_bytes: of a message without its nodes; id_bytes: of a token id.
    """

    form: Form = Form.TREE
    width: int = 4
    budget: int = 400
    floor: float = 0.004
    bytes_per_token: float | None = None
    patience_ms: float | None = None
    message_bytes: int = 4
    id_bytes: int = 2


HANDLING_MS: Final = 0.5
"""What a message takes beside half a round trip."""

MOST_VERIFIED: Final = 24
"""Nodes of one step at most."""

_HIGHEST_FLOOR: Final = 0.5
_MEMORY_TOKENS: Final = 24.0  # over how many tokens the device averages what it sends
_GAIN: Final = 0.15  # how fast the device moves its floor towards the budget of bytes, per token
_UNSENT: Final = math.inf


class Node:
    """A guess. chance: that it is picked after its parent, which the server knows too: the wire's 16 levels of it lose
    nothing. reached: that the target's text reaches it, as the device estimates it now. at: when it reaches the server.
    """

    __slots__ = ("at", "chance", "children", "is_queued", "is_true", "number", "parent", "position", "reached")

    def __init__(self, position: int, is_true: bool, parent: Node | None = None, chance: float = 1.0) -> None:
        self.position, self.is_true, self.parent, self.chance = position, is_true, parent, chance
        self.reached: float = chance if parent is None else chance * parent.reached
        self.children: list[Node] | None = None  # None: not expanded
        self.at, self.number, self.is_queued = _UNSENT, 0, False

    def true_child(self) -> Node | None:
        """The guess that the target picks next, if it was drafted."""
        return next((child for child in self.children or () if child.is_true), None)


class Device:
    """Drafts, best first, and sends; learns of commits half a round trip later."""

    def __init__(self, ranks: Ranks, times: Times, rtt_ms: float, plan: Plan, seed: int) -> None:
        self._ranks, self._times, self._plan, self._half_ms = ranks, times, plan, rtt_ms / 2
        self._random = random.Random(seed)
        self._offset = self._random.randrange(len(ranks.picked))
        self._free_at = 0.0
        self._news: deque[tuple[float, int]] = deque()
        self._known = 0  # committed tokens
        self._frontier: list[tuple[float, int, Node]] = []
        self._order, self._live = itertools.count(), 0
        self._queue: list[Node] = []
        self._send_floor = 0.0
        self._bytes_before, self._bytes_rate = 0, plan.bytes_per_token or 0.0
        self.root = Node(0, True)
        self.num_drafted = self.num_sent = self.num_bytes = self.num_messages = 0
        self._replant()

    @property
    def last_news_at(self) -> float:
        """When the last commit that is on its way arrives."""
        return self._news[-1][0] if self._news else -math.inf

    def inform(self, now_ms: float, committed: int) -> None:
        """The server commits; the device learns of it later."""
        self._news.append((now_ms + self._half_ms, committed))

    def find(self, committed: int) -> Node | None:
        """The last of `committed` tokens, if the tree holds it."""
        node: Node | None = self.root
        while node is not None and node.position < committed:
            node = node.true_child()
        return node if node is not None and node.position == committed else None

    def run(self, until_ms: float) -> None:
        """Drafts, sends, and takes commits as they arrive, up to a time."""
        while True:
            if self._queue:
                self._send()
            if self._news and self._news[0][0] <= self._free_at:
                self._take(self._news.popleft()[1])
                continue
            if self._free_at > until_ms:
                return
            nodes = self._best()
            if nodes:
                self._free_at += self._times.draft_ms * (1 + self._times.call_extra * (len(nodes) - 1))
                for node in nodes:
                    self._expand(node)
                continue
            self._free_at = max(self._free_at, self._news[0][0] if self._news else until_ms + 1e-6)

    def _best(self) -> list[Node]:
        """The nodes to expand in the next call."""
        count = 0 if self._live > self._plan.budget else min(self._times.nodes_per_call, len(self._frontier))
        return [heapq.heappop(self._frontier)[2] for _ in range(count)]

    def _expand(self, node: Node) -> None:
        """What the draft says after a node."""
        picked = self._ranks.picked
        place = (self._offset + node.position) % len(picked)
        rank = picked[place].rank if node.is_true else MISSED
        if not node.is_true:
            place = self._random.randrange(len(picked))
        self.num_drafted += 1
        self._live += self._plan.width
        node.children = []
        for guess in range(self._plan.width):
            child = Node(node.position + 1, rank == guess, node, self._ranks.chances[place][guess])
            node.children.append(child)
            self._push(child)
            if child.reached >= self._send_floor:
                self._enqueue(child)

    def _push(self, node: Node) -> None:
        """Puts a node on the frontier, if it may be expanded before the next commit changes what it is worth."""
        if node.reached >= max(self._plan.floor, self._send_floor):
            heapq.heappush(self._frontier, (-node.reached, next(self._order), node))

    def _take(self, committed: int) -> None:
        gained = committed - self._known
        while self._known < committed:
            self._known += 1
            dropped, self.root = self.root, self.root.true_child() or Node(self._known, True)
            self.root.parent = None
            _release(dropped, self.root)
        self._steer(gained)
        self._replant()

    def _steer(self, gained: int) -> None:
        """Moves the floor of what is sent so that bytes per token meet the budget."""
        budget = self._plan.bytes_per_token
        if budget is None:
            return
        spent, self._bytes_before = self.num_bytes - self._bytes_before, self.num_bytes
        kept = math.exp(-gained / _MEMORY_TOKENS)
        self._bytes_rate = kept * self._bytes_rate + (1.0 - kept) * spent / gained
        excess = min(2.0, self._bytes_rate / budget - 1.0)
        moved = max(self._send_floor, self._plan.floor) * math.exp(_GAIN * min(gained, 8) * excess)
        self._send_floor = min(_HIGHEST_FLOOR, moved)

    def _replant(self) -> None:
        """The frontier and the queue below the root, with what each node is likely to be reached now."""
        self._frontier, self._queue, self._live = [], [], 0
        self.root.reached = 1.0
        stack = [self.root]
        while stack:
            node = stack.pop()
            self._live += 1
            if node.children is None:
                self._push(node)
                continue
            for child in node.children:
                child.reached, child.is_queued = node.reached * child.chance, False
                if child.at == _UNSENT and child.reached >= self._send_floor:
                    self._enqueue(child)
                stack.append(child)

    def _enqueue(self, node: Node | None) -> None:
        """Puts a node on the next message, after those above it that were not sent."""
        if node is None or node is self.root or node.at != _UNSENT or node.is_queued:
            return
        self._enqueue(node.parent)
        node.is_queued = True
        self._queue.append(node)

    def _send(self) -> None:
        self.num_messages += 1
        self.num_bytes += self._plan.message_bytes
        for node in self._queue:
            node.number = self.num_sent
            self.num_sent += 1
            parent = node.parent
            back = 0 if parent is None or parent is self.root else node.number - parent.number
            self.num_bytes += 1 + self._plan.id_bytes + (back >= 15) + (back >= 128)
            node.at, node.is_queued = self._free_at + self._half_ms + HANDLING_MS, False
        self._queue = []


def _release(dropped: Node, kept: Node) -> None:
    """Frees at once what is no longer below the root: collecting so many cycles takes a third of the time."""
    stack = [child for child in dropped.children or () if child is not kept]
    while stack:
        node = stack.pop()
        node.parent = None
        stack += node.children or ()


def choose(root: Node, now_ms: float, times: Times, plan: Plan) -> list[Node]:
    """The pending nodes below `root` that are worth verifying in this step: most expected tokens per ms."""
    heap: list[tuple[float, int, Node]] = []
    order = itertools.count()

    def add(node: Node, reached: float) -> None:
        ready = [child for child in node.children or () if child.at <= now_ms]
        if ready and plan.form is Form.LINE:
            ready = [max(ready, key=lambda child: child.chance)]
        for child in ready:
            heapq.heappush(heap, (-reached * child.chance, next(order), child))

    add(root, 1.0)
    chosen: list[Node] = []
    tokens, best, size = 1.0, 1.0 / times.step_ms, 0
    while heap and len(chosen) < MOST_VERIFIED:
        reached, _, node = heapq.heappop(heap)
        chosen.append(node)
        tokens -= reached
        rate = tokens / (times.step_ms + times.extra_ms * len(chosen))
        if rate > best:
            best, size = rate, len(chosen)
        add(node, -reached)
    return chosen[:size]
