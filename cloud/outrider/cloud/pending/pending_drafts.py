"""Holds the pending drafts of one sequence, and what was measured of its device.

Orders them by what verifying them is worth: a line, or the nodes of a tree.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from outrider.cloud.pending.draft_lag import DraftLag
from outrider.cloud.pending.estimators import AcceptanceEstimator
from outrider.cloud.pending.node_chances import NodeChances, Test
from outrider.cloud.pending.policy import NO_WAIT, Wait
from outrider.cloud.pending.selected_drafts import NOTHING, SelectedDrafts
from outrider.cloud.pending.sources import DraftSource, Sources, expected_gain
from outrider.cloud.pending.trie import REPEATED, UNHINTED, DraftTrie, PendingNode, is_looked_up
from outrider.models.picks.rejection import Evidence
from outrider.models.wire.tree_draft import ROOT, TreeDraft

LEAST: Final = 0.001  # survival below which no drafted token is verified, however little it costs


@dataclass(slots=True, eq=False)
class PendingDrafts:
    """The pending drafts of one sequence. The engine's thread owns it.

    committed: the tokens that the sequence has generated; the engine's own list, which it appends to.
    max_new: tokens that the sequence may commit in all. patience_ms: longest wait for a draft; None: no bound.
    num_own: drafted tokens that a /v1/verify item brought, all of which are verified at once; None for a session.
    evidence: of these, where their rule needs it.
    in_turns: the device answers the next commit with one message, which is waited for; turn_base: of the newest one;
    turn_s: how long it was waited for.
    has_company: other sequences run too. acceptance: of the likeliest path; chances: of numbered and looked-up nodes.
    sources: the verifier's own, if any.
    plan: the wait that would pay after the next commit, where `DraftWaits.prepare` has computed it.
    num_lookup_chosen: looked-up tokens chosen for the step. num_declined: guesses that were worse than the device's.
    """

    committed: list[int]
    max_new: int
    acceptance: AcceptanceEstimator
    chances: NodeChances = field(default_factory=NodeChances)
    sources: Sources = field(default_factory=Sources)
    lag: DraftLag = field(default_factory=DraftLag)
    patience_ms: float | None = None
    num_own: int | None = None
    evidence: Sequence[Evidence] = ()
    trie: DraftTrie = field(default_factory=DraftTrie)
    newest_base: int = -1  # of the messages merged so far
    in_turns: bool = False
    turn_base: int = -1
    turn_s: float = 0.0
    plan: Wait | None = None
    wait: Wait = NO_WAIT
    wait_started: float = 0.0
    wait_deadline: float = 0.0
    wait_nodes: int = 0  # of the device, pending when the wait began
    waited_s: float = 0.0
    has_company: bool = False
    num_lookup_chosen: int = 0
    num_declined: int = 0
    _teaches_path: bool = False

    @property
    def num_left(self) -> int:
        """Tokens that the sequence may still commit."""
        return self.max_new - len(self.committed)

    def own_draft(self, room: int) -> SelectedDrafts:
        """The drafted tokens of a /v1/verify item, as far as there is room for them beside its prompt."""
        most = min(self.num_own or 0, room, self.num_left - 1)  # the last token to commit needs no draft
        tokens = self.trie.likeliest(max(0, most))
        return SelectedDrafts.line(tokens, self.evidence[: len(tokens)])

    def rewind(self, base: int, tokens: Sequence[int], sources: Iterable[DraftSource]) -> None:
        """Replaces the tokens generated after the first `base` by `tokens`, and drops what is pending.

        sources: new ones, for the text as it is now. The list of committed tokens is another one then: a thread that
        reads the old one sees it as it was.
        """
        self.settle()
        self.committed = [*self.committed[:base], *tokens]
        self.trie = DraftTrie()
        self.trie.root.position = len(self.committed)
        self.sources = Sources(sources)
        self.wait, self.wait_nodes, self.num_lookup_chosen, self.in_turns = NO_WAIT, 0, 0, False

    def follow(self, tokens: Sequence[int], *, teaches_path: bool) -> int:
        """Moves to behind the committed `tokens`; learns from them, and drops what they contradict, in `settle`.

        Returns how many of them, the last left out, were looked up. teaches_path: `acceptance` learns, too. A choice
        needs no more than this; what it takes depends on the tokens only.
        """
        if self.trie.passed:
            self.settle()
        self._teaches_path = teaches_path
        return self.trie.follow(tokens)

    def settle(self) -> None:
        """Learns from the tokens followed, and drops what they contradict."""
        trie = self.trie
        passed = trie.passed
        if not passed:
            return
        if self._teaches_path:
            path = trie.path_of_device(len(passed), passed[0][0])
            self.acceptance.observe([node.token for node in path], [token for _, token in passed])
        tests: list[Test] = []
        for node, token in passed:
            children = node.children
            if children:
                child = children.get(token)
                # A path that goes on as guessed: `acceptance` alone learns from it.
                if child is None or child.kind != UNHINTED or len(children) > 1:
                    tests.append((tuple(children.values()), token, node.best))
        trie.settle()
        if tests:
            self.chances.observe(tests)

    def gain_of_device(self, max_draft: int) -> float:
        """Tokens that the likeliest path of the device's drafts is expected to gain."""
        path, rates = self.trie.path_of_device(min(max_draft, self.num_left - 1)), self.chances.rates()
        by_position = self.acceptance.rates(len(path))
        return expected_gain(
            [by_position[index] if node.kind == UNHINTED else rates[node.kind] for index, node in enumerate(path)]
        )

    def prefer_device(self, max_draft: int) -> None:
        """Ends an earlier preference for another guess."""
        best = self.trie.root.best
        if best is not None and is_looked_up(best.kind):
            self.trie.prefer(self.trie.likeliest_of_device(max_draft))

    def looks_up_as_well_as(self, alpha: float) -> bool:
        """Whether some source of the verifier's own may be accepted as often as the device's drafts."""
        rates = self.chances.rates()
        return any(
            max(rates[kind] for kind in source.kinds) >= alpha or (source.goes_first and rates[REPEATED] >= alpha)
            for source in self.sources
        )


