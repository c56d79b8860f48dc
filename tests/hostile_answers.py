"""Answers that no server of this protocol gives: without end, without sense, or of what nobody asked for.

`test_edge_hostile` puts each in an agent's way; row 29 of `bench.abuse` has the local endpoint meet the streams, and
measures its memory.
"""

from __future__ import annotations

import gzip
import json
from typing import Any, NamedTuple

IDENTITY = f"{0:016x}"
"""The target that these answers name."""
MAX_TOKENS = 24
"""Of the text that is asked for: a stream has one token more."""
OK = b"HTTP/1.1 200 OK\r\n"
STREAM = OK + b"content-type: text/event-stream\r\n\r\n"


class Broken(NamedTuple):
    """Bytes, those that follow again and again, and a pattern of what the agent says."""

    data: bytes
    more: bytes
    said: str


def event(**fields: Any) -> bytes:
    """An event of a session's stream."""
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def answer(**fields: Any) -> bytes:
    """An answer to /v1/verify with one result of these fields."""
    body = json.dumps({"results": [fields], "target": IDENTITY}).encode()
    return OK + f"content-length: {len(body)}\r\n\r\n".encode() + body


BOMB = gzip.compress(b"a" * (1 << 20))
DIGITS = b"1" * 5000
USAGE = {
    "prompt_tokens": 1,
    "completion_tokens": 1,
    "target_passes": 1,
    "accepted_prediction_tokens": 0,
    "rejected_prediction_tokens": 0,
}
"""Of a text's end."""


def opened(size: int, **fields: Any) -> bytes:
    """A stream's head and its first event, of a target with so many ids."""
    first = {"type": "open", "session": "s", "model": "m", "target": IDENTITY, "vocab_size": size, "keep_alive_s": 0.1}
    return STREAM + event(**(first | fields))


def broken_streams(size: int) -> dict[str, Broken]:
    """Answers to /v1/sessions, by name."""

    def opening(**fields: Any) -> bytes:
        return opened(size, **fields)

    return {
        "a line without end": Broken(opening() + b"data: ", b"x", "more than 262144 bytes"),
        "a comment without end": Broken(opening() + b":", b"x", "more than 262144 bytes"),
        "keep-alives without end": Broken(opening(), b":\n\n" * 1000, "more than 1048576 bytes without an event"),
        "a header without end": Broken(OK + b"x: ", b"x", "not HTTP"),
        "headers without end": Broken(OK, b"x: y\r\n", "not HTTP"),
        "a status without end": Broken(b"HTTP/1.1 200 ", b"x", "not HTTP"),
        "no HTTP": Broken(b"SSH-2.0-OpenSSH_9.9\r\n\r\n", b"", "not HTTP"),
        "nesting": Broken(opening() + b"data: " + b"[" * 200_000 + b"\n\n", b"", "not an event"),
        "a negative id": Broken(opening() + event(base=0, tokens=[-1]), b"", f"id is -1; expected 0 to {size - 1}"),
        "an id beyond the vocabulary": Broken(
            opening() + event(base=0, tokens=[size]), b"", f"id is {size}; expected 0 to {size - 1}"
        ),
        "an id of 25 bits": Broken(
            opening(vocab_size=None) + event(base=0, tokens=[2**24]), b"", "expected 0 to 16777215"
        ),
        "a vocabulary of 99 bits": Broken(
            opening(vocab_size=2**99) + event(base=0, tokens=[2**70]), b"", "more than 63 bits"
        ),
        "an id of 5000 digits": Broken(
            opening() + b'data: {"base":0,"tokens":[' + DIGITS + b"]}\n\n", b"", "not an event"
        ),
        "a base that leaves a gap": Broken(opening() + event(base=3, tokens=[1]), b"", "base is 3; expected 0"),
        "a negative base": Broken(opening() + event(base=-1, tokens=[1]), b"", "base is -1; expected 0"),
        "one token too many": Broken(opening() + event(base=0, tokens=[1] * 25), b"", "25 tokens .* at most 24 in all"),
        "events without tokens": Broken(opening(), event(base=0, tokens=[]), "0 tokens .* at least 1"),
        "accepted beyond proposed": Broken(
            opening() + event(base=0, tokens=[1, 2], accepted=2, proposed=1), b"", "2 of 1 drafted tokens were accepted"
        ),
        "accepted beyond tokens": Broken(
            opening() + event(base=0, tokens=[1], accepted=9, proposed=9),
            b"",
            "9 of 9 drafted tokens were accepted in a commit of 1",
        ),
        "a commit first": Broken(STREAM + event(base=0, tokens=[1]), b"", "begins with 'commit'"),
        "open twice": Broken(opening(), event(type="open", session="s", model="m"), "'open' twice"),
        "a session that is a path": Broken(opening(session="../../x?"), b"", "session's id is '../../x[?]'"),
        "a session of a million characters": Broken(opening(session="s" * 200_000), b"", "session's id is 'ssss"),
        "times that are none": Broken(
            STREAM + b'data: {"session":"s","model":"m","type":"open","step_ms":NaN}\n\n', b"", "nan"
        ),
        "a pace that is none": Broken(
            STREAM + b'data: {"session":"s","model":"m","type":"open","steady":{"every_ms":NaN}}\n\n',
            b"",
            "not an event",
        ),
        "frames that nobody asked for": Broken(opening(steady={}), b"", "no steady session was asked for"),
        "a negative time in mid-text": Broken(
            opening() + event(base=0, tokens=[1], draft_token_ms=-1.0),
            b"",
            "draft_token_ms is -1.0; expected a number, at least 0",
        ),
        "a wait without end": Broken(
            opening() + event(type="end", reason="length", usage=USAGE | {"waited_ms": "?"}).replace(b'"?"', b"1e999"),
            b"",
            "waited_ms is inf; expected a number",
        ),
        "a redirect": Broken(
            b"HTTP/1.1 307 \r\nlocation: http://elsewhere/\r\n\r\n", b"", "it redirects to http://elsewhere/"
        ),
        "another status": Broken(
            b"HTTP/1.1 202 \r\ncontent-length: 0\r\n\r\n", b"", "HTTP 202; expected an event stream"
        ),
        "a compressed body": Broken(OK + b"content-encoding: gzip\r\n\r\n" + BOMB, b"", "encoded as 'gzip'"),
        "a compressed error": Broken(
            b"HTTP/1.1 400 \r\ncontent-encoding: gzip\r\n\r\n" + BOMB, b"", "encoded as 'gzip'"
        ),
        "lines of one event without end": Broken(opening(), b"data: " + b"5," * 500 + b"\n", "not an event"),
        "a commit of 200,000 tokens": Broken(
            opening() + event(base=0, tokens=[5] * 200_000), b"", "more than 262144 bytes"
        ),
    }


