"""Attacks the local endpoint as its verifier, whose answers have no end or sense. What it shows of a verifier's words,
and that texts are kept apart, is said by tests.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from bench.attacks.exchange import NotMeasured, wait_for
from bench.attacks.local import CHAT
from bench.attacks.probes import MAX_GROWTH_MB, MAX_HEALTH_S, health_of, memory_of
from bench.attacks.subject import COMPLETIONS, Row, Subject, listed
from tests.hostile_answers import IDENTITY, MAX_TOKENS, USAGE, broken_streams, event, opened
from tests.raw_server import RawServer, http_answer, raw_server

VOCAB_SIZE: Final = 4096
MAX_SENT: Final = 512 << 20
_ENDS_S: Final = 30.0
_CHAT: Final = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}
_TEXT: Final = {"prompt": "def walk(path):", "max_tokens": MAX_TOKENS}
Answers = Mapping[str, tuple[bytes, bytes]]
"""By path: the bytes, and those that follow again and again."""


def local_hostile(subject: Subject) -> Iterator[Row]:
    """Answers without end or sense, each to one text; then to the questions around texts."""
    good = _honest(subject)
    forever = b"x" * 65536
    huge = json.dumps({"tokens": [5] * 600_000, "model": "m", "target": IDENTITY}).encode()
    kinds: dict[str, tuple[Answers, str, dict[str, Any]]] = {
        what: ({"/v1/sessions": (each.data, each.more)}, COMPLETIONS, _TEXT)
        for what, each in broken_streams(VOCAB_SIZE).items()
    }
    kinds |= {
        "a refusal without end": (
            {"/v1/sessions": (b'HTTP/1.1 400 Bad Request\r\n\r\n{"error":{"code":"', forever)},
            COMPLETIONS,
            _TEXT,
        ),
        "a model's facts without end": (
            {"/v1/model": (http_answer(b'{"name":"', length=1 << 30), forever)},
            COMPLETIONS,
            {**_TEXT, "model": "another"},
        ),
        "a rendering of 600,000 ids": ({"/v1/render": (http_answer(huge), b"")}, CHAT, _CHAT),
        "a rendering without end": (
            {"/v1/render": (http_answer(b'{"tokens":[', length=1 << 30), b"5," * 32768)},
            CHAT,
            _CHAT,
        ),
    }
    answers, statuses = dict(good), dict[str, int]()
    peaks_mb, high_s = dict[str, float](), dict[str, float]()

    def reply(server: RawServer, connection: socket.socket) -> None:
        path = server.asked[connection][0].partition("?")[0]
        first, more = answers.get(path, (b"HTTP/1.1 204 No Content\r\n\r\n", b""))
        connection.sendall(first)
        for _ in range(MAX_SENT // len(more) if more else 0):
            connection.sendall(more)
        # The agent's end first: what it has not read yet would be lost by a reset.
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(5.0)
        while connection.recv(65536):
            pass

    with raw_server(reply) as server, subject.endpoint(server.url) as endpoint:
        for path, body in ((COMPLETIONS, _TEXT), (CHAT, _CHAT)):  # memory that any use takes is not the attack's
            answer = endpoint.ask("POST", path, body)
            if answer.status != 200:
                raise NotMeasured(f"the endpoint refused an honest verifier's text: {answer.body[-300:]!r}")
        before_mb = endpoint.memory_mb()
        for what, (wrong, path, body) in kinds.items():
            answers.update(wrong)
            with memory_of(endpoint) as memory, health_of(endpoint) as health:
                statuses[what] = endpoint.ask("POST", path, body, timeout_s=_ENDS_S).status
            answers.update(good)
            peaks_mb[what], high_s[what] = memory.peak_mb, health.high
            with suppress(NotMeasured):  # the row on texts left says so
                wait_for("a text was not over", lambda: not endpoint.num_running(), 30.0)
        left = endpoint.num_running()
    largest, slowest = max(peaks_mb, key=peaks_mb.__getitem__), max(high_s, key=high_s.__getitem__)
    growth = peaks_mb[largest] - before_mb
    yield Row(
        "29",
        f"`outrider serve`: a verifier whose answers have no end or sense, {len(kinds)} kinds: the endpoint's memory",
        f"+{growth:.0f} MB, most with: {largest}",
        f"+{MAX_GROWTH_MB:.0f} MB",
        growth <= MAX_GROWTH_MB,
        {"before_mb": before_mb, "peaks_mb": peaks_mb},
    )
    yield Row(
        "29",
        "the same: /health/live meanwhile",
        f"worst: {slowest}: p99 {high_s[slowest] * 1e3:.0f} ms",
        "p99 under 100 ms",
        high_s[slowest] < 2.0 * MAX_HEALTH_S,
        {"p99_s": high_s},
    )
    unclear = [f"{what} (HTTP {status})" for what, status in statuses.items() if not 400 <= status < 600]
    yield Row(
        "29",
        f"the same: without an error within {_ENDS_S:g} s; texts left in work",
        f"{listed(unclear, 'kinds')}; {left} texts",
        "none; 0",
        not unclear and left == 0,
    )


def _honest(subject: Subject) -> Answers:
    """What an honest verifier answers: a short text, and what is asked around texts."""
    manifest = json.loads((subject.bundles[1] / "manifest.json").read_text(encoding="utf-8"))
    facts = {
        "name": "m",
        "tokenizer": manifest["tokenizer_fingerprint"],
        "vocab_size": VOCAB_SIZE,
        "max_positions": 1024,
        "eos_token_ids": [0],
        "has_chat_template": True,
        "target": IDENTITY,
    }
    end = event(type="end", reason="stop", usage=USAGE)
    bodies = {
        "/v1/model": facts,
        "/v1/render": {"tokens": [5, 6], "model": "m", "target": IDENTITY},
        "/health/ready": {"status": "ready", "model": "m"},
    }
    return {"/v1/sessions": (opened(VOCAB_SIZE) + event(base=0, tokens=[5, 6, 7]) + end, b"")} | {
        path: (http_answer(json.dumps(body).encode()), b"") for path, body in bodies.items()
    }
