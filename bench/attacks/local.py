"""Attacks the local endpoint: by texts, all that one client can open, unread, half with a long artificial round trip;
and as its verifier, whose answers have no end or sense.

Runs the endpoint over an emulated verifier, and honest texts of another client beside an attack. What it shows of a
verifier's words, and that texts are kept apart, is said by tests.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.attacks.attackers import attacking, hold
from bench.attacks.crowd import Crowd
from bench.attacks.probes import MAX_GROWTH_MB, MAX_HEALTH_S, beside, health_of, memory_of
from bench.attacks.subject import COMPLETIONS, KEYS, Row, Server, Subject, listed, middle, seconds
from bench.bare_http import NotMeasured, wait_for
from tests.hostile_answers import IDENTITY, MAX_TOKENS, USAGE, broken_streams, event, opened
from tests.raw_server import RawServer, http_answer, raw_server

CHAT: Final = "/v1/chat/completions"
GENERATE: Final = "/v1/outrider/generate"
VERIFY: Final = "/v1/outrider/verify"
ATTACKER, HONEST = KEYS
STEP_MS: Final = 20.0
MAX_OWN: Final = 8
PLACES: Final = ("--max-requests", str(2 * MAX_OWN), "--max-own", str(MAX_OWN))
WELL: Final = "p99 under 50 ms and max under 100 ms more than the idle endpoint's; +64 MB"
CAP_S: Final = 20.0
_DELAY_MS: Final = 500.0
_LONG: Final[dict[str, Any]] = {"prompt": [1 + i % 4000 for i in range(900)], "max_tokens": 1000, "stream": True}
_MIN_RATE: Final = 0.5
"""Of another client's tokens/s, without the attack."""


@contextmanager
def endpoint_and_idle(
    subject: Subject, *, extra_ms: float = 0.0, draft: Path | None = None, target: Path | None = None
) -> Iterator[tuple[Server, Server]]:
    """An endpoint with two keys over an emulated verifier, or over `target`, and an idle one. All places of both
    clients have had a text: memory that any use takes is not the attack's. Raises NotMeasured.
    """
    with ExitStack() as stack:
        server = subject.emulated(STEP_MS, extra_ms) if target is None else subject.serve(bundle=target)
        url = stack.enter_context(server).url
        endpoint, idle = (stack.enter_context(subject.endpoint(url, *PLACES, keys=KEYS, draft=draft)) for _ in range(2))
        with texts_of(endpoint, ATTACKER, MAX_OWN, 200) as ours, texts_of(endpoint, HONEST, MAX_OWN, 200) as theirs:
            streams = [*ours.streams, *theirs.streams]
            what = "the endpoint's first texts did not end"
            wait_for(what, lambda: all(stream.is_over for stream in streams), 120.0)
        if refusals := [stream.refusal for stream in streams if stream.refusal]:
            raise NotMeasured(f"the endpoint refused its first texts: {refusals[0]}")
        endpoint.wait_until_idle()
        yield endpoint, idle


def text_body(index: int, max_tokens: int = 800, **more: Any) -> dict[str, Any]:
    """A text as the page asks for it."""
    return {"prompt": f"def text_{index}(path):", "max_tokens": max_tokens, "seed": index, **more}


def texts_of(
    endpoint: Server, key: str | None, count: int, max_tokens: int = 800, *, keeps: bool = False, **more: Any
) -> closing[Crowd]:
    """Texts of one client. keeps: those that end begin again."""
    bodies = [text_body(index, max_tokens, **more) for index in range(count)]
    return endpoint.crowd(bodies, key=key, path=GENERATE, keeps=keeps)


@contextmanager
def honest_texts(endpoint: Server) -> Iterator[Crowd]:
    """Two texts of the other client, which run. Raises NotMeasured."""
    with texts_of(endpoint, HONEST, 2, keeps=True) as crowd:
        crowd.require_running(2)
        time.sleep(0.5)
        yield crowd


