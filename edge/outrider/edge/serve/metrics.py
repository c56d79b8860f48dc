"""Counts what the local endpoint does, for Prometheus at /metrics; names are the cloud's where they mean the same.

Plain numbers on the event loop, which become metrics at a scrape. No label comes from a client or a server.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.edge.drafting.calibration import LOOKUP_RANK, QUOTE_RANK
from outrider.edge.results import GenerationResult, TokenBatch
from outrider.models.tally import FAST_S, SLOW_S, CommitTimer, Tally

_COUNTERS: Final = {
    "prompt_tokens": "Tokens of prompts, passages included.",
    "passage_tokens": "Of these, tokens of passages from documents.",
    "committed": "Tokens committed by the target.",
    "proposed": "Drafted tokens that the target verified; with accepted, the acceptance rate as a ratio of sums.",
    "accepted": "Drafted tokens accepted.",
    "drafted": "Positions that the draft guessed at, of texts that ended.",
    "sent": "Guesses sent, of texts that ended.",
    "posts": "Draft messages sent, of texts that ended.",
    "failed_posts": "Draft messages lost, of texts that ended.",
    "resumed": "Sessions that were lost and opened again.",
    "draft_failures": "Texts whose draft failed; they went on without it.",
}
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "OPTIONS"})


class LocalMetrics:
    """The endpoint's counts since its start."""

    def __init__(self) -> None:
        self._created_s = time.time()
        self.counts: Counter[str] = Counter()
        self.texts: Counter[str] = Counter()  # by how they ended
        self.hits: Counter[str] = Counter()  # by what guessed
        self.requests: Counter[tuple[str, str, str]] = Counter()  # by route, method and status
        self.request_s: dict[str, Tally] = {}
        self.ttft_s = Tally(SLOW_S)
        self.gap_s = Tally(FAST_S)

    def answered(self, route: str, method: str, status: int, took_s: float) -> None:
        """Counts a request; took_s: until its response began."""
        self.requests[route, method if method in _METHODS else "other", str(status)] += 1
        self.request_s.setdefault(route, Tally(FAST_S)).observe(took_s)

    def text_timer(self) -> CommitTimer:
        """A timer for the commits of a text that begins now."""
        return CommitTimer(self.ttft_s, self.gap_s, time.monotonic())

    def committed(self, batch: TokenBatch) -> None:
        """Counts a commit."""
        self.counts["committed"] += len(batch.tokens)
        self.counts["accepted"] += batch.num_accepted
        self.counts["proposed"] += batch.num_proposed

    def ended(self, result: GenerationResult) -> None:
        """Counts a text that came to its end."""
        self.texts[result.finish_reason] += 1
        for name, count in (
            ("drafted", result.num_drafted),
            ("sent", result.num_sent),
            ("posts", result.num_posts),
            ("failed_posts", result.num_failed_posts),
            ("resumed", result.num_sessions - 1),
            ("draft_failures", int(result.draft_error is not None)),
        ):
            self.counts[name] += count
        for rank, count in result.hits.items():
            self.hits[_source(rank)] += count

    def exposition(self, accept: str, gauges: Mapping[str, tuple[str, float]]) -> tuple[bytes, str]:
        """All metrics in the text format that `accept` prefers, and its content type. gauges: help and value by name.

        Needs prometheus_client.
        """
        from prometheus_client import CollectorRegistry, ProcessCollector
        from prometheus_client.exposition import choose_encoder

        registry = CollectorRegistry()
        registry.register(_Families(lambda: self._families(gauges)))
        ProcessCollector(registry=registry)
        encoder, content_type = choose_encoder(accept)
        return encoder(registry), content_type

    def _families(self, gauges: Mapping[str, tuple[str, float]]) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        def counter(name: str, help_text: str, labels: Sequence[str], values: Mapping[Any, int]) -> Any:
            family = CounterMetricFamily(f"outrider_{name}", help_text, labels=labels)
            for key, count in values.items():
                family.add_metric(key if isinstance(key, tuple) else (key,), count, created=self._created_s)
            return family

        for name, (help_text, value) in gauges.items():
            yield GaugeMetricFamily(f"outrider_device_{name}", help_text, value=value)
        for name, help_text in _COUNTERS.items():
            yield counter(f"device_{name}", help_text, (), {(): self.counts[name]})
        yield counter("device_texts", "Texts that ended, by how.", ("reason",), self.texts)
        yield counter("device_hits", "Tokens that had been guessed, by what guessed them.", ("source",), self.hits)
        yield counter("http_requests", "HTTP requests answered.", ("route", "method", "status"), self.requests)
        request_s = HistogramMetricFamily(
            "outrider_http_request_seconds", "Time until a response began.", labels=("route",)
        )
        for route, tally in self.request_s.items():
            tally.add_to(request_s, {"route": route})
        yield request_s
        for name, help_text, tally in (
            ("ttft", "Time from a text's beginning to its first committed token.", self.ttft_s),
            ("inter_commit", "Time between two commits of a text.", self.gap_s),
        ):
            family = HistogramMetricFamily(f"outrider_{name}_seconds", help_text)
            tally.add_to(family)
            yield family


class _Families:
    """What a registry calls."""

    def __init__(self, collect: Callable[[], Iterator[Any]]) -> None:
        self.collect = collect


class CountedRequests:
    """ASGI layer that counts requests and times them until their response begins."""

    def __init__(self, app: ASGIApp, metrics: LocalMetrics) -> None:
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
                self._metrics.answered(route_of(scope), scope["method"], message["status"], took_s)
            await send(message)

        await self._app(scope, receive, note_start)


ROUTE: Final = "outrider.route"
"""Key of the ASGI scope that holds the pattern of the route that answers."""


def route_of(scope: Scope) -> str:
    """The route's pattern, never the path itself: each model's name would become a time series."""
    return str(scope.get(ROUTE, "unmatched"))


def _source(rank: int) -> str:
    return {0: "first", LOOKUP_RANK: "lookup", QUOTE_RANK: "documents"}.get(rank, "later")
