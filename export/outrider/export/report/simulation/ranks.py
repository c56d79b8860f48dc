"""Holds where the target's picks stood among a draft's guesses: the data that tree simulations and report cards use.

For each token that the target picked, given the same text before it: its rank among the draft's noisy scores, and the
gaps between these scores. A noisy score is logit / temperature + g(seed, position, token), as in `sampling`. The gap of
a guess says how likely it is to be the target's pick; `Ranks` counts that per rank and bucket of gaps.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from outrider.models.errors import ConfigError
from outrider.models.picks.sampling import Candidates

EDGES: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Where the buckets of gaps begin; the first begins at 0."""

MOST_GUESSES: Final = 8
"""Guesses per position that have a gap."""

MISSED: Final = 99
"""The rank of a pick that is not among the guesses."""

UNSCORED: Final = 100
"""The rank of a pick that the draft has no score for: no token of its tokenizer goes on with it."""

_NO_GUESS: Final = 99.0  # the gap of a guess that truncation left out
_PRIOR_HITS, _PRIOR_SEEN = 0.3, 1.0  # what a bucket counts before it has seen anything


class Picked(NamedTuple):
    """One token of the target. rank: 0 is the draft's own pick, MISSED none of the guesses, UNSCORED one that it cannot
    guess. gaps: of guess 1, 2, ... 7 behind guess 0, in units of the noise.
    """

    rank: int
    gaps: tuple[float, ...]

    @classmethod
    def among(cls, guesses: Candidates, token: int, missed: int = MISSED) -> Picked:
        """The record of `token` among a draft's guesses. missed: its rank where it is none of them."""
        gaps = [min(_NO_GUESS, round(gap, 2)) for gap in guesses.gaps[1:MOST_GUESSES]]
        gaps += [_NO_GUESS] * (MOST_GUESSES - 1 - len(gaps))
        return cls(guesses.tokens.index(token) if token in guesses.tokens else missed, tuple(gaps))

    def gap(self, guess: int) -> float:
        """The gap by which a guess is judged: of guess 0 its lead over guess 1, of another its distance behind 0."""
        return self.gaps[max(0, guess - 1)]


def bucket(gap: float) -> int:
    """The index of a gap's bucket, 0 to len(EDGES)."""
    return bisect_right(EDGES, gap)


@dataclass(frozen=True)
class Ranks:
    """The records of several texts. Raises ConfigError where there is none."""

    texts: tuple[tuple[Picked, ...], ...]

    def __post_init__(self) -> None:
        if not any(self.texts):
            raise ConfigError("there are no ranks; expected at least one token")

    @cached_property
    def picked(self) -> tuple[Picked, ...]:
        """The texts, one after the other."""
        return tuple(token for text in self.texts for token in text)

    def hits(self, width: int) -> float:
        """The share of picks among the first `width` guesses."""
        return sum(token.rank < width for token in self.picked) / len(self.picked)

    @cached_property
    def table(self) -> tuple[tuple[float, ...], ...]:
        """The chance that guess j is the pick, by the bucket of its gap: table[j][bucket]."""
        rows = []
        for guess in range(MOST_GUESSES):
            hits, seen = [_PRIOR_HITS] * (len(EDGES) + 1), [_PRIOR_SEEN] * (len(EDGES) + 1)
            for token in self.picked:
                place = bucket(token.gap(guess))
                seen[place] += 1.0
                hits[place] += token.rank == guess
            rows.append(tuple(hit / count for hit, count in zip(hits, seen, strict=True)))
        return tuple(rows)

    @cached_property
    def chances(self) -> tuple[tuple[float, ...], ...]:
        """`table`'s entries for each of `picked`: chances[i][j] of guess j."""
        return tuple(
            tuple(self.table[guess][bucket(token.gap(guess))] for guess in range(MOST_GUESSES)) for token in self.picked
        )
