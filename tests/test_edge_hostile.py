"""Tests servers that stop, or send what no server of this protocol sends: they cost their own session, and no more.

The server is a raw socket: it writes any bytes, and knows how many of them were taken.
"""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from tests.agents import MODES, SOON, VOCAB, drafter, generate, whole
from tests.hostile_answers import BROKEN_ANSWERS, MAX_TOKENS, OK, Broken, broken_streams, event, opened
from tests.raw_server import Reply, raw_server, silent_after, writes
from tests.serving import FakeServer, StepGate, read_events, serve_fake, target_tokens
from tests.waiting import run

from outrider.cloud.api.state import ServerSettings
from outrider.cloud.engine import EngineConfig
from outrider.edge.drafting.depth import FixedDepth
from outrider.edge.results import GenerationResult, Mode, TokenBatch
from outrider.models.client.client import ClientOptions, VerifierClient
from outrider.models.client.errors import EndpointLost, ProtocolBroken
from outrider.models.client.http_endpoint import longest_silence_s
from outrider.models.errors import CloudError, RequestError
from outrider.models.http.sse import KEEP_ALIVE
from outrider.models.picks.sampling import SamplingParams
from outrider.models.wire.protocol import SessionOpen

PROMPT = (5, 6, 7, 8)
REQUEST = whole(PROMPT, SamplingParams(), MAX_TOKENS)
TRUTH = target_tokens(PROMPT, MAX_TOKENS)
HASTY = ClientOptions(keep_alive_s=0.1)
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Making one with certificates takes longer than most of these tests."""
MOST_TAKEN = 32 << 20
"""Beyond the bounds of the agent: what two sockets buffer."""


def opening(**fields: Any) -> bytes:
    return opened(VOCAB, **fields)


def write(
    urls: list[str],
    mode: Mode = Mode.STREAM,
    options: ClientOptions | None = None,
    on_trouble: Callable[[str], None] = lambda words: None,
    on_tokens: Callable[[TokenBatch], None] | None = None,
) -> GenerationResult:
    """The text from the first URL that works, with drafts."""
    clients = [VerifierClient(url, options, httpx.AsyncHTTPTransport(NO_TLS)) for url in urls]
    told: dict[str, Any] = {"on_trouble": on_trouble, "on_tokens": on_tokens}
    return run(generate(clients, REQUEST, drafter(1.0), mode=mode, depth=FixedDepth(2), retry=SOON, **told))


BROKEN_STREAMS = broken_streams(VOCAB)
CASES = [(Mode.STREAM, *case) for case in BROKEN_STREAMS.items()] + [
    (Mode.STOP_AND_WAIT, *case) for case in BROKEN_ANSWERS.items()
]


@pytest.mark.parametrize(("mode", "case"), [pytest.param(m, case, id=f"{m}: {name}") for m, name, case in CASES])
def test_a_server_that_breaks_the_protocol_loses_the_text(server: FakeServer, mode: Mode, case: Broken) -> None:
    """Another endpoint finishes it, and one sentence says why. Memory stays bounded, nothing of it is used."""
    troubles = list[str]()
    with raw_server(writes(case.data, case.more)) as hostile:
        result = write([hostile.url, server.url], mode, on_trouble=troubles.append)
        assert list(result.tokens) == TRUTH
        assert len(troubles) == 1 and len(troubles[0]) < 2000
        assert re.fullmatch(f"the server at {hostile.url} broke the protocol: .*{case.said}.*", troubles[0])
        assert hostile.num_sent < MOST_TAKEN and hostile.num_asked == 1


@pytest.mark.parametrize("mode", MODES)
def test_alone_it_is_a_clear_error_at_once(mode: Mode) -> None:
    """Asking it again would not help."""
    reply = BROKEN_STREAMS["a negative id"] if mode is Mode.STREAM else BROKEN_ANSWERS["a negative id"]
    with raw_server(writes(reply.data)) as hostile:
        with pytest.raises(ProtocolBroken, match=r"id is -1; .*; compare the versions at both ends$"):
            write([hostile.url], mode)
        assert hostile.num_asked == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("status", [400, 503])
def test_of_an_errors_body_only_the_beginning_is_read(mode: Mode, status: int) -> None:
    """The status decides; a message of any size is cut."""
    with raw_server(writes(f"HTTP/1.1 {status} \r\n\r\n".encode(), b"x")) as hostile:
        with pytest.raises((RequestError, CloudError), match=f"HTTP {status} that is not an Outrider answer"):
            write([hostile.url], mode)
        assert hostile.num_sent < MOST_TAKEN
    body = json.dumps({"error": {"code": "c" * 9999, "message": "m" * 30_000}}).encode()
    long = writes(f"HTTP/1.1 {status} \r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    with raw_server(long) as hostile, pytest.raises((RequestError, CloudError)) as refused:
        write([hostile.url], mode)
    assert len(str(refused.value)) < 2000


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("draining", "draining: the server is shutting down"),
        ("failed", "failed: the server's engine cannot work"),
        ("ready", "HTTP 503 that is not an Outrider answer"),
    ],
)
async def test_a_server_that_is_not_ready_is_named_so(state: str, expected: str) -> None:
    """Its readiness is an answer of the protocol, with status 503."""
    body = json.dumps({"status": state, "model": "m"}).encode()
    head = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: %d\r\n\r\n" % len(body)

    with raw_server(writes(head + body)) as server, pytest.raises(EndpointLost, match=expected):
        async with VerifierClient(server.url) as client:
            await client.ready()


def test_an_answer_that_never_begins_is_no_hang() -> None:
    """Interim answers for ever are bytes, but no sign of life."""
    options = ClientOptions(connect_timeout_s=0.2, write_timeout_s=0.2, keep_alive_s=0.1)
    endless = writes(b"", b"HTTP/1.1 100 Continue\r\n\r\n")
    too_long = pytest.raises(CloudError, match=r"no whole answer came within 1\.7 s")
    with raw_server(endless) as hostile, too_long:
        write([hostile.url], options=options)


async def test_cookies_are_not_kept() -> None:
    """A server cannot make every later request larger."""
    cookie = b"set-cookie: a=" + b"b" * 4000 + b"; Path=/\r\n"
    body = b'{"status":"ready","model":"m"}'
    # This server closes after an answer: it says so, or the next request could go out on that connection.
    head = OK + cookie + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    with raw_server(writes(head + body)) as hostile:
        async with VerifierClient(hostile.url) as client:
            await client.ready()
            before = client.wire.headers_up
            await client.ready()
            assert client.wire.headers_up - before < 200


@pytest.mark.parametrize(
    ("mode", "reply"),
    [
        pytest.param(Mode.STREAM, silent_after(opening() + event(base=0, tokens=TRUTH[:1])), id="in the stream"),
        pytest.param(
            Mode.STREAM,
            silent_after(opening(keep_alive_s=-5) + event(base=0, tokens=TRUTH[:1]), drip=b"x"),
            id="a line that never ends",
        ),
        pytest.param(Mode.STREAM, silent_after(b""), id="before the answer"),
        pytest.param(Mode.STREAM, silent_after(OK), id="in the headers"),
        pytest.param(Mode.STOP_AND_WAIT, silent_after(b""), id="it does not say whether it is alive either"),
    ],
)
def test_a_server_that_goes_silent_is_left(server: FakeServer, mode: Mode, reply: Reply) -> None:
    """After three keep-alives that did not come; the text goes on elsewhere."""
    troubles = list[str]()
    with raw_server(reply) as stopped:
        result = write([stopped.url, server.url], mode, HASTY, troubles.append)
        assert mode is Mode.STREAM or stopped.paths == ["/v1/verify", "/health/live"]
    assert list(result.tokens) == TRUTH
    assert troubles == [f"{stopped.url}: the server sent nothing for 1.3 s. Trying {server.url}."]


class Counted(httpx.AsyncByteStream):
    """Passes a body on, and calls `on_chunk` with each chunk."""

    def __init__(self, inner: httpx.AsyncByteStream, on_chunk: Callable[[bytes], None]) -> None:
        self._inner, self._on_chunk = inner, on_chunk

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._inner:
            self._on_chunk(chunk)
            yield chunk

    async def aclose(self) -> None:
        await self._inner.aclose()


class Counting(httpx.AsyncHTTPTransport):
    """Calls `on_path` with each request's path, and `on_chunk` with each chunk of an answer."""

    def __init__(self, on_path: Callable[[str], None], on_chunk: Callable[[bytes], None]) -> None:
        super().__init__()
        self._on_path, self._on_chunk = on_path, on_chunk

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self._on_path(request.url.path)
        response = await super().handle_async_request(request)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = Counted(response.stream, self._on_chunk)
        return response


