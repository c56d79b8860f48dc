"""Attacks by drafts with probabilities: distributions that are none, and as many as there may be."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from typing import Any, Final

from bench.attacks.attackers import attacking, pipeline
from bench.attacks.crowd import Crowd, Stream, crowd_of, prompt_of
from bench.attacks.exchange import ask, request_bytes
from bench.attacks.probes import health_of, memory_of
from bench.attacks.rows import Row
from bench.attacks.subject import VLLM, NotMeasured, Subject
from bench.attacks.tree_bytes import varint

MEDIA_TYPE: Final = "application/vnd.outrider.rule"
ATTACK_S: Final = 8.0
MAX_GROWTH_MB: Final = 64.0
MAX_HEALTH_S: Final = 0.05
WHOLE: Final = 1 << 16
SESSION: Final[dict[str, Any]] = {"max_tokens": 1900, "ignore_eos": True, "patience_ms": 0, "rule": "rejection"}


def rule_bytes(base: int, first: int, num_nodes: int, num_ids: int = 16, rest: int = 1) -> bytes:
    """A path of nodes with distributions. rest: weight of each id but the first."""
    body = bytearray(varint(base) + varint(first) + bytes([num_ids]))
    for index in range(num_nodes):
        body += bytes([int(index > 0), 0])
        body += b"".join((1 + each).to_bytes(3, "little") for each in range(num_ids))
        body += struct.pack(f"<{num_ids - 1}H", *[rest] * (num_ids - 1))
    return bytes(body)


def false_distributions(subject: Subject) -> Iterator[Row]:
    """Sends distributions that are none, then floods a session with the largest messages, beside a coupled text."""
    if subject.engine == VLLM:
        raise NotMeasured("vLLM takes the rules coupled and greedy only")
    item = {"prefix": [1, 2], "draft": [1], "rule": "rejection", "temperature": 1.0}
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
    plain = {"prefix": prompt_of(7), "temperature": 0.8, "seed": 3}
    with (
        subject.emulated(step_ms=10.0) as server,
        crowd_of(server.port, [{"prompt": prompt_of(5), **SESSION}]) as crowd,
    ):
        before = _verified(server.port, plain)
        codes: dict[str, str] = {}
        for name, q in bad.items():
            text = json.dumps({"items": [item | {"draft_q": "@"}]}).replace(
                '"@"', q if isinstance(q, str) else json.dumps(q)
            )
            answer = ask(server.port, "POST", "/v1/verify", text.encode())
            codes[name] = f"{answer.status} {json.loads(answer.body).get('error', {}).get('code')}"
        stream = _running(crowd)
        path = f"/v1/sessions/{stream.session}/drafts"
        bodies = [rule_bytes(0, index * 64, 64) for index in range(8)]
        block = b"".join(request_bytes(server.port, "POST", path, body, content_type=MEDIA_TYPE) for body in bodies)
        with (
            memory_of(server) as memory,
            health_of(server) as health,
            attacking(pipeline, server.port, block, 4, True),
        ):
            time.sleep(ATTACK_S)
            during = _verified(server.port, plain)
    taken = sorted(name for name, code in codes.items() if not code.startswith("4"))
    yield Row(
        "41",
        f"distributions that are none, {len(codes)} kinds: refused by name",
        f"{len(codes) - len(taken)} of {len(codes)} with 4xx" + (f"; not: {', '.join(taken)}" if taken else ""),
        "all with 4xx",
        not taken,
        {"codes": codes},
    )
    yield Row(
        "41",
        f"the largest drafts with probabilities, to one session, {ATTACK_S:g} s: another's token; health; memory",
        f"{'the same' if before == during else 'ANOTHER'}; {health}; +{memory.growth_mb:.0f} MB",
        f"the same; p99 under 50 ms; +{MAX_GROWTH_MB:.0f} MB",
        before == during and health.high < MAX_HEALTH_S and memory.growth_mb <= MAX_GROWTH_MB,
        {"p99_s": health.high, "growth_mb": memory.growth_mb},
    )


def _verified(port: int, item: dict[str, Any]) -> list[int]:
    answer = ask(port, "POST", "/v1/verify", json.dumps({"items": [item]}).encode())
    found: list[int] = json.loads(answer.body)["results"][0]["tokens"]
    return found


def _running(crowd: Crowd) -> Stream:
    stream = crowd.streams[0]
    if not crowd.wait(lambda: bool(stream.commits), 10.0):
        raise NotMeasured("the session had no token within 10 s")
    return stream
