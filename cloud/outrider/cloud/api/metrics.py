"""Collects what Prometheus reads at /metrics. docs/metrics.md lists all of it; a test compares the two.

Names are vLLM's where vLLM has the same, after "outrider_". The engine's numbers come from its snapshot at each scrape.
Only what the HTTP side alone sees is recorded as it happens: requests, dropped drafts, times of commits. These are
recorded thousands of times a second, all on the event loop, so they are plain numbers that become metrics at a scrape.

Another part of the server adds its own with `add_counter`, `add_counts`, `add_gauge` or `add_families`. No client makes
a label.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import Scope

from outrider.cloud.api.audit import AuditLog
from outrider.cloud.distributions import MAX_POSITIONS, AdapterCounts, Distributions
from outrider.cloud.recent.store import RecentStats
from outrider.cloud.seam import EngineStats
from outrider.models.http.limits import Pacer
from outrider.models.process.tally import RequestTally, histogram, text_format

_EXPOSITIONS_AT_ONCE: Final = 20
"""So that who reads counters before and after something finds both."""
_LEAST_POSITIONS: Final = 16
"""Drafted positions that are always shown; more once they were seen."""


class Metrics(RequestTally):
    """The server's metrics, in a registry of their own, so that one process can hold two servers.

    num_dropped: drafts that were not taken because a budget was used up, by its name.
    """

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        num_sessions: Callable[[], int],
        server: Mapping[str, str] | None = None,
        max_age_s: float = 1.0,
    ) -> None:
        """server: labels of outrider_server_info, such as version and model_name. max_age_s: of an exposition where
        many ask; 0: each asks for a new one.
        """
        super().__init__()
        self._pacer = Pacer(1.0 / max_age_s, _EXPOSITIONS_AT_ONCE) if max_age_s else None
        self._expositions: dict[str, asyncio.Task[bytes]] = {}  # the newest, by content type
        self._registry = CollectorRegistry()
        self.add_families(lambda: _engine_families(stats()))
        ProcessCollector(registry=self._registry)
        self.add_families(self.request_counters)
        self.add_families(self.times)
        if server:
            info = InfoMetricFamily("outrider_server", "What is served; always 1.", value=dict(server))
            self.add_families(lambda: [info])
        self.add_gauge("sessions_open", "Open event streams.", num_sessions)
        self.num_dropped = self.add_counter(
            "drafts_dropped",
            "Draft messages that were not taken because a budget was used up.",
            "budget",
            ("session", "owner"),
        )

    def add_counter(self, name: str, help_text: str, label: str, values: Sequence[str]) -> dict[str, int]:
        """A new counter `outrider_NAME_total`: its numbers by the values of its label, to be counted up on the event
        loop. values: all that the label may be.
        """
        counts = dict.fromkeys(values, 0)
        self.add_counts(name, help_text, (label,), lambda: {(value,): n for value, n in counts.items()})
        return counts

    def add_counts(
        self, name: str, help_text: str, labels: Sequence[str], read: Callable[[], Mapping[tuple[str, ...], int]]
    ) -> None:
        """A new counter `outrider_NAME_total` that another part counts. read: the counts by the labels' values."""
        self.add_families(lambda: [self.counter(name, help_text, labels, read())])

    def add_gauge(self, name: str, help_text: str, read: Callable[[], float | None]) -> None:
        """A new gauge `outrider_NAME`. read: called at each scrape; None leaves the gauge out."""

        def collect() -> list[Metric]:
            value = read()
            return [] if value is None else [GaugeMetricFamily(f"outrider_{name}", help_text, value=value)]

        self.add_families(collect)

    def add_families(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """New metrics of any kind. collect: called at each scrape."""
        self._registry.register(Families(collect))

    async def exposition(self, accept: str) -> tuple[bytes, str]:
        """All metrics in the text format that `accept` prefers, and its content type.

        Written in a thread: it takes the loop 1 ms, not 20. A flood of those who ask gets one each `max_age_s`.
        """
        encoder, content_type = text_format(accept)
        is_due = self._pacer is None or self._pacer.wait_s(b"", 0.0) is not None
        if is_due or content_type not in self._expositions:
            families = self.families()  # collected on the loop
            written = asyncio.to_thread(encoder, Families(lambda: families))
            self._expositions[content_type] = asyncio.create_task(written)
        return await asyncio.shield(self._expositions[content_type]), content_type

    def families(self) -> list[Metric]:
        """All metrics as they are now."""
        return list(self._registry.collect())


class Families(Collector):
    """Metrics of any kind. collect: called at each scrape."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()

    def describe(self) -> list[Metric]:
        return []  # else `register` would scrape once, before the engine is there


def _engine_families(stats: EngineStats) -> Iterator[Metric]:
    for name, help_text, value in _shown(stats):
        yield GaugeMetricFamily(name, help_text, value=value)
    yield GaugeMetricFamily(
        "outrider_kv_cache_usage_perc",
        "Share of the KV cache's blocks that sequences hold: 1 is full.",
        value=1.0 - stats.free_blocks / max(1, stats.num_blocks),
    )
    for name, help_text, value in _shown(stats.totals):
        yield CounterMetricFamily(name, help_text, value=value)
    yield from _distribution_families(stats.distributions)


def _distribution_families(found: Distributions) -> Iterator[Metric]:
    ends = CounterMetricFamily("outrider_request_success", "Sequences that ended, by how.", labels=("finished_reason",))
    for reason, count in found.ends.items():
        ends.add_metric((reason,), count)
    yield ends
    tested = found.tested_by_position
    num_shown = max(_LEAST_POSITIONS, MAX_POSITIONS - next((i for i, n in enumerate(reversed(tested)) if n), 64))
    for name, help_text, counts in (
        (
            "accepted",
            "Passes that accepted a drafted token at this position; 0 is the first.",
            found.accepted_by_position,
        ),
        ("tested", "Passes that tested a drafted token at this position: those before it were accepted.", tested),
    ):
        family = CounterMetricFamily(f"outrider_spec_decode_num_{name}_tokens_per_pos", help_text, labels=("position",))
        for position, count in enumerate(counts[:num_shown]):
            family.add_metric((str(position),), count)
        yield family
    yield from _adapter_families(found.adapters)
    for name, help_text, tally in (
        ("engine_batch_size", "Sequences of a step.", found.batch_size),
        ("iteration_tokens", "Tokens of a step.", found.step_tokens),
        ("engine_step_duration_seconds", "Time of a step, in the model and around it.", found.step_s),
        ("request_queue_time_seconds", "From a sequence's submission until it first has its place.", found.queue_s),
        ("draft_wait_seconds", "Waits of sequences for drafts: patience that was used.", found.wait_s),
        (
            "draft_lag_seconds",
            "From a commit after which little was pending to the first draft that knows of it.",
            found.lag_s,
        ),
    ):
        yield histogram(name, help_text, tally)


def _adapter_families(found: Mapping[str, AdapterCounts]) -> Iterator[Metric]:
    for field_name, name, help_text in (
        ("committed", "generation_tokens", "Tokens committed with this adapter."),
        ("drafts", "spec_decode_num_drafts", "Commits with this adapter that had drafted tokens verified."),
        ("proposed", "spec_decode_num_draft_tokens", "Drafted tokens verified with this adapter."),
        ("accepted", "spec_decode_num_accepted_tokens", "Drafted tokens accepted with this adapter."),
    ):
        family = CounterMetricFamily(f"outrider_adapter_{name}", help_text, labels=("adapter",))
        for adapter, counts in found.items():
            family.add_metric((adapter,), getattr(counts, field_name))
        if found:
            yield family


def file_families(
    tally: RequestTally, reloads: Mapping[tuple[str, str], int], audit: AuditLog | None
) -> Iterator[Metric]:
    """The metrics of files that are read again, and of the audit log."""
    counts: dict[tuple[str, ...], int] = dict(reloads.items())
    yield tally.counter("reloads", "Files that were read again after a change.", ("file", "result"), counts)
    if audit is not None:
        help_text = "Lines that the audit log could not write."
        yield tally.counter("audit_lines_lost", help_text, (), {(): audit.num_lost})


def recent_families(stats: RecentStats) -> Iterator[Metric]:
    """The metrics of the store of recent texts."""
    for name, help_text, value in _shown(stats, "recent_"):
        yield GaugeMetricFamily(name, help_text, value=value)
    for name, help_text, value in _shown(stats.counts, "recent_"):
        yield CounterMetricFamily(name, help_text, value=value)


def _shown(numbers: Any, prefix: str = "") -> Iterator[tuple[str, str, float]]:
    """Name, help text and value of each field that has a help text, and a value now."""
    for each in fields(numbers):
        value = getattr(numbers, each.name)
        if "help" in each.metadata and value is not None:
            name = each.metadata.get("name", prefix + each.name)
            yield f"outrider_{name}", each.metadata["help"], value / 1e3 if each.name.endswith("_ms") else value


def route_of(scope: Scope) -> str:
    """The route's pattern, never the path itself: each session would become a time series."""
    return str(getattr(scope.get("route"), "path", "unmatched"))
