"""Simulates a machine that other work slows for a while: what was measured then is measured again, within bounds.

A pure simulation: times are numbers, nothing runs and nothing waits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from outrider.cloud.api.stream import StepTimes
from outrider.cloud.pending.drafting import Drafting
from outrider.cloud.pending.estimators import AcceptanceEstimator, StepSize
from outrider.cloud.pending.pending_drafts import PendingDrafts
from outrider.cloud.pending.policy import Policy
from outrider.edge.drafting.belief import CommitOutcome
from outrider.edge.drafting.depth import CostModelDepth
from outrider.edge.drafting.estimates import Estimates

StepTime = Callable[[int], float]
"""Seconds of a step by its number of drafted tokens."""

CALM: StepTime = lambda count: 0.006 + 0.0005 * count  # noqa: E731
BUSY: StepTime = lambda count: 0.060 + 0.0266 * count  # noqa: E731
STEEP: StepTime = lambda count: 0.040 + 0.030 * count  # noqa: E731


class Device:
    """A device that always sends its drafts."""

    def depth_of_message(self) -> int:
        """Drafted tokens of what it sends now, at most."""
        return 64

    def take(self, committed: list[int], drafting: Drafting, now_s: float) -> None:
        """A commit, and the time at which the server sends it."""


class Deciding(Device):
    """A device that decides by the times that the server sends with its commits; its drafts are right as expected."""

    def __init__(self) -> None:
        self.estimates = Estimates()
        self.controller = CostModelDepth(self.estimates)
        self._sent = StepTimes()
        self._asked_s = 0.0

    def depth_of_message(self) -> int:
        plan = self.controller.plan()
        return 0 if plan.silent else plan.depth

    def take(self, committed: list[int], drafting: Drafting, now_s: float) -> None:
        if now_s >= self._asked_s + 0.5:
            self._asked_s = now_s
            step_s, extra_s = drafting.curve.step_and_extra()
            if (newest := StepTimes(step_s * 1e3, extra_s * 1e3)).has_changed(self._sent):
                self._sent = newest
                self.estimates.on_times(*newest)
        self.controller.observe(CommitOutcome(tuple(committed)))


@dataclass
class Server:
    """One endless text whose drafts, always `depth` of them, are right with the chance `alpha`, on a given machine."""

    alpha: float
    step_s: StepTime
    depth: int = 8
    per_position_s: float = 0.0
    now_s: float = 0.0
    num_tokens: int = 0
    device: Device = field(default_factory=lambda: Device())

    def __post_init__(self) -> None:
        self.drafting = Drafting(self.depth, Policy.AUTO)
        self.rng = random.Random(5)
        self.drafts = PendingDrafts([], 10**9, AcceptanceEstimator(self.depth))
        for count in (0, 1, 2, 3, 4, 5, 7) * 3:
            self.drafting.stepped(StepSize.of(1 + count, 64), self.step_s(count), False)

    def run(self, num_steps: int) -> Iterator[int]:
        """Steps; the number of drafted tokens that each verified."""
        truth = list(range(1, self.depth + 2))
        for step in range(num_steps):
            past = step % 400  # texts of 400 steps
            num_right = next((i for i in range(self.depth) if self.rng.random() >= self.alpha), self.depth)
            path = [*truth[:num_right], *[0] * (self.depth - num_right)][: self.device.depth_of_message()]
            if path:
                self.drafts.trie.merge(path, prefer=True)
            chosen = self.drafting.choose([self.drafts], 64, StepSize.of(1, past), float(past))[self.drafts]
            count = len(chosen.tokens)
            took_s = self.step_s(count) * self.rng.choice((1.0, 1.0, 1.0, 1.1, 1.3))
            took_s += self.per_position_s * StepSize.of(1 + count, past).attended
            self.drafting.stepped(StepSize.of(1 + count, past), took_s, False)
            committed = truth[: 1 + min(count, num_right)]
            self.drafts.acceptance.observe(path, committed)
            self.device.take(committed, self.drafting, self.now_s)
            self.drafts.trie = type(self.drafts.trie)()
            self.now_s, self.num_tokens = self.now_s + took_s, self.num_tokens + len(committed)
            yield count

    def rate(self, num_steps: int) -> float:
        """Tokens per second over as many steps."""
        began_s, began = self.now_s, self.num_tokens
        for _ in self.run(num_steps):
            pass
        return (self.num_tokens - began) / (self.now_s - began_s)


@pytest.mark.parametrize("spell", [100, 1_000])
def test_drafts_are_verified_again_soon_after_a_busy_spell(spell: int) -> None:
    """Times of sizes that are no longer run must not keep them from being run: within 600 steps all is as before."""
    server = Server(0.7, CALM)
    before = server.rate(600)
    server.step_s = BUSY
    server.rate(spell)
    server.step_s = CALM
    server.rate(600)
    step_s, extra_s = server.drafting.curve.step_and_extra()
    assert step_s == pytest.approx(0.006, rel=0.3) and extra_s < 0.001
    assert server.rate(600) > 0.9 * before


def test_a_device_that_has_switched_off_drafts_again_soon_after_a_busy_spell() -> None:
    """Device and server together: the one drafts nothing, so the other times nothing but plain steps."""
    device = Deciding()
    server = Server(0.7, lambda count: 0.020 + 0.001 * count, device=device)
    before = server.rate(600)
    assert device.controller.is_on
    server.step_s = lambda count: 0.060 + 0.100 * count
    server.rate(300)
    assert not device.controller.is_on
    server.step_s = lambda count: 0.020 + 0.001 * count
    server.rate(600)
    assert device.controller.is_on and device.estimates.extra_ms < 2.0
    assert server.rate(600) > 0.9 * before


def test_a_plain_step_is_timed_again_where_drafts_are_always_verified() -> None:
    """The mirror: a slow old time of the step without drafts makes all drafts seem free, so it would never be run."""
    server = Server(0.95, lambda count: 0.120)
    server.rate(60)
    server.step_s = lambda count: 0.020 + 0.010 * count
    server.rate(600)
    step_s, extra_s = server.drafting.curve.step_and_extra()
    assert step_s == pytest.approx(0.020, rel=0.3) and extra_s == pytest.approx(0.010, rel=0.3)


def test_what_a_position_costs_is_learned_again_on_a_machine_that_is_slower_for_good() -> None:
    """Steps that take over three times their old mean are no outliers once they are the rule."""
    server = Server(0.0, CALM)
    server.rate(400)
    server.step_s, server.per_position_s = (lambda count: 0.060 + 0.005 * count), 100e-6
    server.rate(5_000)
    times = server.drafting.curve.seconds(1, StepSize.of(1, 390), 390.0)
    assert times[0] == pytest.approx(0.060 + 100e-6 * 391, rel=0.15)
    assert server.drafting.curve.seconds(1)[0] == pytest.approx(0.060, rel=0.25)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("step_s", [STEEP, BUSY], ids=["steep", "busy"])
def test_trying_sizes_again_costs_little_where_no_draft_pays(alpha: float, step_s: StepTime) -> None:
    """Tokens per second over those of plain steps, where a drafted token costs most of a step."""
    server = Server(alpha, step_s)
    plain = 1.0 / (step_s(0) * 1.08)  # the mean of the noise
    assert server.rate(4_000) > 0.98 * plain


def test_one_slow_step_of_a_seldom_size_keeps_no_other_size_from_being_run() -> None:
    """Sizes are drawn together by how often they were run."""
    server = Server(0.7, CALM)
    server.rate(300)
    server.drafting.stepped(StepSize.of(2, 64), 1.0, False)
    assert max(server.run(8)) >= 3
