"""Decides before a measurement what of it fits into a time. Pure arithmetic on texts that were measured."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from outrider.edge.results import GenerationResult, Mode

MARGIN: Final = 1.2
"""What is planned takes this much less than the time: texts differ, and so does the machine's speed."""
MIN_TOKENS: Final = 16
"""Texts are not made shorter than this: a rate needs some commits."""


@dataclass(frozen=True, slots=True)
class TextTime:
    """How long a text takes in one mode at a round trip of `rtt_ms`.

    first_s: until its first token. token_s: per token from then on. trips: round trips per token that are waited for.
    """

    rtt_ms: float
    first_s: float
    token_s: float
    trips: float

    @classmethod
    def of(cls, result: GenerationResult, rtt_ms: float) -> TextTime:
        """As a finished text took. Raises ZeroDivisionError for one without tokens."""
        num_tokens, first_s = len(result.tokens), result.arrival_s[0]
        trips = result.num_passes / num_tokens if result.mode is Mode.STOP_AND_WAIT else 0.0
        return cls(rtt_ms, first_s, (result.arrival_s[-1] - first_s) / max(1, num_tokens - 1), trips)

    def at(self, rtt_ms: float, num_tokens: int) -> float:
        """Seconds that a text of so many tokens takes at another round trip."""
        more_s = (rtt_ms - self.rtt_ms) / 1e3
        return max(0.0, self.first_s + more_s + num_tokens * (self.token_s + self.trips * more_s))


@dataclass(frozen=True, slots=True)
class TimePlan:
    """So many texts of so many tokens at each round trip, in every mode. seconds: estimate, the warm-up included."""

    rtts_ms: tuple[float, ...]
    num_texts: int
    max_tokens: int
    seconds: float


def plan_texts(
    times: Collection[TextTime],
    rtts_ms: Sequence[float],
    kept_ms: Collection[float],
    num_texts: int,
    max_tokens: int,
    warm_up: int,
    left_s: float,
) -> TimePlan:
    """As many texts as fit into `left_s`, at most `num_texts`; at least one text at each round trip of `kept_ms`.

    Where not even one text fits, the other round trips are left out; then texts become shorter. times: of each mode.
    warm_up: tokens that each mode generates before, at each round trip.
    """

    def seconds(rtts_ms: Sequence[float], num_tokens: int) -> float:
        return MARGIN * sum(time.at(rtt_ms, num_tokens) for rtt_ms in rtts_ms for time in times)

    kept = [rtt_ms for rtt_ms in rtts_ms if rtt_ms in kept_ms]
    choices = [(tuple(rtts_ms), max_tokens), (tuple(kept), max_tokens)]
    while choices[-1][1] // 2 >= MIN_TOKENS:
        choices.append((tuple(kept), choices[-1][1] // 2))
    for rtts, num_tokens in choices:
        first_s, text_s = seconds(rtts, warm_up), seconds(rtts, num_tokens)
        if first_s + text_s <= left_s:
            break
    num = max(1, min(num_texts, int((left_s - first_s) / text_s)))
    return TimePlan(rtts, num, num_tokens, first_s + num * text_s)
