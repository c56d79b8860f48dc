"""Attacks the local endpoint by texts: all that one client can open, unread, and with a long artificial round trip; and
while its verifier is slow.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.attacks.attackers import attacking, hold, repeat
from bench.attacks.false_verifiers import relay_to
from bench.attacks.local import (
    ATTACKER,
    CHAT,
    GENERATE,
    HONEST,
    MAX_OWN,
    MIN_RATE,
    PLACES,
    STEP_MS,
    WELL,
    endpoint_and_idle,
    honest_texts,
    text_body,
    texts_of,
    warm_up,
)
from bench.attacks.probes import beside
from bench.attacks.subject import COMPLETIONS, KEYS, NotMeasured, Row, Server, Subject, middle, seconds, wait_for
from bench.changed_bundle import TURNS, change_bundle

CAP_S: Final = 20.0
_NUM_CONNECTIONS: Final = 64
_EXTRA_MS: Final = 0.05
_DELAY_MS: Final = 500.0
_LONG: Final[dict[str, Any]] = {"prompt": [1 + i % 4000 for i in range(900)], "max_tokens": 1000, "stream": True}
_ROUNDS: Final = 2
_MIN_RATE: Final = 0.5
_DELAY_S: Final = 10.0
_NUM_CALLERS: Final = 200
_MAX_UPSTREAM: Final = 16
"""Questions about the model that may be at the verifier at a time, however many clients ask."""


def greedy_texts(subject: Subject) -> Iterator[Row]:
    """One key asks for long texts on 64 connections and reads none; another key's texts run, and new ones begin."""
    rates: dict[str, list[float]] = {"alone": [], "beside": []}
    took: dict[str, list[float | None]] = {"alone": [], "beside": []}
    with endpoint_and_idle(subject, extra_ms=_EXTRA_MS) as (endpoint, idle), ExitStack() as stack:
        _read_long_texts(endpoint)
        seen = stack.enter_context(beside(endpoint, idle))
        request = endpoint.request("POST", COMPLETIONS, _LONG, ATTACKER)
        for number in range(_ROUNDS):
            _measure(endpoint, rates["alone"], took["alone"], number)
            with attacking(hold, endpoint.port, request, _NUM_CONNECTIONS):
                _wait_until_running(endpoint)
                _measure(endpoint, rates["beside"], took["beside"], 100 + number)
            endpoint.wait_until_idle()
    yield _row(
        "25",
        f"`outrider serve --max-own {MAX_OWN}`: one key's long texts on {_NUM_CONNECTIONS} connections, never read: "
        "another key's first token and tokens/s",
        rates,
        took,
    )
    yield Row("25", "the same: /health/live, memory", str(seen), WELL, seen.is_well, seen.raw)


def _read_long_texts(endpoint: Server) -> None:
    """The draft's caches for texts of this length are there before: what they take is bounded by --draft-context."""
    with ThreadPoolExecutor(MAX_OWN) as pool:
        body = {**_LONG, "stream": False, "max_tokens": 100}
        answers = list(pool.map(lambda _: endpoint.ask("POST", COMPLETIONS, body, key=ATTACKER), range(MAX_OWN)))
    if any(answer.status != 200 for answer in answers):
        raise NotMeasured(f"the endpoint refused long texts: {answers[0].body[-200:]!r}")


def _wait_until_running(endpoint: Server) -> None:
    wait_for(f"the attacker's {MAX_OWN} texts did not run", lambda: endpoint.num_running() >= MAX_OWN, 30.0)


def _measure(endpoint: Server, rates: list[float], took: list[float | None], number: int) -> None:
    with honest_texts(endpoint) as texts:
        rates.append(texts.tokens_per_s(5.0))
        for i in range(3):
            body = text_body(1000 + 10 * number + i)
            took.append(endpoint.first_token_s(body, CAP_S, key=HONEST, path=GENERATE))


