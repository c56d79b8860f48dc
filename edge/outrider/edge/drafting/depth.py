"""Chooses how far to draft ahead: two controllers with one interface.

A controller decides from estimates, never from the clock. The drafting thread may call `plan`, which only reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from outrider.edge.drafting.belief import CommitOutcome
from outrider.edge.drafting.estimates import Estimates
from outrider.models.bundle.speed_up import tokens_per_pass
from outrider.models.errors import ConfigError

MAX_DEPTH = 64
LEAST_REACH = 0.01
"""Expanding a node of a tree that is less likely to be reached does not pay, whatever it costs."""


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What to draft now. depth: tokens ahead of the last commit, 0 for none.

    floor: no node is expanded that the target reaches with a smaller chance; sending: the part of it that pays for
    sending and verifying the node, not for drafting it. silent: draft only to measure and send
    nothing, so that a hopeless draft costs neither network nor server. answer: tokens that the server can use in one
    pass; after the device was out of sync they are sent together, as soon as all are drafted. 0: unknown, so send by
    time.
    in_turns: draft a path, send it whole, and rest until the next commit.
    """

    depth: int
    floor: float = 0.0
    silent: bool = False
    answer: int = 0
    in_turns: bool = False
    sending: float = 0.0


class DepthController:
    """Chooses how far to run ahead; without a subclass, always as `plan` says. in_turns: where turns can be taken."""

    def __init__(self, plan: DraftPlan, in_turns: DraftPlan | None = None) -> None:
        self._plan, self._in_turns = plan, in_turns

    def plan(self, can_take_turns: bool = False) -> DraftPlan:
        """The plan in force until the next `observe`; thread-safe, changes nothing."""
        in_turns = self._in_turns  # once: another text's commit may change it
        return in_turns if can_take_turns and in_turns is not None else self._plan

    def observe(self, outcome: CommitOutcome, is_alone: bool = True) -> None:
        """Takes a commit; the estimates have it already. is_alone: whether no other text shares the draft."""

    def block(self) -> int:
        """The depth for stop-and-wait, at least 1: every block costs a round trip there."""
        return max(1, self._plan.depth)


class FixedDepth(DepthController):
    """A constant depth, 0 to 64."""

    def __init__(self, depth: int) -> None:
        if not 0 <= depth <= MAX_DEPTH:
            raise ConfigError(f"depth is {depth}; expected 0 to {MAX_DEPTH}")
        super().__init__(DraftPlan(depth))


class Effort(StrEnum):
    """How much the device drafts: the less, the less energy it takes."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"

    @property
    def cost(self) -> float:
        """Cost of a ms of drafting on the device, relative to a ms of the user's time."""
        return {Effort.LOW: 1.0, Effort.NORMAL: 0.1, Effort.HIGH: 0.03}[self]


MAX_BLOCK: Final = 32
"""Most tokens that a pass verifies."""
MAX_PROBE_GAP: Final = 16
"""Most commits between two probes. The gap starts at one, doubles when all of a probe is rejected, and is one again
after an accepted token."""
_PROBE_DEPTH: Final = 2
"""Tokens of a silent probe at depth 0."""
_MAX_SILENCE: Final = 64
"""Commits after which a probe is sent, so that the server, too, may time it."""
_TOKEN_COST_MS: Final = 0.1
"""Cost of a drafted token on the network and in the server."""
_MESSAGE_COST_MS: Final = 1.5
"""Cost of a draft message to the server, which often handles it on the model's own cores."""
_SURE: Final = 0.9
"""A guess that is as likely is always worth a turn's time."""
_HYSTERESIS: Final = 1.5
"""Drafting starts again when it is worth this many times its cost."""


