"""Collects what Prometheus reads at /metrics.

The engine's numbers come from its snapshot at each scrape. Only what the HTTP side alone sees is recorded as it
happens: requests, dropped drafts, time to first token, time between commits. These are recorded thousands of times a
second, all on the event loop, so they are plain numbers that become metrics at a scrape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.cloud.seam import EngineStats
from outrider.models.tally import FAST_S, SLOW_S, Tally
from outrider.models.tally import CommitTimer as CommitTimer  # also for importers of this module


class Metrics:
    """The server's metrics, in a registry of their own, so that one process can hold two servers.

    num_dropped: drafts that were not taken because a budget was used up, by its name.
    """

    def __init__(self, stats: Callable[[], EngineStats], num_sessions: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(stats, num_sessions))
        ProcessCollector(registry=self._registry)
        self._registry.register(_HttpCollector(self))
        self.requests: dict[tuple[str, str, int], int] = {}  # by route, method and status
        self.request_s: dict[str, Tally] = {}  # by route
        self.num_dropped = {"session": 0, "owner": 0}
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

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """All metrics in the text format that `accept` prefers, and its content type."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self._registry), content_type


class _HttpCollector(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._created_s = time.time()

    def collect(self) -> Iterator[Metric]:
        metrics = self._metrics
        yield self._counter(
            "outrider_http_requests",
            "HTTP requests answered.",
            ("route", "method", "status"),
            {(route, method, str(status)): n for (route, method, status), n in metrics.requests.items()},
        )
        yield self._counter(
            "outrider_drafts_dropped",
            "Draft messages that were not taken because a budget was used up.",
            ("budget",),
            {(budget,): n for budget, n in metrics.num_dropped.items()},
        )
        request_s = HistogramMetricFamily(
            "outrider_http_request_seconds", "Time until a response began.", labels=("route",)
        )
        for route, tally in metrics.request_s.items():
            tally.add_to(request_s, {"route": route})
        yield request_s
        for name, help_text, tally in (
            ("outrider_ttft_seconds", "Time from a request's arrival to its first committed token.", metrics.ttft_s),
            ("outrider_inter_commit_seconds", "Time between two commits of a sequence.", metrics.gap_s),
        ):
            family = HistogramMetricFamily(name, help_text)
            tally.add_to(family)
            yield family

    def _counter(
        self, name: str, help_text: str, labels: Sequence[str], values: Mapping[tuple[str, ...], int]
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(name, help_text, labels=labels)
        for label_values, count in values.items():
            family.add_metric(label_values, count, created=self._created_s)
        return family


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


class HttpMetrics:
    """ASGI layer that counts requests and times them until their response begins."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started_s = time.perf_counter()

        async def note_start(message: Message) -> None:
            if message["type"] == "http.response.start":
                took_s = time.perf_counter() - started_s
                self._metrics.answered(_route(scope), scope["method"], message["status"], took_s)
            await send(message)

        await self._app(scope, receive, note_start)


def _route(scope: Scope) -> str:
    """The route's pattern, never the path itself: each session would become a time series."""
    return str(getattr(scope.get("route"), "path", "unmatched"))
