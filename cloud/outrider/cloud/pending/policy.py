"""Decides about drafts, in pure functions: how many to verify, how long to wait for them.

Both maximize tokens committed per second. `docs/policy.md` derives the closed form and compares it with the simulation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np


class Policy(StrEnum):
    """What the engine optimizes when it decides whether to wait for a draft."""

    AUTO = "auto"  # tokens per second: of each session, and of all together where places are scarce
    STREAM = "stream"  # tokens per second of each session, as if it were alone
    VERIFY = "verify"  # capacity: the fewest target passes


def choose_drafts(
    survivals: Sequence[Sequence[float]], num_fixed: int, num_committing: int, step_s: np.ndarray, budget: int
) -> tuple[list[int], float]:
    """How many drafted tokens each sequence verifies in this step, and the expected tokens per second of the step.

    survivals: for each sequence, P(its pending token i is reached and accepted), i = 0, 1, ... (not increasing): the
    tokens of a path in order, or of a tree, the likeliest first.
    num_fixed: tokens in the step without drafts. num_committing: sequences that will commit at least one.
    step_s: seconds of a step of 1, 2, ... tokens; must cover num_fixed + budget. budget: drafted tokens at most.

    Takes tokens by falling probability and stops at the count where expected tokens per second is highest: the optimum,
    because a step's time depends on the number of its tokens, not on whose they are.
    """
    likely = np.array(list(chain.from_iterable(survivals)))
    order = np.argsort(-likely, kind="stable")[: max(0, budget)]
    if not order.size or num_committing == 0:
        return [0] * len(survivals), num_committing / float(step_s[num_fixed - 1]) if num_fixed else 0.0
    gained = num_committing + np.concatenate([[0.0], np.cumsum(likely[order])])
    rate = gained / step_s[num_fixed - 1 : num_fixed + order.size]
    whose = np.repeat(np.arange(len(survivals)), list(map(len, survivals)))
    best = int(rate.argmax())
    counts: list[int] = np.bincount(whose[order[:best]], minlength=len(survivals)).tolist()
    return counts, float(rate[best])


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until `want` drafted tokens are here; `lag_s` is when they are expected. want 0: do not wait."""

    want: int
    lag_s: float


NO_WAIT = Wait(0, 0.0)

_MOST_STEPS = 32
_MOST_S = 1.0
_TURN_STEPS = 4
_PATIENCE = 1.5
_MARGIN_S = 0.003
_VAIN = 0.1  # of a step: what a wait in vain takes beyond that, roughly; in steps, as only ratios of times may matter

ENOUGH_ANSWERS = 0.5
"""Share of waits that a draft must have ended for another wait to be tried."""


def bounded(lags: Sequence[float | None], step_s: float) -> list[float | None]:
    """Lags that may be waited for; None for one so long that only a client's false hint, or a slow device, has it."""
    longest_s = min(_MOST_STEPS * step_s, _MOST_S)
    return [lag if lag is not None and lag <= longest_s else None for lag in lags]


def longest_wait(lag_s: float) -> float:
    """Half as long again as expected, plus a margin for timers; after that the draft is late."""
    return _PATIENCE * lag_s + _MARGIN_S


def turn_wait(step_s: float) -> Wait:
    """For a device that takes turns: it drafts a whole path while the target waits, and answers once."""
    return Wait(0, min(_TURN_STEPS * step_s, _MOST_S))


class _Cycle(NamedTuple):
    """What happens between two moments in which the device is out of sync."""

    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def waiting(
    alpha: float,
    k: int,
    step_s: float,
    extra_s: float,
    lag_s: float,
    crowding: float = 1.0,
    beta: float = 0.0,
    later_k: int | None = None,
) -> _Cycle:
    """The target waits `lag_s` each time the device is out of sync, until k tokens are here.

    A cycle is one wait and passes until one ends with a token that is not pending: after a pass of k with probability
    (1 - a^(k+1)) (1 - b); b is the share of misses that an alternative covers. The first pass verifies k, the others
    `later_k`, as the device goes on meanwhile; None: k. A cycle has 1 / ((1 - a) (1 - b)) tokens, whatever these are.
    With `crowding` sequences for each place, all of which wait alike, a pass comes up every crowding steps; the waits
    of others leave places, at most all that are lacking.
    """
    in_sync = 1 - (1 - alpha ** (k + 1)) * (1 - beta)
    later_s = _in_sync_s(alpha, k if later_k is None else later_k, step_s, extra_s, beta)
    passes_s = step_s + extra_s * k + in_sync * later_s
    return _Cycle(1 / ((1 - alpha) * (1 - beta)), max(lag_s + passes_s, crowding * passes_s))


