"""What a client leaves behind is bounded: pipelines, answers that nobody reads, connections without a handshake."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import AsyncMock

import pytest
from starlette.types import Scope
from tests.certificates import make_own, needs_openssl
from tests.raw_client import ENOUGH, LIVE, QUICK, SESSION, Raw, is_well, post, unread
from tests.serving import PROMPT, FakeServer, StepGate, serve_fake
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from outrider.cloud.api.state import ServerSettings
from outrider.models.errors import RequestError
from outrider.models.http.served_requests import ServedRequests
from outrider.models.ingress.bounded_http import BoundedProtocol
from outrider.models.ingress.connections import ConnectionLimits
from outrider.models.ingress.sockets import TlsFiles
from outrider.models.process.tally import RequestTally


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with serve_fake(limits=ENOUGH) as running:
        yield running


# Pipelines


def test_a_few_pipelined_requests_are_answered_in_order(server: FakeServer) -> None:
    """As HTTP/1.1 has it."""
    paths = ("/health/live", "/v1/models", "/v1/none") * 5
    with Raw(server) as raw:
        raw.send(b"".join(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode() for path in paths))
        assert [raw.answer()[0] for _ in paths] == [200, 200, 404] * 5


def test_a_long_pipeline_is_closed(server: FakeServer) -> None:
    """Requests that wait behind another are few, also when one read holds hundreds."""
    with Raw(server) as raw:
        raw.send(LIVE * 1000)
        answers = 0
        while raw.answer()[0]:
            answers += 1
        assert answers < 100  # 17, or some more where the bytes come in several reads
    assert is_well(server)


@pytest.mark.parametrize("fails", [False, True])
def test_a_request_s_scope_is_emptied_but_for_what_uvicorn_reads_after_it(fails: bool) -> None:
    """Its own answer, where not even the error could be sent, needs the method."""
    scope: Scope = {"type": "http", "method": "GET", "path": "/" + "a" * 1000, "headers": []}
    application = AsyncMock(side_effect=ValueError if fails else None)
    served = ServedRequests(application, RequestTally(), lambda scope: "unmatched")
    with nullcontext() if not fails else pytest.raises(ConnectionError):
        asyncio.run(served(scope, AsyncMock(), AsyncMock(side_effect=ConnectionError)))
    assert scope == {"method": "GET"}


@pytest.mark.parametrize("path", ["/v1/sessions", "/v1/sessions/none/drafts"])
def test_closed_connections_leave_little_to_the_collector(server: FakeServer, path: str) -> None:
    """Neither requests that waited nor errors stay in circles: a flood of them would end in a collection of 0.2 s.

    A request that ran may stay: its route leaves some objects in a circle, with its `send`.
    """

    def left(*kinds: type) -> int:
        return sum(isinstance(each, kinds) for each in gc.get_objects())

    assert is_well(server)
    gc.collect()
    gc.disable()
    num_connections, num_run = 20, 2  # on each connection, before it is closed
    try:
        before, requests_before = left(BoundedProtocol, RequestError), left(RequestResponseCycle)
        for _ in range(num_connections):
            with Raw(server) as raw:
                raw.send(post(path, b"[]") * 100)
                while raw.answer()[0]:
                    pass
        server.wait_until(lambda: left(BoundedProtocol, RequestError) - before < num_connections)
        server.wait_until(lambda: left(RequestResponseCycle) - requests_before <= num_connections * num_run)
    finally:
        gc.enable()
    assert is_well(server)


def test_a_pipeline_behind_a_stream_waits_in_the_network() -> None:
    """While a request waits, nothing more is read: not when the stream's own request has been, either."""
    block = post("/v1/verify", b"{" + b" " * 1000 + b"}")
    with serve_fake(gate=StepGate(), limits=ENOUGH) as server:
        with Raw(server) as raw:
            protocol = piped(server, raw, SESSION_POST, block)
            raw.socket.setblocking(False)
            sent = 0
            with pytest.raises(BlockingIOError):
                while sent < 256 << 20:
                    sent += raw.socket.send(block * 100)
            assert protocol.flow.read_paused and len(protocol.pipeline) == 1
        server.gate.open()
        assert is_well(server)


