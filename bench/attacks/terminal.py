"""Attacks on the agent by a hostile server: escapes for its terminal, answers without end or sense."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from bench.attacks.agents import agent
from bench.attacks.false_verifiers import Answers, HostileServer, Ways, as_answer, as_stream, hostile_server
from bench.attacks.local_hostile import (
    ENDLESS_REFUSAL,
    ESCAPES,
    USAGE,
    VOCAB_SIZE,
    facts_of,
    honest_answers,
    opened_event,
    tokens_of,
)
from bench.attacks.probes import MAX_GROWTH_MB
from bench.attacks.subject import NotMeasured, Row, Subject, listed
from tests.hostile_answers import MAX_TOKENS, broken_streams

HOSTILE: Final = "a" + "b".join(ESCAPES) + "c"
ENDS_S: Final = 15.0
_TEXT: Final = ("--mode", "cloud-only", "--max-tokens", str(MAX_TOKENS), "--", "def walk(path):")


def escapes(subject: Subject) -> Iterator[Row]:
    """Sends terminal escapes wherever a server's words reach the user, whose terminal is a pseudo-terminal."""
    tokens = tokens_of(subject.bundles[1], HOSTILE)
    opened = opened_event()
    error = {"code": "shutting_down", "message": HOSTILE, "type": "server_error", "param": HOSTILE}
    refused = {"error": {**error, "code": "invalid_parameter"}}
    ways = {
        "text": Ways(
            as_stream(opened, {"base": 0, "tokens": tokens}, {"type": "end", "reason": "stop", "usage": USAGE})
        ),
        "a refusal": Ways(as_answer(refused, "400 Bad Request")),
        "a refusal's code": Ways(as_answer({"error": {**error, "code": HOSTILE}}, "400 Bad Request")),
        "a missing key": Ways(as_answer(refused, "401 Unauthorized")),
        "an overloaded server": Ways(as_answer({"error": error}, "503 Service Unavailable")),
        "the end's error": Ways(as_stream(opened, {"type": "end", "reason": "error", "usage": USAGE, "error": error})),
        "an unknown event": Ways(as_stream(opened, {"type": HOSTILE})),
        "the model's name": Ways(as_stream({**opened, "model": HOSTILE}, {"type": HOSTILE})),
        "another tokenizer": Ways(as_answer({"error": {**error, "code": "tokenizer_mismatch"}}, "409 Conflict")),
    }
    shown: dict[str, list[str]] = {}
    honest = honest_answers(facts_of(subject))
    with hostile_server() as server:
        for what, way in ways.items():
            server.ways = replace(way, others=honest)
            server.paths.clear()
            # Until it has tried often enough that it would have shown its words.
            with agent(subject, "--cloud", server.url, *_TEXT, on_terminal=True) as running:
                running.wait(lambda: server.num_asked > 8, 12.0)
                printed = running.text.decode(errors="replace")
            if not server.num_asked:
                raise NotMeasured(f"the agent opened no session: {printed[-300:]!r}")
            # Without BEL, BS and DEL a terminal still obeys the rest, so each is looked for by itself.
            found = [repr(escape) for escape in ESCAPES if escape in printed]
            if found:
                shown[what] = found
    yield Row(
        "15",
        f"terminal escapes from a server, in {len(ways)} places: shown on the user's terminal",
        f"in {listed(list(shown), 'places')}" if shown else "none",
        "none",
        not shown,
        {"shown": shown},
    )


def huge_answers(subject: Subject) -> Iterator[Row]:
    """Sends what no server of the protocol sends; the agent must end, without growing."""
    ways = {what: Ways(each.data, each.more) for what, each in broken_streams(VOCAB_SIZE).items()}
    ways["a refusal without end"] = ENDLESS_REFUSAL
    unclear: list[str] = []
    raw: dict[str, Any] = {}
    honest = honest_answers(facts_of(subject))
    with hostile_server() as server:
        plain_mb = _plain_memory(subject, server, honest)
        for what, way in ways.items():
            server.ways = replace(way, others=honest)
            began_s = time.monotonic()
            with agent(subject, "--cloud", server.url, *_TEXT) as running:
                is_over = running.finish(ENDS_S) is not None
                status, growth = running.process.returncode, running.peak_mb - plain_mb
                errors = running.errors.decode(errors="replace")
            took_s = time.monotonic() - began_s
            raw[what] = {"status": status, "growth_mb": growth, "took_s": took_s, "errors": errors[-300:]}
            if not is_over or status == 0 or "Traceback" in errors:
                unclear.append(f"{what} ({'runs on' if not is_over else f'exit {status}'})")
    worst = max(raw, key=lambda what: raw[what]["growth_mb"])
    growth = raw[worst]["growth_mb"]
    yield Row(
        "15",
        f"answers without end or sense, {len(ways)} kinds: the agent's memory",
        f"+{growth:.0f} MB, most with: {worst}",
        f"+{MAX_GROWTH_MB:.0f} MB",
        growth <= MAX_GROWTH_MB,
        {"plain_mb": plain_mb, "kinds": raw},
    )
    yield Row(
        "15",
        f"the same: not ended with an error within {ENDS_S:.0f} s",
        listed(unclear, "not"),
        "none",
        not unclear,
    )


def _plain_memory(subject: Subject, server: HostileServer, honest: Answers) -> float:
    """The agent's memory when the server sends a short, honest text."""
    end = {"type": "end", "reason": "stop", "usage": USAGE}
    server.ways = Ways(as_stream(opened_event(), {"base": 0, "tokens": [5, 6, 7]}, end), others=honest)
    with agent(subject, "--cloud", server.url, *_TEXT) as running:
        if running.finish(60.0) != 0:
            raise NotMeasured(f"the agent failed on an honest text: {running.errors[-300:]!r}")
        return running.peak_mb