class CostModelDepth(DepthController):
    """Drafts ahead while another token is worth more than it costs, as far as the server can use it.

    A node helps only if the target reaches it, so expanding it is worth its reach * step; it costs its drafting and its
    bytes. Tokens beyond what the server can verify until the next message arrives are worth
    nothing: with p passes in that time, the limit is p * (k + 1) + k tokens for the k that the server would verify. The
    first k are sent before the rest: on a short round trip the server waits for them.

    Drafting is off while a draft saves less than it costs the server, or takes the device so long that not even the
    next token is worth it. Probes measure both again. effort: what drafting costs; the device drafts while it waits
    anyway, so that is energy more than time.
    """

    def __init__(self, estimates: Estimates, effort: Effort = Effort.NORMAL) -> None:
        super().__init__(DraftPlan(0))
        self._estimates = estimates
        self._effort = effort
        self.is_on = True
        self._probe_gap = 1
        self._commits_to_probe = 0
        self._num_silent = 0  # commits since the last message that could be sent
        self._depth = 0
        self._replan()

    @property
    def saved_ms(self) -> float:
        """What a drafted token saves on average."""
        return self._estimates.acceptance * self._estimates.step_ms

    @property
    def cost_ms(self) -> float:
        """What it costs the server with its message."""
        return self._estimates.extra_ms + _MESSAGE_COST_MS

    @property
    def doubt(self) -> float:
        """How many times its cost a draft must be worth."""
        return 1.0 if self.is_on else _HYSTERESIS

    @property
    def is_slow(self) -> bool:
        """Whether the device takes too long for a draft, however sure it is."""
        return self.doubt * self._floor() > 1.0

    def observe(self, outcome: CommitOutcome, is_alone: bool = True) -> None:
        """Turns drafting on or off, with hysteresis, and chooses the depth again."""
        was_on = self.is_on
        self.is_on = self.saved_ms >= self.doubt * self.cost_ms and not self.is_slow
        e = self._estimates
        e.turns.is_shared = not is_alone
        if was_on and e.interval_ms is not None:
            rest_ms = e.round_trip_ms + self.block() * e.draft_ms
            e.turns.on_commit(len(outcome.tokens), e.interval_ms, rest_ms, e.step_ms)
        if was_on:
            self._probe_gap = self._commits_to_probe = 1
            self._num_silent = 0
        else:
            self._num_silent += 1
            self._schedule_probe(outcome)
        self._replan()

    def block(self) -> int:
        """The k that minimizes (k * draft + round trip + step + extra * k) / expected tokens."""
        acceptance, (once_ms, each_ms) = self._estimates.acceptance, self._turn_times()
        return min(range(1, MAX_BLOCK + 1), key=lambda k: (once_ms + k * each_ms) / tokens_per_pass(acceptance, k))

    def _schedule_probe(self, outcome: CommitOutcome) -> None:
        if outcome.hits and not self.is_slow:
            self._probe_gap = 1
        elif outcome.tested:
            self._probe_gap = min(MAX_PROBE_GAP, 2 * self._probe_gap)
        if outcome.tested:
            self._commits_to_probe = self._probe_gap
        self._commits_to_probe = max(0, self._commits_to_probe - 1)

    def _replan(self) -> None:
        e = self._estimates
        verified = best_verified(e.acceptance, e.step_ms, e.extra_ms, MAX_BLOCK)
        lag_ms = e.round_trip_ms + verified * e.draft_ms
        num_passes = max(1, math.ceil(lag_ms / max(1e-3, e.step_ms)))
        depth = max(1, min(MAX_DEPTH, num_passes * (verified + 1) + verified))
        # A difference of one is within the estimates' noise.
        if abs(depth - self._depth) > 1 or self._depth == 0:
            self._depth = depth
        takes_turns = self.is_on and e.turns.now
        self._in_turns = DraftPlan(MAX_BLOCK, self._floor_in_turns(), in_turns=True) if takes_turns else None
        if self.is_on:  # the next token at least: what an earlier text measured may be out of date
            answer = min(verified, self._depth)
            sending = _TOKEN_COST_MS / max(1e-3, e.step_ms)
            self._plan = DraftPlan(self._depth, min(1.0, self._floor()), answer=answer, sending=sending)
        else:
            probed = _PROBE_DEPTH if self._commits_to_probe == 0 else 0
            is_sent = probed > 0 and self._num_silent >= _MAX_SILENCE
            if is_sent:
                self._num_silent = 0
            self._plan = DraftPlan(probed, floor=0.0, silent=not is_sent)

    def _floor_in_turns(self) -> float:
        """The reach from which another token of a path gains more than the time that it takes, in which nothing else is
        done.
        """
        e, (once_ms, each_ms) = self._estimates, self._turn_times()
        if not (rate := e.turns.rate(True)):
            block = self.block()
            rate = tokens_per_pass(e.acceptance, block) / (once_ms + block * each_ms)
        return min(_SURE, max(LEAST_REACH, each_ms * rate))

    def _turn_times(self) -> tuple[float, float]:
        """ms of a turn without its drafted tokens, and of each of these."""
        e = self._estimates
        return e.round_trip_ms + e.step_ms, e.draft_ms + e.extra_ms

    def _floor(self) -> float:
        """The reach from which expanding a node is worth its cost."""
        cost_ms = self._effort.cost * self._estimates.draft_ms + _TOKEN_COST_MS
        return max(LEAST_REACH, cost_ms / max(1e-3, self._estimates.step_ms))


def best_verified(acceptance: float, step_ms: float, extra_ms: float, max_k: int) -> int:
    """The k <= max_k that maximizes expected tokens per ms of a step of step_ms + k * extra_ms; at least 1."""
    return max(range(1, max_k + 1), key=lambda k: tokens_per_pass(acceptance, k) / (step_ms + extra_ms * k))