def streaming(
    alpha: float, k: int, step_s: float, extra_s: float, lag_s: float, crowding: float = 1.0, beta: float = 0.0
) -> _Cycle:
    """The target never waits: plain steps go on until the device is in sync again.

    n = ceil(lag / step) plain steps must all be guessed in a row before a draft is of use; each is with probability
    c = a + (1 - a) b. That takes B = c^-1 + ... + c^-n plain steps on average, of one token each; then passes of k as
    above. With `crowding` sequences for each place, each takes part in one step of as many.
    """
    covered = alpha + (1 - alpha) * beta
    blind_steps = max(1, math.ceil(lag_s / (step_s * crowding)))
    blind = (covered**-blind_steps - 1) / (1 - covered) if blind_steps <= 64 else math.inf
    if blind > 1e6:
        return _Cycle(1.0, step_s * crowding)
    seconds = blind * step_s + _in_sync_s(alpha, k, step_s, extra_s, beta)
    return _Cycle(blind + 1 / ((1 - alpha) * (1 - beta)), crowding * seconds)


def _in_sync_s(alpha: float, k: int, step_s: float, extra_s: float, beta: float) -> float:
    """Seconds of passes of k until the device is out of sync."""
    return (step_s + extra_s * k) / ((1 - alpha ** (k + 1)) * (1 - beta))


def best_rate(survivals: Sequence[float], step_s: float, extra_s: float) -> float:
    """Tokens per second of a step that verifies the best number of pending tokens now; survivals as above."""
    gained, best = 1.0, 1.0 / step_s
    for count, survival in enumerate(survivals, start=1):
        gained += survival
        best = max(best, gained / (step_s + extra_s * count))
    return best


def next_rate(alpha: float, wait: Wait, step_s: float, extra_s: float) -> float:
    """Tokens per second of a wait and the step that follows it."""
    expected = (1 - alpha ** (wait.want + 1)) / (1 - alpha) if alpha < 1.0 else wait.want + 1.0
    return expected / (wait.lag_s + step_s + extra_s * wait.want)


def plan_wait(
    alpha: float,
    step_s: float,
    extra_s: float,
    lags: Sequence[float | None],
    answer_rate: float,
    *,
    saves_passes: bool,
    crowding: float = 1.0,
    beta: float = 0.0,
) -> Wait:
    """Whether to wait for drafts while the device is out of sync, and for how many.

    lags: seconds until 1, 2, ... drafted tokens are expected (None: unknown). answer_rate: share of waits that a draft
    ended. saves_passes: passes are what counts, so wait whenever a draft is likely worth its verification. crowding:
    sequences for each place, at least 1: a waiting one leaves its place to another. beta: share of the likeliest path's
    misses where a pending alternative is picked; 0 for paths.
    """
    alpha, beta = min(max(alpha, 0.01), 0.99), min(max(beta, 0.0), 0.95)
    known = [(k, lag) for k, lag in enumerate(lags, start=1) if lag is not None]
    if not known or answer_rate < ENOUGH_ANSWERS:
        return NO_WAIT
    first = known[0][1]
    # Where even one pass after the shortest wait yields a cycle's tokens more slowly than plain steps come, nothing
    # else needs to be computed.
    if not saves_passes and (first + step_s) > crowding * step_s / ((1 - alpha) * (1 - beta)):
        return NO_WAIT
    later_k = min(range(len(lags) + 1), key=lambda k: _in_sync_s(alpha, k, step_s, extra_s, beta))

    def waits(k: int, lag: float) -> _Cycle:
        # A pass that verifies few tokens costs as much capacity as any: where passes count, all verify as many.
        return waiting(alpha, k, step_s, extra_s, lag, crowding, beta, k if saves_passes else later_k)

    k, lag = max(known, key=lambda item: waits(*item).rate)
    if saves_passes:
        return Wait(k, lag) if alpha > 0.2 else NO_WAIT
    answered, streams = waits(k, lag), streaming(alpha, later_k, step_s, extra_s, first, crowding, beta)
    missed = 1 - answer_rate  # plain steps follow, when the wait is over
    tokens = answer_rate * answered.tokens + missed * streams.tokens
    vain_s = max(_PATIENCE * lag + _VAIN * step_s + streams.seconds / crowding, streams.seconds)
    seconds = answer_rate * answered.seconds + missed * vain_s
    return Wait(k, lag) if tokens / seconds > streams.rate else NO_WAIT


def worth_waiting_for(alpha: float) -> int:
    """Drafted tokens beyond which a wait buys next to nothing: less than 2 % of passes accept as many."""
    return max(8, math.ceil(math.log(0.02) / math.log(min(max(alpha, 0.01), 0.99))))


@lru_cache(maxsize=4096)
def plan_in_company(
    alpha: float,
    extra: float,
    lags: tuple[float | None, ...],
    answer_rate: float,
    crowding: float,
    beta: float,
    saves_passes: bool,
) -> int:
    """How many drafted tokens to wait for, with times in units of a step; 0: do not wait.

    Only ratios of times matter. Where many sequences run, their lags are whole steps, so few cases differ.
    """
    wait = plan_wait(alpha, 1.0, extra, lags, answer_rate, saves_passes=saves_passes, crowding=crowding, beta=beta)
    return wait.want
