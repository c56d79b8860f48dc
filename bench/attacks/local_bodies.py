"""Attacks the local endpoint by bodies: wrong in every element, deep, and documents of every hostile shape."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from typing import Final

from bench.attacks.attackers import attacking, repeat
from bench.attacks.bodies import IN_FLIGHT, SIZE, filled
from bench.attacks.exchange import ask, request_bytes
from bench.attacks.local import (
    ATTACKER,
    CHAT,
    COMPLETIONS,
    GENERATE,
    MAX_GROWTH_MB,
    MAX_HEALTH_S,
    MIN_RATE,
    VERIFY,
    beside,
    endpoint_and_idle,
    honest_texts,
)
from bench.attacks.rows import Row
from bench.attacks.subject import NotMeasured, Server, Subject

_ATTACK_S: Final = 4.0
_ALONE_S: Final = 2.0
_NUM_DOCUMENTS: Final = 256
_TEXT: Final = (1 << 17) - 512
"""Bytes of the documents of a request: what the endpoint takes."""
_NUM_TEXTS: Final = 2
_DOCUMENTS: Final = '{"prompt":"what is abcde?","max_tokens":1,"documents":['


def hostile_bodies() -> dict[str, tuple[str, bytes]]:
    """Name -> (path, body)."""
    unknown = "{" + ",".join(f'"k{i}":0' for i in range(SIZE // 11)) + "}"
    deep = b'{"messages":' + b"[" * (SIZE // 2) + b"]" * (SIZE // 2 - 16) + b"}"
    return {
        "prompt of empty texts": (COMPLETIONS, filled('{"prompt":[', '""', "]}")),
        "prompt of texts and ids in turn": (COMPLETIONS, filled('{"prompt":[', '"a",1', "]}")),
        "prompt of one huge number": (COMPLETIONS, filled('{"prompt":[', "9", "]}", separator="")),
        "unknown keys": (COMPLETIONS, unknown.encode()),
        "deep nesting": (CHAT, deep),
        "100,000 chat messages": (CHAT, filled('{"messages":[', "{}", "]}")),
        "chat messages of wrong roles": (CHAT, filled('{"messages":[', '{"role":0,"content":[]}', "]}")),
        "100,000 tools": (CHAT, filled('{"messages":[{"role":"user","content":"a"}],"tools":[', "{}", "]}")),
        "the page's messages of nothing": (GENERATE, filled('{"seed":1,"messages":[', "{}", "]}")),
        "the page's deep nesting": (GENERATE, deep),
        "an id of 1 MiB": (VERIFY, filled('{"id":"', "a", '"}', separator="")),
        "an id of lists": (VERIFY, filled('{"id":[', "[]", "]}")),
    }


def hostile_documents() -> dict[str, tuple[str, bytes]]:
    """Bodies with documents: name -> (path, body). All are taken, or refused for their shape."""
    rng = random.Random(22)
    words = " ".join("".join(rng.choices("abcdefghij", k=5)) for _ in range(SIZE // 6 - 100))
    part = words[:_TEXT]
    many = json.dumps(
        {
            "prompt": "what is abcde?",
            "max_tokens": 1,
            "documents": [{"text": part[at : at + 1000]} for at in range(0, 1000 * _NUM_DOCUMENTS, 1000)],
        }
    )
    pairs = "".join(chr(0x4E00 + rng.randrange(2000)) for _ in range(_TEXT // 3))
    return {
        "documents without text": (COMPLETIONS, filled(_DOCUMENTS, '{"text":""}', "]}")),
        "documents of wrong types": (COMPLETIONS, filled(_DOCUMENTS, '{"text":0}', "]}")),
        f"{_NUM_DOCUMENTS} documents of 1,000 characters": (COMPLETIONS, many.encode()),
        "a document of 170,000 words": (COMPLETIONS, _document(words)),
        "a document of 43,000 words": (COMPLETIONS, _document(part)),
        "a document of one word": (COMPLETIONS, _document("a" * _TEXT)),
        "a document of headings": (COMPLETIONS, _document("# a\n\n" * (_TEXT // 5))),
        "a document of short lines": (COMPLETIONS, _document("ab\n\n" * (_TEXT // 4))),
        "a document of blanks": (COMPLETIONS, _document(" " * _TEXT)),
        "a document of names in humps": (COMPLETIONS, _document("aB" * (_TEXT // 2))),
        "a document without blanks between words": (COMPLETIONS, _document(pairs)),
    }


def local_bodies(subject: Subject) -> Iterator[Row]:
    """Keeps four bodies of one key in flight, for each kind, beside two texts of another key."""
    yield from _beside_texts(subject, "bodies of 1 MiB of wrong elements", hostile_bodies())


def local_documents(subject: Subject) -> Iterator[Row]:
    """The same with documents, which are indexed for each request."""
    yield from _beside_texts(subject, "requests with documents, of 128 KiB and more", hostile_documents())


def _beside_texts(subject: Subject, what: str, bodies: dict[str, tuple[str, bytes]]) -> Iterator[Row]:
    raw: dict[str, dict[str, float]] = {}
    statuses: set[int] = set()
    with endpoint_and_idle(subject) as (endpoint, idle), honest_texts(endpoint, _NUM_TEXTS) as texts:
        small = json.loads(_document("abcde fghij\n" * 2000))
        if ask(endpoint.port, "POST", COMPLETIONS, small, key=ATTACKER).status != 200:
            raise NotMeasured("the endpoint takes no documents: pip install bm25s")
        before_mb = endpoint.memory_mb()  # with what finding passages takes at its first use
        for name, (path, body) in bodies.items():
            requests = [request_bytes(endpoint.port, "POST", path, body, ATTACKER)]
            alone, count = texts.tokens_per_s(_ALONE_S), 0
            with beside(endpoint, idle) as seen, attacking(repeat, endpoint.port, requests, IN_FLIGHT, 60.0) as reports:
                during = texts.tokens_per_s(_ATTACK_S)
                while reports.poll():
                    statuses.add(reports.recv())
                    count += 1
            raw[name] = {
                "p99_ms": seen.health.high * 1e3,
                "max_ms": seen.health.worst * 1e3,
                "idle_p99_ms": seen.idle.high * 1e3,
                "idle_max_ms": seen.idle.worst * 1e3,
                "failures": seen.health.num_failures,
                "peak_mb": seen.memory.peak_mb,
                "answers": count,
                "alone": alone,
                "during": during,
            }
            _wait_until_settled(endpoint)
    slowest = max(raw, key=lambda name: raw[name]["p99_ms"] - raw[name]["idle_p99_ms"])
    worst = raw[slowest]
    is_quick = all(
        one["p99_ms"] < MAX_HEALTH_S * 1e3 + one["idle_p99_ms"]
        and one["max_ms"] < 2e3 * MAX_HEALTH_S + one["idle_max_ms"]
        and not one["failures"]
        for one in raw.values()
    )
    failures = sorted(status for status in statuses if status >= 500 and status != 503)
    yield Row(
        "24",
        f"`outrider serve`: four {what} in flight, {len(raw)} kinds: GET /health/live",
        f"worst: {slowest}: p99 {worst['p99_ms']:.0f} ms, max {worst['max_ms']:.0f} ms; an idle endpoint beside it: "
        f"p99 {worst['idle_p99_ms']:.0f} ms, max {worst['idle_max_ms']:.0f} ms"
        + (f"; statuses {failures}" if failures else ""),
        "p99 under 50 ms and max under 100 ms more than the idle endpoint's; no 5xx but 503",
        is_quick and not failures,
        {"bodies": raw, "statuses": sorted(statuses)},
    )
    largest = max(raw, key=lambda name: raw[name]["peak_mb"])
    growth = raw[largest]["peak_mb"] - before_mb
    yield Row(
        "24",
        "the same: memory",
        f"+{growth:.0f} MB, most with: {largest}",
        f"+{MAX_GROWTH_MB:.0f} MB",
        growth <= MAX_GROWTH_MB,
        {"before_mb": before_mb, "growth_mb": growth},
    )
    least = min(raw, key=lambda name: raw[name]["during"] / max(1e-9, raw[name]["alone"]))
    share = raw[least]["during"] / max(1e-9, raw[least]["alone"])
    yield Row(
        "24",
        "the same: tokens/s of another key's two texts",
        f"{raw[least]['during']:.0f}; without {raw[least]['alone']:.0f} ({share:.2f}x), least with: {least}",
        f"at least {MIN_RATE:g}x",
        share >= MIN_RATE,
    )


def _wait_until_settled(endpoint: Server) -> None:
    """Returns once only the other key's texts run: an abandoned request may still be in work."""
    deadline_s = time.monotonic() + 120.0
    while ask(endpoint.port, "GET", "/health/ready").json["running"] > _NUM_TEXTS:
        if time.monotonic() > deadline_s:
            raise NotMeasured("the attack's requests were still in work 120 s after it had ended")
        time.sleep(0.1)


def _document(text: str) -> bytes:
    request = {"prompt": "what is abcde?", "max_tokens": 1, "documents": [{"text": text}]}
    return json.dumps(request, ensure_ascii=False).encode()
