"""Attacks by many requests that cost the server little each, and by one answer that is large."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from bench.attacks.attackers import attacking, fetch
from bench.attacks.exchange import request_bytes
from bench.attacks.local import GENERATE, endpoint_and_idle, text_body
from bench.attacks.probes import MAX_GROWTH_MB, MAX_HEALTH_S, beside
from bench.attacks.subject import KEYS, Row, Server, Subject, middle, prompt_of

ATTACKER, OTHER = KEYS
POOR: Final = "key-of-few-tokens-a-minute-0003"
MAX_FIRST: Final = 2.0
_CAP_S: Final = 10.0
_NUM_FIRST: Final = 40
_ENOUGH_S: Final = 10.0
_BURST_S: Final = 1.0
"""Of a flood, before anything is measured."""
_LARGE_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class _Flood:
    """Requests, each again and again on connections of its own that stay open."""

    what: str
    num_connections: int
    requests: tuple[bytes, ...]


def floods(subject: Subject) -> Iterator[Row]:
    """Floods the server with requests that need no key or do no work; another key asks for single tokens."""
    poor = f"sha256:{hashlib.sha256(POOR.encode()).hexdigest()} name=poor tokens-per-minute=1"
    with subject.serve(keys=[*KEYS, poor]) as server:
        port = server.port
        openapi, live = (request_bytes(port, "GET", path) for path in ("/openapi.json", "/health/live"))
        metrics = request_bytes(port, "GET", "/metrics", key=ATTACKER)
        keyed = request_bytes(port, "POST", "/v1/completions", b"{}", ATTACKER)
        keyless = request_bytes(port, "GET", "/v1/models")
        spent = request_bytes(port, "POST", "/v1/completions", b'{"prompt":[5,6,7],"max_tokens":32}', POOR)
        cases = [
            _Flood("GET /openapi.json, no key", 32, (openapi,)),
            _Flood("GET /openapi.json, no key", 200, (openapi,)),
            _Flood("GET /metrics, a plain key", 4, (metrics,)),
            _Flood("GET /metrics, a plain key", 100, (metrics,)),
            _Flood("refusals (400), a plain key", 32, (keyed,)),
            _Flood("refusals (401), no key", 32, (keyless,)),
            _Flood("refusals (429), a key whose tokens are spent", 32, (spent,)),
            _Flood("GET /health/live, no key", 32, (live,)),
            _Flood("refusals (400, 401) and /health/live together", 32, (keyed, keyless, live)),
        ]
        numbers = count()
        yield from _rows("43", server, cases, lambda: ({"prompt": prompt_of(next(numbers))}, {}))


def local_floods(subject: Subject) -> Iterator[Row]:
    """The same at the local endpoint."""
    with endpoint_and_idle(subject) as (endpoint, _):
        port = endpoint.port
        bad = request_bytes(port, "POST", "/v1/completions", b"{}", ATTACKER)
        cases = [
            _Flood("the page, no key", 32, (request_bytes(port, "GET", "/"),)),
            _Flood("refusals (400), a key", 32, (bad,)),
            _Flood("GET /health/live, no key", 32, (request_bytes(port, "GET", "/health/live"),)),
        ]
        numbers = count()
        path = {"path": GENERATE}
        yield from _rows("43", endpoint, cases, lambda: (text_body(next(numbers)), path), "outrider serve: ")


def _rows(number: str, server: Server, cases: list[_Flood], newcomer: Any, where: str = "") -> Iterator[Row]:
    def firsts() -> list[float | None]:
        found: list[float | None] = []
        ends_s = time.monotonic() + _ENOUGH_S
        while len(found) < _NUM_FIRST and time.monotonic() < ends_s:
            body, options = newcomer()
            found.append(server.first_token_s(body, _CAP_S, key=OTHER, **options))
        return found

    firsts()
    for case in cases:
        idle_s = firsts()
        with ExitStack() as stack:
            for request in case.requests:
                stack.enter_context(attacking(fetch, server.port, request, case.num_connections))
            time.sleep(_BURST_S)
            flooded_s = firsts()
        idle, flooded = middle(idle_s, _CAP_S), middle(flooded_s, _CAP_S)
        yield Row(
            number,
            f"{where}{case.what}, {case.num_connections} connections that stay open: another key's first token",
            f"{flooded * 1e3:.1f} ms; without {idle * 1e3:.1f} ms ({flooded / idle:.1f}x)",
            f"at most {MAX_FIRST:g}x",
            flooded <= MAX_FIRST * idle,
            {"first_token_s": {"idle": idle_s, "flooded": flooded_s}},
        )
        server.wait_until_awake()


def large_answers(subject: Subject) -> Iterator[Row]:
    """Asks for whole answers of 64 and 128 texts of 300 tokens with the 20 likeliest of each."""
    with subject.serve(keys=KEYS) as server, subject.serve(keys=KEYS) as idle:
        plain = {"prompt": prompt_of(1), "max_tokens": 300, "ignore_eos": True, "temperature": 1.0}
        body = plain | {"logprobs": 20}
        # What the runtime takes for as many texts is not the answer's.
        server.ask("POST", "/v1/completions", plain | {"n": 128}, key=ATTACKER, timeout_s=_LARGE_S)
        for num_choices in (64, 128):
            with beside(server, idle) as seen:
                sent = body | {"n": num_choices}
                answer = server.ask("POST", "/v1/completions", sent, key=ATTACKER, timeout_s=_LARGE_S)
            size_mb = len(answer.body) / 1e6
            num_tokens = sum(len(each["logprobs"]["tokens"]) for each in answer.json.get("choices", ()))
            is_quick = seen.is_steady and seen.health.worst < MAX_HEALTH_S + seen.idle.worst
            is_whole = answer.status == 200 and num_tokens == 300 * num_choices
            yield Row(
                "44",
                f"a whole answer of {num_choices} texts of 300 tokens with 20 logprobs each: /health/live, memory",
                f"status {answer.status}, {num_tokens} tokens, {size_mb:.0f} MB in {answer.took_s:.0f} s; {seen}",
                f"complete; p99 and max under {MAX_HEALTH_S * 1e3:.0f} ms more than the idle server's; "
                f"+{MAX_GROWTH_MB:g} MB",
                is_whole and is_quick and seen.is_small,
                seen.raw,
            )
