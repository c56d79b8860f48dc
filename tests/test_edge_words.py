"""Tests what a verifier's words do to who reads them: on the terminal of `outrider run`, in the log and the answers of
`outrider serve`.
"""

from __future__ import annotations

import json
import os
import pty
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.agents import SOON
from tests.commands import Outrider
from tests.hostile_answers import IDENTITY, USAGE, event, opened
from tests.local_endpoint import serve_local
from tests.raw_server import RawServer, Reply, http_answer, raw_server
from tests.serving import fake_tokenizer

from outrider.edge.link import endpoints

ESCAPES = ("\x1b]0;pwned", "\x1b[2J", "\x1b[6n", "\x9b31m", "\x1bP+q544e\x1b\\", "\x08\x08", "\x7f")
"""A title, a cleared screen, a question that the terminal answers as if typed, C1 codes, a device string, BS, DEL."""
BIDI = ("\u202e", "\u2066", "\u200f")
WORDS = "a" + "b".join((*ESCAPES, *BIDI)) + "c"
ERROR = {"code": "shutting_down", "message": WORDS, "type": "server_error", "param": WORDS}


def answer(body: Any, status: str = "200 OK") -> bytes:
    return http_answer(json.dumps(body).encode(), status)


def stream(*events: dict[str, Any], **fields: Any) -> bytes:
    return opened(fake_tokenizer().size, **fields) + b"".join(event(**each) for each in events)


ENDS = {"type": "end", "reason": "error", "usage": USAGE, "error": ERROR}
WAYS = {
    "text": stream(
        {"base": 0, "tokens": fake_tokenizer().encode(WORDS)}, {"type": "end", "reason": "stop", "usage": USAGE}
    ),
    "a refusal": answer({"error": {**ERROR, "code": "invalid_parameter"}}, "400 Bad Request"),
    "a refusal's code": answer({"error": {**ERROR, "code": WORDS}}, "400 Bad Request"),
    "a missing key": answer({"error": {**ERROR, "code": "invalid_parameter"}}, "401 Unauthorized"),
    "an overloaded server": answer({"error": ERROR}, "503 Service Unavailable"),
    "the end's error": stream(ENDS),
    "an unknown event": stream({"type": WORDS}),
    "the model's name": stream({"type": WORDS}, model=WORDS),
    "another tokenizer": answer({"error": {**ERROR, "code": "tokenizer_mismatch"}}, "409 Conflict"),
}


def verifier(session: bytes, name: str = "m") -> Reply:
    """Answers so to what opens a session, and as a verifier does to what is asked around texts."""
    tokenizer = fake_tokenizer()
    facts = {
        "name": name,
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.size,
        "max_positions": 1024,
        "eos_token_ids": [0],
        "has_chat_template": True,
        "target": IDENTITY,
    }
    given = {"/v1/sessions": session, "/v1/model": answer(facts)}

    def reply(server: RawServer, connection: socket.socket) -> None:
        connection.sendall(given.get(server.asked[connection][0], answer({"status": "ready", "model": name})))

    return reply


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_a_terminal_obeys_no_word_of_a_server(
    way: bytes, outrider: Outrider, fake_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pseudo-terminal, as a user has it: wherever the words reach it, they are shown."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(endpoints, "RetryPolicy", lambda **_: SOON)
    leader, follower = pty.openpty()
    pieces: list[bytes] = []

    def read() -> None:
        with suppress(OSError):  # the terminal's other side is closed
            while data := os.read(leader, 65536):
                pieces.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    with raw_server(verifier(way)) as server, os.fdopen(follower, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "stderr", terminal)
        given = ("--cloud", server.url, "--draft", fake_bundle, "--mode", "cloud-only")
        outrider("run", *given, "--max-tokens", 60, "x", code=None)
    reader.join()
    os.close(leader)
    shown = b"".join(pieces).decode()
    assert server.num_asked and ("pwned" in shown or "requires an API key" in shown), shown
    assert not [escape for escape in (*ESCAPES, *BIDI) if escape in shown]


def test_the_endpoint_logs_and_answers_no_command(caplog: pytest.LogCaptureFixture) -> None:
    """JSON escapes the C0 codes only; what the log has goes to a terminal as it is."""
    asked = {"prompt": "a", "max_tokens": 5}
    page = {**asked, "seed": 1}
    with caplog.at_level("INFO"):
        for way in ("a refusal", "the end's error"):
            with raw_server(verifier(WAYS[way], WORDS)) as server, serve_local(server.url) as local:
                said = [
                    httpx.get(f"{local.url}/v1/models"),
                    httpx.post(f"{local.url}/v1/completions", json=asked),
                    httpx.post(f"{local.url}/v1/completions", json={**asked, "model": WORDS}),
                    httpx.post(f"{local.url}/v1/outrider/generate", json=page),
                ]
                shown = b"".join(each.content for each in said)
                assert server.num_asked and b"\x1b" not in shown and b"\x08" not in shown
                assert "pwned" in said[0].text and said[0].status_code == 200 and said[1].status_code >= 400
    assert not [escape for escape in (*ESCAPES, *BIDI) if escape in caplog.text] and r"\x1b]0;pwned" in caplog.text
