"""Attacks by /v1/verify items with probabilities: distributions that are none, and as many as there may be."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any, Final

from bench.attacks.attackers import attacking, repeat
from bench.attacks.crowd import prompt_of
from bench.attacks.exchange import OTHER_ADDRESS, ask, request_bytes
from bench.attacks.probes import health_of, memory_of
from bench.attacks.rows import Row
from bench.attacks.subject import VLLM, NotMeasured, Subject

ATTACK_S: Final = 8.0
MAX_GROWTH_MB: Final = 64.0
MAX_HEALTH_S: Final = 0.05
WHOLE: Final = 1 << 16
MAX_COMMAS: Final = 240_000
"""Between the elements of a body, at most (`models.http.requests`)."""
ITEM: Final[dict[str, Any]] = {"prefix": [1, 2], "draft": [1], "rule": "rejection", "temperature": 1.0}


def largest_items() -> bytes:
    """A body of drafts of 64 tokens, each with a distribution over 16 ids: as many as a body may have elements for."""
    q = [number for token in range(1, 17) for number in (token, WHOLE - 15 if token == 1 else 1)]
    item = ITEM | {"draft": [1] * 64, "draft_q": [q] * 64}
    items = [item | {"seed": seed} for seed in range(MAX_COMMAS // (json.dumps(item).count(",") + 2))]
    return json.dumps({"items": items}, separators=(",", ":")).encode()


def false_distributions(subject: Subject) -> Iterator[Row]:
    """Sends distributions that are none, then floods the server with the largest drafts, beside another's item."""
    if subject.engine == VLLM:
        raise NotMeasured("vLLM takes the rules coupled and greedy only")
    half = WHOLE // 2
    bad: dict[str, Any] = {
        "negative": [[1, WHOLE + 1, 2, -1]],
        "NaN": "[[1, NaN]]",
        "not 1 in all": [[1, half, 2, half + 1]],
        "an id twice": [[1, half, 1, half]],
        "17 ids": [[1, WHOLE] + [number for each in range(2, 18) for number in (each, 0)]],
        "not drawn from it": [[2, half, 3, half]],
        "no distribution": [],
        "beyond the vocabulary": [[1, half, 1 << 24, half]],
    }
    codes: dict[str, str] = {}
    with subject.emulated(step_ms=10.0) as server:
        before = _verified(server.port)
        for name, q in bad.items():
            text = json.dumps({"items": [ITEM | {"draft_q": "@"}]}).replace(
                '"@"', q if isinstance(q, str) else json.dumps(q)
            )
            answer = ask(server.port, "POST", "/v1/verify", text.encode())
            codes[name] = f"{answer.status} {json.loads(answer.body).get('error', {}).get('code')}"
        largest = largest_items()
        taken = ask(server.port, "POST", "/v1/verify", largest)
        if taken.status != 200:
            raise NotMeasured(f"the largest items got {taken.status}: {taken.body[:200]!r}")
        requests = [request_bytes(server.port, "POST", "/v1/verify", largest)]
        with (
            memory_of(server) as memory,
            health_of(server) as health,
            attacking(repeat, server.port, requests, 4, 60.0),
        ):
            time.sleep(ATTACK_S)
            during = _verified(server.port)
    not_refused = sorted(name for name, code in codes.items() if not code.startswith("4"))
    yield Row(
        "41",
        f"distributions that are none, {len(codes)} kinds: refused by name",
        f"{len(codes) - len(not_refused)} of {len(codes)} with 4xx"
        + (f"; not: {', '.join(not_refused)}" if not_refused else ""),
        "all with 4xx",
        not not_refused,
        {"codes": codes},
    )
    yield Row(
        "41",
        f"the largest drafts with probabilities in /v1/verify, {ATTACK_S:g} s: another's token; health; memory",
        f"{'the same' if before == during else 'ANOTHER'}; {health}; +{memory.growth_mb:.0f} MB",
        f"the same; p99 under 50 ms; +{MAX_GROWTH_MB:.0f} MB",
        before == during and health.high < MAX_HEALTH_S and memory.growth_mb <= MAX_GROWTH_MB,
        {"p99_s": health.high, "growth_mb": memory.growth_mb},
    )


def _verified(port: int) -> list[int]:
    """What another client's item gets."""
    item = {"prefix": prompt_of(7), "temperature": 0.8, "seed": 3}
    answer = ask(port, "POST", "/v1/verify", {"items": [item]}, address=OTHER_ADDRESS)
    found: list[int] = json.loads(answer.body)["results"][0]["tokens"]
    return found
