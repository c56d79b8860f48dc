"""Merges drafts, chooses which to verify, and waits for them when that pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from outrider.cloud.distributions import Distributions
from outrider.cloud.pending.estimators import CHEAP, AcceptanceEstimator, DraftLag, StepSize, StepTimeCurve
from outrider.cloud.pending.node_chances import NodeChances
from outrider.cloud.pending.pending_drafts import LEAST, Candidates, PendingDrafts, likeliest_path, line_of, tree_of
from outrider.cloud.pending.policy import (
    ENOUGH_ANSWERS,
    NO_WAIT,
    Policy,
    Wait,
    best_rate,
    bounded,
    choose_drafts,
    longest_wait,
    next_rate,
    plan_in_company,
    plan_wait,
    turn_wait,
    worth_waiting_for,
)
from outrider.cloud.pending.selected_drafts import SelectedDrafts
from outrider.cloud.pending.tree_trials import TreeTrials
from outrider.cloud.pending.trie import NUM_LOOKUP_KINDS, UNHINTED, is_looked_up
from outrider.models.wire.tree_draft import TreeDraft

_LIKELY: Final = 0.05  # survival below which a drafted token is not verified even when only passes count
_MANY: Final = 64  # drafted tokens of all sequences beyond which nodes are looked at more sparingly
_STRETCH: Final = 8  # tokens over which the cheapest of them is averaged: a curve may have flat steps
_SURE: Final = 0.6  # chance of the next token from which a pending guess is not compared with a wait
_LITTLE: Final = 0.25  # survival of a path's end beyond which little is gained by waiting for more of it
_BETTER: Final = 1.1  # of what the device's drafts are expected to gain, from which another guess replaces them
_TESTED_EVERY: Final = 16  # such guesses, of which one is pending all the same: so that commits test it
_MAX_CLIENTS: Final = 256  # whose earlier sessions are remembered
_PLAIN_AFTER: Final = 32  # steps at least between two that are run without drafts, to time them
_TRIAL_SHARE: Final = 0.01  # of the time, for steps of sizes that were not run of late


@dataclass(frozen=True, slots=True)
class Learned:
    """What a client's sessions have shown: a new one begins with it."""

    acceptance: AcceptanceEstimator
    chances: NodeChances