SESSION_POST = post("/v1/sessions", json.dumps(SESSION).encode())


def piped(server: FakeServer, raw: Raw, first: bytes, *others: bytes) -> Any:
    """The protocol of a connection on which others wait behind the first, which runs."""
    raw.send(first)
    server.wait_until(lambda: server.core.slots.num_taken == 1)
    (protocol,) = server.server.server_state.connections
    assert isinstance(protocol, BoundedProtocol)
    raw.send(b"".join(others))
    server.wait_until(lambda: len(protocol.pipeline) == len(others))
    return protocol


@pytest.mark.parametrize(
    "first",
    [
        SESSION_POST,
        post("/v1/completions", json.dumps({"prompt": PROMPT, "max_tokens": 8, "stream": True}).encode()),
    ],
    ids=["session", "completion"],
)
def test_a_client_that_leaves_with_a_pipeline_frees_everything(first: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """The stream that runs learns of it, too, not only the last of the requests that wait behind it. Nothing is read
    while they wait, so a keep-alive finds the client gone.
    """
    # No step ends, so only the client's leaving can free anything.
    with serve_fake(ServerSettings(keep_alive_s=0.05), gate=StepGate(), limits=ENOUGH) as server:
        with Raw(server) as raw:
            piped(server, raw, first, LIVE, LIVE, LIVE)
        server.wait_until(lambda: server.core.slots.num_taken == len(server.core.sessions) == 0)
        server.wait_until(lambda: not server.server.server_state.tasks)
        server.gate.open()
        assert is_well(server)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


# Answers


def test_answers_that_nobody_reads_end() -> None:
    """The write buffer fills, the route waits, and after a while the connection is cut."""
    with serve_fake(limits=ConnectionLimits(write_s=0.1, max_pipelined=1000)) as server:
        with unread(server, b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 600):
            server.wait_until(lambda: len(server.server.table) == 1)
            server.wait_until(lambda: len(server.server.table) == 0)
        server.wait_until(lambda: not server.server.server_state.tasks)
        assert is_well(server)


# TLS


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return TlsFiles(*make_own(tmp_path_factory.mktemp("tls"), "localhost"))


@contextmanager
def encrypted(server: FakeServer, tls: TlsFiles) -> Iterator[Raw]:
    """A connection after its handshake."""
    context = ssl.create_default_context(cafile=str(tls.certificate))
    with Raw(server) as plain, Raw(server, context.wrap_socket(plain.socket, server_hostname="127.0.0.1")) as raw:
        yield raw


@needs_openssl
def test_tls_has_the_same_limits_and_handshakes_a_deadline(tls: TlsFiles) -> None:
    """Headers and time; a client that connects and does not begin, or sends no TLS."""
    with serve_fake(limits=QUICK, tls=tls) as server:
        for head, status in ((b"GET / HTTP/1.1\r\nX-A: " + b"a" * 40_000, 431), (LIVE[:30], 408)):
            with encrypted(server, tls) as raw:
                assert [raw.answer(data)[0] for data in (LIVE, head)] == [200, status]
        with Raw(server) as silent, Raw(server) as plain:
            plain.send(LIVE)
            assert silent.is_closed() and (plain.is_closed() or plain.is_closed())
        server.wait_until(lambda: len(server.server.table) == 0)


@needs_openssl
def test_connections_count_from_before_the_handshake(tls: TlsFiles) -> None:
    """Otherwise those that never begin it would be without bound."""
    with serve_fake(limits=ConnectionLimits(max_connections=1), tls=tls) as server:
        with Raw(server):
            server.wait_until(lambda: len(server.server.table) == 1)
            with Raw(server) as refused:
                assert refused.is_closed()
        server.wait_until(lambda: len(server.server.table) == 0)
        with encrypted(server, tls) as raw:
            assert raw.answer(LIVE)[0] == 200
