"""Tests servers that stop, or send what no server of this protocol sends: they cost their own session, and no more; and
networks that are slow, or change: connections, long bodies, how long a server is waited for.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any
from unittest.mock import AsyncMock, Mock

import httpcore
import httpx
import pytest
from tests.agents import MODES, SOON, VOCAB, Clock, Passing, drafter, generate, truth, whole
from tests.hostile_answers import BROKEN_ANSWERS, MAX_TOKENS, OK, STREAM, Broken, broken_streams, event, opened
from tests.raw_server import RawServer, Reply, http_answer, raw_server, silent_after, writes
from tests.serving import FakeServer, StepGate, read_events, serve_fake
from tests.waiting import run

from outrider.cloud.api.state import ServerSettings
from outrider.cloud.engine import EngineConfig
from outrider.edge.drafting.depth import FixedDepth
from outrider.edge.results import GenerationResult, Mode
from outrider.models.client import http_endpoint
from outrider.models.client.checks import EventParser
from outrider.models.client.client import ClientOptions, VerifierClient
from outrider.models.client.errors import EndpointLost, ProtocolBroken
from outrider.models.errors import CloudError, RequestError
from outrider.models.http.sse import KEEP_ALIVE
from outrider.models.wire.protocol import Commit, SessionOpen, SessionRequest

PROMPT = (5, 6, 7, 8)
REQUEST = whole(PROMPT, max_tokens=MAX_TOKENS)
TRUTH = list(truth(REQUEST))
HASTY = ClientOptions(keep_alive_s=0.1)
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Making one with certificates takes longer than most of these tests."""
MOST_TAKEN = 32 << 20
"""Beyond the bounds of the agent: what two sockets buffer."""
READY = b'{"status":"ready","model":"m"}'


def opening(**fields: Any) -> bytes:
    return opened(VOCAB, **fields)


def write(
    urls: list[str], mode: Mode = Mode.STREAM, options: ClientOptions | None = None, **told: Any
) -> GenerationResult:
    """The text from the first URL that works, with drafts."""
    clients = [VerifierClient(url, options, httpx.AsyncHTTPTransport(NO_TLS)) for url in urls]
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
        assert hostile.num_sent < MOST_TAKEN and hostile.num_asked == 1
    (trouble,) = troubles
    assert list(result.tokens) == TRUTH and len(trouble) < 2000
    assert re.fullmatch(f"the server at {hostile.url} broke the protocol: .*{case.said}.*", trouble)


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
    long = raw_server(writes(http_answer(body, f"{status} ")))
    with long as hostile, pytest.raises((RequestError, CloudError)) as refused:
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
    answer = http_answer(json.dumps({"status": state, "model": "m"}).encode(), "503 Service Unavailable")
    with raw_server(writes(answer)) as server, pytest.raises(EndpointLost, match=expected):
        async with VerifierClient(server.url) as client:
            await client.ready()


@pytest.mark.parametrize("tokens", [[], [-1], [1 << 31]])
async def test_a_server_cannot_render_what_no_session_takes(tokens: list[int]) -> None:
    """A conversation's ids are checked as all others that a server sends."""
    answer = http_answer(json.dumps({"tokens": tokens, "model": "fake"}).encode())
    with raw_server(writes(answer)) as hostile, pytest.raises(ProtocolBroken):
        async with VerifierClient(hostile.url) as client:
            await client.render(b"{}")


def test_an_answer_that_never_begins_is_no_hang() -> None:
    """Interim answers for ever are bytes, but no sign of life."""
    options = ClientOptions(connect_timeout_s=0.2, write_timeout_s=0.2, keep_alive_s=0.1)
    too_long = pytest.raises(CloudError, match=r"no whole answer came within 1\.7 s")
    with raw_server(writes(b"", b"HTTP/1.1 100 Continue\r\n\r\n")) as hostile, too_long:
        write([hostile.url], options=options)


async def test_cookies_are_not_kept() -> None:
    """A server cannot make every later request larger."""
    cookie = f"set-cookie: a={'b' * 4000}; Path=/"
    with raw_server(writes(http_answer(READY, "200 OK", cookie))) as hostile:
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
        result = write([stopped.url, server.url], mode, HASTY, on_trouble=troubles.append)
        assert mode is Mode.STREAM or stopped.paths == ["/v1/verify", "/health/live"]
    assert list(result.tokens) == TRUTH
    assert troubles == [f"{stopped.url}: the server sent nothing for 1.3 s. Trying {server.url}."]


