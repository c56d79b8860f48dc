"""Attacks on a server by connections: trickled and pipelined requests, answers left unread, floods of requests that are
cheap each (also on the local endpoint), large answers and downloads. That each is bounded or refused is said by tests.
"""

from __future__ import annotations

import hashlib
import json
import re
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, Final

from bench.attacks.attackers import attacking, fetch, for_ever, hold, pipeline, trickle
from bench.attacks.local import GENERATE, endpoint_and_idle, text_body
from bench.attacks.probes import MAX_GROWTH_MB, MAX_HEALTH_S, beside, health_of, memory_of
from bench.attacks.subject import COMPLETIONS, KEYS, Row, Server, Subject, middle, prompt_of, rates_of, seconds, slowed
from bench.attacks.texts import SESSION, tree
from bench.bare_http import HOST, NotMeasured, connect, next_bytes, request_bytes
from bench.changed_bundle import change_bundle

from outrider.models.wire.draft_stream import DRAFTS_MEDIA_TYPE, framed
from outrider.models.wire.tree_draft import MAX_MESSAGE_NODES, ROOT

ATTACKER, OTHER = KEYS
POOR: Final = "key-of-few-tokens-a-minute-0003"
MAX_FIRST: Final = 2.0
NUM_TRICKLES: Final = 1500
NUM_BODIES: Final = 100
TRICKLE_LIMIT_S: Final = 30.0
PAD_BYTES: Final = 64 << 20
TOKENIZER_BYTES: Final = 32 << 20
NUM_CONNECTIONS: Final = 64
ATTACK_S: Final = 10.0
UNREAD_S: Final = 30.0
FASTEST_STEP_MS: Final = 0.2
_CAP_S: Final = 10.0
_LARGE_S: Final = 300.0
Requests = dict[str, tuple[int, list[bytes]]]
"""Name -> connections for each request, and the requests."""


def trickled_requests(subject: Subject) -> Iterator[Row]:
    """Opens 1,500 connections that send a header line every two seconds, then 100 whose bodies trickle likewise."""
    _require_open_files(NUM_TRICKLES + 500)
    header = b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    with subject.serve(keys=KEYS) as server:
        body = server.request("POST", COMPLETIONS, b" " * 1000, ATTACKER)[:-1000]
        with (
            attacking(trickle, server.port, [body] * NUM_BODIES, b" ", 2.0) as bodies,
            health_of(server, reconnects=True, timeout_s=5.0) as health,
            attacking(trickle, server.port, [header] * NUM_TRICKLES, b"X-A: a\r\n", 2.0) as headers,
        ):
            (headers_s, headers_left), (bodies_s, bodies_left) = _until_closed(headers), _until_closed(bodies)
    yield Row(
        "8",
        f"{NUM_TRICKLES} connections that trickle headers, no key",
        f"{headers_left} open after {headers_s:.0f} s; /health/live on new connections: {health}",
        "all closed or refused within 30 s (and 3 s); health always answers, p99 under 250 ms",
        not headers_left and not health.num_failures and health.high < 0.25,
        {"health_s": health.values, "failures": health.num_failures},
    )
    yield Row(
        "8",
        f"{NUM_BODIES} connections with a key that trickle bodies",
        f"{bodies_left} open after {bodies_s:.0f} s",
        "all closed or refused within 30 s (and 3 s)",
        not bodies_left,
    )


