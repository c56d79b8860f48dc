"""Predicts a draft's speed-up over plain cloud streaming, by round trip, from four numbers.

A drafted token is accepted with probability alpha, independently; the target's step with k drafted tokens takes
step_ms + extra_ms * k; plain cloud streaming takes step_ms per token and no round trip. Two ways of drafting: streamed
(docs/policy.md), and stop-and-wait, which drafts, sends, and waits for the answer before it drafts again.

Exact expectations, no simulation. When the target rejects a guess, everything drafted is void and a new cycle begins,
so the rate is that of one cycle, E[tokens] / E[ms] (renewal reward: Ross, *Introduction to Probability Models*, section
7.4). The times within a cycle do not depend on chance: a guess is rejected only in the step that commits its position.
So one run in which every guess is accepted contains all cycles, and each step counts with the probability that all
guesses before it were accepted. `tests/played_drafts.py` plays the same rules event by event; tests compare the two.

Knows nothing of models, bytes, or other work on the machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from outrider.models.bundle.manifest import AtRoundTrip
from outrider.models.errors import ConfigError

ROUND_TRIPS_MS: Final = (0.0, 10.0, 25.0, 50.0, 75.0, 100.0, 150.0, 200.0, 300.0)
"""The round trips of a report card."""

MAX_DEPTH: Final = 32
"""Most tokens that the device runs ahead, and deepest block of stop-and-wait."""

MAX_WANTED: Final = 8
"""Most drafted tokens that the target waits for."""

WORTH_IT: Final = 1.05
"""Below this speed-up, streamed drafts have faded."""

_POSITIONS: Final = 1024  # longest cycle that is followed: the rest is worth under 1 %
_NEGLIGIBLE: Final = 1e-4
_SAME_MS: Final = 1e-9  # times that differ by less are one
_PRECISION_MS: Final = 0.05


@dataclass(frozen=True, slots=True)
class Setting:
    """alpha: chance that a drafted token is accepted. Times in ms; extra_ms is what a drafted token adds to a step.

    Raises ConfigError for values out of range.
    """

    alpha: float
    draft_ms: float
    step_ms: float
    extra_ms: float
    rtt_ms: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.alpha <= 1.0:
            raise ConfigError(f"the acceptance rate is {self.alpha}; expected a share from 0 to 1")
        for name, time in (("draft", self.draft_ms), ("extra", self.extra_ms), ("round trip", self.rtt_ms)):
            if not (math.isfinite(time) and time >= 0.0):
                raise ConfigError(f"the {name} time is {time} ms; expected 0 or more")
        if not (math.isfinite(self.step_ms) and self.step_ms > 0.0):
            raise ConfigError(f"the target's step takes {self.step_ms} ms; expected more than 0")


@dataclass(frozen=True, slots=True)
class Reach:
    """The result of a way of drafting. speed_up: over cloud-only streaming. choice: the depth, or (patience ms, W)."""

    speed_up: float
    passes_per_token: float
    choice: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prediction:
    """A curve over round trips, and where drafting stops paying.

    fades_ms: round trip from which streamed drafts gain less than 5 %. breaks_even_ms: from which stop-and-wait is
    slower than no draft. To 0.1 ms; 0: at every round trip; None: beyond the last one of the curve.
    """

    curve: tuple[AtRoundTrip, ...]
    fades_ms: float | None
    breaks_even_ms: float | None


def tokens_per_pass(alpha: float, depth: int) -> float:
    """Expected tokens of a pass that verifies `depth` drafted ones (Leviathan, Kalman and Matias 2023, equation 1)."""
    if alpha == 1.0:
        return depth + 1.0
    # The bound is for alphas a rounding error below 1.
    return min(depth + 1.0, (1.0 - alpha ** (depth + 1)) / (1.0 - alpha))


def alpha_for(tokens: float, depth: int) -> float:
    """The alpha with which `tokens_per_pass` at `depth`, at least 1, gives `tokens`: its inverse, to 1e-6.

    Real tokens are not independent: some passages are easy and some hard, so rounds are shorter than the mean
    acceptance rate suggests. This is the rate of independent tokens whose rounds are as long.
    """
    low, high = 0.0, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_per_pass(middle, depth) < tokens else (low, middle)
    return (low + high) / 2


def best_depth(setting: Setting, available: int) -> int:
    """Depth k <= available that maximises expected committed tokens per ms."""
    return max(
        range(available + 1),
        key=lambda k: tokens_per_pass(setting.alpha, k) / (setting.step_ms + setting.extra_ms * k),
    )


def stop_and_wait(setting: Setting) -> Reach:
    """Stop-and-wait at its best fixed depth, at least 1: a round drafts k, travels, and is verified."""

    def ms_per_token(k: int) -> float:
        took_ms = k * setting.draft_ms + setting.rtt_ms + setting.step_ms + setting.extra_ms * k
        return took_ms / tokens_per_pass(setting.alpha, k)

    k = min(range(1, MAX_DEPTH + 1), key=ms_per_token)
    return Reach(setting.step_ms / ms_per_token(k), 1 / tokens_per_pass(setting.alpha, k), (k,))


def stream(setting: Setting) -> Reach:
    """Streamed drafts; the target waits for as many as pays, or for none. Never slower than no draft."""
    depths = best_depths(setting)
    reaches = (waiting_for(setting, depths, wanted) for wanted in range(MAX_WANTED + 1))
    return max(reaches, key=lambda reach: reach.speed_up)


def predict(
    alpha: float, *, draft_ms: float, step_ms: float, extra_ms: float, round_trips_ms: Sequence[float] = ROUND_TRIPS_MS
) -> Prediction:
    """The curve over `round_trips_ms`, and where drafting stops paying. Raises as `Setting`."""
    setting = Setting(alpha, draft_ms, step_ms, extra_ms, 0.0)

    def streamed(rtt_ms: float) -> float:
        return stream(replace(setting, rtt_ms=rtt_ms)).speed_up

    def waited(rtt_ms: float) -> float:
        return stop_and_wait(replace(setting, rtt_ms=rtt_ms)).speed_up

    curve = tuple(
        AtRoundTrip(rtt_ms=rtt_ms, stream=round(streamed(rtt_ms), 3), stop_and_wait=round(waited(rtt_ms), 3))
        for rtt_ms in round_trips_ms
    )
    last_ms = max(round_trips_ms)
    return Prediction(curve, _first_below(WORTH_IT, streamed, last_ms), _first_below(1.0, waited, last_ms))


def best_depths(setting: Setting) -> tuple[int, ...]:
    """`best_depth` for each number of drafted tokens at hand."""
    return tuple(best_depth(setting, available) for available in range(MAX_DEPTH + 1))


def waiting_for(setting: Setting, depths: Sequence[int], wanted: int) -> Reach:
    """Streamed drafts; the target begins no step before it has `wanted` of them. 0: it never waits.

    depths: of a step, by the number of drafts at hand. It waits at most as long as the device needs to draft so many
    after a rejected guess.
    """
    reached = 1.0  # probability that every guess before this step was accepted
    ms = passes = tokens = 0.0
    for took_ms, num_committed in _cycle(setting, depths, wanted):
        ms += reached * took_ms
        passes += reached
        tokens += reached * tokens_per_pass(setting.alpha, num_committed - 1)
        reached *= setting.alpha**num_committed
        if reached < _NEGLIGIBLE:
            break
    patience_ms = round(setting.rtt_ms + wanted * setting.draft_ms) if wanted else 0
    return Reach(tokens * setting.step_ms / ms, passes / tokens, (patience_ms, wanted))


def _cycle(setting: Setting, depths: Sequence[int], wanted: int) -> Iterator[tuple[float, int]]:
    """The steps after a rejected guess, with every later guess accepted: ms and committed tokens of each.

    Ends where the device learns of a token before it has guessed it: another cycle begins there.
    """
    half_ms = setting.rtt_ms / 2
    guessed_ms: list[float] = []  # when the device had guessed position 0, 1, ... after the rejected guess
    learned_ms: list[float] = []  # when it learned the committed token of position 0, 1, ...

    def has_arrived(position: int, by_ms: float) -> bool:
        while len(guessed_ms) <= position:
            before = len(guessed_ms) - MAX_DEPTH  # to run ahead so far, the device must know this one
            if before >= len(learned_ms):
                return False
            begin_ms = max(guessed_ms[-1] if guessed_ms else half_ms, learned_ms[before] if before >= 0 else 0.0)
            guessed_ms.append(begin_ms + setting.draft_ms)
        return guessed_ms[position] + half_ms <= by_ms + _SAME_MS

    now_ms = 0.0
    while len(learned_ms) < _POSITIONS:
        began_ms, committed = now_ms, len(learned_ms)
        if wanted and not has_arrived(last_wanted := committed + wanted - 1, now_ms):
            now_ms += setting.rtt_ms + wanted * setting.draft_ms
            if has_arrived(last_wanted, now_ms):
                now_ms = guessed_ms[last_wanted] + half_ms
        available = 0
        while available < MAX_DEPTH and has_arrived(committed + available, now_ms):
            available += 1
        num_committed = depths[available] + 1
        now_ms += setting.step_ms + setting.extra_ms * (num_committed - 1)
        learned_ms += [now_ms + half_ms] * num_committed
        yield now_ms - began_ms, num_committed
        if not has_arrived(len(learned_ms) - 1, now_ms + setting.rtt_ms):
            return


def _first_below(bound: float, speed_up: Callable[[float], float], last_ms: float) -> float | None:
    """The round trip from which `speed_up`, a falling function, is below `bound`; None if beyond `last_ms`."""
    if speed_up(last_ms) >= bound:
        return None
    if speed_up(0.0) < bound:
        return 0.0
    low, high = 0.0, last_ms
    while high - low > _PRECISION_MS:
        middle = (low + high) / 2
        low, high = (middle, high) if speed_up(middle) >= bound else (low, middle)
    return math.ceil(10.0 * high) / 10.0