@pytest.mark.parametrize("mode", MODES)
async def test_a_server_that_works_for_long_has_not_stopped(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill of more than the longest silence: the stream's comments, or its answers elsewhere, show life."""
    signs, gate, feed = list[str](), StepGate(), EventParser.feed

    def on_sign(what: str) -> None:
        signs.append(what)
        if len(signs) == 20:  # at least 1.9 s; the longest silence is 1.3 s
            gate.open()

    def fed(parser: EventParser, data: bytes) -> Iterator[Any]:
        if data == KEEP_ALIVE:
            on_sign("comment")
        return feed(parser, data)

    monkeypatch.setattr(EventParser, "feed", fed)
    transport = Passing(lambda request: on_sign("live") if request.url.path == "/health/live" else None)
    with serve_fake(ServerSettings(keep_alive_s=0.1), gate=gate) as server:
        client = VerifierClient(server.url, HASTY, transport)
        result = await generate([client], REQUEST, mode=mode, depth=FixedDepth(0), retry=SOON)
    assert list(result.tokens) == TRUTH and result.num_sessions == 1
    assert set(signs[:20]) == {"comment" if mode is Mode.STREAM else "live"}


def test_keep_alives_come_while_a_session_waits_in_the_queue_and_in_the_engine() -> None:
    """From the moment that it is accepted; `open` says how often."""
    gate, body = StepGate(), {"prompt": list(PROMPT), "max_tokens": 4, "stop_ids": []}
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
    assert [http_endpoint.longest_silence_s(said) for said in (5.0, 0.0, -1.0, 1e9)] == [16.0, 1.3, 1.3, 181.0]
    assert ServerSettings().keep_alive_s == ClientOptions().keep_alive_s == 5.0


def answer(body: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join([b"HTTP/1.1 200 OK", b"content-length: %d" % len(body), *headers, b"", body])


def stream_of(data: bytes, delay_s: float = 0.0) -> AsyncMock:
    """A connection that answers `data` after `delay_s`."""
    parts = [data, b""]

    async def read(max_bytes: int, timeout: float | None) -> bytes:
        await asyncio.sleep(delay_s)
        return parts.pop(0)

    made = AsyncMock(httpcore.AsyncNetworkStream)
    made.read.side_effect, made.get_extra_info.return_value = read, None
    return made


def client_over(connect: AsyncMock, options: ClientOptions | None = None) -> VerifierClient:
    """connect: gives a connection, or raises."""
    transport = httpx.AsyncHTTPTransport()
    transport._pool._network_backend = Mock(connect_tcp=connect)
    return VerifierClient("http://verifier", options, transport)


def bounds_of(calls: AsyncMock) -> list[float | None]:
    """How long each of them was given."""
    return [call.kwargs["timeout"] for call in calls.call_args_list]


async def test_a_connection_after_one_that_failed_has_twice_the_time() -> None:
    """Within bounds. One that is made, or another text, begins again with the shortest: where nothing is, it is found
    soon.
    """
    never = httpcore.ConnectTimeout()
    connect = AsyncMock(side_effect=[*[never] * 4, stream_of(answer(READY, b"connection: close")), *[never] * 6])
    async with client_over(connect) as client:
        for _ in range(4):
            with pytest.raises(EndpointLost, match="ConnectTimeout"):
                await client.ready()
        assert (await client.ready()).status == "ready"
        for text in (client.for_one_text(), client.for_one_text()):
            with pytest.raises(EndpointLost, match="ConnectTimeout"):
                await text.ready()
        for _ in range(2):  # two at the same time: one failure
            await asyncio.gather(client.ready(), client.ready(), return_exceptions=True)
    assert bounds_of(connect) == [2.5, 5.0, 5.0, 5.0, 5.0, 2.5, 2.5, 2.5, 2.5, 5.0, 5.0]


@pytest.mark.parametrize("is_text", [True, False])
async def test_a_long_prompt_has_the_time_that_a_slow_uplink_takes(
    is_text: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces, each with the bound on a write; the answer's bounds grow with the body, whose length is announced."""
    monkeypatch.setattr(http_endpoint, "MARGIN_S", 0.0)
    stream = stream_of(STREAM if is_text else answer(b'{"tokens":[5],"model":"m"}'), 0.5)  # else it would have 0.4 s
    options = ClientOptions(connect_timeout_s=0.05, write_timeout_s=0.05, keep_alive_s=0.0)
    async with client_over(AsyncMock(return_value=stream), options) as client:
        if is_text:
            async with client.open_session(SessionRequest(prompt=[100_000] * 20_000, max_tokens=5)):
                pass
        else:
            long = {"messages": [{"role": "user", "content": "a" * 100_000}]}
            assert (await client.render(json.dumps(long).encode())).tokens == [5]
    head, *pieces = (call.args[0] for call in stream.write.call_args_list)
    body = b"".join(pieces)
    assert max(map(len, pieces)) == 16384 and b"content-length: %d\r\n" % len(body) in head.lower()
    assert set(bounds_of(stream.write)) == {0.05} and b"transfer-encoding" not in head.lower()
    assert is_text == (b"100000,100000" in body) and len(body) > 100_000
    assert bounds_of(stream.read)[0] == pytest.approx(0.3 + len(body) / 8192)


async def test_of_connections_that_died_together_one_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a change of the device's network: nothing closes them, and each would cost the longest silence."""
    monkeypatch.setattr(http_endpoint, "MARGIN_S", 0.0)
    num_connected, num_lost, is_dead, all_asked = 0, 0, False, asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connected, num_lost
        num_connected += 1
        if (number := num_connected) == 3:
            all_asked.set()
        with suppress(asyncio.IncompleteReadError), closing(writer):
            while await reader.readuntil(b"\r\n\r\n"):
                await all_asked.wait()
                if is_dead and number <= 3:
                    num_lost += 1
                else:
                    writer.write(answer(READY))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with VerifierClient(url, ClientOptions(keep_alive_s=0.5)) as client:
        await asyncio.gather(*(client.ready() for _ in range(3)))
        await client.ready()
        assert num_connected == 3  # one of them served again
        is_dead = True
        with pytest.raises(EndpointLost, match=r"sent nothing for 1\.5 s"):
            await client.ready()
        assert (await client.ready()).status == "ready" and (num_connected, num_lost) == (4, 1)
    server.close()


async def test_a_stream_may_be_silent_for_as_long_as_its_server_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where that is longer than what the device expects of other answers."""
    monkeypatch.setattr(http_endpoint, "MARGIN_S", 0.0)

    def reply(server: RawServer, connection: socket.socket) -> None:
        connection.sendall(opening(keep_alive_s=60))
        server.is_over.wait(1.2)  # the device's own 0.9 s are over
        connection.sendall(event(base=0, tokens=[5]))

    request = SessionRequest(prompt=[1], max_tokens=5)
    with raw_server(reply) as server:
        async with (
            VerifierClient(server.url, ClientOptions(keep_alive_s=0.3)) as client,
            client.open_session(request) as events,
        ):
            assert [each.tokens async for each in events if isinstance(each, Commit)] == [[5]]


async def test_one_late_acknowledgement_costs_later_texts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only three texts in a row without any switch long requests off, or a refusal; after ten minutes one is tried."""
    clock = Clock()
    monkeypatch.setattr("outrider.models.client.client.time", Mock(monotonic=clock))
    opened = SessionOpen(session="s", model="m", stop_ids=[], protocol=3)
    async with VerifierClient("http://verifier") as client:

        def has_one(num_taken: int = 0, *, is_refused: bool = False) -> bool:
            """Whether a text has a long request, of which so many messages are then acknowledged."""
            if (line := client.for_one_text()._begin_long(opened, 0.1)) is None:
                return False
            line.num_taken = num_taken
            if not num_taken:
                line._on_unusable(is_refused)
            client._end_long(line, is_cut=True)
            return True

        assert all(has_one(num_taken) for num_taken in (0, 0, 1, 0, 0, 0)) and not has_one()
        clock.now += 599.0
        assert not has_one()
        clock.now += 1.0
        assert has_one() and not has_one()
        clock.now += 600.0
        assert has_one(1) and has_one(is_refused=True) and not has_one()