def _require_open_files(count: int) -> None:
    """Lets this process and its children open as many files. Raises NotMeasured where the system does not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < count:
        raise NotMeasured(f"this system allows {hard} open files; the row needs {count}")
    if 0 <= soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def _until_closed(reports: Any) -> tuple[float, int]:
    """Seconds, and connections still open: once none is or the limit has passed."""
    while True:
        took_s, num_open = reports.recv()
        if not num_open or took_s > TRICKLE_LIMIT_S + 3.0:
            return took_s, num_open


def unread_answers(subject: Subject) -> Iterator[Row]:
    """Pipelines POSTs on one connection, then asks on 64 for the largest answer without a key; reads nothing."""
    with subject.serve(keys=KEYS) as server, subject.serve(keys=KEYS) as idle:
        requests: Requests = {
            "pipelined POSTs on one connection, no key": (1, [server.request("POST", "/v1/sessions", b"{}")]),
            "64 connections that never read their answers": (64, [server.request("GET", "/openapi.json")]),
        }
        for what, (num_connections, (request,)) in requests.items():
            server.wait_until_awake()
            with beside(server, idle) as seen, attacking(pipeline, server.port, request * 500, num_connections, False):
                time.sleep(ATTACK_S)
            limit = "+64 MB; p99 under 50 ms more than the idle server's"
            yield Row("9", what, f"{seen} in 10 s", limit, seen.is_small and seen.is_steady)


def unread_texts(subject: Subject) -> Iterator[Row]:
    """Asks for texts with 20 logprobs a token and reads none: long sessions, and a streamed call of many texts. They
    are longer than what the system's buffers take.
    """
    if subject.verifier.is_vllm:
        raise NotMeasured("the texts of its target end within the system's buffers")
    text = {"ignore_eos": True, "logprobs": 20}
    session = text | {"prompt": [5, 6, 7], "max_tokens": 12_000}
    call = text | {"prompt": "a", "max_tokens": 500, "n": 128, "stream": True}
    for what, path, body, num_connections, step_ms in (
        ("2 sessions", "/v1/sessions", session, 2, FASTEST_STEP_MS),
        ("a streamed call of 128 texts", COMPLETIONS, call, 1, 10.0),
    ):
        with subject.emulated(step_ms, 0.0, "--max-positions", "16384") as server, subject.emulated(step_ms) as idle:
            request = server.request("POST", path, body)
            with beside(server, idle) as seen, attacking(hold, server.port, request, num_connections):
                time.sleep(UNREAD_S)
        yield Row(
            "9",
            f"{what} with 20 logprobs a token, never read, steps of {step_ms:g} ms: /health/live, memory",
            f"{seen} in {UNREAD_S:g} s",
            f"p99 and max under 50 ms more than the idle server's; +{MAX_GROWTH_MB:g} MB",
            seen.is_steady and seen.health.worst < MAX_HEALTH_S + seen.idle.worst and seen.is_small,
        )


def floods(subject: Subject) -> Iterator[Row]:
    """Floods the server with requests that need no key or do no work; another key asks for single tokens."""
    poor = f"sha256:{hashlib.sha256(POOR.encode()).hexdigest()} name=poor tokens-per-minute=1"
    with subject.serve(keys=[*KEYS, poor]) as server:
        openapi, live = ([server.request("GET", path)] for path in ("/openapi.json", "/health/live"))
        metrics = [server.request("GET", "/metrics", key=ATTACKER)]
        keyed, keyless = [server.request("POST", COMPLETIONS, {}, ATTACKER)], [server.request("GET", "/v1/models")]
        spent = [server.request("POST", COMPLETIONS, {"prompt": [5, 6, 7], "max_tokens": 32}, POOR)]
        cases: Requests = {
            "GET /openapi.json, no key, 32": (32, openapi),
            "GET /openapi.json, no key, 200": (200, openapi),
            "GET /metrics, a plain key, 4": (4, metrics),
            "GET /metrics, a plain key, 100": (100, metrics),
            "refusals (400), a plain key, 32": (32, keyed),
            "refusals (401), no key, 32": (32, keyless),
            "refusals (429), a key whose tokens are spent, 32": (32, spent),
            "GET /health/live, no key, 32": (32, live),
            "refusals (400, 401) and /health/live together, 32": (32, [*keyed, *keyless, *live]),
        }
        yield from _first_beside(server, cases, lambda number: {"prompt": prompt_of(number)})


def local_floods(subject: Subject) -> Iterator[Row]:
    """The same at the local endpoint."""
    with endpoint_and_idle(subject) as (endpoint, _):
        cases: Requests = {
            "outrider serve: the page, no key, 32": (32, [endpoint.request("GET", "/")]),
            "outrider serve: refusals (400), a key, 32": (32, [endpoint.request("POST", COMPLETIONS, {}, ATTACKER)]),
            "outrider serve: GET /health/live, no key, 32": (32, [endpoint.request("GET", "/health/live")]),
        }
        yield from _first_beside(endpoint, cases, text_body, path=GENERATE)


def _first_beside(
    server: Server, cases: Requests, newcomer: Callable[[int], dict[str, Any]], **options: str
) -> Iterator[Row]:
    numbers = count()

    def firsts() -> list[float | None]:
        found, ends_s = list[float | None](), time.monotonic() + 10.0
        while len(found) < 40 and time.monotonic() < ends_s:
            found.append(server.first_token_s(newcomer(next(numbers)), _CAP_S, key=OTHER, **options))
        return found

    firsts()
    for what, (num_connections, requests) in cases.items():
        idle_s = firsts()
        with ExitStack() as stack:
            for request in requests:
                stack.enter_context(attacking(fetch, server.port, request, num_connections))
            time.sleep(1.0)
            flooded_s = firsts()
        idle, flooded = middle(idle_s, _CAP_S), middle(flooded_s, _CAP_S)
        yield Row(
            "43",
            f"{what} connections that stay open: another key's first token",
            f"{flooded * 1e3:.1f} ms; without {idle * 1e3:.1f} ms ({flooded / idle:.1f}x)",
            f"at most {MAX_FIRST:g}x",
            flooded <= MAX_FIRST * idle,
            {"first_token_s": {"idle": idle_s, "flooded": flooded_s}},
        )
        server.wait_until_awake()


def large_answers(subject: Subject) -> Iterator[Row]:
    """Asks for whole answers of 64 and 128 texts of 300 tokens with the 20 likeliest of each."""
    with subject.serve(keys=KEYS) as server, subject.serve(keys=KEYS) as idle:
        plain = {"prompt": prompt_of(1), "max_tokens": 300, "ignore_eos": True, "temperature": 1.0}
        # What the runtime takes for as many texts is not the answer's.
        server.ask("POST", COMPLETIONS, plain | {"n": 128}, key=ATTACKER, timeout_s=_LARGE_S)
        for num_choices in (64, 128):
            body = plain | {"logprobs": 20, "n": num_choices}
            with beside(server, idle) as seen:
                answer = server.ask("POST", COMPLETIONS, body, key=ATTACKER, timeout_s=_LARGE_S)
            num_tokens = sum(len(each["logprobs"]["tokens"]) for each in answer.json.get("choices", ()))
            is_whole = answer.status == 200 and num_tokens == 300 * num_choices
            is_quick = seen.is_steady and seen.health.worst < MAX_HEALTH_S + seen.idle.worst
            yield Row(
                "44",
                f"a whole answer of {num_choices} texts of 300 tokens with 20 logprobs each: /health/live, memory",
                f"status {answer.status}, {num_tokens} tokens, {len(answer.body) / 1e6:.0f} MB in {answer.took_s:.0f} "
                f"s; {seen}",
                f"complete; p99 and max under 50 ms more than the idle server's; +{MAX_GROWTH_MB:g} MB",
                is_whole and is_quick and seen.is_small,
            )


def downloads(subject: Subject) -> Iterator[Row]:
    """One key downloads on 64 connections; another key downloads once. The server offers the reference draft, 64 MiB
    larger, and shares a tokenizer of 32 MiB.
    """
    target, draft = subject.bundles
    pad = "/v1/drafts/draft/pad.txt"
    # JSON may end with spaces: it stays the same tokenizer.
    tokenizer = (target / "tokenizer.json").read_bytes().ljust(TOKENIZER_BYTES)
    with tempfile.TemporaryDirectory() as place:
        change_bundle(draft, Path(place, "drafts", "draft"), files={"pad.txt": bytes(PAD_BYTES)})
        padded = change_bundle(target, Path(place, "target"), files={"tokenizer.json": tokenizer}).path
        for what, path, attack in (
            ("downloads that are never read", pad, hold),
            ("downloads of a tokenizer that are never read", "/v1/tokenizer/tokenizer.json", hold),
            ("greedy downloads", pad, fetch),
        ):
            with (
                subject.serve("--drafts", str(Path(place, "drafts")), keys=KEYS, bundle=padded) as server,
                subject.serve(keys=KEYS) as idle,
            ):
                if server.ask("GET", path, key=ATTACKER).status != 200:
                    raise NotMeasured(f"the server has no {path}")
                request = server.request("GET", path, key=ATTACKER)
                with beside(server, idle) as seen, attacking(attack, server.port, request, NUM_CONNECTIONS):
                    time.sleep(ATTACK_S / 2)
                    other = server.ask("GET", pad, key=OTHER, timeout_s=ATTACK_S)
                    time.sleep(ATTACK_S / 2)
            is_whole = other.status == 200 and len(other.body) == PAD_BYTES
            yield Row(
                "21",
                f"{NUM_CONNECTIONS} {what}, of one key: another key's 64 MiB, /health/live, memory",
                f"{seconds(other.took_s) if is_whole else f'HTTP {other.status}'}; {seen}",
                f"whole within {ATTACK_S:g} s; p99 under 50 ms more than the idle server's; +64 MB",
                is_whole and seen.is_small and seen.is_steady,
            )


def long_requests(subject: Subject) -> Iterator[Row]:
    """Sends drafts up long requests as fast as they are read. That those end which trickle, are two, or go on after
    their session, is said by tests.
    """
    messages = _chunk(framed(tree(0, 0, range(1, 1 + MAX_MESSAGE_NODES), [ROOT] * MAX_MESSAGE_NODES))) * 40
    with subject.emulated(step_ms=10.0) as server:
        what = "4 sessions that send 512-node messages up a long request as fast as it is read"
        yield _beside_plain(server, what, 4, messages)
        what = "the same of steady sessions, with filler"
        yield _beside_plain(server, what, 4, _chunk(bytes(1 << 16)), steady=True)
        yield _beside_plain(server, "256 steady sessions of one client that send nothing", 256, b"", steady=True)


def _beside_plain(server: Server, what: str, num: int, piece: bytes, **more: bool) -> Row:
    """What floods cost others beside as many sessions that send nothing, and have no pace."""

    @contextmanager
    def flooding(is_flooded: bool) -> Iterator[None]:
        flooded = (piece, more) if is_flooded else (b"", {})
        with ExitStack() as stack:
            for index in range(4):
                stack.enter_context(attacking(flood, server.port, prompt_of(20 + index), num // 4, *flooded))
            yield

    with memory_of(server) as memory:
        rates = rates_of(server, flooding)
    growth, limit = f"; +{memory.growth_mb:.0f} MB", f"; +{MAX_GROWTH_MB:.0f} MB"
    return slowed("52", f"{what}, step of 10 ms; memory", rates, growth, limit=limit, is_kept=memory.is_small)


def flood(report: Any, port: int, prompt: list[int], num: int, piece: bytes, more: dict[str, bool]) -> None:
    """Opens `num` sessions at a time, again and again; each has a long request with `piece` for ever, if there is one.
    more: fields of the sessions.
    """
    body = json.dumps({"prompt": prompt, **SESSION, **more}).encode()

    def talk() -> None:
        with connect(port) as stream:
            stream.sendall(request_bytes(port, "POST", "/v1/sessions", body))
            data = b""
            while not (session := re.search(rb'"session":"([^"]+)"', data)):
                data += next_bytes(stream)
            lines = [f"POST /v1/sessions/{session[1].decode()}/drafts HTTP/1.1", f"Host: {HOST}:{port}"]
            lines += [f"Content-Type: {DRAFTS_MEDIA_TYPE}", "Transfer-Encoding: chunked", "", ""]
            while not piece:
                next_bytes(stream)
            stream.setblocking(False)
            for _ in range(1000):  # the request is ended: again, as often as that is answered
                with suppress(OSError), connect(port, 30.0) as up:
                    up.sendall("\r\n".join(lines).encode())
                    while True:
                        up.sendall(piece)
                        with suppress(BlockingIOError):
                            stream.recv(1 << 20)

    for_ever(report, talk, num)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)
