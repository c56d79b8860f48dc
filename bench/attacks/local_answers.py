"""Attacks the answers that the local endpoint keeps for verification: another's, the same many times, and many."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Final

from bench.attacks.local import ATTACKER, HONEST, MAX_OWN, PLACES, VERIFY, warm_up
from bench.attacks.probes import MAX_GROWTH_MB, memory_of
from bench.attacks.relay import Relay, relay_to
from bench.attacks.subject import KEYS, Answer, NotMeasured, Row, Server, Subject, wait_for

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
