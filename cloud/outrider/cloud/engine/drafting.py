"""What the engine does about drafts: merges them, chooses how many to verify, and waits for them when that pays."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.cloud.engine.estimators import AcceptanceEstimator, StepTimeCurve
from outrider.cloud.engine.policy import NO_WAIT, choose_drafts, plan_wait
from outrider.cloud.engine.sequence import Sequence
from outrider.cloud.engine.types import EngineConfig, Policy

_MAX_WAITED_FOR = 8  # drafted tokens: what more would add to a pass is never worth a longer wait
_LIKELY = 0.05  # survival under which a drafted token is not worth its place even when passes are all that counts


class Drafting:
    """The decisions of `policy`, taken on what was measured. The engine's thread owns it."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.curve = StepTimeCurve()
        self.acceptance = AcceptanceEstimator(config.max_draft)

    def merge(self, sequence: Sequence, base: int, paths: Seq[Seq[int]], arrived: float) -> None:
        """Adds what is consistent with the commits since `base`; the newest message's first path is the likeliest."""
        sequence.lag.drafted(base, len(paths[0]), arrived)
        is_newest = base >= sequence.newest_base
        overlap = len(sequence.generated) - base
        for path in reversed(paths):  # the likeliest last, so that it wins
            if len(path) > overlap and list(path[:overlap]) == sequence.generated[base:]:
                sequence.pending.merge(path[overlap:], prefer=is_newest)
        sequence.newest_base = max(base, sequence.newest_base)

    def committed(self, sequence: Sequence, pending: Seq[int], tokens: Seq[int], now: float, *, is_busy: bool) -> None:
        """Learns from a commit; starts a wait if it left nothing pending. pending: the likeliest path before the step.

        is_busy: other sequences are queued for a place.
        """
        sequence.acceptance.observe(pending, tokens)
        if not sequence.pending:  # the device has lost step: how fast it answers is what a wait would cost
            sequence.lag.committed(len(sequence.generated), now)
            self._start_wait(sequence, now, is_busy=is_busy)

    def _start_wait(self, sequence: Sequence, now: float, *, is_busy: bool) -> None:
        allowed = sequence.request.patience_ms
        if allowed == 0 or self._config.max_draft == 0 or sequence.num_wanted <= 1:
            return
        step_s, extra_s = self.curve.step_and_extra()
        most = min(self._config.max_draft, _MAX_WAITED_FOR, sequence.num_wanted - 1)
        lags = [sequence.lag.seconds_until(k) for k in range(1, most + 1)]
        if sequence.has_company:
            # The others' steps go on meanwhile, so it can join again at the end of one of theirs only.
            lags = [None if lag is None else -(-lag // step_s) * step_s for lag in lags]
        is_capacity = self._config.policy is Policy.VERIFY or (self._config.policy is Policy.AUTO and is_busy)
        wait = plan_wait(
            sequence.acceptance.rate, step_s, extra_s, lags, sequence.lag.answer_rate, capacity=is_capacity
        )
        if wait.want == 0 or (allowed is not None and wait.lag_s * 1e3 > allowed):
            return
        # Half as long again as expected, and a little for timers: past that the draft is late and the step goes on.
        longest = 1.5 * wait.lag_s + 0.003
        sequence.wait, sequence.wait_started = wait, now
        sequence.wait_deadline = now + (longest if allowed is None else min(longest, allowed / 1e3))

    def is_waiting(self, sequence: Sequence, now: float) -> bool:
        """Whether the sequence sits this step out for a draft; ends the wait when the draft is here or late."""
        if sequence.wait is NO_WAIT:
            return False
        want = min(sequence.wait.want, sequence.num_wanted - 1)
        if now < sequence.wait_deadline and len(sequence.pending_path(want)) < want:
            return True
        sequence.lag.waited(bool(sequence.pending))
        sequence.usage.waited_s += now - sequence.wait_started
        sequence.wait = NO_WAIT
        return False

    def choose(self, decoding: list[Sequence], budget: int) -> dict[Sequence, list[int]]:
        """The drafted tokens that each decoding sequence verifies in this step, at most `budget` in all."""
        if not decoding:
            return {}
        limits = [len(s.request.draft) if s.request.once else self._config.max_draft for s in decoding]
        paths = [s.pending_path(limit) for s, limit in zip(decoding, limits, strict=True)]
        if any(s.request.once for s in decoding) or self._config.policy is Policy.VERIFY:
            counts = _all_likely(decoding, paths, budget)
        else:
            survivals = [s.acceptance.survival(len(p)) for s, p in zip(decoding, paths, strict=True)]
            most = min(budget, sum(map(len, paths)))
            step_s = self.curve.seconds(len(decoding) + most)
            counts = choose_drafts(survivals, len(decoding), len(decoding), step_s, most)
        return {s: p[:n] for s, p, n in zip(decoding, paths, counts, strict=True)}


def _all_likely(decoding: list[Sequence], paths: list[list[int]], budget: int) -> list[int]:
    """For when passes are scarce: all that a /v1/verify item brought, what is likely of a session's drafts."""
    counts = []
    for sequence, path in zip(decoding, paths, strict=True):
        alive = sum(p >= _LIKELY for p in sequence.acceptance.survival(len(path)))
        counts.append(min(len(path) if sequence.request.once else alive, budget))
        budget -= counts[-1]
    return counts
