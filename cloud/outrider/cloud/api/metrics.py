"""Collects what Prometheus reads at /metrics.

The engine's numbers come from its snapshot at each scrape. Only what the HTTP side alone sees is recorded as it
happens: requests, dropped drafts, time to first token, time between commits. These are recorded thousands of times a
second, all on the event loop, so they are plain numbers that become metrics at a scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.types import Scope

from outrider.cloud.recent.store import RecentStats
from outrider.cloud.seam import EngineStats
from outrider.models.tally import RequestTally


class Metrics(RequestTally):
    """The server's metrics, in a registry of their own, so that one process can hold two servers.

    num_dropped: drafts that were not taken because a budget was used up, by its name.
    """

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        num_sessions: Callable[[], int],
        recent: Callable[[], RecentStats] | None = None,
    ) -> None:
        super().__init__()
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(stats, num_sessions))
        if recent is not None:
            self._registry.register(_RecentCollector(recent))
        ProcessCollector(registry=self._registry)
        self._registry.register(_HttpCollector(self))
        self.num_dropped = {"session": 0, "owner": 0}

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """All metrics in the text format that `accept` prefers, and its content type."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self._registry), content_type


class _HttpCollector(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        metrics = self._metrics
        yield metrics.request_counter()
        yield metrics.counter(
            "drafts_dropped",
            "Draft messages that were not taken because a budget was used up.",
            ("budget",),
            {(budget,): n for budget, n in metrics.num_dropped.items()},
        )
        yield from metrics.times(
            "Time from a request's arrival to its first committed token.", "Time between two commits of a sequence."
        )


class _EngineCollector(Collector):
    def __init__(self, stats: Callable[[], EngineStats], num_sessions: Callable[[], int]) -> None:
        self._stats = stats
        self._num_sessions = num_sessions

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield GaugeMetricFamily("outrider_sessions_open", "Open event streams.", value=self._num_sessions())
        for gauge in fields(stats):
            value = getattr(stats, gauge.name)
            if gauge.name != "totals" and value is not None:
                yield GaugeMetricFamily(f"outrider_engine_{gauge.name}", gauge.metadata["help"], value=value)
        for counter in fields(stats.totals):
            name = counter.name.removesuffix("_s") + "_seconds" if counter.name.endswith("_s") else counter.name
            value = getattr(stats.totals, counter.name)
            yield CounterMetricFamily(f"outrider_engine_{name}", counter.metadata["help"], value=value)


class _RecentCollector(Collector):
    def __init__(self, stats: Callable[[], RecentStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for gauge in fields(stats):
            value = getattr(stats, gauge.name)
            if gauge.name != "counts" and value is not None:
                yield GaugeMetricFamily(f"outrider_recent_{gauge.name}", gauge.metadata["help"], value=value)
        for counter in fields(stats.counts):
            value = getattr(stats.counts, counter.name)
            yield CounterMetricFamily(f"outrider_recent_{counter.name}", counter.metadata["help"], value=value)


def route_of(scope: Scope) -> str:
    """The route's pattern, never the path itself: each session would become a time series."""
    return str(getattr(scope.get("route"), "path", "unmatched"))
