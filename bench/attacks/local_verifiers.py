"""Attacks the local endpoint while its verifier is away or slow: answers that it keeps for verification (another's, the
same many times, and many), and questions that wait.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from bench.attacks.attackers import attacking, repeat
from bench.attacks.crowd import first_token_s
from bench.attacks.false_verifiers import Relay, relay_to
from bench.attacks.local import (
    ATTACKER,
    CHAT,
    GENERATE,
    HONEST,
    MAX_OWN,
    MIN_RATE,
    PLACES,
    VERIFY,
    WELL,
    honest_texts,
    text_body,
    warm_up,
)
from bench.attacks.probes import MAX_GROWTH_MB, beside, memory_of
from bench.attacks.subject import COMPLETIONS, KEYS, Answer, NotMeasured, Row, Server, Subject, seconds, wait_for
from bench.changed_bundle import TURNS, change_bundle

_NUM_ANSWERS: Final = 150
_MAX_KEPT: Final = 64


def kept_answers(subject: Subject) -> Iterator[Row]:
    """Has answers written without a verifier; asks for another key's, for one many times at once, and writes many."""
    with ExitStack() as stack:
        cloud = stack.enter_context(subject.emulated(step_ms=20.0))
        relay = stack.enter_context(relay_to(cloud.port))
        endpoint = stack.enter_context(subject.endpoint(relay.url, "--offline-ok", *PLACES, keys=KEYS))
        warm_up(endpoint)
        yield from _others(endpoint, relay)
        yield from _at_once(endpoint, relay)
        yield from _many(endpoint, relay)


def _others(endpoint: Server, relay: Relay) -> Iterator[Row]:
    relay.is_away = True
    name = _written(endpoint, HONEST)
    while_away = _verify(endpoint, ATTACKER, name).status
    relay.is_away = False
    _wait_for_cloud(endpoint)
    stolen = _verify(endpoint, ATTACKER, name)
    no_key = _verify(endpoint, None, name).status
    own = _verify(endpoint, HONEST, name).status
    again = _verify(endpoint, HONEST, name).status
    yield Row(
        "27",
        "`outrider serve --offline-ok`: the check of another key's answer, without a key, by its owner, again",
        f"HTTP {while_away} without a cloud, {stolen.status}; {no_key}; {own}; {again}",
        "404, 404; 401; 200; 404",
        (while_away, stolen.status, no_key, own, again) == (404, 404, 401, 200, 404),
        {"body": stolen.body.decode(errors="replace")},
    )


def _at_once(endpoint: Server, relay: Relay) -> Iterator[Row]:
    relay.is_away = True
    name = _written(endpoint, ATTACKER, num_tokens=100)
    relay.is_away = False
    _wait_for_cloud(endpoint)
    before = relay.seen["/v1/sessions"]
    with ThreadPoolExecutor(MAX_OWN) as pool:
        answers = list(pool.map(lambda _: _verify(endpoint, ATTACKER, name), range(MAX_OWN)))
    num_texts = relay.seen["/v1/sessions"] - before
    statuses = sorted(answer.status for answer in answers)
    yield Row(
        "27",
        f"one answer, asked for {MAX_OWN} times at once: texts at the verifier",
        f"{num_texts}; HTTP {', '.join(map(str, statuses))}",
        "1; one 200, the others refused by name (4xx)",
        num_texts == 1 and statuses[0] == 200 and all(400 <= status < 500 for status in statuses[1:]),
        {"statuses": statuses, "texts": num_texts},
    )


def _many(endpoint: Server, relay: Relay) -> Iterator[Row]:
    relay.is_away = True
    with memory_of(endpoint) as memory:
        others = _written(endpoint, HONEST)
        with ThreadPoolExecutor(MAX_OWN) as pool:
            names = list(pool.map(lambda _: _written(endpoint, ATTACKER), range(_NUM_ANSWERS)))
        relay.is_away = False
        _wait_for_cloud(endpoint)
        still = _verify(endpoint, HONEST, others).status
        kept = sum(_verify(endpoint, ATTACKER, name).status == 200 for name in names)
    yield Row(
        "27",
        f"{_NUM_ANSWERS} unverified answers of one key: kept, another key's earlier answer, memory",
        f"{kept} kept; the other's: HTTP {still}; +{memory.growth_mb:.0f} MB",
        f"at most {_MAX_KEPT}; 200; +{MAX_GROWTH_MB:.0f} MB",
        0 < kept <= _MAX_KEPT and still == 200 and memory.is_small,
        {"kept": kept, "others": still, "growth_mb": memory.growth_mb},
    )


def _written(endpoint: Server, key: str, num_tokens: int = 4) -> str:
    """The id of an answer that the draft wrote alone. Raises NotMeasured."""
    found = endpoint.complete({"prompt": "def walk(path):", "max_tokens": num_tokens, "ignore_eos": True}, key)
    if "outrider" not in found["choices"][0]:
        raise NotMeasured("the answer without a cloud does not say that it is unverified")
    return str(found["id"])


def _verify(endpoint: Server, key: str | None, name: str) -> Answer:
    return endpoint.ask("POST", VERIFY, {"id": name}, key=key)


def _wait_for_cloud(endpoint: Server) -> None:
    what = "the endpoint did not find its verifier again"
    wait_for(what, lambda: endpoint.readiness().status == 200, 60.0, 0.1)


_DELAY_S: Final = 10.0
_NUM_CALLERS: Final = 200
_CAP_S: Final = 20.0
_MAX_UPSTREAM: Final = 16
"""Questions about the model that may be at the verifier at a time, however many clients ask."""


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
                alone, alone_s = texts.tokens_per_s(4.0), _first(endpoint.port)
                models_s = endpoint.ask("GET", "/v1/models", key=HONEST).took_s
                relay.delays = {path: _DELAY_S, "/health/ready": _DELAY_S}
                relay.most_at_once.clear()
                with (
                    beside(endpoint, idle) as seen,
                    attacking(repeat, endpoint.port, requests, _NUM_CALLERS, 60.0),
                ):
                    time.sleep(2.0)
                    during = texts.tokens_per_s(4.0)
                    during_s = _first(endpoint.port)
                    during_models_s = endpoint.ask("GET", "/v1/models", key=HONEST).took_s
                relay.delays = {}
            most = relay.most_at_once[path]
            limit_s = 1.0 + (alone_s or _CAP_S)
            yield Row(
                "30",
                f"{path} takes {_DELAY_S:g} s, {_NUM_CALLERS} connections ask for {what}: another key's texts",
                f"first token {seconds(during_s, _CAP_S)}, before {seconds(alone_s, _CAP_S)}; {during:.0f} tokens/s, "
                f"before {alone:.0f} ({during / max(alone, 1e-9):.2f}x); /v1/models {seconds(during_models_s)}; "
                f"{most} such questions at the verifier at once",
                f"first token and /v1/models at most 1 s later; at least {MIN_RATE:g}x; {_MAX_UPSTREAM} questions",
                (during_s or _CAP_S) <= limit_s
                and during >= MIN_RATE * alone
                and during_models_s <= 1.0 + models_s
                and most <= _MAX_UPSTREAM,
                {"rates": [alone, during], "first_s": [alone_s, during_s], "at_once": dict(relay.most_at_once)},
            )
            yield Row("30", "the same: /health/live, memory", str(seen), WELL, seen.is_well, seen.raw)
            time.sleep(_DELAY_S)  # what waits at the verifier ends


def _first(port: int) -> float | None:
    return first_token_s(port, text_body(5000 + int(time.monotonic()) % 1000), _CAP_S, key=HONEST, path=GENERATE)
