"""Counts requests, and observations for histograms, as plain numbers that become Prometheus metrics at a scrape.

Prometheus' own objects take a lock per observation, and these are recorded thousands of times a second.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

FAST_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SLOW_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
LONG_S: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
METHODS: Final = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS"})
MAX_CODES: Final = 64
_OPENMETRICS: Final = "application/openmetrics-text"


def text_format(accept: str) -> tuple[Callable[[Any], bytes], str]:
    """What writes the text format that an Accept header prefers, and its content type: one of two.

    Needs prometheus_client, which would copy a version into the content type, or fail on it.
    """
    from prometheus_client.exposition import choose_encoder

    return choose_encoder(_OPENMETRICS if _OPENMETRICS in accept else "")


class Tally:
    """The observations of a histogram: how many fell into each bucket, and their sum, `total`. For one thread."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Counts one value; a bucket includes its bound."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """Values observed."""
        return sum(self._counts)

    def numbers(self) -> list[float]:
        """The counts of the buckets, then the sum."""
        return [*self._counts, self.total]

    def load(self, numbers: Sequence[float]) -> None:
        """Takes over what another tally with the same bounds counted, from its `numbers`."""
        *counts, self.total = numbers
        self._counts = [int(count) for count in counts]

    def add_to(self, family: HistogramMetricFamily, labels: Mapping[str, str] | None = None) -> None:
        """Adds this histogram to a scrape."""
        from prometheus_client.utils import floatToGoString

        names = [*map(floatToGoString, self._bounds), "+Inf"]
        labels = dict(labels or {})
        family.add_metric(list(labels.values()), list(zip(names, accumulate(self._counts), strict=True)), self.total)


class CommitTimer:
    """Times the commits of one sequence: the first from the request's arrival, each other from the one before."""

    __slots__ = ("_arrived_s", "_first_s", "_last_s", "_num_tokens", "_tally")

    def __init__(self, tally: RequestTally, arrived_s: float) -> None:
        self._tally = tally
        self._arrived_s = arrived_s
        self._first_s = self._last_s = arrived_s
        self._num_tokens = 0

    def committed(self, num_tokens: int) -> None:
        """Notes a commit."""
        now = time.monotonic()
        if self._num_tokens:
            self._tally.inter_token_s.observe(now - self._last_s)
        else:
            self._tally.ttft_s.observe(now - self._arrived_s)
            self._first_s = now
        self._num_tokens += num_tokens
        self._last_s = now

    def ended(self) -> None:
        """Notes the end."""
        self._tally.e2e_s.observe(time.monotonic() - self._arrived_s)
        if self._num_tokens > 1:
            self._tally.per_token_s.observe((self._last_s - self._first_s) / (self._num_tokens - 1))


class RequestTally:
    """Requests of a server by route, method and status, its errors by code, and its times. On one event loop."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, str, int], int] = {}  # by route, method and status
        self.errors: dict[str, int] = {}  # by code
        self.request_s: dict[str, Tally] = {}  # by route
        self.ttft_s = Tally(SLOW_S)
        self.inter_token_s = Tally(FAST_S)
        self.per_token_s = Tally(FAST_S)
        self.e2e_s = Tally(LONG_S)

    def answered(self, route: str, method: str, status: int, took_s: float) -> None:
        """Records a request; took_s: until its response began. Methods are the client's: unusual ones count as one."""
        key = (route, method if method in METHODS else "other", status)
        self.requests[key] = self.requests.get(key, 0) + 1
        tally = self.request_s.get(route)
        if tally is None:
            tally = self.request_s[route] = Tally(FAST_S)
        tally.observe(took_s)

    def failed(self, code: str) -> None:
        """Records an error by its code, one of ours. More codes than MAX_CODES count as "other"."""
        if code not in self.errors and len(self.errors) >= MAX_CODES:
            code = "other"
        self.errors[code] = self.errors.get(code, 0) + 1

    def commit_timer(self, arrived_s: float) -> CommitTimer:
        """A timer for one sequence; arrived_s: when its request arrived, by the monotonic clock."""
        return CommitTimer(self, arrived_s)

    def counter(
        self, name: str, help_text: str, labels: Sequence[str], values: Mapping[tuple[str, ...], int]
    ) -> CounterMetricFamily:
        """Counts since the server's start, by the values of the labels. name: without "outrider_"."""
        from prometheus_client.core import CounterMetricFamily

        family = CounterMetricFamily(f"outrider_{name}", help_text, labels=labels)
        for label_values, count in values.items():
            family.add_metric(label_values, count)
        return family

    def request_counters(self) -> Iterator[Metric]:
        """The requests and the errors."""
        values: dict[tuple[str, ...], int] = {
            (route, method, str(status)): count for (route, method, status), count in self.requests.items()
        }
        yield self.counter("http_requests", "HTTP requests answered.", ("route", "method", "status"), values)
        errors: dict[tuple[str, ...], int] = {(code,): count for code, count in self.errors.items()}
        yield self.counter("request_errors", "Errors reported to clients, by their code.", ("code",), errors)

    def times(self) -> Iterator[Metric]:
        """The times of requests and commits."""
        from prometheus_client.core import HistogramMetricFamily

        request_s = HistogramMetricFamily(
            "outrider_http_request_duration_seconds", "Time until a response began.", labels=("route",), unit="seconds"
        )
        for route, tally in self.request_s.items():
            tally.add_to(request_s, {"route": route})
        yield request_s
        for name, help_text, tally in (
            ("time_to_first_token", "From a request's arrival to its first tokens.", self.ttft_s),
            (
                "inter_token_latency",
                "Between two commits of a sequence; several tokens may come with one, as in vLLM.",
                self.inter_token_s,
            ),
            (
                "request_time_per_output_token",
                "Mean time per token after the first, of each sequence that ended.",
                self.per_token_s,
            ),
            ("e2e_request_latency", "From a request's arrival to the end of its sequence.", self.e2e_s),
        ):
            yield histogram(name + "_seconds", help_text, tally)


def histogram(name: str, help_text: str, tally: Tally) -> HistogramMetricFamily:
    """A histogram without labels. name: without "outrider_"; one that ends in _seconds has that unit."""
    from prometheus_client.core import HistogramMetricFamily

    unit = "seconds" if name.endswith("_seconds") else ""
    family = HistogramMetricFamily(f"outrider_{name}", help_text, unit=unit)
    tally.add_to(family)
    return family
