"""Counts observations for histograms, as plain numbers that become Prometheus metrics at a scrape.

Prometheus' own objects take a lock per observation, and these are recorded thousands of times a second.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from prometheus_client.core import HistogramMetricFamily

FAST_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SLOW_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Tally:
    """The observations of a histogram: how many fell into each bucket, and their sum. For one thread."""

    __slots__ = ("_bounds", "_counts", "_created_s", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._created_s = time.time()

    def observe(self, value: float) -> None:
        """Counts one value; a bucket includes its bound."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add_to(self, family: HistogramMetricFamily, labels: Mapping[str, str] | None = None) -> None:
        """Adds this histogram to a scrape."""
        from prometheus_client.utils import floatToGoString

        names = [*map(floatToGoString, self._bounds), "+Inf"]
        labels = dict(labels or {})
        family.add_metric(list(labels.values()), list(zip(names, accumulate(self._counts), strict=True)), self._sum)
        family.add_sample(f"{family.name}_created", labels, self._created_s)


class CommitTimer:
    """Times the commits of one sequence: the first from the request's arrival, each other from the one before."""

    __slots__ = ("_gap_s", "_last_s", "_next")

    def __init__(self, ttft_s: Tally, gap_s: Tally, arrived_s: float) -> None:
        self._next = ttft_s
        self._gap_s = gap_s
        self._last_s = arrived_s

    def committed(self) -> None:
        """Notes a commit."""
        now = time.monotonic()
        self._next.observe(now - self._last_s)
        self._next = self._gap_s
        self._last_s = now