class Drafting:
    """Takes the decisions of `policy` on what was measured. The engine's thread owns it.

    max_draft: drafted tokens verified per sequence and step. with_trees: any part of a tree may be verified in a step;
    otherwise a line.
    """

    def __init__(self, max_draft: int, policy: Policy, *, with_trees: bool = False) -> None:
        self._max_draft = max_draft
        self._policy = policy
        self._with_trees = with_trees
        self.curve = StepTimeCurve()
        self.learned = lru_cache(_MAX_CLIENTS)(self._nothing_learned)
        self.distributions = Distributions()
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
        self,
        client: bytes,
        committed: list[int],
        max_new: int,
        *,
        lag_ms: float | None = None,
        patience_ms: float | None = None,
        num_own: int | None = None,
    ) -> PendingDrafts:
        """Of a new sequence, or of one that begins again after `committed`: nothing yet. lag_ms: a first guess of it.

        The others: as in PendingDrafts; client: as `Asker.client`.
        """
        learned = self.learned(client)
        drafts = PendingDrafts(
            committed=committed,
            max_new=max_new,
            acceptance=AcceptanceEstimator(self._max_draft, parent=learned.acceptance),
            chances=NodeChances(learned.chances),
            lag=DraftLag(lag_ms),
            patience_ms=patience_ms,
            num_own=num_own,
        )
        drafts.trie.root.position = len(committed)
        return drafts

    def merge(self, drafts: PendingDrafts, base: int, paths: Sequence[Sequence[int]], arrived: float) -> None:
        """Adds what is consistent with the commits since `base`; the newest message's first path is the likeliest."""
        num_before, overlap = drafts.trie.num_nodes, len(drafts.committed) - base
        is_newest = base >= drafts.newest_base
        self._note_arrival(drafts, base, paths[0], len(paths[0]), arrived)
        for path in reversed(paths):  # the likeliest last, so that it wins
            if len(path) > overlap and list(path[:overlap]) == drafts.committed[base:]:
                drafts.trie.merge(path[overlap:], prefer=is_newest)
        self.num_nodes += max(0, drafts.trie.num_nodes - num_before)

    def merge_tree(self, drafts: PendingDrafts, message: TreeDraft, arrived: float) -> None:
        """Adds the nodes of a message that are consistent with the commits."""
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

    def committed(
        self, drafts: PendingDrafts, pending: Sequence[int], tokens: Sequence[int], now: float, *, crowding: float
    ) -> None:
        """Learns from a commit; starts a wait if little of the device's is pending after it.

        pending: the likeliest path before the step, as far as the device sent it. crowding: sequences for each place.
        """
        drafts.acceptance.observe(pending, tokens)
        drafts.turn_s = 0.0
        if drafts.in_turns:
            drafts.lag.committed(len(drafts.committed), now)
            self._start_turn(drafts, now)
        elif self._is_thin(drafts):  # how fast the device answers now is what a wait would cost
            drafts.lag.committed(len(drafts.committed), now)
            self._start_wait(drafts, now, crowding)

    def _is_thin(self, drafts: PendingDrafts) -> bool:
        """Whether the device is out of sync, or has only an unlikely guess of the next token pending."""
        trie = drafts.trie
        best = trie.root.best
        if best is None or not trie.has_device_nodes:
            return True
        kind = best.kind
        return kind != UNHINTED and kind >= NUM_LOOKUP_KINDS and drafts.chances.rates()[kind] < _SURE

    def _look_up(self, drafts: PendingDrafts) -> None:
        """Asks the verifier's own sources what follows: where nothing is pending, where one repeats the request, and
        where an earlier text gains more than the device's pending drafts.
        """
        sources, trie = drafts.sources, drafts.trie
        most = min(self._max_draft, drafts.num_left - 1)
        if not sources or most <= 0:
            return
        of_device: float | None = None
        if trie and not any(source.goes_first for source in sources):
            if not trie.has_device_nodes:
                return  # a guess that holds so far
            of_device = drafts.gain_of_device(self._max_draft)
        step_s = self.curve.step_and_extra()[0] if self.curve.is_known and self._policy is not Policy.VERIFY else None
        is_rival = of_device is not None
        guesses = sources.guesses(most, drafts.chances.rates(), step_s, of_rivals=is_rival)
        is_better = bool(guesses) and (of_device is None or guesses[0].gain > _BETTER * of_device)
        if is_rival and not is_better:
            drafts.num_declined += bool(guesses)
            if drafts.num_declined % _TESTED_EVERY:
                guesses = []
        for guess in guesses if self._with_trees else guesses[:1]:
            trie.merge(guess.tokens, guess.kinds)
        if is_better and (is_rival or len(guesses) > 1):
            trie.prefer(guesses[0].tokens)
        elif is_rival:
            drafts.prefer_device(self._max_draft)

    def _start_turn(self, drafts: PendingDrafts, now: float) -> None:
        """Waits for the one message by which a device that takes turns answers the commit: whole, or not at all."""
        if drafts.patience_ms == 0 or self._max_draft == 0 or drafts.num_left <= 1:
            return
        wait, (lag_s,) = turn_wait(self.curve.step_and_extra()[0]), drafts.lag.seconds_until(1)
        if drafts.lag.answer_rate >= ENOUGH_ANSWERS and (lag_s is None or lag_s <= wait.lag_s):
            self._wait(drafts, wait, now, wait.lag_s)

    def _wait(self, drafts: PendingDrafts, wait: Wait, now: float, longest_s: float) -> None:
        drafts.wait, drafts.wait_started = wait, now
        drafts.wait_nodes = drafts.trie.num_nodes - drafts.trie.num_looked_up
        allowed = drafts.patience_ms
        drafts.wait_deadline = now + (longest_s if allowed is None else min(longest_s, allowed / 1e3))

    def _start_wait(self, drafts: PendingDrafts, now: float, crowding: float) -> None:
        allowed = drafts.patience_ms
        if allowed == 0 or self._max_draft == 0 or drafts.num_left <= 1 or not drafts.lag.is_known:
            return
        alpha = drafts.acceptance.rate
        if drafts.looks_up_as_well_as(alpha):
            self._look_up(drafts)
            looked_up = drafts.trie.root.best
            if looked_up is not None and drafts.chances.rates()[looked_up.kind] >= alpha:
                return  # what is here is as good as what would come
        step_s, extra_s = self.curve.step_and_extra()
        most = min(self._max_draft, worth_waiting_for(alpha), drafts.num_left - 1)
        lags = [bounded(lag, step_s) for lag in drafts.lag.seconds_until(most)]
        beta, answered, crowding = drafts.chances.beta, drafts.lag.answer_rate, max(1.0, crowding)
        if self._policy is not Policy.AUTO:
            crowding = 1.0
        saves_passes = self._policy is Policy.VERIFY
        if drafts.has_company:
            # The others' steps go on meanwhile: it can join again only at the end of one of theirs.
            in_steps = tuple(None if lag is None else -(-lag // step_s) for lag in lags)
            coarse = round(alpha, 2), round(extra_s / step_s, 2), in_steps, round(answered, 2), round(crowding, 1)
            want = plan_in_company(*coarse, round(beta, 1), saves_passes)
            wait = Wait(want, (in_steps[want - 1] or 0.0) * step_s) if want else NO_WAIT
        else:
            wait = plan_wait(
                alpha, step_s, extra_s, lags, answered, saves_passes=saves_passes, crowding=crowding, beta=beta
            )
        if wait.want == 0 or (allowed is not None and wait.lag_s * 1e3 > allowed):
            return
        line = line_of(drafts, self._max_draft)
        here = line.survivals if drafts.trie.has_device_nodes else []
        if here and not saves_passes and best_rate(here, step_s, extra_s) > next_rate(alpha, wait, step_s, extra_s):
            return  # what is here is worth a step now
        self._wait(drafts, wait, now, longest_wait(wait.lag_s))

    def is_waiting(self, drafts: PendingDrafts, now: float) -> bool:
        """Whether the sequence sits this step out for a draft; ends the wait when the draft is here or late."""
        if drafts.wait is NO_WAIT:
            return False
        if now < drafts.wait_deadline and not self._is_enough(drafts):
            return True
        trie = drafts.trie
        is_answered = trie.num_nodes - trie.num_looked_up > drafts.wait_nodes
        if drafts.in_turns:
            drafts.in_turns = is_answered = drafts.turn_base == len(drafts.committed)
        drafts.lag.waited(is_answered)
        waited_s = now - drafts.wait_started
        drafts.waited_s += waited_s
        drafts.turn_s = waited_s if drafts.in_turns else 0.0
        self.distributions.wait_s.observe(waited_s)
        drafts.wait = NO_WAIT
        return False

    def _is_enough(self, drafts: PendingDrafts) -> bool:
        """Whether what was waited for is here, or what is here and likely has come to its end."""
        if drafts.in_turns:
            return drafts.turn_base == len(drafts.committed)
        want, trie = min(drafts.wait.want, drafts.num_left - 1), drafts.trie
        num_here = trie.num_nodes - trie.num_looked_up
        if num_here <= drafts.wait_nodes:
            return want <= 0
        if len(trie.likeliest_of_device(want)) >= want:
            return True
        if not drafts.chances.has_hints:
            return False
        if self._with_trees:  # alternatives come before the end of the path where they are likelier to be reached
            return num_here >= want
        survivals = line_of(drafts, self._max_draft).survivals
        return bool(survivals) and survivals[-1] < _LITTLE

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
            drafts.num_lookup_chosen = sum(map(is_looked_up, row.kinds[:count])) if drafts.trie.num_looked_up else 0
        return chosen

    def stepped(self, size: StepSize, seconds: float, has_trees: bool) -> None:
        """Records a step: the model's time, without the engine around it. has_trees: it verified a branching tree."""
        self._untried_s += seconds
        self._num_drafted += 1
        if not has_trees:
            self.curve.observe(size, seconds)
            return
        if not self.curve.is_known:
            return
        expected_s = float(self.curve.seconds(size.tokens, size)[-1])
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
