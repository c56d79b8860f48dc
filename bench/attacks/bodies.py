"""Attacks by bodies of 1 MiB that are wrong in every element. Valid ones are `generated`."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bench.attacks.attackers import attacking, repeat
from bench.attacks.exchange import request_bytes
from bench.attacks.grammars import TEMPLATE, hostile_grammars
from bench.attacks.probes import health_of, memory_of
from bench.attacks.rows import Row
from bench.attacks.subject import VLLM, Subject
from bench.changed_bundle import change_bundle

SIZE: Final = (1 << 20) - 512
"""Bytes of a body: what a server takes by default, less a little."""
IN_FLIGHT: Final = 4
ATTACK_S: Final = 3.0
MAX_HEALTH_S: Final = 0.05
MAX_GROWTH_MB: Final = 64.0


def hostile_bodies() -> dict[str, tuple[str, bytes]]:
    """Name -> (path, body)."""
    completions, sessions, verify, chat = "/v1/completions", "/v1/sessions", "/v1/verify", "/v1/chat/completions"
    unknown = "{" + ",".join(f'"k{i}":0' for i in range(SIZE // 11)) + "}"
    unknown_keys = ",".join(f'"k{i}":0' for i in range(32_700))
    known = '{"prompt":[1],"logit_bias":{' + ",".join(f'"{i}":0.5' for i in range(32_700)) + "}}"
    return {
        "prompt of empty texts": (completions, filled('{"prompt":[', '""', "]}")),
        "prompt of texts and ids in turn": (completions, filled('{"prompt":[', '"a",1', "]}")),
        "prompt of empty lists": (completions, filled('{"prompt":[', "[]", "]}")),
        "prompt of true": (sessions, filled('{"max_tokens":1,"prompt":[', "true", "]}")),
        "as many keys as a body may have": (sessions, known.encode()),
        "prompt of large numbers": (sessions, filled('{"max_tokens":1,"prompt":[', "9" * 40, "]}")),
        "prompt of one huge number": (sessions, filled('{"max_tokens":1,"prompt":[', "9", "]}", separator="")),
        "unknown keys": (sessions, unknown.encode()),
        "deep nesting": (sessions, b'{"prompt":' + b"[" * (SIZE // 2) + b"]" * (SIZE // 2 - 16) + b"}"),
        "items that are no objects": (verify, filled('{"items":[', "0", "]}")),
        "items of wrong drafts": (verify, _verify_body()),
        "100,000 chat messages": (chat, filled('{"messages":[', "{}", "]}")),
        "chat messages of wrong roles": (chat, filled('{"messages":[', '{"role":0,"content":[]}', "]}")),
        "100,000 messages to render": ("/v1/render", filled('{"messages":[', "{}", "]}")),
        "100,000 tools": (chat, filled('{"messages":[{"role":"user","content":"a"}],"tools":[', "{}", "]}")),
        "a session's prediction": (sessions, filled('{"max_tokens":1,"prompt":[5],"prediction":[', "5", "]}")),
        "a session's stop strings": (sessions, filled('{"max_tokens":1,"prompt":[5],"stop":[', '"a"', "]}")),
        "drafts of wrong ids": ("/v1/sessions/none/drafts", filled('{"base":0,"paths":[', '["a"]', "]}")),
        "unknown keys of a call to verify": (verify, ("{" + unknown_keys + "}").encode()),
        "a schema of numbers": (completions, filled('{"prompt":"a","max_tokens":1,"guided_json":[', "1023", "]}")),
        "a schema's text of lists": (
            completions,
            filled('{"prompt":"a","max_tokens":1,"guided_json":"[', "[],", '0]"}', separator=""),
        ),
        "arguments of lists": (
            chat,
            filled(
                '{"messages":[{"role":"assistant","tool_calls":[{"type":"function","function":{"name":"a","arguments":"[',
                "[],",
                '0]"}}]}]}',
                separator="",
            ),
        ),
        **hostile_grammars(),
    }


def wrong_elements(subject: Subject) -> Iterator[Row]:
    """Keeps four bodies in flight, for each kind; asks the server, and an idle one beside it, for their health."""
    # A small KV cache, which is in use to its last block before the attack: pages that a text touches for the first
    # time are no attack's.
    small = () if subject.engine == VLLM else ("--kv-cache-mb", "32")
    with (
        tempfile.TemporaryDirectory() as place,
        subject.serve(*small, bundle=_with_template(subject, Path(place))) as server,
        subject.serve() as idle,
    ):
        raw: dict[str, dict[str, float]] = {}
        statuses: set[int] = set()
        for path, body in (
            ("/v1/completions", b'{"prompt":"a","max_tokens":1}'),
            ("/v1/sessions", b"{}"),
            ("/v1/completions", b'{"prompt":"a","max_tokens":64,"temperature":1}'),
        ):
            with attacking(repeat, server.port, [request_bytes(server.port, "POST", path, body)], 4, 20.0) as reports:
                for _ in range(160):  # memory that any use takes is not the attack's
                    reports.recv()
        before_mb = server.memory_mb()
        for name, (path, body) in hostile_bodies().items():
            requests = [request_bytes(server.port, "POST", path, body)]
            count = 0
            server.wait_until_awake()
            with (
                memory_of(server) as memory,
                health_of(server) as health,
                health_of(idle) as beside,
                attacking(repeat, server.port, requests, IN_FLIGHT, 30.0) as reports,
            ):
                deadline_s = time.monotonic() + ATTACK_S
                while (left_s := deadline_s - time.monotonic()) > 0.0 and reports.poll(left_s):
                    statuses.add(reports.recv())
                    count += 1
            raw[name] = {
                "p99_ms": health.high * 1e3,
                "max_ms": health.worst * 1e3,
                "idle_p99_ms": beside.high * 1e3,
                "idle_max_ms": beside.worst * 1e3,
                "peak_mb": memory.peak_mb,
                "answers": count,
            }
    slowest = max(raw, key=lambda name: raw[name]["max_ms"] - raw[name]["idle_max_ms"])
    worst = raw[slowest]
    is_quick = all(
        one["p99_ms"] < MAX_HEALTH_S * 1e3 and one["max_ms"] < MAX_HEALTH_S * 1e3 + one["idle_max_ms"]
        for one in raw.values()
    )
    # 0: the server closed while the body was being sent, which refuses it. One that died would not answer for health.
    failures = sorted(status for status in statuses if status and not 200 <= status < 500)
    yield Row(
        "6",
        f"four bodies of 1 MiB of wrong elements in flight, {len(raw)} kinds: GET /health/live",
        f"worst: {slowest}: p99 {worst['p99_ms']:.0f} ms, max {worst['max_ms']:.0f} ms; an idle server beside it: "
        f"p99 {worst['idle_p99_ms']:.0f} ms, max {worst['idle_max_ms']:.0f} ms"
        + (f"; statuses {failures}" if failures else ""),
        "p99 under 50 ms; max under 50 ms more than the idle server's; no 5xx",
        is_quick and not failures,
        {"bodies": raw, "statuses": sorted(statuses)},
    )
    grammars = set(hostile_grammars())
    for what, names in (
        ("the same: memory, without grammars", raw.keys() - grammars),
        ("the same: memory, with costly grammars too", raw.keys()),
    ):
        largest = max(names, key=lambda name: raw[name]["peak_mb"])
        growth = raw[largest]["peak_mb"] - before_mb
        yield Row(
            "6",
            what,
            f"+{growth:.0f} MB, most with: {largest}",
            f"+{MAX_GROWTH_MB:.0f} MB",
            growth <= MAX_GROWTH_MB,
            {"before_mb": before_mb, "growth_mb": growth},
        )


def _with_template(subject: Subject, place: Path) -> Path:
    """The target with a template, so that chats get as far as their grammars."""
    change_bundle(subject.bundles[0], place / "target", template=TEMPLATE)
    return place / "target"


def filled(head: str, element: str, tail: str, separator: str = ",") -> bytes:
    """As many elements as fit."""
    count = (SIZE - len(head) - len(tail)) // (len(element) + len(separator))
    return (head + separator.join([element] * count) + tail).encode()


def _verify_body() -> bytes:
    item = {"prefix": [], "draft": ["a"] * 800, "temperature": "warm", "x": 1}
    return json.dumps({"items": [item] * 256}).encode()[:SIZE]
