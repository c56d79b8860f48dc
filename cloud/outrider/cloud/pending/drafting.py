"""Merges drafts, and chooses which to verify."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from outrider.cloud.pending.draft_lag import DraftLag
from outrider.cloud.pending.estimators import (
    CHEAP,
    AcceptanceEstimator,
    StepSize,
)
from outrider.cloud.pending.lookup import RecentTextSource
from outrider.cloud.pending.node_chances import NodeChances
from outrider.cloud.pending.pending_drafts import LEAST, Candidates, PendingDrafts, likeliest_path, line_of, tree_of
from outrider.cloud.pending.policy import Policy, choose_drafts
from outrider.cloud.pending.selected_drafts import SelectedDrafts
from outrider.cloud.pending.sources import DraftSource, Sources
from outrider.cloud.pending.tree_trials import TreeTrials
from outrider.cloud.pending.trie import EARLIER_KINDS, PREDICTED_KINDS, is_looked_up
from outrider.cloud.pending.waits import DraftWaits
from outrider.cloud.seam import DraftHints
from outrider.models.wire.tree_draft import TreeDraft

_LIKELY: Final = 0.05  # survival below which a drafted token is not verified even when only passes count
_MANY: Final = 64  # drafted tokens of all sequences beyond which nodes are looked at more sparingly
_STRETCH: Final = 8  # tokens over which the cheapest of them is averaged: a curve may have flat steps
_MAX_CLIENTS: Final = 256  # whose earlier sessions are remembered
_PLAIN_AFTER: Final = 32  # steps at least between two that are run without drafts, to time them
_TRIAL_SHARE: Final = 0.01  # of the time, for steps of sizes that were not run of late


@dataclass(frozen=True, slots=True)
class Learned:
    """What a client's sessions have shown: a new one begins with it."""

    acceptance: AcceptanceEstimator
    chances: NodeChances


