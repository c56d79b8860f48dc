"""Merges drafts, chooses how many to verify, and waits for them when that pays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from outrider.cloud.pending.chosen import Chosen
from outrider.cloud.pending.drafts import PendingDrafts
from outrider.cloud.pending.estimators import AcceptanceEstimator, StepSize, StepTimeCurve
from outrider.cloud.pending.policy import NO_WAIT, Policy, Wait, bounded, choose_drafts, longest_wait, plan_wait

_MAX_WAITED_FOR = 8  # drafted tokens: more of them are never worth a longer wait
_LIKELY = 0.05  # survival below which a drafted token is not verified even when only passes count


class Drafting:
    """Takes the decisions of `policy` on what was measured. The engine's thread owns it.

    max_draft: drafted tokens verified per sequence and step.
    """

    def __init__(self, max_draft: int, policy: Policy, *, with_trees: bool = False) -> None:
        self._max_draft = max_draft
        self._policy = policy
        self.curve = StepTimeCurve()
        self.acceptance = AcceptanceEstimator(max_draft)

    def stepped(self, size: StepSize, seconds: float, has_trees: bool) -> None:
        """Learns from the time of a step."""
        self.curve.observe(size, seconds)

    def merge(self, drafts: PendingDrafts, base: int, paths: Sequence[Sequence[int]], arrived: float) -> None:
        """Adds what is consistent with the commits since `base`; the newest message's first path is the likeliest."""
        is_answer = drafts.lag.drafted(base, len(paths[0]), arrived)
        is_newest = base >= drafts.newest_base
        overlap = len(drafts.committed) - base
        if is_answer and overlap > 0:  # late, but it shows how well the device guesses: else no wait is ever tried
            drafts.acceptance.observe(paths[0][:overlap], drafts.committed[base:])
        for path in reversed(paths):  # the likeliest last, so that it wins
            if len(path) > overlap and list(path[:overlap]) == drafts.committed[base:]:
                drafts.trie.merge(path[overlap:], prefer=is_newest)
        drafts.newest_base = max(base, drafts.newest_base)

    def committed(
        self, drafts: PendingDrafts, pending: Sequence[int], tokens: Sequence[int], now: float, *, crowding: float
    ) -> None:
        """Learns from a commit; starts a wait if nothing is pending after it.

        pending: the likeliest path before the step. crowding: sequences for each place.
        """
        drafts.acceptance.observe(pending, tokens)
        if not drafts.trie:  # the device is out of sync: how fast it answers is what a wait would cost
            drafts.lag.committed(len(drafts.committed), now)
            self._start_wait(drafts, now, crowding)

    def _start_wait(self, drafts: PendingDrafts, now: float, crowding: float) -> None:
        allowed = drafts.patience_ms
        if allowed == 0 or self._max_draft == 0 or drafts.num_left <= 1 or not drafts.lag.is_known:
            return
        step_s, extra_s = self.curve.step_and_extra()
        most = min(self._max_draft, _MAX_WAITED_FOR, drafts.num_left - 1)
        lags = [bounded(lag, step_s) for lag in drafts.lag.seconds_until(most)]
        alpha, answered, crowding = drafts.acceptance.rate, drafts.lag.answer_rate, max(1.0, crowding)
        if self._policy is not Policy.AUTO:
            crowding = 1.0
        saves_passes = self._policy is Policy.VERIFY
        if drafts.has_company:
            # The others' steps go on meanwhile: it can join again only at the end of one of theirs.
            in_steps = tuple(None if lag is None else -(-lag // step_s) for lag in lags)
            coarse = round(alpha, 2), round(extra_s / step_s, 2), in_steps, round(answered, 2), round(crowding, 1)
            want = _plan_in_company(*coarse, saves_passes)
            wait = Wait(want, (in_steps[want - 1] or 0.0) * step_s) if want else NO_WAIT
        else:
            wait = plan_wait(alpha, step_s, extra_s, lags, answered, saves_passes=saves_passes, crowding=crowding)
        if wait.want == 0 or (allowed is not None and wait.lag_s * 1e3 > allowed):
            return
        longest = longest_wait(wait.lag_s)
        drafts.wait, drafts.wait_started = wait, now
        drafts.wait_deadline = now + (longest if allowed is None else min(longest, allowed / 1e3))

    def is_waiting(self, drafts: PendingDrafts, now: float) -> bool:
        """Whether the sequence sits this step out for a draft; ends the wait when the draft is here or late."""
        if drafts.wait is NO_WAIT:
            return False
        want = min(drafts.wait.want, drafts.num_left - 1)
        if now < drafts.wait_deadline and len(drafts.likeliest(want)) < want:
            return True
        drafts.lag.waited(bool(drafts.trie))
        drafts.waited_s += now - drafts.wait_started
        drafts.wait = NO_WAIT
        return False

    def choose(
        self, decoding: Sequence[PendingDrafts], budget: int, fixed: StepSize, context: float
    ) -> dict[PendingDrafts, Chosen]:
        """The drafted tokens that each decoding sequence verifies in this step, at most `budget` in all.

        fixed: the step without drafts, prompt chunks included. context: positions that a drafted token attends to.
        """
        if not decoding:
            return {}
        # A /v1/verify item gets its whole draft verified, whatever its neighbours choose.
        chosen: dict[PendingDrafts, Chosen] = {}
        for drafts in decoding:
            if drafts.num_own is not None:
                own = drafts.own_draft(budget)
                chosen[drafts] = Chosen.line(own)
                budget -= len(own)
                fixed += StepSize(len(own), round(len(own) * context))
        others = [drafts for drafts in decoding if drafts.num_own is None]
        paths = [drafts.likeliest(self._max_draft) for drafts in others]
        survivals = [drafts.acceptance.survival(len(p)) for drafts, p in zip(others, paths, strict=True)]
        if self._policy is Policy.VERIFY:
            likely = [[p for p in row if p >= _LIKELY] for row in survivals]
            most = min(budget, sum(map(len, likely)))
            # As if drafts cost no time, so the likeliest of all, whosever they are.
            counts = choose_drafts(likely, 1, len(decoding), np.ones(1 + most), most)
        else:
            most = min(budget, sum(map(len, paths)))
            step_s = self.curve.seconds(fixed.tokens + most, fixed, context)
            counts = choose_drafts(survivals, fixed.tokens, len(decoding), step_s, most)
        return chosen | {drafts: Chosen.line(p[:n]) for drafts, p, n in zip(others, paths, counts, strict=True)}


@lru_cache(maxsize=4096)
def _plan_in_company(
    alpha: float,
    extra: float,
    lags: tuple[float | None, ...],
    answer_rate: float,
    crowding: float,
    saves_passes: bool,
) -> int:
    """How many drafted tokens to wait for, with times in units of a step; 0: do not wait.

    Only ratios of times matter. Where many sequences run, their lags are whole steps, so few cases differ.
    """
    wait = plan_wait(alpha, 1.0, extra, lags, answer_rate, saves_passes=saves_passes, crowding=crowding)
    return wait.want
