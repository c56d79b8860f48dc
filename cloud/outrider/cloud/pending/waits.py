"""Waits for drafts when that pays, and asks the verifier's own sources where a device has sent nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from outrider.cloud.distributions import Distributions
from outrider.cloud.pending.estimators import StepTimeCurve
from outrider.cloud.pending.pending_drafts import PendingDrafts, line_of
from outrider.cloud.pending.policy import (
    ENOUGH_ANSWERS,
    NO_WAIT,
    Policy,
    Wait,
    best_rate,
    bounded,
    longest_wait,
    next_rate,
    plan_in_company,
    plan_wait,
    turn_wait,
    worth_waiting_for,
)
from outrider.cloud.pending.trie import MAX_NODES, NUM_LOOKUP_KINDS, UNHINTED

_SURE: Final = 0.6  # chance of the next token from which a pending guess is not compared with a wait
_LITTLE: Final = 0.25  # survival of a path's end beyond which little is gained by waiting for more of it
_SLOWER: Final = 0.25
"""Of a step: how much later than usual an answer may come that is waited for."""
_BETTER: Final = 1.1  # of what the device's drafts are expected to gain, from which another guess replaces them
_TESTED_EVERY: Final = 16  # such guesses, of which one is pending all the same: so that commits test it


class DraftWaits:
    """What `Drafting` does between a commit and the next choice. The engine's thread owns it."""

    def __init__(self, max_draft: int, policy: Policy, *, with_trees: bool, captured: Sequence[int]) -> None:
        """As `Drafting`."""
        self._max_draft = max_draft
        self._policy = policy
        self._with_trees = with_trees
        self.curve = StepTimeCurve(captured)
        self.distributions = Distributions()

    def may_wait(self, drafts: PendingDrafts) -> bool:
        """After a commit: whether little of the device's is pending."""
        drafts.turn_s = 0.0
        if drafts.in_turns:
            return True
        trie = drafts.trie
        best = trie.root.best
        if best is None or not trie.has_device_nodes:
            return True  # the device is out of sync
        kind = best.kind  # or has only an unlikely guess of the next token
        return kind != UNHINTED and kind >= NUM_LOOKUP_KINDS and drafts.chances.rates()[kind] < _SURE

    def start_wait(self, drafts: PendingDrafts, now: float, *, crowding: float) -> None:
        """Waits for a draft if that pays; call it where one may be waited for. crowding: sequences for each place."""
        drafts.lag.committed(len(drafts.committed), now)  # how fast the device answers now is what a wait would cost
        if drafts.in_turns:
            self._start_turn(drafts, now)
        else:
            self._start_wait(drafts, now, crowding)

    def prepare(self, drafts: PendingDrafts, *, crowding: float) -> None:
        """Computes what the next commit and the choice after it need of what was learned, so that they only look it up:
        the chances by kind, and the wait that would pay.
        """
        drafts.chances.rates()
        if drafts.lag.is_known and drafts.patience_ms != 0 and not drafts.in_turns:
            drafts.plan = self._plan(drafts, crowding)

    def _look_up(self, drafts: PendingDrafts) -> None:
        """Asks the verifier's own sources what follows: where nothing is pending, where one repeats the request, and
        where an earlier text gains more than the device's pending drafts.
        """
        sources, trie = drafts.sources, drafts.trie
        if not sources or (trie and not sources.has_rivals):
            return  # what is pending is not compared with anything
        most = min(self._max_draft, drafts.num_left - 1)
        if most <= 0:
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
        if trie.num_nodes > MAX_NODES - most * len(guesses):
            drafts.settle()  # what a commit has passed takes no place
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
        drafts.settle()
        drafts.wait, drafts.wait_started = wait, now
        drafts.wait_nodes = drafts.trie.num_nodes - drafts.trie.num_looked_up
        allowed = drafts.patience_ms
        drafts.wait_deadline = now + (longest_s if allowed is None else min(longest_s, allowed / 1e3))

    def _start_wait(self, drafts: PendingDrafts, now: float, crowding: float) -> None:
        allowed, plan, drafts.plan = drafts.patience_ms, drafts.plan, None
        if plan is NO_WAIT:
            return  # what the verifier's own sources say is asked when it is chosen
        if allowed == 0 or self._max_draft == 0 or drafts.num_left <= 1 or not drafts.lag.is_known:
            return
        alpha = drafts.acceptance.rate
        if drafts.looks_up_as_well_as(alpha):
            self._look_up(drafts)
            looked_up = drafts.trie.root.best
            if looked_up is not None and drafts.chances.rates()[looked_up.kind] >= alpha:
                return  # what is here is as good as what would come
        wait = self._plan(drafts, crowding) if plan is None else plan
        if wait.want == 0 or (allowed is not None and wait.lag_s * 1e3 > allowed):
            return
        saves_passes = self._policy is Policy.VERIFY
        if drafts.trie.has_device_nodes and not saves_passes:
            here, (step_s, extra_s) = line_of(drafts, self._max_draft).survivals, self.curve.step_and_extra()
            if here and best_rate(here, step_s, extra_s) > next_rate(alpha, wait, step_s, extra_s):
                return  # what is here is worth a step now
        self._wait(drafts, wait, now, longest_wait(self._slow_s(drafts, wait.lag_s)))

    def _slow_s(self, drafts: PendingDrafts, usual_s: float) -> float:
        """The lag of slow answers, where it is worth waiting for; else the usual one."""
        slow_s = drafts.lag.slow_s
        return slow_s if usual_s < slow_s <= usual_s + _SLOWER * self.curve.step_and_extra()[0] else usual_s

    def _plan(self, drafts: PendingDrafts, crowding: float) -> Wait:
        """The wait that pays while nothing is pending."""
        alpha = drafts.acceptance.rate
        step_s, extra_s = self.curve.step_and_extra()
        most = min(self._max_draft, worth_waiting_for(alpha), drafts.num_left - 1)
        lags = bounded(drafts.lag.seconds_until(most), step_s)
        beta, answered, crowding = drafts.chances.beta, drafts.lag.answer_rate, max(1.0, crowding)
        if self._policy is not Policy.AUTO:
            crowding = 1.0
        saves_passes = self._policy is Policy.VERIFY
        if not drafts.has_company:
            return plan_wait(
                alpha, step_s, extra_s, lags, answered, saves_passes=saves_passes, crowding=crowding, beta=beta
            )
        # The others' steps go on meanwhile: it can join again only at the end of one of theirs.
        in_steps = tuple([None if lag is None else -(-lag // step_s) for lag in lags])
        coarse = round(alpha, 2), round(extra_s / step_s, 2), in_steps, round(answered, 2), round(crowding, 1)
        want = plan_in_company(*coarse, round(beta, 1), saves_passes)
        return Wait(want, (in_steps[want - 1] or 0.0) * step_s) if want else NO_WAIT

    def reconsider_wait(self, drafts: PendingDrafts) -> None:
        """Ends a wait where a guess of the verifier's own that has come meanwhile is worth a step now."""
        if drafts.wait is NO_WAIT or drafts.in_turns or self._policy is Policy.VERIFY:
            return
        self._look_up(drafts)
        step_s, extra_s = self.curve.step_and_extra()
        here = line_of(drafts, self._max_draft).survivals
        if here and best_rate(here, step_s, extra_s) > next_rate(drafts.acceptance.rate, drafts.wait, step_s, extra_s):
            drafts.wait = NO_WAIT

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
