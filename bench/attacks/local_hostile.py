"""Attacks the local endpoint as its verifier: answers without end, escapes in names, sessions with one name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from bench.attacks.false_verifiers import Answers, HostileServer, Ways, as_answer, as_stream, hostile_server
from bench.attacks.local import CHAT, GENERATE, text_body
from bench.attacks.probes import MAX_GROWTH_MB, MAX_HEALTH_S, health_of, memory_of
from bench.attacks.subject import COMPLETIONS, NotMeasured, Row, Server, Subject, listed, wait_for
from tests.hostile_answers import IDENTITY, MAX_TOKENS, broken_streams

ESCAPES: Final = ("\x1b]0;pwned", "\x1b[2J", "\x1b[6n", "\x9b31m", "\x1bP+q544e\x1b\\", "\x08\x08", "\x7f")
"""A title, a cleared screen, a question that the terminal answers as if typed, C1 codes, a device string, BS, DEL."""
MODEL: Final = "/v1/model"
RENDER: Final = "/v1/render"
USAGE: Final = {
    "prompt_tokens": 1,
    "completion_tokens": 1,
    "target_passes": 1,
    "accepted_prediction_tokens": 0,
    "rejected_prediction_tokens": 0,
}
VOCAB_SIZE: Final = 4096
ENDLESS_REFUSAL: Final = Ways(b'HTTP/1.1 400 Bad Request\r\n\r\n{"error":{"code":"', b"x" * 65536)
_MARKUP: Final = "<img src=x onerror=document.title='pwned'></script>"
_BIDI: Final = ("\u202e", "\u2066", "\u200f")
_NAME: Final = f"a{'b'.join(ESCAPES)}c{_MARKUP}{''.join(_BIDI)}"
_ENDS_S: Final = 30.0
_NUM_CLIENTS: Final = 8
_NUM_TOKENS: Final = 40


def local_hostile(subject: Subject) -> Iterator[Row]:
    """Serves an endpoint from a verifier that lies in every answer."""
    facts = facts_of(subject)
    with _endpoint(subject, facts) as (server, endpoint):
        yield from _endless(server, endpoint, facts)
    with _endpoint(subject, facts) as (server, endpoint):
        yield _mixed(subject, server, endpoint)
    with _endpoint(subject, {**facts, "name": _NAME}) as (server, endpoint):
        yield _escapes(server, endpoint)


def _endless(server: HostileServer, endpoint: Server, facts: dict[str, Any]) -> Iterator[Row]:
    """Answers without end or sense, each to one text; then to the questions around texts."""
    good = honest_answers(facts)
    forever, text = b'{"name":"' + b"x" * 65536, {"prompt": "def walk(path):", "max_tokens": MAX_TOKENS}
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}
    huge = json.dumps({"tokens": [5] * 600_000, "model": "m", "target": facts["target"]}).encode()
    kinds: dict[str, tuple[Ways, str, dict[str, Any]]] = {
        what: (Ways(each.data, each.more, others=good), COMPLETIONS, text)
        for what, each in broken_streams(VOCAB_SIZE).items()
    }
    kinds["a refusal without end"] = (replace(ENDLESS_REFUSAL, others=good), COMPLETIONS, text)
    kinds["a model's facts without end"] = (
        Ways(b"", others={**good, MODEL: (_head(1 << 30), forever)}),
        COMPLETIONS,
        {**text, "model": "another"},
    )
    for what, first, more in (
        ("a rendering of 600,000 ids", _head(len(huge)) + huge, b""),
        ("a rendering without end", _head(1 << 30) + b'{"tokens":[', b"5," * 32768),
    ):
        kinds[what] = (Ways(b"", others={**good, RENDER: (first, more)}), CHAT, chat)
    _honest(server, endpoint, good)
    raw: dict[str, dict[str, Any]] = {}
    before_mb = endpoint.memory_mb()
    for what, (ways, path, body) in kinds.items():
        server.ways = ways
        with memory_of(endpoint) as memory, health_of(endpoint) as health:
            answer = endpoint.ask_in_time("POST", path, body, _ENDS_S)
        server.ways = Ways(b"", others=good)
        raw[what] = {
            "status": answer.status,
            "took_s": answer.took_s,
            "peak_mb": memory.peak_mb,
            "p99_ms": health.high * 1e3,
            "max_ms": health.worst * 1e3,
            "body": answer.body[-200:].decode(errors="replace"),
        }
        with suppress(NotMeasured):  # the row on texts left says so
            wait_for("a text was not over", lambda: not endpoint.num_running(), 30.0)
    largest = max(raw, key=lambda what: raw[what]["peak_mb"])
    growth = raw[largest]["peak_mb"] - before_mb
    yield Row(
        "29",
        f"`outrider serve`: a verifier whose answers have no end or sense, {len(raw)} kinds: the endpoint's memory",
        f"+{growth:.0f} MB, most with: {largest}",
        f"+{MAX_GROWTH_MB:.0f} MB",
        growth <= MAX_GROWTH_MB,
        {"before_mb": before_mb, "kinds": raw},
    )
    slowest = max(raw, key=lambda what: raw[what]["p99_ms"])
    yield Row(
        "29",
        "the same: /health/live meanwhile",
        f"worst: {slowest}: p99 {raw[slowest]['p99_ms']:.0f} ms, max {raw[slowest]['max_ms']:.0f} ms",
        "p99 under 100 ms",
        raw[slowest]["p99_ms"] < 2e3 * MAX_HEALTH_S,
    )
    unclear = [f"{what} (HTTP {one['status']})" for what, one in raw.items() if not 400 <= one["status"] < 600]
    left = endpoint.num_running()
    yield Row(
        "29",
        f"the same: without an error within {_ENDS_S:g} s; texts left in work",
        f"{listed(unclear, 'kinds')}; {left} texts",
        "none; 0",
        not unclear and left == 0,
    )


def _mixed(subject: Subject, server: HostileServer, endpoint: Server) -> Row:
    """Eight clients at once; all sessions have the same name, and each answers with its own prompt's last token."""

    def echo(request: dict[str, Any]) -> bytes:
        token = request["prompt"][-1]
        commits = [{"base": base, "tokens": [token]} for base in range(_NUM_TOKENS)]
        return as_stream(opened_event(), *commits, {"type": "end", "reason": "length", "usage": USAGE})

    server.ways = Ways(b"", others=server.ways.others, answer=echo)
    prompts = [[7, *tokens_of(subject.bundles[1], letter)] for letter in "abcdefgh"]

    def text_of(prompt: list[int]) -> str:
        answer = endpoint.ask("POST", COMPLETIONS, {"prompt": prompt, "max_tokens": _NUM_TOKENS})
        return str(answer.json["choices"][0]["text"]) if answer.status == 200 else f"HTTP {answer.status}"

    alone = [text_of(prompt) for prompt in prompts]
    with ThreadPoolExecutor(_NUM_CLIENTS) as pool:
        together = [text for _ in range(5) for text in pool.map(text_of, prompts)]
    wrong = sum(text != alone[index % _NUM_CLIENTS] for index, text in enumerate(together))
    are_apart = len(set(alone)) == _NUM_CLIENTS and not any(text.startswith("HTTP ") for text in alone)
    return Row(
        "29",
        f"a verifier that gives {_NUM_CLIENTS} clients' sessions one name: answers with another client's text",
        f"{wrong} of {len(together)}" + ("" if are_apart else f"; alone: {alone}"),
        "0",
        are_apart and not wrong,
        {"alone": alone},
    )


