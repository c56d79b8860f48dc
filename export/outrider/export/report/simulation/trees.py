"""Simulates drafts that branch, event by event, over measured ranks: speed-up, tokens per pass, nodes and bytes.

The device expands the node that is likeliest to be reached, `nodes_per_call` nodes in one draft step; a node reaches
the server half a round trip later. The server verifies the part of its tree that gives most expected tokens per ms,
commits what the target picks, and keeps the subtree below as pending. Where nothing is pending it waits, if that pays,
or goes on with plain steps. Positions, ranks and gaps come from `Ranks`; below a wrong guess the draft's gaps are those
of a random token. Equal arguments give equal results.

Knows nothing of models or other work on either machine. `prediction` has the exact expectation for paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import Final

from outrider.export.report.simulation.ranks import Ranks
from outrider.export.report.simulation.world import Device, Form, Node, Plan, Times, choose

NUM_TOKENS: Final = 400
SEEDS: Final = (0, 1, 2)
BYTES_PER_TOKEN: Final = 150.0
"""What a device sends per generated token by default."""

_POLL_MS: Final = 0.5  # how often a waiting server looks


@dataclass(frozen=True, slots=True)
class Outcome:
    """Means over the simulated tokens. speed_up: over cloud-only streaming. All others are per committed token.

    verified, drafted, sent: nodes; drafted counts those that the draft model expanded. bytes_up: bodies of messages.
    """

    speed_up: float
    passes: float
    verified: float
    drafted: float
    sent: float
    bytes_up: float
    messages: float
    patience_ms: float


def simulate(
    ranks: Ranks,
    times: Times,
    rtt_ms: float,
    plan: Plan,
    *,
    num_tokens: int = NUM_TOKENS,
    seeds: Sequence[int] = SEEDS,
) -> Outcome:
    """The mean of one run per seed, at least one, each of `num_tokens`, at least one.

    With `plan.patience_ms` None: the better of none and one that suits the round trip.
    """
    patiences = (0.0, suiting_patience(times, rtt_ms)) if plan.patience_ms is None else (plan.patience_ms,)
    found = [
        _mean([_Run(ranks, times, rtt_ms, plan, patience_ms, seed).run(num_tokens) for seed in seeds])
        for patience_ms in patiences
    ]
    return max(found, key=lambda outcome: outcome.speed_up)


def path(plan: Plan) -> Plan:
    """The same plan with one guess per position: today's drafts."""
    return replace(plan, form=Form.LINE, width=1)


def suiting_patience(times: Times, rtt_ms: float) -> float:
    """Long enough for a device that learns of a commit to answer with a few nodes, in ms."""
    return 1.2 * rtt_ms + 6.0 * times.draft_ms + 3.0


def _mean(outcomes: Sequence[Outcome]) -> Outcome:
    return Outcome(*(fmean(getattr(outcome, field.name) for outcome in outcomes) for field in fields(Outcome)))


class _Run:
    """One text, one device, one server."""

    def __init__(self, ranks: Ranks, times: Times, rtt_ms: float, plan: Plan, patience_ms: float, seed: int) -> None:
        self._times, self._plan, self._patience_ms = times, plan, patience_ms
        self._device = Device(ranks, times, rtt_ms, plan, seed)
        self._now = 0.0
        self._committed = self._passes = self._verified = 0

    def run(self, num_tokens: int) -> Outcome:
        """Commits at least `num_tokens`."""
        pending: Node | None = self._device.root
        while self._committed < num_tokens:
            pending = self._step(pending) if pending is not None else self._catch_up()
        device, count = self._device, self._committed
        return Outcome(
            speed_up=count * self._times.step_ms / self._now,
            passes=self._passes / count,
            verified=self._verified / count,
            drafted=device.num_drafted / count,
            sent=device.num_sent / count,
            bytes_up=device.num_bytes / count,
            messages=device.num_messages / count,
            patience_ms=self._patience_ms,
        )

    def _step(self, pending: Node) -> Node | None:
        """One target pass; the node that it ends on, or None where the tree does not hold the target's text."""
        chosen = self._choose(pending)
        waited = 0.0
        while not chosen and self._committed and waited < self._patience_ms:
            waited += _POLL_MS
            self._now += _POLL_MS
            found = self._choose(pending)
            # One node is not worth a step that began too early: the others follow at once.
            chosen = found if len(found) > 1 or waited >= self._patience_ms else []
        self._now += self._times.step_ms + self._times.extra_ms * len(chosen)
        self._passes += 1
        self._verified += len(chosen)
        self._device.run(self._now)
        inside, node = set(map(id, chosen)), pending
        while True:
            self._committed += 1
            child = node.true_child()
            if child is None or id(child) not in inside:
                break
            node = child
        self._device.inform(self._now, self._committed)
        return child

    def _choose(self, pending: Node) -> list[Node]:
        self._device.run(self._now)
        return choose(pending, self._now, self._times, self._plan)

    def _catch_up(self) -> Node | None:
        """Looks for the text in the device's tree; where it is not there, waits for an answer or takes a plain step."""
        self._device.run(self._now)
        found = self._device.find(self._committed)
        if found is not None:
            return found
        answer_in = self._device.last_news_at - self._now
        if 0.0 < answer_in <= self._patience_ms:
            self._now += answer_in
            self._device.run(self._now + 1e-3)
            return None
        self._now += self._times.step_ms
        self._passes += 1
        self._committed += 1
        self._device.inform(self._now, self._committed)
        return None
