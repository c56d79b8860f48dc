"""Counts what the local endpoint does, for Prometheus at /metrics; names are the cloud's where they mean the same.

Plain numbers on the event loop, which become metrics at a scrape. No label comes from a client or a server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from starlette.types import Scope

from outrider.edge.drafting.calibration import LOOKUP_RANK, QUOTE_RANK
from outrider.edge.results import GenerationResult, TokenBatch
from outrider.models.process.tally import RequestTally, text_format

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


class LocalMetrics(RequestTally):
    """The endpoint's counts since its start."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.texts: Counter[str] = Counter()  # by how they ended
        self.hits: Counter[str] = Counter()  # by what guessed

    def committed(self, batch: TokenBatch) -> None:
        """Counts a commit."""
        self.counts["committed"] += len(batch.tokens)
        self.counts["accepted"] += batch.num_accepted
        self.counts["proposed"] += batch.num_proposed

    def ended(self, result: GenerationResult) -> None:
        """Counts a text that came to its end."""
        self.texts[result.finish_reason] += 1
        self.counts.update(
            drafted=result.num_drafted,
            sent=result.num_sent,
            posts=result.num_posts,
            failed_posts=result.num_failed_posts,
            resumed=result.num_sessions - 1,
            draft_failures=int(result.draft_error is not None),
        )
        for rank, count in result.hits.items():
            self.hits[_source(rank)] += count

    def exposition(self, accept: str, gauges: Mapping[str, tuple[str, float]]) -> tuple[bytes, str]:
        """All metrics in the text format that `accept` prefers, and its content type. gauges: help and value by name.

        Needs prometheus_client.
        """
        from prometheus_client import CollectorRegistry, ProcessCollector

        registry = CollectorRegistry()
        registry.register(_Families(lambda: self._families(gauges)))
        ProcessCollector(registry=registry)
        encoder, content_type = text_format(accept)
        return encoder(registry), content_type

    def _families(self, gauges: Mapping[str, tuple[str, float]]) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        for name, (help_text, value) in gauges.items():
            yield GaugeMetricFamily(f"outrider_device_{name}", help_text, value=value)
        for name, help_text in _COUNTERS.items():
            yield self.counter(f"device_{name}", help_text, (), {(): self.counts[name]})
        for name, help_text, label, counts in (
            ("texts", "Texts that ended, by how.", "reason", self.texts),
            ("hits", "Tokens that had been guessed, by what guessed them.", "source", self.hits),
        ):
            yield self.counter(f"device_{name}", help_text, (label,), {(key,): n for key, n in counts.items()})
        yield from self.request_counters()
        yield from self.times()


class _Families(NamedTuple):
    """What a registry calls."""

    collect: Callable[[], Iterator[Any]]


ROUTE: Final = "outrider.route"
"""Key of the ASGI scope that holds the pattern of the route that answers."""


def route_of(scope: Scope) -> str:
    """The route's pattern, never the path itself: each model's name would become a time series."""
    return str(scope.get(ROUTE, "unmatched"))


def _source(rank: int) -> str:
    return {0: "first", LOOKUP_RANK: "lookup", QUOTE_RANK: "documents"}.get(rank, "later")
