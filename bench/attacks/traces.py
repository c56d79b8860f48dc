"""Attacks by trace headers: contexts that ask for a span of every request, with state and baggage of any size."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Final

from bench.attacks.attackers import attacking, received, repeat
from bench.attacks.exchange import HOST, OTHER_ADDRESS, NotMeasured, request_bytes
from bench.attacks.probes import memory_of
from bench.attacks.subject import Row, Server, Subject, prompt_of

ATTACK_S: Final = 5.0
MAX_GROWTH_MB: Final = 16.0
BURST, PER_S = 20, 5
"""Spans of one owner that docs/metrics.md allows."""
NUM_OWNERS: Final = 2
"""The attacker and the four others: requests without a context may be recorded, too."""


def hostile_contexts(subject: Subject) -> Iterator[Row]:
    """Floods a server, whose collector never answers, with requests that ask to be traced; four sessions run."""
    with socket.create_server((HOST, 0), backlog=64) as collector:
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{HOST}:{collector.getsockname()[1]}"}
        traced = replace(subject, environment=subject.environment | variables)
        with traced.serve(bundle=subject.bundles[0]) as server:
            yield from _measured(server)


def _measured(server: Server) -> Iterator[Row]:
    rates: dict[bool, list[float]] = {False: [], True: []}
    growth_mb = {False: 0.0, True: 0.0}
    statuses: set[int] = set()
    began_s = time.monotonic()
    for is_traced in (False, True) * 3:
        server.wait_until_idle()
        bodies = [{"prompt": prompt_of(i), "max_tokens": 900, "ignore_eos": True} for i in range(4)]
        requests = [_request(server.port, index, is_traced=is_traced) for index in range(64)]
        with (
            server.crowd(bodies, keeps=True, address=OTHER_ADDRESS) as crowd,
            memory_of(server) as memory,
            attacking(repeat, server.port, requests, 2, 20.0) as reports,
        ):
            rates[is_traced].append(crowd.tokens_per_s(ATTACK_S))
            statuses.update(received(reports))
        growth_mb[is_traced] = max(growth_mb[is_traced], memory.growth_mb)
    spans = _spans(server)
    recorded, allowed = sum(spans), len(spans) * NUM_OWNERS * (BURST + PER_S * (time.monotonic() - began_s))
    without, during = median(rates[False]), median(rates[True])
    failures = sorted(status for status in statuses if status >= 500)
    yield Row(
        "35",
        "requests that ask to be traced, with 12 KB of state and baggage, and a dead collector: four others' tokens/s",
        f"{during:.0f}; without these headers {without:.0f} ({without / max(during, 1e-9):.2f}x slower)"
        + (f"; statuses {failures}" if failures else ""),
        "at most 1.2x slower; no 5xx",
        1.2 * during >= without and not failures,
        {"tokens_per_s": {"without": rates[False], "during": rates[True]}, "statuses": sorted(statuses)},
    )
    yield Row(
        "35",
        "the same: spans recorded, memory",
        f"{recorded:.0f} spans; +{growth_mb[True]:.0f} MB, without these headers +{growth_mb[False]:.0f} MB",
        f"{allowed:.0f} spans; {MAX_GROWTH_MB:.0f} MB more than without",
        recorded <= allowed and growth_mb[True] <= growth_mb[False] + MAX_GROWTH_MB,
        {"recorded": recorded, "growth_mb": [growth_mb[False], growth_mb[True]]},
    )


def _request(port: int, index: int, *, is_traced: bool) -> bytes:
    body = json.dumps({"prompt": prompt_of(200 + index), "max_tokens": 1}).encode()
    plain = request_bytes(port, "POST", "/v1/completions", body)
    if not is_traced:
        return plain
    head, _, rest = plain.partition(b"\r\n")
    lines = [
        head,
        f"traceparent: 00-{index + 1:032x}-{index + 1:016x}-01".encode(),
        b"tracestate: " + b"a=" + b"x" * 6000,
        b"baggage: " + b"b=" + b"y" * 6000,
    ]
    return b"\r\n".join([*lines, rest])


def _spans(server: Server) -> list[float]:
    """Spans recorded so far: one number, or one of each replica, which has budgets of its own."""
    found = server.metrics("outrider_trace_spans_total", 'outcome="recorded"')
    if not found:
        raise NotMeasured("/metrics counts no spans: this version makes none")
    return found
