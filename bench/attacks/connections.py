"""Attacks on the HTTP layer: huge headers, trickled ones, pipelined requests, answers that nobody reads."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from typing import Final

from bench.attacks.attackers import attacking, huge_header, pipeline, trickle
from bench.attacks.exchange import request_bytes
from bench.attacks.probes import Latency, health_of, memory_of
from bench.attacks.rows import Row
from bench.attacks.subject import KEYS, NotMeasured, Subject

MAX_HEALTH_S: Final = 0.05
MAX_GROWTH_MB: Final = 64.0
NUM_TRICKLES: Final = 1500
TRICKLE_LIMIT_S: Final = 30.0
BODY_LIMIT_S: Final = 60.0


def large_header(subject: Subject) -> Iterator[Row]:
    """Sends a header of 64 MiB, four times."""
    size = 64 << 20
    with subject.serve(keys=KEYS) as server, subject.serve(keys=KEYS) as idle:
        with memory_of(server) as memory, health_of(server) as health, health_of(idle) as beside:
            with attacking(huge_header, server.port, size) as reports:
                sent = list(iter(reports.recv, None))
    yield Row(
        "7",
        "a header of 64 MiB, no key: GET /health/live, memory",
        f"{health} (an idle server beside it: {beside}); +{memory.growth_mb:.0f} MB; it takes "
        f"{max(sent) / 2**20:.0f} MiB",
        "p99 under 50 ms; max under 50 ms more than the idle server's; +64 MB; refused before 8 MiB",
        _is_quick(health, beside) and memory.growth_mb <= MAX_GROWTH_MB and max(sent) < 8 << 20,
        {"sent": sent, "health_s": health.values, "idle_s": beside.values, "growth_mb": memory.growth_mb},
    )


def trickled_headers(subject: Subject) -> Iterator[Row]:
    """Opens 1,500 connections that send a header line every two seconds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < NUM_TRICKLES + 500:
        if hard < NUM_TRICKLES + 500:
            raise NotMeasured(f"this system allows {hard} open files; 1,500 connections need more")
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    head = b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    with subject.serve(keys=KEYS) as server, health_of(server, reconnects=True, timeout_s=5.0) as health:
        with attacking(trickle, server.port, [head] * NUM_TRICKLES, b"X-A: a\r\n", 2.0) as reports:
            open_after = list[tuple[float, int]]()
            while not open_after or (open_after[-1][0] < TRICKLE_LIMIT_S + 3.0 and open_after[-1][1]):
                open_after.append(reports.recv())
    closed = next((f"all closed after {at:.0f} s" for at, count in open_after if not count), None)
    yield Row(
        "8",
        f"{NUM_TRICKLES} connections that trickle headers, no key",
        f"{closed or f'{open_after[-1][1]} open after {open_after[-1][0]:.0f} s'}; /health/live on new connections: "
        f"{health}",
        "all closed or refused within 30 s (and 3 s); health always answers, p99 under 250 ms",
        closed is not None and not health.num_failures and health.high < 0.25,
        {"open_after": open_after, "health_s": health.values, "failures": health.num_failures},
    )


def trickled_bodies(subject: Subject) -> Iterator[Row]:
    """Opens 100 connections with a key whose bodies trickle: a byte every two seconds."""
    open_after = list[tuple[float, int]]()
    with subject.serve(keys=KEYS) as server:
        head = request_bytes(server.port, "POST", "/v1/completions", b" " * 1000, KEYS[0])[:-1000]
        with attacking(trickle, server.port, [head] * 100, b" ", 2.0) as reports:
            while not open_after or (open_after[-1][0] < BODY_LIMIT_S + 3.0 and open_after[-1][1]):
                open_after.append(reports.recv())
    closed = next((f"all closed after {at:.0f} s" for at, count in open_after if not count), None)
    yield Row(
        "8",
        "100 connections that trickle bodies",
        closed or f"{open_after[-1][1]} open after {open_after[-1][0]:.0f} s",
        "all closed within 60 s (and 3 s)",
        closed is not None,
        {"open_after": open_after},
    )


def pipelined_requests(subject: Subject) -> Iterator[Row]:
    """Pipelines POSTs on one connection for ten seconds, without a key and without reading the answers."""
    yield from _pipelined(subject, "pipelined POSTs on one connection, no key", "POST", "/v1/sessions", b"{}", 1)


def unread_answers(subject: Subject) -> Iterator[Row]:
    """Asks on 64 connections for the largest answer that needs no key, again and again, and reads nothing."""
    yield from _pipelined(subject, "64 connections that never read their answers", "GET", "/openapi.json", b"", 64)


def _pipelined(subject: Subject, what: str, method: str, path: str, body: bytes, connections: int) -> Iterator[Row]:
    with subject.serve(keys=KEYS) as server, subject.serve(keys=KEYS) as idle:
        block = request_bytes(server.port, method, path, body) * 500
        with memory_of(server) as memory, health_of(server) as health, health_of(idle) as beside:
            with attacking(pipeline, server.port, block, connections, False):
                time.sleep(10.0)
    yield Row(
        "9",
        what,
        f"+{memory.growth_mb:.0f} MB in 10 s; /health/live: {health} (an idle server beside it: {beside})",
        "+64 MB; p99 under 50 ms more than the idle server's",
        memory.growth_mb <= MAX_GROWTH_MB and health.high < MAX_HEALTH_S + beside.high and not health.num_failures,
        {"growth_mb": memory.growth_mb, "health_s": health.values, "idle_s": beside.values},
    )


def _is_quick(health: Latency, beside: Latency) -> bool:
    return health.high < MAX_HEALTH_S and health.worst < MAX_HEALTH_S + beside.worst and not health.num_failures
