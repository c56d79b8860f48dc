"""Defines the seam of a source of drafts in the verifier: what it proposes.

A source belongs to one sequence. Whatever it proposes, the text is the target's: a wrong guess costs time only. The
device's drafts are no such source: they arrive by themselves (`trie`). `Sources` asks a sequence's sources.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

_FORGET: Final = 0.98  # weight of a question after a newer step
_PRIOR: Final = 0.5  # questions before the first, which gained a token each
_COST_KEPT: Final = 0.99  # of a source's time, for each question that it was not worth: one slow answer proves little


class DraftSource(Protocol):
    """Guesses of what follows one sequence's committed tokens. The engine's thread owns it.

    kinds: of its nodes (`trie`): how sure it is, by which their chances are measured. goes_first: its guess goes before
    all others, since it repeats what the same request got. rivals_device: it is asked where the device has sent drafts,
    too.
    """

    kinds: range
    goes_first: bool = False
    rivals_device: bool = False

    def propose(self, most: int) -> tuple[list[int], list[int]]:
        """A path of at most `most` tokens that follow the committed ones, and their kinds; nothing where it has none.

        Changes no text; how long it takes is measured.
        """


@dataclass(frozen=True, slots=True)
class Guess:
    """A path, the kinds of its nodes, and the tokens that it is expected to gain."""

    tokens: list[int]
    kinds: list[int]
    gain: float


@dataclass(slots=True)
class _Asked:
    """Of one source, forgetting: tokens that its guesses were expected to gain, questions, and seconds of the last."""

    gained: float = 0.0
    num: float = 0.0
    took_s: float = 0.0


class Sources:
    """The verifier's own sources of one sequence. The engine's thread owns it. clock: for the time that a source takes.
    has_rivals: some are asked where the device has sent drafts, too.

    The chances of a guess are those of its kinds (`node_chances`), which every commit tests. So the guess with the most
    expected tokens is the one to verify. All that is kept of a source is what a question gains, and takes: it is left
    out while that takes longer than steps for as many tokens would, and asked again in time, because this forgets.
    """

    def __init__(self, sources: Iterable[DraftSource] = (), clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._asked = {source: _Asked() for source in sources}
        self.has_rivals = any(source.rivals_device or source.goes_first for source in self._asked)

    def __bool__(self) -> bool:
        return bool(self._asked)

    def __iter__(self) -> Iterator[DraftSource]:
        return iter(self._asked)

    def guesses(
        self, most: int, rates: Sequence[float], step_s: float | None, *, of_rivals: bool = False
    ) -> list[Guess]:
        """Guesses of at most `most` tokens, the best first.

        rates: by kind, the chance that a node is picked where its parent was. step_s: seconds of a step; None: only
        passes count. of_rivals: asks those that rival the device's drafts, and no others.
        """
        found: list[Guess] = []
        for source, asked in self._asked.items():
            if of_rivals and not source.rivals_device:
                continue
            asked.gained *= _FORGET
            asked.num *= _FORGET
            if step_s is not None and (asked.gained + _PRIOR) / (asked.num + _PRIOR) * step_s < asked.took_s:
                asked.took_s *= _COST_KEPT
                continue
            started = self._clock()
            tokens, kinds = source.propose(most)
            gain = expected_gain([rates[kind] for kind in kinds])
            asked.took_s = self._clock() - started
            asked.gained, asked.num = asked.gained + gain, asked.num + 1.0
            if tokens and source.goes_first:
                return [Guess(tokens, kinds, gain)]
            if tokens:
                found.append(Guess(tokens, kinds, gain))
        return sorted(found, key=lambda guess: -guess.gain)


def expected_gain(chances: Sequence[float]) -> float:
    """Tokens of a path that are expected to be accepted, from the chance of each where the one before it was."""
    gain, alive = 0.0, 1.0
    for chance in chances:
        alive *= chance
        gain += alive
    return gain
