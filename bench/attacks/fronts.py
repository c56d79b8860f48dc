"""Attacks on what stands beside a server: the front of replicas by scrapes, a cascade by a target that stops, and a
collector of traces that never answers.
"""

from __future__ import annotations

import hashlib
import json
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from bench.attacks.attackers import attacking, received, repeat
from bench.attacks.exchange import HOST, OTHER_ADDRESS, request_bytes
from bench.attacks.probes import MAX_HEALTH_S, health_of, memory_of
from bench.attacks.subject import KEYS, Crowd, NotMeasured, Row, Subject, prompt_of, rates_of, slowed

CLIENT, SCRAPER = KEYS
NUM_SCRAPERS: Final = 4
NUM_TEXTS: Final = 32
STOPPED_S: Final = 5.0


def replicas_front(subject: Subject) -> Iterator[Row]:
    """Runs two replicas behind a front; floods of /metrics with a key for metrics only, beside such of /health/live."""
    if "--ray" not in subject.options:
        options = (*subject.options, "--ray", "--replicas", "2")
        subject = replace(subject, options=options, start_s=max(subject.start_s, 400.0))
    digest = hashlib.sha256(SCRAPER.encode()).hexdigest()
    statuses: list[int] = []
    with subject.serve(keys=[CLIENT, f"sha256:{digest} name=scraper scopes=metrics"]) as server:

        @contextmanager
        def scraping(is_scraped: bool) -> Iterator[None]:
            requests = [server.request("GET", "/metrics" if is_scraped else "/health/live", key=SCRAPER)]
            with attacking(repeat, server.port, requests, NUM_SCRAPERS, 20.0) as reports:
                yield
                statuses.extend(received(reports) if is_scraped else ())

        rates = rates_of(server, scraping, key=CLIENT)
    yield slowed(
        "37",
        f"{NUM_SCRAPERS} connections ask for /metrics all the while, with a key for metrics only, or for /health/live",
        rates,
        f"; {len(statuses)} answers",
        most=1.5,
        limit="; all 200",
        is_kept=set(statuses) == {200},
        num_answers=len(statuses),
    )


def hostile_contexts(subject: Subject) -> Iterator[Row]:
    """Floods a server, whose collector never answers, with requests that ask to be traced. How many spans are recorded,
    and how large they may be, is said by tests.
    """
    statuses: set[int] = set()
    growth_mb = {False: 0.0, True: 0.0}
    with socket.create_server((HOST, 0), backlog=64) as collector:
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{HOST}:{collector.getsockname()[1]}"}
        traced = replace(subject, environment=subject.environment | variables)
        with traced.serve(bundle=subject.bundles[0]) as server:

            @contextmanager
            def asking(is_traced: bool) -> Iterator[None]:
                requests = [_request(server.port, index, is_traced=is_traced) for index in range(64)]
                with memory_of(server) as memory, attacking(repeat, server.port, requests, 2, 20.0) as reports:
                    yield
                    statuses.update(received(reports))
                growth_mb[is_traced] = max(growth_mb[is_traced], memory.growth_mb)

            rates = rates_of(server, asking, times=3, address=OTHER_ADDRESS)
            if not sum(server.metrics("outrider_trace_spans_total", 'outcome="recorded"')):
                raise NotMeasured("/metrics counts no spans: this version makes none")
    failures = sorted(status for status in statuses if status >= 500)
    extra_mb = growth_mb[True] - growth_mb[False]
    yield slowed(
        "35",
        "requests that ask to be traced, with 12 KB of state and baggage, and a dead collector; memory",
        rates,
        f"; {extra_mb:+.0f} MB to that without these headers" + (f"; statuses {failures}" if failures else ""),
        limit="; 16 MB more; no 5xx",
        is_kept=extra_mb <= 16.0 and not failures,
        growth_mb=list(growth_mb.values()),
    )


def _request(port: int, index: int, *, is_traced: bool) -> bytes:
    body = json.dumps({"prompt": prompt_of(200 + index), "max_tokens": 1}).encode()
    head, _, rest = request_bytes(port, "POST", "/v1/completions", body).partition(b"\r\n")
    context = [f"traceparent: 00-{index + 1:032x}-{index + 1:016x}-01".encode()]
    context += [b"tracestate: a=" + b"x" * 6000, b"baggage: b=" + b"y" * 6000]
    return b"\r\n".join([head, *(context if is_traced else ()), rest])


def cascades(subject: Subject) -> Iterator[Row]:
    """A mid before a target, both of the reference bundle; the target stops in mid-text."""
    with subject.serve() as target, subject.serve("--upstream", target.url, keys=KEYS) as mid:
        # Sampled: a greedy text may repeat itself, is drafted from itself, and is over before the last has begun.
        texts: dict[str, Any] = {"max_tokens": 900, "temperature": 1.0, "ignore_eos": True}
        bodies = [{"prompt": prompt_of(10 + i, 20), "seed": i, **texts} for i in range(NUM_TEXTS)]
        with mid.crowd(bodies, key=KEYS[0]) as crowd:
            if not crowd.wait(lambda: crowd.num_running() == NUM_TEXTS, 60.0):
                raise NotMeasured(f"{crowd.num_running()} of {NUM_TEXTS} texts ran at once, {_ends(crowd)}")
            target.signal(signal.SIGSTOP)
            try:
                time.sleep(0.5)  # what was on its way has arrived
                before = crowd.num_commits()
                with health_of(mid) as latency:
                    crowd.wait(lambda: False, STOPPED_S)
                after = crowd.num_commits()
            finally:
                target.signal(signal.SIGCONT)
            resumed = crowd.wait(lambda: crowd.num_commits() > after, 60.0)
            ends = _ends(crowd)
    p99 = latency.high
    yield Row(
        "39",
        f"{NUM_TEXTS} texts whose target stops for {STOPPED_S:g} s: GET /health/live of the mid-size verifier, and "
        "what is committed",
        f"p99 {p99 * 1e3:.0f} ms; {after - before} commits meanwhile; goes on: {'yes' if resumed else 'no'}",
        f"under {MAX_HEALTH_S * 1e3:.0f} ms, 0 commits, goes on",
        p99 < MAX_HEALTH_S and after == before and resumed,
        {"p99_s": p99, "commits": after - before, "resumed": resumed, "ends": ends},
    )


def _ends(crowd: Crowd) -> str:
    """How the texts ended so far."""
    refusals = sorted({stream.refusal for stream in crowd.streams if stream.refusal})
    return f"{sum(stream.is_over for stream in crowd.streams)} are over; refused: {refusals}"
