"""Attacks on the agent by a hostile server: escapes for its terminal, events and ids of any size."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from bench.attacks.agents import agent
from bench.attacks.false_verifiers import Answers, HostileServer, Ways, as_answer, as_stream, hostile_server
from bench.attacks.probes import MAX_GROWTH_MB
from bench.attacks.subject import NotMeasured, Row, Subject, listed

ESCAPES: Final = ("\x1b]0;pwned", "\x1b[2J", "\x1b[6n", "\x9b31m", "\x1bP+q544e\x1b\\", "\x08\x08", "\x7f")
"""A title, a cleared screen, a question that the terminal answers as if typed, C1 codes, a device string, BS, DEL."""
HOSTILE: Final = "a" + "b".join(ESCAPES) + "c"
ENDS_S: Final = 15.0
MODEL: Final = "/v1/model"
RENDER: Final = "/v1/render"
USAGE: Final = {
    "prompt_tokens": 1,
    "completion_tokens": 1,
    "target_passes": 1,
    "accepted_prediction_tokens": 0,
    "rejected_prediction_tokens": 0,
}
_TEXT: Final = ("--mode", "cloud-only", "--max-tokens", "200", "--", "def walk(path):")


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
    """Sends events, ids, commits and errors without end; the agent must end, without growing."""
    ways = endless_sessions()
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


def endless_sessions() -> dict[str, Ways]:
    """Name -> an answer to a session without end or sense."""
    opened, one = opened_event(), b'data: {"base":0,"tokens":[5]}\n\n'
    far = json.dumps({"base": 0, "tokens": [5] * 200_000}).encode()
    forever = b"data: " + b'{"base":0,"tokens":[' + b"5," * 32768
    return {
        "an event without end": Ways(as_stream(opened) + b'data: {"base":0,"tokens":[', b"5," * 32768),
        "a comment without end": Ways(as_stream(opened) + b":", b"x" * 65536),
        "lines of one event without end": Ways(as_stream(opened), (b"data: " + b"5," * 500 + b"\n") * 64),
        "commits of 200,000 tokens": Ways(as_stream(opened) + b"data: " + far + b"\n\n", b"data: " + far + b"\n\n"),
        "commits without end": Ways(as_stream(opened), one * 2000),
        "a huge id": Ways(as_stream(opened, {"base": 0, "tokens": [10**30]})),
        "an id beyond the vocabulary": Ways(as_stream(opened, {"base": 0, "tokens": [2**31 - 1]})),
        "a negative id": Ways(as_stream(opened, {"base": 0, "tokens": [-1]})),
        "a session's name of 64 KiB": Ways(as_stream({**opened, "session": "s" * 65536}), forever),
        "a refusal without end": Ways(b"HTTP/1.1 400 Bad Request\r\n\r\n" + b'{"error":{"code":"', b"x" * 65536),
        "headers without end": Ways(b"HTTP/1.1 200 OK\r\nX: ", b"x" * 65536),
    }


def _plain_memory(subject: Subject, server: HostileServer, honest: Answers) -> float:
    """The agent's memory when the server sends a short, honest text."""
    end = {"type": "end", "reason": "stop", "usage": USAGE}
    server.ways = Ways(as_stream(opened_event(), {"base": 0, "tokens": [5, 6, 7]}, end), others=honest)
    with agent(subject, "--cloud", server.url, *_TEXT) as running:
        if running.finish(60.0) != 0:
            raise NotMeasured(f"the agent failed on an honest text: {running.errors[-300:]!r}")
        return running.peak_mb


def opened_event() -> dict[str, Any]:
    """A session's first event."""
    return {
        "type": "open",
        "session": "s",
        "model": "m",
        "protocol": 1,
        "stop_ids": [0],
        "max_positions": 1024,
        "target": "t" * 32,
    }


def honest_answers(facts: dict[str, Any]) -> Answers:
    """To the questions around texts."""
    rendered = {"tokens": [5, 6], "model": facts["name"], "target": facts["target"]}
    return {MODEL: (as_answer(facts), b""), RENDER: (as_answer(rendered), b"")}


def facts_of(subject: Subject) -> dict[str, Any]:
    """What an honest verifier says of its model; its sessions' target is that of `opened_event`."""
    manifest = json.loads((subject.bundles[1] / "manifest.json").read_text(encoding="utf-8"))
    return {
        "name": "m",
        "tokenizer": manifest["tokenizer_fingerprint"],
        "vocab_size": 4096,
        "max_positions": 1024,
        "eos_token_ids": [0],
        "has_chat_template": True,
        "target": opened_event()["target"],
    }


def tokens_of(bundle: Path, text: str) -> list[int]:
    """The text's ids: from the draft's own tokenizer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(bundle / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    if tokenizer.decode(ids, skip_special_tokens=False) != text:
        raise NotMeasured("the tokenizer cannot write terminal escapes, so no server can send them as tokens")
    return ids
