"""Attacks on the agent's terminal by a hostile server. Answers without end or sense meet the agent in tests."""

from __future__ import annotations

import os
import pty
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Final

from bench.attacks.false_verifiers import HostileServer, Ways, as_answer, as_stream, hostile_server
from bench.attacks.local_hostile import ESCAPES, USAGE, facts_of, honest_answers, opened_event, tokens_of
from bench.attacks.subject import NotMeasured, Row, Subject, listed
from bench.processes import end_group

HOSTILE: Final = "a" + "b".join(ESCAPES) + "c"
_TEXT: Final = ("--mode", "cloud-only", "--max-tokens", "24", "--", "def walk(path):")
_ENDS_S: Final = 12.0


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
            printed = _printed(subject, server)
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


def _printed(subject: Subject, server: HostileServer) -> str:
    """What `outrider run` writes to a terminal of its own, until it ends, or has asked so often that it has shown the
    server's words.
    """
    environment = {**subject.environment, "TERM": "xterm-256color", "COLUMNS": "200"}
    environment.pop("NO_COLOR", None)
    leader, follower = pty.openpty()
    command = subject.agent("--cloud", server.url, *_TEXT)
    process = subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=follower, env=environment, start_new_session=True
    )
    os.close(follower)
    pieces: list[bytes] = []

    def read() -> None:
        with suppress(OSError):  # the terminal's other side is closed
            while data := os.read(leader, 65536):
                pieces.append(data)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    deadline_s = time.monotonic() + _ENDS_S
    while process.poll() is None and server.num_asked <= 8 and time.monotonic() < deadline_s:
        time.sleep(0.005)
    end_group(process)
    reader.join(5.0)
    os.close(leader)
    return b"".join(pieces).decode(errors="replace")
