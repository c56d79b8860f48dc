"""Chooses which source drafts, by measured worth: a bandit with forgetting, one for each request.

The text does not depend on what is drafted. So the commits that follow test the guess of every source that was asked,
verified or not, and choosing among guesses needs no exploration: the guess with the highest expected tokens
per second is verified. Its chances are those of its kinds, times the source's own ratio of hits to promised chances,
which forgets.

Asking takes time. So a source is asked when the tokens that it gains per question, drawn from their posterior (Thompson
1933; a gamma distribution over discounted counts, as in Raj and Kalyani 2017, arXiv 1707.09727), are worth more than
its measured time. A source that is not asked is forgotten, with its time, so it is tried again. The draws are seeded by
the request.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from outrider.cloud.pending.sources import DraftSource, LearningSource, Verified

_FORGET: Final = 0.98  # weight of a question after a newer step, and of a tested node after a newer one
_PRIOR: Final = 0.5  # tokens gained, and questions, before the first
_RATIO_WEIGHT: Final = 2.0  # of the prior ratio 1, in promised chances
_MOST_RATIO: Final = 1.5
_MOST_RATE: Final = 0.995
_COST_SHARE: Final = 0.2  # of the newest measurement of a source's time
_COST_KEPT: Final = 0.99  # of that time, for each question that it was not worth: one slow answer proves little
_PROBE_EVERY: Final = 16  # steps with drafts of the device between two questions that they leave no need for


@dataclass(frozen=True, slots=True)
class Guess:
    """A path, the kinds of its nodes, and the tokens that it is expected to gain."""

    tokens: list[int]
    kinds: list[int]
    gain: float


@dataclass(slots=True, eq=False)
class _Arm:
    """A source, and what it was worth so far, forgetting.

    hits, promised: of tested nodes of its guesses. gained, asked: tokens of the text that it guessed, questions.
    tokens, chances: its last guess as far as it is not tested yet.
    """

    source: DraftSource
    hits: float = 0.0
    promised: float = 0.0
    gained: float = 0.0
    asked: float = 0.0
    cost_s: float | None = None
    tokens: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Hits for each promised chance."""
        return min(_MOST_RATIO, (self.hits + _RATIO_WEIGHT) / (self.promised + _RATIO_WEIGHT))

    @property
    def mean_gain(self) -> float:
        """Tokens gained per question."""
        return self.gained / (self.asked + _PRIOR)

    def test(self, committed: Sequence[int]) -> None:
        """Compares its last guess with what was committed."""
        for index, token in enumerate(committed):
            if index == len(self.tokens):
                break
            self.promised = _FORGET * self.promised + self.chances[index]
            self.hits *= _FORGET
            if self.tokens[index] != token:
                self.tokens, self.chances = [], []
                return
            self.hits += 1.0
            self.gained += 1.0
        del self.tokens[: len(committed)], self.chances[: len(committed)]


class Selection:
    """The sources of one sequence. The engine's thread owns it.

    seed: of the draws. clock: for the time that a source takes.
    """

    def __init__(self, seed: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        self._arms: list[_Arm] = []
        self._learning: list[LearningSource] = []
        self._seed = seed
        self._random: random.Random | None = None  # until it is needed: it takes 2.5 KB
        self._clock = clock
        self._num_declined = 0

    def add(self, source: DraftSource) -> None:
        """Another source."""
        self._arms.append(_Arm(source))
        if isinstance(source, LearningSource):
            self._learning.append(source)

    def renewed(self, sources: Iterable[DraftSource]) -> Selection:
        """With other sources, nothing learned of them."""
        fresh = Selection(self._seed, self._clock)
        for source in sources:
            fresh.add(source)
        return fresh

    def __bool__(self) -> bool:
        return bool(self._arms)

    def __iter__(self) -> Iterator[DraftSource]:
        return (arm.source for arm in self._arms)

    @property
    def learns(self) -> bool:
        """Whether `learn` is of use."""
        return bool(self._learning)

    @property
    def goes_first(self) -> bool:
        """Whether a source has a guess that goes before the device's."""
        return any(arm.source.goes_first for arm in self._arms)

    def learn(self, verified: Verified) -> None:
        """Passes a pass on to the sources that learn."""
        for source in self._learning:
            source.learn(verified)

    def committed(self, tokens: Sequence[int]) -> None:
        """Compares every source's last guess with the text."""
        for arm in self._arms:
            if arm.tokens:
                arm.test(tokens)

    def may_beat(self, gain: float) -> bool:
        """Whether some source is likely to gain more than the pending drafts of the device; at times, to find out."""
        if any(arm.mean_gain > gain for arm in self._arms):
            return True
        self._num_declined += 1
        if self._num_declined < _PROBE_EVERY:
            return False
        self._num_declined = 0
        return True

    def choose(self, most: int, rates: Sequence[float], step_s: float | None, extra_s: float) -> list[Guess]:
        """Guesses of at most `most` tokens, the one to verify first; none where no source that was asked has one.

        rates: by kind, the chance that a node is picked where its parent was. step_s, extra_s: seconds of a step, and
        of each drafted token in it; step_s None: only passes count.
        """
        if self._random is None:
            self._random = random.Random(self._seed)
        found: list[tuple[float, Guess]] = []
        for arm in self._arms:
            arm.gained *= _FORGET
            arm.asked *= _FORGET
            is_first = arm.source.goes_first
            if not is_first and step_s is not None and arm.cost_s is not None:
                drawn = self._random.gammavariate(arm.gained + _PRIOR, 1.0 / (arm.asked + _PRIOR))
                if drawn * step_s < arm.cost_s:
                    arm.cost_s *= _COST_KEPT
                    continue
            guess = self._ask(arm, most, rates)
            if guess is None:
                continue
            if is_first:
                return [guess]
            found.append((_worth(arm.chances, step_s, extra_s), guess))
        found.sort(key=lambda each: -each[0])
        return [guess for _, guess in found]

    def _ask(self, arm: _Arm, most: int, rates: Sequence[float]) -> Guess | None:
        started = self._clock()
        tokens, kinds = arm.source.propose(most)
        took_s = self._clock() - started
        arm.cost_s = took_s if arm.cost_s is None else arm.cost_s + _COST_SHARE * (took_s - arm.cost_s)
        arm.asked += 1.0
        if not tokens:
            arm.tokens, arm.chances = [], []
            return None
        ratio = arm.ratio
        arm.tokens, arm.chances = list(tokens), [min(_MOST_RATE, ratio * rates[kind]) for kind in kinds]
        return Guess(tokens, kinds, expected_gain(arm.chances))


def expected_gain(chances: Sequence[float]) -> float:
    """Tokens of a path that are expected to be accepted, from the chance of each where the one before it was."""
    gain, alive = 0.0, 1.0
    for chance in chances:
        alive *= chance
        gain += alive
    return gain


def _worth(chances: Sequence[float], step_s: float | None, extra_s: float) -> float:
    """Tokens per second of a step that verifies the best part of a path; tokens per pass where only passes count."""
    if step_s is None:
        return 1.0 + expected_gain(chances)
    gained, alive, best = 1.0, 1.0, 1.0 / step_s
    for count, chance in enumerate(chances, start=1):
        alive *= chance
        gained += alive
        best = max(best, gained / (step_s + extra_s * count))
    return best
