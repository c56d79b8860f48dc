"""Plays one replica with its devices, for `bench.scale`: no drafts, a draft beside the target, drafts from devices.

At most `MOST_SIMULATED` sessions are played, each of which stands for as many of the replica's as needed. What counts
begins once engine and devices have learned. Devices go by the agent's cost model, so they rest where drafting does not
pay; the verifier goes by the default policy.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from bench.load_devices import Device
from bench.virtual_time import RIGHT, WRONG, Core, Drafting, Link, Peer, StepTime, Text, Verifier
from tests.ranks import read_ranks

from outrider.edge.drafting.calibration import Calibration, Guess, model_guesses
from outrider.edge.drafting.depth import CostModelDepth
from outrider.edge.drafting.estimates import Estimates
from outrider.export.report.simulation.ranks import MISSED, Ranks
from outrider.models.bundle.speed_up import tokens_per_pass
from outrider.models.picks.sampling import Candidates

NONE, BESIDE, DEVICES = "none", "beside", "devices"
WAYS: Final = (NONE, BESIDE, DEVICES)
MOST_SIMULATED: Final = 24
MOST_TOKENS: Final = 4000
"""Of a text."""
LEARNED_IN: Final = 1500
"""Tokens, of all sessions, in which engine and devices learn before anything counts."""
MOST_GAMMA: Final = 8
WIDTH: Final = 4
"""Guesses of a call. A step verifies paths; an alternative that is picked keeps a device in sync."""
RANKS: Final = read_ranks("reference_ranks_0.8")
"""Of the reference pair's picks among its draft's guesses, at temperature 0.8. What counts of all sessions goes along
all of them once, or a little farther."""


@dataclass(frozen=True, slots=True)
class Host:
    """Seconds of our server's processor for a pass: plain: without drafts. engine: what drafts add in the engine's
    thread. loop: what they add in the event loop, which handles the devices' messages.

    bench.server_overhead found these at 256 sessions (docs/log.md, 2026-11-26). Its engine's part without drafts is not
    known apart: all of it is taken to come between two steps. The event loop works while the GPUs do. One interpreter
    runs both, so what does not fit into the step comes after it.
    """

    plain: float = 0.037e-3
    engine: float = 0.069e-3
    loop: float = 0.043e-3

    def after(self, way: str, passes: float, step_s: float) -> float:
        """Seconds between a step that took so long and the next. A draft beside the target sends no messages."""
        serial = passes * (self.plain if way == NONE else self.plain + self.engine)
        return serial + max(0.0, passes * self.loop - step_s) if way == DEVICES else serial


HOST: Final = Host()
NO_HOST: Final = Host(0.0, 0.0, 0.0)
"""A server that keeps up with any GPU."""


@dataclass(frozen=True, slots=True)
class Field:
    """The devices. lost: share of the target's picks that no guess of the draft is, beyond those of the reference pair,
    wherever the draft runs. draft_ms: of a token on a device; 12 ms is a 1B draft in INT8 on a laptop that reads 100
    GB/s. jitter_ms: of a message, on average. seed: of all chance.
    """

    lost: float = 0.0
    draft_ms: float = 12.0
    rtt_ms: float = 50.0
    jitter_ms: float = 2.0
    seed: int = 0

    @property
    def acceptance(self) -> float:
        """Of first guesses."""
        return (1.0 - self.lost) * RANKS.hits(1)


@dataclass(frozen=True, slots=True)
class Outcome:
    """client_rate: tokens/s of a session on average: all are alike. rate: of all. passes: per token."""

    client_rate: float
    rate: float
    passes: float


@dataclass(frozen=True, slots=True)
class Machine:
    """What steps take, drafts of one token for so many sequences, and the server around them."""

    step_s: StepTime
    draft_s: Callable[[int], float]
    host: Host = NO_HOST

    def gamma(self, count: int, alpha: float) -> int:
        """The depth of a draft beside that gives the most tokens/s; 0 where none pays."""

        def rate(gamma: int) -> float:
            step_s = self.step_s(count, count * (1 + gamma))
            host_s = self.host.after(BESIDE if gamma else NONE, count, step_s)
            return tokens_per_pass(alpha, gamma) / (gamma * self.draft_s(count) + step_s + host_s)

        return max(range(MOST_GAMMA + 1), key=rate)


class RankedDraft:
    """A draft whose guesses hold the target's picks as often, and look as sure, as those of a real one.

    ranks: of the real draft along its texts (`outrider.export.report.simulation`). first: the pick that it begins at.
    lost: share of picks that none of its guesses is, beyond those of the real one.
    """

    def __init__(self, ranks: Ranks, width: int, first: int, lost: float = 0.0, seed: int = 0) -> None:
        self._picked, self._width, self._lost = ranks.picked, width, lost
        self._first, self._seed = first, seed

    def guess(self, num_known: int, branch: Sequence[int]) -> list[Guess]:
        """The same for the same branch, whenever it is asked for."""
        position, is_right = num_known + len(branch), all(token == RIGHT for token in branch)
        chance = random.Random(f"{self._seed} {self._first} {position} {'' if is_right else branch}")
        if is_right:
            picked = self._picked[(self._first + position) % len(self._picked)]
            rank = MISSED if chance.random() < self._lost else picked.rank
        else:
            picked, rank = chance.choice(self._picked), MISSED
        gaps = [picked.gap(guess) for guess in range(self._width)]
        tokens = [RIGHT if guess == rank else WRONG + guess for guess in range(self._width)]
        return model_guesses(Candidates(tokens, gaps), self._width)


def simulate(machine: Machine, way: str, count: int, devices: Field) -> Outcome:
    """So many sessions on one verifier, while all of them run."""
    num_played = min(count, MOST_SIMULATED)
    each = count / num_played
    gamma = machine.gamma(count, devices.acceptance) if way == BESIDE else 0
    if way == BESIDE and not gamma:
        way = NONE
    verifier = Verifier(
        lambda sequences, tokens: machine.step_s(round(each * sequences), round(each * tokens)),
        num_played,
        host_s=lambda passes, step_s: machine.host.after(way, each * passes, step_s),
        beside_s=(lambda some: gamma * machine.draft_s(round(each * some))) if way == BESIDE else None,
    )
    verifier.knows_steps(1 + MOST_GAMMA)
    num_learning, num_counted = LEARNED_IN // num_played, len(RANKS.picked) // num_played
    seeds, calibration = random.Random(devices.seed), Calibration()
    shift, half_s, jitter_s = seeds.randrange(len(RANKS.picked)), devices.rtt_ms / 2e3, devices.jitter_ms / 1e3
    peers = list[Peer]()

    def link() -> Link:
        return Link(half_s, jitter_s, random.Random(seeds.random()))

    for number in range(num_played):
        device, estimates = None, Estimates()
        estimates.calibration = calibration  # what one device learns in a long time, all learn in a short
        if way != NONE:
            draft = RankedDraft(RANKS, WIDTH, shift + number * num_counted, devices.lost, devices.seed)
            depth = CostModelDepth(estimates) if way == DEVICES else None
            device = Device(draft, gamma or 1, WIDTH, depth, estimates)
        peers.append(
            Peer(
                verifier.timeline,
                Text([RIGHT] * min(MOST_TOKENS, 4 * (num_learning + num_counted))),  # none ends before all is counted
                device,
                Drafting.BESIDE if way == BESIDE else Drafting.ON,
                Core(devices.draft_ms / 1e3),
                links=(link(), link()),
                stands_for=each,
            )
        )
    verifier.run(peers, num_played * (num_learning + num_counted))
    begin = next(each for each in verifier.progress if each.tokens >= num_played * num_learning)
    end = verifier.progress[-1]
    num_tokens = end.tokens - begin.tokens
    rate = num_tokens / (end.at - begin.at)
    return Outcome(rate / num_played, each * rate, (end.passes - begin.passes) / num_tokens)