BROKEN_ANSWERS: dict[str, Broken] = {
    "an answer without end": Broken(OK + b"\r\n{", b" ", "more than 262144 bytes"),
    "no JSON": Broken(OK + b"content-length: 2\r\n\r\nno", b"", "not a VerifyAnswer"),
    "no result": Broken(OK + b'content-length: 14\r\n\r\n{"results":[]}', b"", "0 results answer 1 items"),
    "too many tokens": Broken(answer(tokens=[1] * 9), b"", "9 tokens answer 2 drafted ones; expected 1 to 3"),
    "no token": Broken(answer(tokens=[]), b"", "0 tokens answer 2 drafted ones"),
    "a negative id": Broken(answer(tokens=[-1]), b"", "id is -1; expected 0 to 16777215"),
    "an id of 5000 digits": Broken(OK + b'\r\n{"results":[{"tokens":[' + DIGITS + b"]}]}", b"", "number out of range"),
    "accepted beyond tokens": Broken(answer(tokens=[1], accepted=2), b"", "2 of 2 drafted tokens were accepted in 1"),
    "negative accepted": Broken(answer(tokens=[1], accepted=-1), b"", "-1 of 2 drafted tokens"),
    "a hash of any size": Broken(answer(tokens=[1], prefix_hash="0" * 65), b"", "prefix_hash has more than 64"),
    "a time that is none": Broken(
        OK + b'\r\n{"results":[{"tokens":[1]}],"step_ms":1e999}', b"", "step_ms is inf; expected a number"
    ),
    "a redirect": Broken(b"HTTP/1.1 302 \r\nlocation: /x\r\ncontent-length: 0\r\n\r\n", b"", "it redirects to /x"),
    "a compressed body": Broken(OK + b"content-encoding: br\r\n\r\n" + BOMB, b"", "encoded as 'br'"),
}
"""Answers to /v1/verify, by name."""
