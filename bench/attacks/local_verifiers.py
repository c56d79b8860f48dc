"""Attacks the local endpoint while its verifier is away or slow: answers that it keeps, and questions that wait."""

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
    honest_texts,
    text_body,
    warm_up,
)
from bench.attacks.probes import MAX_GROWTH_MB, beside, memory_of
from bench.attacks.subject import COMPLETIONS, KEYS, NotMeasured, Row, Subject, seconds
from bench.changed_bundle import TURNS, change_bundle

_NUM_ANSWERS: Final = 150
_DELAY_S: Final = 10.0
_NUM_CALLERS: Final = 200
_CAP_S: Final = 20.0
_MAX_UPSTREAM: Final = 16
"""Questions about the model that may be at the verifier at a time, however many clients ask."""


def kept_answers(subject: Subject) -> Iterator[Row]:
    """Has answers written after the verifier has gone; whose they are, and how many stay, is said by tests."""
    with ExitStack() as cloud, ExitStack() as stack:
        url = cloud.enter_context(subject.emulated(step_ms=STEP_MS)).url
        endpoint = stack.enter_context(subject.endpoint(url, "--offline-ok", *PLACES, keys=KEYS))
        warm_up(endpoint)
        cloud.close()
        body = {"prompt": "def walk(path):", "max_tokens": 4, "ignore_eos": True}
        with memory_of(endpoint) as memory, ThreadPoolExecutor(MAX_OWN) as pool:
            answers = list(pool.map(lambda _: endpoint.complete(body, ATTACKER), range(_NUM_ANSWERS)))
    if not all("outrider" in answer["choices"][0] for answer in answers):
        raise NotMeasured("an answer without a cloud does not say that it is unverified")
    yield Row(
        "27",
        f"`outrider serve --offline-ok`: {_NUM_ANSWERS} unverified answers of one key: memory",
        f"+{memory.growth_mb:.0f} MB",
        f"+{MAX_GROWTH_MB:.0f} MB",
        memory.is_small,
        {"before_mb": memory.before_mb, "peak_mb": memory.peak_mb},
    )


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