def _escapes(server: HostileServer, endpoint: Server) -> Row:
    """Names and errors with escapes: in the endpoint's log and its answers. What its page shows, is said by tests."""
    endpoint.ask("POST", COMPLETIONS, {"prompt": "a", "model": _NAME, "max_tokens": 1})
    error = {"code": "invalid_parameter", "message": _NAME, "type": "invalid_request_error", "param": _NAME}
    server.ways = Ways(as_answer({"error": error}, "400 Bad Request"), others=server.ways.others)
    refused = endpoint.ask("POST", COMPLETIONS, {"prompt": "a", "max_tokens": 1})
    models = endpoint.ask("GET", "/v1/models")
    page = endpoint.ask("POST", GENERATE, text_body(1, 5))
    end = {"type": "end", "reason": "error", "usage": USAGE, "error": {**error, "code": "shutting_down"}}
    server.ways = Ways(as_stream(opened_event(), end), others=server.ways.others)
    ended = endpoint.ask("POST", GENERATE, text_body(1, 5))
    shown = [
        f"{where}: {escape!r}"
        for where, words in {
            "the log": endpoint.said(),
            "/v1/models": models.body.decode(errors="replace"),
            "an error": refused.body.decode(errors="replace"),
            "the page's events": (page.body + ended.body).decode(errors="replace"),
        }.items()
        # JSON escapes the C0 codes only; what the log has goes to a terminal as it is.
        for escape in ((*ESCAPES, *_BIDI) if where == "the log" else ("\x1b", "\x08"))
        if escape in words
    ]
    return Row(
        "29",
        "terminal escapes in a verifier's name and errors: raw in the endpoint's log or answers",
        listed(shown, "places"),
        "none",
        not shown and models.status == 200 and refused.status >= 400,
        {"shown": shown, "statuses": [refused.status, models.status, page.status, ended.status]},
    )


@contextmanager
def _endpoint(subject: Subject, facts: dict[str, Any]) -> Iterator[tuple[HostileServer, Server]]:
    with hostile_server() as server:
        server.ways = Ways(b"", others=honest_answers(facts))
        with subject.endpoint(server.url) as endpoint:
            yield server, endpoint


def _honest(server: HostileServer, endpoint: Server, good: Answers) -> None:
    """A short, honest text first: memory that any use takes is not the attack's. Raises NotMeasured."""
    end = {"type": "end", "reason": "stop", "usage": USAGE}
    server.ways = Ways(as_stream(opened_event(), {"base": 0, "tokens": [5, 6, 7]}, end), others=good)
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": [{"role": "user", "content": "a"}]})):
        answer = endpoint.ask("POST", path, {**body, "max_tokens": 5})
        if answer.status != 200:
            raise NotMeasured(f"the endpoint refused an honest verifier's text: {answer.body[-300:]!r}")


def _head(length: int) -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n".encode()


def opened_event() -> dict[str, Any]:
    """A session's first event."""
    return {
        "type": "open",
        "session": "s",
        "model": "m",
        "protocol": 1,
        "stop_ids": [0],
        "max_positions": 1024,
        "target": IDENTITY,
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
        "vocab_size": VOCAB_SIZE,
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
