"""What Prometheus reads at /metrics.

The engine's own numbers are taken from its snapshot when they are asked for; only what the HTTP side alone can see
(requests, time to first token, time between commits) is recorded as it happens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.cloud.engine.types import EngineStats

ROUTE: Final = "outrider.route"
"""Key of the ASGI scope under which a route below the framework names itself."""

_FAST_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SLOW_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

_GAUGES: Final = {
    "running": "Sequences in the batch.",
    "queued": "Sequences that wait for admission.",
    "parked": "Prefixes kept for the next verify call.",
    "parked_blocks": "Blocks that parked prefixes hold: not free, and given up when a sequence needs them.",
    "num_blocks": "Blocks of the KV cache.",
    "free_blocks": "Blocks that a new sequence could have.",
    "patience_ms": "Longest wait for a draft that the engine now chooses, milliseconds.",
    "step_ms": "Measured decode step with nothing drafted, milliseconds.",
    "draft_token_ms": "Measured extra time of a drafted token in a step, milliseconds.",
}
_COUNTERS: Final = {
    "steps_total": "Engine steps.",
    "step_tokens_total": "Tokens run through the model.",
    "committed_total": "Tokens committed.",
    "proposed_total": "Drafted tokens verified; with accepted, the acceptance rate as a ratio of sums.",
    "accepted_total": "Drafted tokens that were right.",
    "passes_total": "Target passes that committed tokens.",
    "preempted_total": "Sequences whose blocks were taken back for older ones.",
    "finished_total": "Sequences that ended, however they ended.",
    "faults_total": "Steps that the model or the engine failed on; the log says where.",
    "prefix_hit_tokens_total": "Prompt tokens whose cache was shared.",
    "waited_s_total": "Seconds that sequences waited for drafts.",
    "model_s_total": "Seconds in the model.",
    "overhead_s_total": "Seconds of engine steps outside the model.",
}


class Metrics:
    """The server's metrics, in a registry of their own, so that two servers in one process do not meet."""

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
        """A timer for one sequence; arrived_s: when its request came, by the monotonic clock."""
        return CommitTimer(self._ttft_s, self._gap_s, arrived_s)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """All metrics in the text format that `accept` prefers, and that format's content type."""
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
        for name, text in _GAUGES.items():
            value = getattr(stats, name)
            if value is not None:
                yield GaugeMetricFamily(f"outrider_engine_{name}", text, value=value)
        for name, text in _COUNTERS.items():
            plain = name.removesuffix("_total").replace("_s", "_seconds") if "_s_" in name else name
            yield CounterMetricFamily(f"outrider_engine_{plain}", text, value=getattr(stats, name))


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
    """The route's pattern, never the path itself: that would make a series of every session."""
    own = scope.get(ROUTE)
    return str(own or getattr(scope.get("route"), "path", "unmatched"))