class Drafting(DraftWaits):
    """Takes the decisions of `policy` on what was measured. The engine's thread owns it.

    max_draft: drafted tokens verified per sequence and step. with_trees: any part of a tree may be verified in a step;
    otherwise a line. captured: as in StepTimeCurve.
    """

    def __init__(
        self, max_draft: int, policy: Policy, *, with_trees: bool = False, captured: Sequence[int] = ()
    ) -> None:
        super().__init__(max_draft, policy, with_trees=with_trees, captured=captured)
        self.learned = lru_cache(_MAX_CLIENTS)(self._nothing_learned)
        self.num_nodes = 0  # of devices, that became pending
        self.trees = TreeTrials()
        self._untried_s = 0.0  # time of all steps since a size was tried
        self._num_drafted = 0  # steps since one was run without drafts, to time it

    def _nothing_learned(self, client: bytes) -> Learned:
        """Of a client (`Asker.client`) that is new, or forgotten.

        What is kept of one is its own sessions', and nobody else's: others' texts cannot be told from it.
        """
        return Learned(AcceptanceEstimator(self._max_draft), NodeChances())

    def pending(
        self, client: bytes, committed: list[int], max_new: int, hints: DraftHints, *, num_own: int | None = None
    ) -> PendingDrafts:
        """Of a new sequence, or of one that begins again after `committed`: nothing yet. client: as `Asker.client`.

        The others: as in PendingDrafts.
        """
        learned = self.learned(client)
        drafts = PendingDrafts(
            committed=committed,
            max_new=max_new,
            acceptance=AcceptanceEstimator(self._max_draft, parent=learned.acceptance),
            chances=NodeChances(learned.chances),
            lag=DraftLag(hints.lag_ms),
            patience_ms=hints.patience_ms,
            num_own=num_own,
            evidence=hints.evidence,
        )
        drafts.trie.root.position = len(committed)
        return drafts

    def begin(self, drafts: PendingDrafts, hints: DraftHints, sources: Iterable[DraftSource]) -> None:
        """Takes the draft that a request brought, and its sources: `sources`, and the earlier text of its hints."""
        own = list(sources)
        if hints.recent:
            kinds = PREDICTED_KINDS if hints.is_predicted else EARLIER_KINDS
            own.append(RecentTextSource(hints.recent, drafts.committed, is_repeat=hints.is_repeat, kinds=kinds))
        drafts.sources = Sources(own)
        drafts.trie.merge(hints.draft, prefer=True)

    def merge(self, drafts: PendingDrafts, base: int, paths: Sequence[Sequence[int]], arrived: float) -> None:
        """Adds what is consistent with the commits since `base`; the newest message's first path is the likeliest."""
        drafts.settle()
        num_before, overlap = drafts.trie.num_nodes, len(drafts.committed) - base
        is_newest = base >= drafts.newest_base
        self._note_arrival(drafts, base, paths[0], len(paths[0]), arrived)
        for path in reversed(paths):  # the likeliest last, so that it wins
            if len(path) > overlap and list(path[:overlap]) == drafts.committed[base:]:
                drafts.trie.merge(path[overlap:], prefer=is_newest)
        self.num_nodes += max(0, drafts.trie.num_nodes - num_before)

    def merge_tree(self, drafts: PendingDrafts, message: TreeDraft, arrived: float) -> None:
        """Adds the nodes of a message that are consistent with the commits."""
        drafts.settle()
        drafts.chances.has_hints = True
        if message.base >= drafts.newest_base:
            drafts.in_turns = message.is_turn
            drafts.turn_base = message.base if message.is_turn else -1
        base, overlap = message.base, len(drafts.committed) - message.base
        num_before = drafts.trie.num_nodes
        length = drafts.trie.merge_tree(message, drafts.committed) - base
        self.num_nodes += max(0, drafts.trie.num_nodes - num_before)
        late: list[int] = []
        if overlap > 0 and drafts.lag.is_awaited(base):
            late = likeliest_path(message)
            length = max(length, len(late))
        self._note_arrival(drafts, base, late, max(1, length), arrived)

    def _note_arrival(self, drafts: PendingDrafts, base: int, path: Sequence[int], length: int, arrived: float) -> None:
        """Learns from a message when it came, as `DraftLag.drafted`. path: its likeliest one, if it may be late."""
        if drafts.lag.drafted(base, length, arrived):
            self.distributions.lag_s.observe(drafts.lag.last_s)
            overlap = len(drafts.committed) - base
            if path and overlap > 0:  # late, but it shows how well the device guesses: else no wait is ever tried
                drafts.acceptance.observe(path[:overlap], drafts.committed[base:])
        drafts.newest_base = max(base, drafts.newest_base)

    def choose(
        self, decoding: Sequence[PendingDrafts], budget: int, fixed: StepSize, context: float
    ) -> dict[PendingDrafts, SelectedDrafts]:
        """The drafted tokens that each decoding sequence verifies in this step, at most `budget` in all.

        fixed: the step without drafts, prompt chunks included. context: positions that a drafted token attends to.
        """
        if not decoding:
            return {}
        # A /v1/verify item gets its whole draft verified, whatever its neighbours choose.
        chosen: dict[PendingDrafts, SelectedDrafts] = {}
        for drafts in decoding:
            if drafts.num_own is not None:
                own = chosen[drafts] = drafts.own_draft(budget)
                budget -= len(own.tokens)
                fixed += StepSize(len(own.tokens), round(len(own.tokens) * context))
        others = [drafts for drafts in decoding if drafts.num_own is None]
        for drafts in others:
            if not drafts.trie.root.children or drafts.sources.has_rivals:
                self._look_up(drafts)
        lines = rows = [line_of(drafts, self._max_draft) for drafts in others]
        # Where nothing else ran meanwhile, a turn's tokens also paid for its wait.
        spent_s = decoding[0].turn_s if len(decoding) == 1 and not decoding[0].has_company else 0.0
        counts, rate = self._counts(rows, len(decoding), budget, fixed, context, spent_s)
        if self._with_trees and any(drafts.trie for drafts in others):
            least = self._least_worth(rate, min(budget, self._max_draft * len(others)), fixed, context)
            trees = [tree_of(drafts, self._max_draft, least) for drafts in others]
            tree_counts, tree_rate = self._counts(trees, len(decoding), budget, fixed, context, spent_s)
            if tree_rate > rate and self.trees.pay(tree_rate, rate):
                rows, counts, rate = trees, tree_counts, tree_rate
        if self._num_drafted >= _PLAIN_AFTER and self.curve.lacks(fixed.tokens) and self._policy is not Policy.VERIFY:
            self._num_drafted = 0
            rows, counts = lines, [0] * len(lines)  # else the step without drafts would never be timed again
        elif rows is lines:
            counts = self._tried(rows, counts, rate, len(decoding), budget, fixed, context)
        for drafts, row, count in zip(others, rows, counts, strict=True):
            chosen[drafts] = row.chosen(count)
            has_looked_up = count and drafts.trie.num_looked_up
            drafts.num_lookup_chosen = sum(map(is_looked_up, row.kinds[:count])) if has_looked_up else 0
        return chosen

    def shared_room(self, room: int, num_own: int, plain: StepSize, context: float) -> int:
        """What drafts may have of `room` in a step of several owners' texts: a decode step's time, but for capacity.

        Sure guesses for one owner's many texts would make everybody's step as long as they are many. num_own: drafted
        tokens of /v1/verify items, which are bounded elsewhere. plain: the step without drafts and prompts.
        """
        if self._policy is Policy.VERIFY:
            return room
        return min(room, num_own + self.curve.tokens_in_a_step(room, plain, context))

    def stepped(self, size: StepSize, seconds: float, has_trees: bool) -> None:
        """Records a step: the model's time, without the engine around it. has_trees: it verified a branching tree."""
        self._untried_s += seconds
        self._num_drafted += 1
        if not has_trees:
            self.curve.observe(size, seconds)
            return
        if not self.curve.is_known:
            return
        expected_s = self.curve.expected_s(size)
        self.trees.ran(seconds, expected_s)
        if size.tokens > self.curve.largest:  # no line of about this size was run of late
            self.curve.observe(size, seconds / self.trees.ratio)
        else:
            self.curve.passed()

    def _counts(
        self,
        rows: Sequence[Candidates],
        num_decoding: int,
        budget: int,
        fixed: StepSize,
        context: float,
        spent_s: float = 0.0,
    ) -> tuple[list[int], float]:
        """How many of each, and tokens per second. spent_s: seconds before the step that count as its own."""
        survivals = [row.survivals for row in rows]
        if self._policy is Policy.VERIFY:
            likely = [[p for p in row if p >= _LIKELY] for row in survivals]
            most = min(budget, sum(map(len, likely)))
            # As if drafts cost no time, so the likeliest of all, whosever they are.
            return choose_drafts(likely, 1, num_decoding, np.ones(1 + most), most)
        most = min(budget, sum(map(len, survivals)))
        if self.curve.is_known:  # step by step to sizes that were not run of late: they are guessed
            most = min(most, 2 * max(fixed.tokens, self.curve.largest) - fixed.tokens)
        step_s = self.curve.seconds(fixed.tokens + most, fixed, context)
        return choose_drafts(survivals, fixed.tokens, num_decoding, step_s + spent_s, most)

    def _tried(
        self,
        rows: Sequence[Candidates],
        counts: list[int],
        rate: float,
        num_decoding: int,
        budget: int,
        fixed: StepSize,
        context: float,
    ) -> list[int]:
        """The same counts, or others so that the next larger size is timed again, where it pays if its tokens are
        cheap. rate: tokens per second of the step chosen.
        """
        num_chosen = sum(counts)
        if self._policy is Policy.VERIFY or not self.curve.is_known:
            return counts
        survivals = [row.survivals for row in rows]
        most = fixed.tokens + min(budget, sum(map(len, survivals)))
        size = self.curve.untried(fixed.tokens + num_chosen, most)
        if size is None:
            return counts
        count = size - fixed.tokens
        step_s = self.curve.seconds(size, fixed, context)
        if step_s[-1] - step_s[fixed.tokens + num_chosen - 1] > _TRIAL_SHARE * self._untried_s:
            return counts
        cheap_s = step_s[fixed.tokens - 1] * (1.0 + CHEAP * np.maximum(0, np.arange(1, size + 1) - fixed.tokens))
        if choose_drafts(survivals, fixed.tokens, num_decoding, cheap_s, count)[1] <= rate:
            return counts
        self._untried_s = 0.0
        return choose_drafts(survivals, fixed.tokens, num_decoding, np.ones(size), count)[0]

    def _least_worth(self, rate: float, most: int, fixed: StepSize, context: float) -> float:
        """Survival below which no node of a tree is looked at. rate: tokens per second that lines reach in this step.

        Where many sequences run, most nodes of their trees cost more than they can gain.
        """
        if self._policy is Policy.VERIFY:
            return _LIKELY
        if most <= _MANY:
            return LEAST
        step_s = self.curve.seconds(fixed.tokens + most, fixed, context)[fixed.tokens - 1 :]
        cheapest_s = float((step_s[_STRETCH:] - step_s[:-_STRETCH]).min()) / _STRETCH
        return max(LEAST, 0.5 * rate * cheapest_s)
