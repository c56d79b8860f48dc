"""Counts requests, and observations for histograms, as plain numbers that become Prometheus metrics at a scrape.

Prometheus' own objects take a lock per observation, and these are recorded thousands of times a second.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

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

    def numbers(self) -> list[float]:
        """The counts of the buckets, then the sum."""
        return [*self._counts, self._sum]

    def load(self, numbers: Sequence[float]) -> None:
        """Takes over what another tally with the same bounds counted, from its `numbers`."""
        *counts, self._sum = numbers
        self._counts = [int(count) for count in counts]

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


class RequestTally:
    """Requests of a server by route, method and status, and its times. On one event loop."""

    def __init__(self) -> None:
        self.created_s = time.time()
        self.requests: dict[tuple[str, str, int], int] = {}  # by route, method and status
        self.request_s: dict[str, Tally] = {}  # by route
        self.ttft_s = Tally(SLOW_S)
        self.gap_s = Tally(FAST_S)

    def answered(self, route: str, method: str, status: int, took_s: float) -> None:
        """Records a request; took_s: until its response began."""
        key = (route, method, status)
        self.requests[key] = self.requests.get(key, 0) + 1
        tally = self.request_s.get(route)
        if tally is None:
            tally = self.request_s[route] = Tally(FAST_S)
        tally.observe(took_s)

    def commit_timer(self, arrived_s: float) -> CommitTimer:
        """A timer for one sequence; arrived_s: when its request arrived, by the monotonic clock."""
        return CommitTimer(self.ttft_s, self.gap_s, arrived_s)

    def counter(
        self, name: str, help_text: str, labels: Sequence[str], values: Mapping[tuple[str, ...], int]
    ) -> CounterMetricFamily:
        """Counts since the server's start, by the values of the labels. name: without "outrider_"."""
        from prometheus_client.core import CounterMetricFamily

        family = CounterMetricFamily(f"outrider_{name}", help_text, labels=labels)
        for label_values, count in values.items():
            family.add_metric(label_values, count, created=self.created_s)
        return family

    def request_counter(self) -> CounterMetricFamily:
        """The requests."""
        values: dict[tuple[str, ...], int] = {
            (route, method, str(status)): count for (route, method, status), count in self.requests.items()
        }
        return self.counter("http_requests", "HTTP requests answered.", ("route", "method", "status"), values)

    def times(self, ttft_help: str, gap_help: str) -> Iterator[Metric]:
        """The times of requests and commits."""
        from prometheus_client.core import HistogramMetricFamily

        request_s = HistogramMetricFamily(
            "outrider_http_request_seconds", "Time until a response began.", labels=("route",)
        )
        for route, tally in self.request_s.items():
            tally.add_to(request_s, {"route": route})
        yield request_s
        for name, help_text, tally in (
            ("ttft", ttft_help, self.ttft_s),
            ("inter_commit", gap_help, self.gap_s),
        ):
            family = HistogramMetricFamily(f"outrider_{name}_seconds", help_text)
            tally.add_to(family)
            yield family