@dataclass(slots=True)
class Candidates:
    """Pending nodes of a sequence in the order in which they are worth verifying: by falling survival.

    parents: indices into the same lists, -1 for children of the last committed token. kinds: of a line's nodes only
    where some are looked up. is_line: each follows the last.
    """

    tokens: list[int] = field(default_factory=list)
    parents: Sequence[int] = ()
    survivals: list[float] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    is_line: bool = True

    def chosen(self, count: int) -> SelectedDrafts:
        """The first `count`, the likeliest path moved to the front."""
        if count == 0:
            return NOTHING
        if self.is_line:
            return SelectedDrafts(self.tokens[:count], range(-1, count - 1))
        path: list[int] = []
        for index in range(count):
            if self.parents[index] == (path[-1] if path else -1):  # the first child of its end, so the likeliest
                path.append(index)
        if len(path) == count:
            return SelectedDrafts.line(self.tokens[:count])
        order = [*path, *sorted(set(range(count)).difference(path))]
        place = {index: new for new, index in enumerate(order)}
        place[-1] = -1
        return SelectedDrafts([self.tokens[index] for index in order], [place[self.parents[index]] for index in order])


_NO_LINE: Final = Candidates()


def line_of(drafts: PendingDrafts, max_draft: int) -> Candidates:
    """The likeliest path, of at most `max_draft` tokens. Not to be changed: empty ones are one and the same."""
    trie = drafts.trie
    node = trie.root.best
    if node is None:
        return _NO_LINE
    most = min(max_draft, drafts.num_left - 1)
    if most <= 0:
        return _NO_LINE
    rates = drafts.chances.rates()
    # Not `list[int]()`, which takes half a microsecond: this runs for each sequence between two steps.
    by_position: list[float] = []  # of unhinted nodes
    tokens: list[int] = []
    survivals: list[float] = []
    kinds: list[int] = []
    has_looked_up, alive = trie.num_looked_up, 1.0
    for index in range(most):
        kind = node.kind
        if kind == UNHINTED:
            by_position = by_position or drafts.acceptance.rates(max_draft)
            alive *= by_position[index]
        else:
            alive *= rates[kind]
        if alive < LEAST:
            break
        tokens.append(node.token)
        survivals.append(alive)
        if has_looked_up:
            kinds.append(kind)
        node = node.best
        if node is None:
            break
    return Candidates(tokens, (), survivals, kinds)


def tree_of(drafts: PendingDrafts, max_draft: int, least: float) -> Candidates:
    """At most `max_draft` nodes, the likeliest to be reached and picked first: parents come before their children.

    least: survival of those that are looked at.
    """
    root, num_left = drafts.trie.root, drafts.num_left - 1
    parents: list[int] = []
    row = Candidates(parents=parents, is_line=False)
    if root.children is None or num_left <= 0 or max_draft == 0:
        return row
    rates, beta = drafts.chances.rates(), drafts.chances.beta
    by_position: list[float] = []
    deepest = root.position + min(max_draft, num_left)
    heap: list[tuple[float, int, PendingNode, int]] = []
    num_pushed, parent, index, alive = 0, root, -1, 1.0
    while True:
        children = parent.children
        if children is not None and parent.position < deepest:
            for child in children.values():
                kind = child.kind
                if kind == UNHINTED:
                    by_position = by_position or drafts.acceptance.rates(max_draft)
                    chance = by_position[parent.position - root.position]
                    if child is not parent.best:
                        chance = (1.0 - chance) * beta / max(1, len(children) - 1)
                else:
                    chance = rates[kind]
                chance *= alive
                if chance >= least:
                    num_pushed += 1
                    heapq.heappush(heap, (-chance, num_pushed, child, index))
        if not heap or len(row.tokens) == max_draft:
            return row
        alive, _, parent, above = heapq.heappop(heap)
        alive, index = -alive, len(row.tokens)
        row.tokens.append(parent.token)
        parents.append(above)
        row.survivals.append(alive)
        row.kinds.append(parent.kind)


def likeliest_path(message: TreeDraft) -> list[int]:
    """The tokens of the path from `message.base` on along which each node's level is the highest."""
    best: dict[int, tuple[int, int]] = {}  # by parent: level and number
    for number, (parent, level) in enumerate(zip(message.parents, message.levels, strict=True), start=message.first):
        if parent not in best or level > best[parent][0]:
            best[parent] = level, number
    path, at = [], ROOT
    while at in best:
        at = best[at][1]
        path.append(message.tokens[at - message.first])
    return path
