"""What the engine does about drafts: merges them, chooses how many to verify, and waits for them when that pays."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.cloud.engine.sequence import Sequence
from outrider.cloud.engine.types import EngineConfig, Policy
from outrider.cloud.pending.estimators import AcceptanceEstimator, StepTimeCurve
from outrider.cloud.pending.policy import NO_WAIT, choose_drafts, longest_wait, plan_wait

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
        wait = plan_wait(
            sequence.acceptance.rate,
            step_s,
            extra_s,
            lags,
            sequence.lag.answer_rate,
            capacity=self._is_capacity_scarce(is_busy),
        )
        if wait.want == 0 or (allowed is not None and wait.lag_s * 1e3 > allowed):
            return
        longest = longest_wait(wait.lag_s)
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

    def _is_capacity_scarce(self, is_busy: bool) -> bool:
        return self._config.policy is Policy.VERIFY or (self._config.policy is Policy.AUTO and is_busy)

    def choose(self, decoding: list[Sequence], budget: int, *, is_busy: bool) -> dict[Sequence, list[int]]:
        """The drafted tokens that each decoding sequence verifies in this step, at most `budget` in all.

        is_busy: other sequences are queued for a place.
        """
        if not decoding:
            return {}
        # An item of /v1/verify asks for all of its draft to be verified, and pays nothing for its neighbours' choice.
        once = [s for s in decoding if s.request.once]
        chosen = {s: s.pending_path(len(s.request.draft)) for s in once}
        for sequence, path in chosen.items():
            chosen[sequence] = path[:budget]
            budget -= len(chosen[sequence])
        others = [s for s in decoding if not s.request.once]
        paths = [s.pending_path(self._config.max_draft) for s in others]
        survivals = [s.acceptance.survival(len(p)) for s, p in zip(others, paths, strict=True)]
        if self._is_capacity_scarce(is_busy):
            counts = _all_likely(survivals, budget)
        else:
            most = min(budget, sum(map(len, paths)))
            num_fixed = len(decoding) + sum(map(len, chosen.values()))
            counts = choose_drafts(survivals, num_fixed, len(decoding), self.curve.seconds(num_fixed + most), most)
        return chosen | {s: p[:n] for s, p, n in zip(others, paths, counts, strict=True)}


def _all_likely(survivals: Seq[Seq[float]], budget: int) -> list[int]:
    """For when passes are scarce: all that is likely, in turn, at most `budget` in all."""
    counts = []
    for row in survivals:
        counts.append(min(sum(p >= _LIKELY for p in row), budget))
        budget -= counts[-1]
    return counts