def delayed_texts(subject: Subject) -> Iterator[Row]:
    """One key fills its places with texts of a round trip of 500 ms, and reads them; another key's texts run."""
    rates: dict[str, list[float]] = {"alone": [], "beside": []}
    took: dict[str, list[float | None]] = {"alone": [], "beside": []}
    trips: dict[str, list[float]] = {"alone": [], "beside": [], "after": []}
    clouds: dict[str, list[float]] = {"alone": [], "beside": []}
    with ExitStack() as stack:
        # Two verifiers: then readiness shows what the endpoint measures of them.
        first, second = (stack.enter_context(subject.emulated(STEP_MS)) for _ in range(2))
        endpoint = stack.enter_context(subject.endpoint(first.url, "--cloud", second.url, *PLACES, keys=KEYS))
        warm_up(endpoint)
        for number in range(_ROUNDS):
            trips["alone"].append(_round_trip_ms(endpoint, 10 + number))
            _measure(endpoint, rates["alone"], took["alone"], number)
            clouds["alone"] += _cloud_trips_ms(endpoint)
            with texts_of(endpoint, ATTACKER, MAX_OWN, 4096 // 4, keeps=True, round_trip_ms=_DELAY_MS):
                _wait_until_running(endpoint)
                _measure(endpoint, rates["beside"], took["beside"], 100 + number)
                trips["beside"].append(_round_trip_ms(endpoint, 20 + number))
                clouds["beside"] += _cloud_trips_ms(endpoint)
            endpoint.wait_until_idle()
            trips["after"].append(_round_trip_ms(endpoint, 30 + number))
    yield _row(
        "28",
        f"one key's {MAX_OWN} texts with `round_trip_ms` {_DELAY_MS:g}: another key's first token and tokens/s",
        rates,
        took,
    )
    worst = max([*trips["beside"], *trips["after"], *clouds["beside"]])
    usual = max([*trips["alone"], *clouds["alone"]])
    yield Row(
        "28",
        "the same: round trips as measured for the other key's texts and for the verifiers, beside and after",
        f"at most {worst:.1f} ms; before {usual:.1f} ms",
        f"under {_DELAY_MS / 4:g} ms",
        worst < _DELAY_MS / 4,
        {"texts_ms": trips, "verifiers_ms": clouds},
    )


def _row(number: str, what: str, rates: dict[str, list[float]], took: dict[str, list[float | None]]) -> Row:
    """rates, took: "alone" and "beside" the attack."""
    alone, during = median(rates["alone"]), median(rates["beside"])
    alone_s, during_s = middle(took["alone"], CAP_S), middle(took["beside"], CAP_S)
    limit_s = 10.0 * STEP_MS / 1e3 + alone_s
    return Row(
        number,
        what,
        f"{seconds(during_s if during_s < CAP_S else None, CAP_S)}, alone {seconds(alone_s)}; "
        f"{during:.0f} tokens/s, alone {alone:.0f} ({during / max(alone, 1e-9):.2f}x)",
        f"10 steps and the time alone: {seconds(limit_s)}; at least {_MIN_RATE:g}x",
        during_s <= limit_s and during >= _MIN_RATE * alone,
        {"tokens_per_s": rates, "first_token_s": took},
    )


def _round_trip_ms(endpoint: Server, index: int) -> float:
    """What is measured for a text of the other key. Raises NotMeasured."""
    answer = endpoint.ask("POST", GENERATE, text_body(index, 60), key=HONEST)
    events = [json.loads(line[6:]) for line in answer.body.splitlines() if line.startswith(b"data: ")]
    found = [event["round_trip_ms"] for event in events if event.get("round_trip_ms")]
    if not found:
        raise NotMeasured(f"a text of the other key measured no round trip: HTTP {answer.status}")
    return float(found[-1])


def _cloud_trips_ms(endpoint: Server) -> list[float]:
    clouds = endpoint.readiness().json.get("clouds", [])
    return [cloud["round_trip_ms"] for cloud in clouds if cloud.get("round_trip_ms") is not None]


def slow_verifier(subject: Subject) -> Iterator[Row]:
    """Has /v1/render, then /v1/model and /health/ready, take ten seconds, while 200 connections of one key ask."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "target"
        change_bundle(subject.bundles[0], place, template=TURNS)
        cloud = stack.enter_context(subject.serve(bundle=place))
        relay = stack.enter_context(relay_to(cloud.port))
        endpoint = stack.enter_context(subject.endpoint(relay.url, *PLACES, keys=KEYS))
        idle = stack.enter_context(subject.endpoint(cloud.url, keys=KEYS))
        warm_up(endpoint)
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}
        other: dict[str, Any] = {"prompt": "a", "max_tokens": 1, "model": "another"}
        for path, what, asked in (
            ("/v1/render", "chats", [("POST", CHAT, chat)]),
            (
                "/v1/model",
                "texts of another model, and probes",
                [("POST", COMPLETIONS, other), ("GET", "/v1/models/another", None), ("GET", "/health/ready", None)],
            ),
        ):
            requests = [
                endpoint.request(method, to, json.dumps(body).encode() if body else b"", ATTACKER)
                for method, to, body in asked
            ]
            with honest_texts(endpoint) as texts:
                alone, alone_s = texts.tokens_per_s(4.0), _first(endpoint)
                models_s = endpoint.ask("GET", "/v1/models", key=HONEST).took_s
                relay.delays = {path: _DELAY_S, "/health/ready": _DELAY_S}
                relay.most_at_once.clear()
                with (
                    beside(endpoint, idle) as seen,
                    attacking(repeat, endpoint.port, requests, _NUM_CALLERS, 60.0),
                ):
                    time.sleep(2.0)
                    during = texts.tokens_per_s(4.0)
                    during_s = _first(endpoint)
                    during_models_s = endpoint.ask("GET", "/v1/models", key=HONEST).took_s
                relay.delays = {}
            most = relay.most_at_once[path]
            limit_s = 1.0 + (alone_s or CAP_S)
            yield Row(
                "30",
                f"{path} takes {_DELAY_S:g} s, {_NUM_CALLERS} connections ask for {what}: another key's texts",
                f"first token {seconds(during_s, CAP_S)}, before {seconds(alone_s, CAP_S)}; {during:.0f} tokens/s, "
                f"before {alone:.0f} ({during / max(alone, 1e-9):.2f}x); /v1/models {seconds(during_models_s)}; "
                f"{most} such questions at the verifier at once",
                f"first token and /v1/models at most 1 s later; at least {MIN_RATE:g}x; {_MAX_UPSTREAM} questions",
                (during_s or CAP_S) <= limit_s
                and during >= MIN_RATE * alone
                and during_models_s <= 1.0 + models_s
                and most <= _MAX_UPSTREAM,
                {"rates": [alone, during], "first_s": [alone_s, during_s], "at_once": dict(relay.most_at_once)},
            )
            yield Row("30", "the same: /health/live, memory", str(seen), WELL, seen.is_well, seen.raw)
            time.sleep(_DELAY_S)  # what waits at the verifier ends


def _first(endpoint: Server) -> float | None:
    body = text_body(5000 + int(time.monotonic()) % 1000)
    return endpoint.first_token_s(body, CAP_S, key=HONEST, path=GENERATE)
