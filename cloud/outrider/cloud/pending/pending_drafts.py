"""Holds the pending drafts of one sequence, and what was measured of its device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from outrider.cloud.pending.estimators import AcceptanceEstimator, DraftLag
from outrider.cloud.pending.node_chances import NodeChances, Test
from outrider.cloud.pending.policy import NO_WAIT, Wait
from outrider.cloud.pending.selected_drafts import SelectedDrafts
from outrider.cloud.pending.sources import DraftSource, Sources
from outrider.cloud.pending.trie import UNHINTED, DraftTrie, is_looked_up
from outrider.models.picks.rejection import Evidence


@dataclass(slots=True, eq=False)
class PendingDrafts:
    """The pending drafts of one sequence. The engine's thread owns it.

    committed: the tokens that the sequence has generated; the engine's own list, which it appends to.
    max_new: tokens that the sequence may commit in all. patience_ms: longest wait for a draft; None: no bound.
    num_own: drafted tokens that a /v1/verify item brought, all of which are verified at once; None for a session.
    evidence: of these, where their rule needs it.
    has_company: other sequences run too. acceptance: of the likeliest path; chances: of numbered and looked-up nodes.
    sources: the verifier's own, if any.
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
    wait: Wait = NO_WAIT
    wait_started: float = 0.0
    wait_deadline: float = 0.0
    wait_nodes: int = 0  # of the device, pending when the wait began
    waited_s: float = 0.0
    has_company: bool = False
    num_lookup_chosen: int = 0
    num_declined: int = 0

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
        self.committed = [*self.committed[:base], *tokens]
        self.trie = DraftTrie()
        self.trie.root.position = len(self.committed)
        self.sources = Sources(sources)
        self.wait, self.wait_nodes, self.num_lookup_chosen = NO_WAIT, 0, 0

    def advance(self, tokens: Sequence[int]) -> int:
        """Learns from the committed `tokens`, and drops what they contradict; what follows them stays pending.

        Returns how many of them, the last left out, were looked up.
        """
        trie, num_looked_up, last = self.trie, 0, len(tokens) - 1
        tests: list[Test] = []
        for index, token in enumerate(tokens):
            root = trie.root
            children = root.children
            if children:
                child = children.get(token)
                # A path that goes on as guessed: `acceptance` alone learns from it.
                if child is None or child.kind != UNHINTED or len(children) > 1:
                    tests.append((tuple(children.values()), token, root.best))
                    if child is not None and is_looked_up(child.kind) and index < last:
                        num_looked_up += 1
            trie.advance(token)
        if tests:
            self.chances.observe(tests)
        return num_looked_up
