"""Attacks the HTTP layer of the local endpoint: trickled requests, unread answers and streams."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Final

from bench.attacks.attackers import attacking, hold
from bench.attacks.connections import NUM_TRICKLES, pipelines, require_open_files, trickles
from bench.attacks.exchange import request_bytes
from bench.attacks.local import ATTACKER, GENERATE, WELL, beside, endpoint_and_idle, text_body
from bench.attacks.rows import Row
from bench.attacks.subject import Server, Subject

_SCRIPT: Final = "/page/page.js"


def local_connections(subject: Subject) -> Iterator[Row]:
    """Trickles headers and bodies, pipelines answers that need no key, and leaves streams unread."""
    require_open_files(NUM_TRICKLES + 500)
    with endpoint_and_idle(subject) as (endpoint, idle):
        yield from trickles("26", endpoint)
        for what, count in (
            ("pipelined GETs of the page's script on one connection, no key", 1),
            ("64 connections that never read the page's script, no key", 64),
        ):
            endpoint.wait_until_awake()
            yield pipelines("26", endpoint, idle, what, request_bytes(endpoint.port, "GET", _SCRIPT), count)
        endpoint.wait_until_awake()
        yield _unread_streams(endpoint, idle)


def _unread_streams(endpoint: Server, idle: Server) -> Row:
    body = json.dumps(text_body(1, 1500)).encode()
    request = request_bytes(endpoint.port, "POST", GENERATE, body, ATTACKER)
    with beside(endpoint, idle) as seen, attacking(hold, endpoint.port, request, 64):
        time.sleep(10.0)
    return Row("26", "64 unread streams of the page", str(seen), WELL, seen.is_well, seen.raw)
