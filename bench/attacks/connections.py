"""Attacks on the HTTP layer of a server and of the local endpoint: trickled headers, pipelined requests,
answers and streams left unread. That huge headers are refused is said by tests.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator
from typing import Any, Final

from bench.attacks.attackers import attacking, hold, pipeline, trickle
from bench.attacks.local import ATTACKER, GENERATE, WELL, endpoint_and_idle, text_body
from bench.attacks.probes import beside, health_of
from bench.attacks.subject import COMPLETIONS, KEYS, NotMeasured, Row, Server, Subject

NUM_TRICKLES: Final = 1500
TRICKLE_LIMIT_S: Final = 30.0
NUM_BODIES: Final = 100


def trickled_requests(subject: Subject) -> Iterator[Row]:
    """Opens 1,500 connections that send a header line every two seconds, then 100 whose bodies trickle likewise."""
    _require_open_files(NUM_TRICKLES + 500)
    with subject.serve(keys=KEYS) as server:
        yield from _trickles("8", server)


def pipelined_requests(subject: Subject) -> Iterator[Row]:
    """Pipelines POSTs on one connection for ten seconds, without a key and without reading the answers."""
    with subject.serve(keys=KEYS) as server, subject.serve(keys=KEYS) as idle:
        request = server.request("POST", "/v1/sessions", b"{}")
        yield _pipelines("9", server, idle, "pipelined POSTs on one connection, no key", request, 1)


def unread_answers(subject: Subject) -> Iterator[Row]:
    """Asks on 64 connections for the largest answer that needs no key, again and again, and reads nothing."""
    with subject.serve(keys=KEYS) as server, subject.serve(keys=KEYS) as idle:
        request = server.request("GET", "/openapi.json")
        yield _pipelines("9", server, idle, "64 connections that never read their answers", request, 64)


def local_connections(subject: Subject) -> Iterator[Row]:
    """Trickles headers and bodies, pipelines answers that need no key, and leaves streams unread."""
    _require_open_files(NUM_TRICKLES + 500)
    with endpoint_and_idle(subject) as (endpoint, idle):
        yield from _trickles("26", endpoint)
        script = endpoint.request("GET", "/page/page.js")
        for what, count in (
            ("pipelined GETs of the page's script on one connection, no key", 1),
            ("64 connections that never read the page's script, no key", 64),
        ):
            endpoint.wait_until_awake()
            yield _pipelines("26", endpoint, idle, what, script, count)
        endpoint.wait_until_awake()
        body = json.dumps(text_body(1, 1500)).encode()
        request = endpoint.request("POST", GENERATE, body, ATTACKER)
        with beside(endpoint, idle) as seen, attacking(hold, endpoint.port, request, 64):
            time.sleep(10.0)
    yield Row("26", "64 unread streams of the page", str(seen), WELL, seen.is_well, seen.raw)


def _trickles(number: str, server: Server) -> Iterator[Row]:
    """Trickled headers and bodies at a server with KEYS."""
    header = b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    body = server.request("POST", COMPLETIONS, b" " * 1000, KEYS[0])[:-1000]
    with (
        attacking(trickle, server.port, [body] * NUM_BODIES, b" ", 2.0) as bodies,
        health_of(server, reconnects=True, timeout_s=5.0) as health,
        attacking(trickle, server.port, [header] * NUM_TRICKLES, b"X-A: a\r\n", 2.0) as headers,
    ):
        open_headers = _open_after(headers)
        open_bodies = _open_after(bodies)
    yield Row(
        number,
        f"{NUM_TRICKLES} connections that trickle headers, no key",
        f"{_closed(open_headers)}; /health/live on new connections: {health}",
        "all closed or refused within 30 s (and 3 s); health always answers, p99 under 250 ms",
        not open_headers[-1][1] and not health.num_failures and health.high < 0.25,
        {"open_after": open_headers, "health_s": health.values, "failures": health.num_failures},
    )
    yield Row(
        number,
        f"{NUM_BODIES} connections with a key that trickle bodies",
        _closed(open_bodies),
        "all closed or refused within 30 s (and 3 s)",
        not open_bodies[-1][1],
        {"open_after": open_bodies},
    )


def _require_open_files(count: int) -> None:
    """Lets this process and its children open as many files. Raises NotMeasured where the system does not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < count:
        raise NotMeasured(f"this system allows {hard} open files; the row needs {count}")
    if 0 <= soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def _open_after(reports: Any) -> list[tuple[float, int]]:
    """(seconds, connections still open), until none is or the limit has passed."""
    found: list[tuple[float, int]] = []
    while not found or (found[-1][0] < TRICKLE_LIMIT_S + 3.0 and found[-1][1]):
        found.append(reports.recv())
    return found


def _closed(open_after: list[tuple[float, int]]) -> str:
    at_s, count = open_after[-1]
    return f"{count} open after {at_s:.0f} s" if count else f"all closed after {at_s:.0f} s"


def _pipelines(number: str, server: Server, idle: Server, what: str, request: bytes, connections: int) -> Row:
    """Pipelines a request on connections for ten seconds, without reading the answers."""
    with beside(server, idle) as seen, attacking(pipeline, server.port, request * 500, connections, False):
        time.sleep(10.0)
    limit = "+64 MB; p99 under 50 ms more than the idle server's"
    return Row(number, what, f"{seen} in 10 s", limit, seen.is_small and seen.is_steady, seen.raw)
