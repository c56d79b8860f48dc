"""Collects what Prometheus reads at /metrics.

The engine's numbers come from its snapshot at each scrape. Only what the HTTP side alone sees is recorded as it
happens: requests, time to first token, time between commits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.cloud.seam import EngineStats

ROUTE: Final = "outrider.route"
"""Key of the ASGI scope under which a route below the framework names itself."""

_FAST_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SLOW_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """The server's metrics, in a registry of their own, so that one process can hold two servers."""

    def __init__(self, stats: Callable[[], EngineStats], num_sessions: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(stats, num_sessions))
        ProcessCollector(registry=self._registry)
        self.requests = Counter(
            "outrider_http_requests",
            "HTTP requests answered.",
            ("route", "method", "status"),
            registry=self._registry,
        )
        self.request_s = Histogram(
            "outrider_http_request_seconds",
            "Time until a response began.",
            ("route",),
            buckets=_FAST_S,
            registry=self._registry,
        )
        self._ttft_s = Histogram(
            "outrider_ttft_seconds",
            "Time from a request's arrival to its first committed token.",
            buckets=_SLOW_S,
            registry=self._registry,
        )
        self._gap_s = Histogram(
            "outrider_inter_commit_seconds",
            "Time between two commits of a sequence.",
            buckets=_FAST_S,
            registry=self._registry,
        )

    def commit_timer(self, arrived_s: float) -> CommitTimer:
        """A timer for one sequence; arrived_s: when its request arrived, by the monotonic clock."""
        return CommitTimer(self._ttft_s, self._gap_s, arrived_s)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """All metrics in the text format that `accept` prefers, and its content type."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self._registry), content_type


class CommitTimer:
    """Times the commits of one sequence: the first from the request's arrival, each other from the one before."""

    __slots__ = ("_gap_s", "_last_s", "_next")

    def __init__(self, ttft_s: Histogram, gap_s: Histogram, arrived_s: float) -> None:
        self._next = ttft_s
        self._gap_s = gap_s
        self._last_s = arrived_s

    def committed(self) -> None:
        """Notes a commit."""
        now = time.monotonic()
        self._next.observe(now - self._last_s)
        self._next = self._gap_s
        self._last_s = now


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
                route = _route(scope)
                self._metrics.requests.labels(route, scope["method"], message["status"]).inc()
                self._metrics.request_s.labels(route).observe(time.perf_counter() - started_s)
            await send(message)

        await self._app(scope, receive, note_start)


def _route(scope: Scope) -> str:
    """The route's pattern, never the path itself: each session would become a time series."""
    own = scope.get(ROUTE)
    return str(own or getattr(scope.get("route"), "path", "unmatched"))