def greedy_texts(subject: Subject) -> Iterator[Row]:
    """One key asks for long texts on 64 connections and reads none; another key's texts run, and new ones begin.

    Half of them are the page's, with a round trip of 500 ms: what watches a text and delays it is unread, too.
    """
    with endpoint_and_idle(subject, extra_ms=0.05) as (endpoint, idle):
        # The draft's caches for texts of this length are there before: what they take is bounded by --draft-context.
        body = {**_LONG, "stream": False, "max_tokens": 100}
        with ThreadPoolExecutor(MAX_OWN) as pool:
            answers = list(pool.map(lambda _: endpoint.ask("POST", COMPLETIONS, body, key=ATTACKER), range(MAX_OWN)))
        if any(answer.status != 200 for answer in answers):
            raise NotMeasured(f"the endpoint refused long texts: {answers[0].body[-200:]!r}")
        delayed = text_body(1, 1500, round_trip_ms=_DELAY_MS)
        requests = [
            endpoint.request("POST", path, body, ATTACKER) for path, body in ((COMPLETIONS, _LONG), (GENERATE, delayed))
        ]

        @contextmanager
        def held() -> Iterator[None]:
            with ExitStack() as stack:
                for request in requests:
                    stack.enter_context(attacking(hold, endpoint.port, request, 32))
                yield

        what = f"`outrider serve --max-own {MAX_OWN}`: one key's long texts on 64 connections, never read"
        with beside(endpoint, idle) as seen:
            yield _beside(what, endpoint, held)
    yield Row("25", "the same: /health/live, memory", str(seen), WELL, seen.is_well)


def _beside(what: str, endpoint: Server, attack: Callable[[], AbstractContextManager[Any]]) -> Row:
    """Another key's tokens/s, and its first tokens, in turn without the attack and beside it."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    took: dict[bool, list[float | None]] = {False: [], True: []}
    for turn in range(4):
        with ExitStack() as stack:
            if is_attacked := bool(turn % 2):
                stack.enter_context(attack())
                what_not = f"the attacker's {MAX_OWN} texts did not run"
                wait_for(what_not, lambda: endpoint.num_running() >= MAX_OWN, 30.0)
            texts = stack.enter_context(honest_texts(endpoint))
            rates[is_attacked].append(texts.tokens_per_s(5.0))
            bodies = [text_body(1000 + 10 * turn + i) for i in range(3)]
            took[is_attacked] += [endpoint.first_token_s(body, CAP_S, key=HONEST, path=GENERATE) for body in bodies]
        endpoint.wait_until_idle()
    alone, during = median(rates[False]), median(rates[True])
    alone_s, during_s = middle(took[False], CAP_S), middle(took[True], CAP_S)
    limit_s = 10.0 * STEP_MS / 1e3 + alone_s
    return Row(
        "25",
        f"{what}: another key's first token and tokens/s",
        f"{seconds(during_s if during_s < CAP_S else None, CAP_S)}, alone {seconds(alone_s)}; "
        f"{during:.0f} tokens/s, alone {alone:.0f} ({during / max(alone, 1e-9):.2f}x)",
        f"10 steps and the time alone: {seconds(limit_s)}; at least {_MIN_RATE:g}x",
        during_s <= limit_s and during >= _MIN_RATE * alone,
        {"tokens_per_s": rates, "first_token_s": took},
    )


VOCAB_SIZE: Final = 4096
MAX_SENT: Final = 512 << 20
_ENDS_S: Final = 30.0
_CHAT_BODY: Final = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}
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
        "a rendering of 600,000 ids": ({"/v1/render": (http_answer(huge), b"")}, CHAT, _CHAT_BODY),
        "a rendering without end": (
            {"/v1/render": (http_answer(b'{"tokens":[', length=1 << 30), b"5," * 32768)},
            CHAT,
            _CHAT_BODY,
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
        for path, body in ((COMPLETIONS, _TEXT), (CHAT, _CHAT_BODY)):  # memory that any use takes is not the attack's
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
