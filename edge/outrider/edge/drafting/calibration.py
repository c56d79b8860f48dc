"""Calibrates guesses: how often the target picks a guess of this rank with this gap.

Draft and target add the same noise to their logits, so the gap between the draft's best score and another says more
about the target's pick than the draft's probabilities do (docs/policy.md has the measurement).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final, NamedTuple

from outrider.models.picks.rejection import Evidence
from outrider.models.picks.sampling import Candidates

MAX_WIDTH: Final = 8
LOOKUP_RANK: Final = MAX_WIDTH
"""The rank of a guess that only prompt lookup made."""
QUOTE_RANK: Final = MAX_WIDTH + 1
"""The rank of a guess that a document made: it followed the same tokens there."""
PROVISIONAL_RANK: Final = MAX_WIDTH + 2
"""The rank of a token that a cascade's mid-size verifier has committed and the target has not."""

_GAPS: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
_NUM_GAPS: Final = len(_GAPS) + 1
_NUM_MODEL: Final = MAX_WIDTH * _NUM_GAPS
_LOOKUP_SIZES: Final = (2, 3, 4)
"""Tokens of the repeated suffix that a lookup found."""
_QUOTE_SIZES: Final = (2, 3, 4, 6, 12)
"""Tokens of the suffix that a document has too: a text that quotes shares many."""

# Shares of the target's picks by rank (rows; the last is for all further ranks) and gap, measured on the reference pair
# at temperature 0.8, rounded (docs/log.md, 2026-11-27).
_MODEL_PRIOR: Final = (
    (0.40, 0.46, 0.58, 0.80, 0.92, 0.99),
    (0.33, 0.30, 0.19, 0.08, 0.018, 0.003),
    (0.22, 0.15, 0.12, 0.075, 0.02, 0.003),
    (0.15, 0.10, 0.09, 0.05, 0.015, 0.002),
    (0.10, 0.08, 0.07, 0.04, 0.012, 0.001),
)
_LOOKUP_PRIOR: Final = (0.30, 0.45, 0.65)
_QUOTE_PRIOR: Final = (0.25, 0.40, 0.60, 0.75, 0.90)
_BOTH_LIFT: Final = 0.5
"""A guess that model and lookup share: this part of the doubt of either is left."""

_FIRST_QUOTE: Final = 2 * _NUM_MODEL + len(_LOOKUP_SIZES)
_FORCED: Final = _FIRST_QUOTE + len(_QUOTE_SIZES)
_FORCED_PRIOR: Final = 0.95
"""A forced text may be made of other tokens than the draft's."""

_SHARES: Final = (0.3, 0.5, 0.7, 0.9)
_SAMPLED_PRIOR: Final = (0.5, 0.55, 0.65, 0.8, 0.95)
_FIRST_SAMPLED: Final = _FORCED + 1

_PRIOR_WEIGHT: Final = 16.0  # tests that a cell's prior counts as
_SCALE_WEIGHT: Final = 3.0  # promised hits that the prior's own scale starts with
_MOST_SCALE: Final = 1.2
_KEEP: Final = 0.995  # of a cell's past, per test
_SURE: Final = 0.995


class Guess(NamedTuple):
    """A guess of the next token. rank: 0 is the draft's own pick. cell: of `Calibration`. evidence: what the acceptance
    rule needs with it.
    """

    token: int
    rank: int
    cell: int
    evidence: Evidence | None = None


def model_guesses(found: Candidates, width: int) -> list[Guess]:
    """The best `width` candidates of a model as guesses."""
    return [
        Guess(token, rank, min(rank, MAX_WIDTH - 1) * _NUM_GAPS + bisect_right(_GAPS, gap))
        for rank, (token, gap) in enumerate(zip(found.tokens[:width], found.gaps, strict=False))
    ]


def lookup_guess(token: int, suffix: int) -> Guess:
    """A token that followed an earlier occurrence of the last `suffix` tokens."""
    size = min(max(suffix, _LOOKUP_SIZES[0]), _LOOKUP_SIZES[-1])
    return Guess(token, LOOKUP_RANK, _NUM_MODEL + _LOOKUP_SIZES.index(size))


def quoted_guess(token: int, suffix: int) -> Guess:
    """A token that follows the text's last `suffix` tokens in a document."""
    return Guess(token, QUOTE_RANK, _FIRST_QUOTE + max(0, bisect_right(_QUOTE_SIZES, suffix) - 1))


def forced_guess(token: int) -> Guess:
    """A token that the grammar leaves no choice for."""
    return Guess(token, 0, _FORCED)


def shared_guess(model: Guess) -> Guess:
    """The same guess where lookup makes it too; a forced one is as sure without."""
    if model.cell >= _NUM_MODEL:
        return model
    return Guess(model.token, model.rank, _NUM_MODEL + len(_LOOKUP_SIZES) + model.cell)


def sampled_guess(token: int, most: float, evidence: Evidence) -> Guess:
    """A token that goes with evidence. most: the draft's chance of its likeliest token; not of this one, because what
    is sent must not depend on the drawn token (`outrider.models.picks.rejection`).
    """
    return Guess(token, 0, _FIRST_SAMPLED + bisect_right(_SHARES, most), evidence)


def _priors() -> list[float]:
    model = [chance for rank in range(MAX_WIDTH) for chance in _MODEL_PRIOR[min(rank, len(_MODEL_PRIOR) - 1)]]
    both = (1.0 - _BOTH_LIFT * (1.0 - max(chance, 0.3)) for chance in model)
    return [*model, *_LOOKUP_PRIOR, *both, *_QUOTE_PRIOR, _FORCED_PRIOR, *_SAMPLED_PRIOR]


class Calibration:
    """Chances of guesses, learned from commits: ratios of sums with forgetting, drawn to measured priors.

    The priors themselves are scaled by how well they did over all cells, so that a hopeless draft shows within ten
    tokens whatever its gaps are.
    """

    def __init__(self) -> None:
        self._priors = _priors()
        self._hits = [0.0] * len(self._priors)
        self._tests = [0.0] * len(self._priors)
        self._all_hits = self._all_promised = _SCALE_WEIGHT

    def observe(self, guesses: Sequence[Guess], token: int) -> None:
        """Records that the target picked `token` where these guesses were made."""
        for guess in guesses:
            cell, is_hit = guess.cell, guess.token == token
            self._hits[cell] = _KEEP * self._hits[cell] + is_hit
            self._tests[cell] = _KEEP * self._tests[cell] + 1.0
            self._all_hits = _KEEP * self._all_hits + is_hit
            self._all_promised = _KEEP * self._all_promised + self._priors[cell]

    def chance(self, cell: int) -> float:
        """The chance that the target picks a guess of this cell where it reaches it; under 1."""
        scale = min(_MOST_SCALE, self._all_hits / self._all_promised)
        prior = min(_SURE, scale * self._priors[cell])
        return min(_SURE, (self._hits[cell] + _PRIOR_WEIGHT * prior) / (self._tests[cell] + _PRIOR_WEIGHT))
