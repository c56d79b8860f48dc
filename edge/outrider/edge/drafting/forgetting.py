"""A rate that forgets: what every estimate of the device is made of."""

from __future__ import annotations


class ForgettingRatio:
    """sum(numerators) / sum(denominators), faded by the factor `keep` at every update; starts at `prior`.

    prior_weight: the denominator at the start.
    """

    def __init__(self, prior: float, prior_weight: float, keep: float) -> None:
        self._top = prior * prior_weight
        self._bottom = prior_weight
        self._keep = keep

    def add(self, numerator: float, denominator: float) -> None:
        """Takes one observation."""
        self._top = self._top * self._keep + numerator
        self._bottom = self._bottom * self._keep + denominator

    def fade(self, count: int) -> None:
        """Forgets as much as `count` observations would."""
        share = self._keep**count
        self._top, self._bottom = self._top * share, self._bottom * share

    @property
    def value(self) -> float:
        """The ratio."""
        return self._top / self._bottom