@pytest.mark.parametrize("mode", MODES)
async def test_a_server_that_works_for_long_has_not_stopped(mode: Mode) -> None:
    """A prefill of more than the longest silence: the stream's comments, or its answers elsewhere, show life."""
    signs, gate = list[str](), StepGate()

    def on_sign(what: str) -> None:
        signs.append(what)
        if len(signs) == 20:  # at least 1.9 s; the longest silence is 1.3 s
            gate.open()

    transport = Counting(
        lambda path: on_sign(path) if path == "/health/live" else None,
        lambda chunk: on_sign("comment") if chunk == KEEP_ALIVE else None,
    )
    with serve_fake(ServerSettings(keep_alive_s=0.1), gate=gate) as server:
        client = VerifierClient(server.url, HASTY, transport)
        result = await generate([client], REQUEST, mode=mode, depth=FixedDepth(0), retry=SOON)
    assert list(result.tokens) == TRUTH and result.num_sessions == 1
    assert set(signs[:20]) == {"comment" if mode is Mode.STREAM else "/health/live"}


def test_keep_alives_come_while_a_session_waits_in_the_queue_and_in_the_engine() -> None:
    """From the moment that it is accepted; `open` says how often."""
    gate = StepGate()
    body = {"prompt": list(PROMPT), "max_tokens": 4, "stop_ids": []}
    with (
        serve_fake(ServerSettings(keep_alive_s=0.05), gate=gate, config=EngineConfig(max_running=1)) as server,
        httpx.Client(base_url=server.url) as client,
        client.stream("POST", "/v1/sessions", json=body) as running,
        client.stream("POST", "/v1/sessions", json=body) as queued,
    ):
        streams = [response.iter_raw() for response in (running, queued)]
        for chunks in streams:
            opened = next(read_events(httpx.Response(200, content=next(chunks))))
            assert isinstance(opened, SessionOpen) and opened.keep_alive_s == 0.05
            assert [next(chunks) for _ in range(3)] == [KEEP_ALIVE] * 3  # the engine's thread is in its first step
        gate.allow(1)
        server.wait_until(lambda: server.core.engine.stats().queued == 1)
        assert [chunk for chunk, _ in zip(streams[1], range(3), strict=False)] == [KEEP_ALIVE] * 3
        gate.open()


def test_what_a_server_says_of_its_keep_alives_is_bounded() -> None:
    """Three of them and a second for the network; neither at once nor never."""
    assert [longest_silence_s(said) for said in (5.0, 0.0, -1.0, 1e9)] == [16.0, 1.3, 1.3, 181.0]
    assert ServerSettings().keep_alive_s == ClientOptions().keep_alive_s == 5.0
