"""What reaches the server before a route runs is bounded: headers, time, connections, pipelines, pages."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from packaging.requirements import Requirement
from starlette.types import Message, Receive, Scope, Send
from tests.serving import FakeServer, StepGate, run_session, serve_fake, target_tokens
from tests.waiting import TIMEOUT_S
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from outrider.cloud.api.state import ServerSettings
from outrider.cloud.server.access import page_policy_of
from outrider.cloud.server.options import ServeOptions
from outrider.models.errors import ConfigError, RequestError
from outrider.models.hosts import client_network
from outrider.models.http.limits import RateLimiter, Slots
from outrider.models.http.security import OWNER, Gate, GatePaths, GateSettings, KeyRing, PagePolicy
from outrider.models.http.served_requests import ServedRequests
from outrider.models.ingress.bounded_http import BoundedProtocol
from outrider.models.ingress.connections import ConnectionLimits, ConnectionTable, reserve_files
from outrider.models.ingress.sockets import TlsFiles
from outrider.models.process.tally import RequestTally

KEY = "a-key-of-this-test"
PROMPT = [5, 17, 99, 3]
LIVE = b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
SESSION = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}
QUICK = ConnectionLimits(header_s=0.05, body_grace_s=0.05, write_s=0.2, linger_s=0.2, handshake_s=0.05)
ENOUGH = ConnectionLimits(header_s=TIMEOUT_S, body_grace_s=TIMEOUT_S)


class Raw:
    """A client that writes its own bytes."""

    def __init__(self, server: FakeServer, connection: socket.socket | None = None) -> None:
        host, _, port = server.url.rpartition("/")[2].partition(":")
        self.socket = connection or socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
        self._stream = self.socket.makefile("rb")

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Sends; the server may have closed the connection meanwhile."""
        try:
            self.socket.sendall(data)
        except (ConnectionError, ssl.SSLError):
            pass

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the next answer; status 0 if the connection is closed."""
        try:
            line = self._stream.readline()
            if not line:
                return 0, {}, b""
            headers = {}
            while (header := self._stream.readline()) not in (b"\r\n", b""):
                name, _, value = header.decode().partition(":")
                headers[name.lower()] = value.strip()
            return int(line.split()[1]), headers, self._stream.read(int(headers.get("content-length", 0)))
        except ConnectionError:
            return 0, {}, b""

    def refusal(self) -> tuple[int, str]:
        """Status and code of an answer after which the server closes."""
        status, headers, body = self.answer()
        assert (headers["connection"], headers["content-type"]) == ("close", "application/json")
        assert self.is_closed()
        return status, json.loads(body)["error"]["code"]

    def is_closed(self) -> bool:
        """Waits for the server's next byte; True if there is none."""
        try:
            return self._stream.read(1) == b""
        except ConnectionError:
            return True


def post(path: str, body: bytes, *headers: str) -> bytes:
    """A POST of JSON."""
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", *headers]
    if not any(header.startswith(("Content-Length", "Transfer-Encoding")) for header in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def is_well(server: FakeServer) -> bool:
    """Whether the server answers, and holds nothing of those who left."""
    server.wait_until(lambda: len(server.server.table) == 0 and server.is_empty())
    with Raw(server) as raw:
        raw.send(LIVE)
        return raw.answer()[0] == 200


@pytest.fixture(scope="module")
def web() -> Iterator[httpx.Client]:
    """A client that keeps no connection."""
    with httpx.Client(limits=httpx.Limits(max_keepalive_connections=0)) as client:
        yield client


@pytest.fixture(scope="module")
def quick() -> Iterator[FakeServer]:
    with serve_fake(limits=QUICK) as running:
        yield running


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with serve_fake(limits=ENOUGH) as running:
        yield running


# Headers


def test_a_url_beyond_the_limit_is_refused(server: FakeServer) -> None:
    """Before it is decoded; one of the largest size reaches the routes."""
    with Raw(server) as raw:
        raw.send(b"GET /v1/" + b"%" * 4092 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert raw.answer()[0] == 404
    with Raw(server) as raw:
        raw.send(b"GET /v1/" + b"%" * 4093 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert raw.refusal() == (414, "url_too_long")


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nX-A: " + b"a" * (64 << 20),
        b"GET / HTTP/1.1\r\nX-A: " + b"a" * 40_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 101 + b"\r\n",
        b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 200_000,
        b"GET /" + b"a" * (8 << 20),
        b"GET / HTTP/1.1\r\n" + b"a" * (8 << 20),
        b"\r\n" * (4 << 20),
    ],
    ids=["64 MiB header", "40 kB header", "101 headers", "200,000 headers", "long URL", "long name", "empty lines"],
)
def test_headers_beyond_the_limit_are_refused(server: FakeServer, head: bytes) -> None:
    """Counted as they arrive, so that nothing is read to its end."""
    with Raw(server) as raw:
        raw.send(head)
        if len(head) <= 1 << 20:  # beyond that the connection is cut, and the refusal may be lost
            assert raw.refusal() == (431, "headers_too_large")
        else:
            assert raw.answer()[0] in (0, 431)
    assert is_well(server)


def test_headers_within_the_limit_are_answered(server: FakeServer) -> None:
    """100 headers of nearly 32 KiB, in one piece and in many."""
    head = b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"".join(
        b"x-%03d: %s\r\n" % (number, b"v" * 310) for number in range(99)
    )
    with Raw(server) as raw:
        raw.send(head + b"\r\n")
        assert raw.answer()[0] == 200
        for start in range(0, len(head), 1000):
            raw.send(head[start : start + 1000])
        raw.send(b"\r\n")
        assert raw.answer()[0] == 200


def test_large_headers_after_a_body_count_too(server: FakeServer) -> None:
    """The headers of one request are bounded behind a large body of another."""
    first = post("/v1/verify", b" " * 100_000)
    with Raw(server) as raw:
        raw.send(first + b"GET / HTTP/1.1\r\nX: " + b"a" * 40_000 + b"\r\n\r\n")
        assert raw.answer()[0] in (0, 400)  # the connection may end before the first is answered
        assert raw.is_closed() or raw.answer()[0] in (0, 431)
    assert is_well(server)


@pytest.mark.parametrize("trailers", [b"x: y\r\n" * 20_000, b"x: " + b"y" * (1 << 20)], ids=["many", "long"])
def test_trailers_count_as_headers(server: FakeServer, trailers: bytes) -> None:
    """What follows a chunked body."""
    with Raw(server) as raw:
        raw.send(post("/v1/verify", b"2\r\n{}\r\n0\r\n" + trailers, "Transfer-Encoding: chunked"))
        assert raw.answer()[0] in (0, 431)
    assert is_well(server)


def test_a_trailer_is_no_header(server: FakeServer) -> None:
    """What a proxy has checked are headers; one that comes after the body in the same packet counted as one."""
    head = b"POST /v1/verify HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    with Raw(server) as raw:
        raw.send(head + b"Content-Type: application/json\r\n\r\n")
        assert raw.answer()[0] == 415
        raw.send(post("/v1/verify", b"{}"))
        assert raw.answer()[0] == 400  # the connection goes on


@pytest.mark.parametrize("codings", [("gzip, chunked",), ("gzip", "chunked"), ("Identity, Chunked",)])
def test_transfer_codings_are_not_guessed(server: FakeServer, codings: tuple[str, ...]) -> None:
    """Taken as plain chunks a gzip body would be refused as wrong JSON, and a proxy may read it otherwise."""
    with Raw(server) as raw:
        raw.send(post("/v1/verify", b"2\r\n{}\r\n0\r\n\r\n", *(f"Transfer-Encoding: {each}" for each in codings)))
        assert raw.refusal() == (501, "unsupported_transfer_encoding")
    assert is_well(server)


def test_what_is_not_http_is_refused(server: FakeServer) -> None:
    """In the shape of every other error."""
    wrong = (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET \xff HTTP/1.1\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\n\r\n",
    )
    for request in (*wrong, post("/v1/verify", b"zz\r\n", "Transfer-Encoding: chunked")):
        with Raw(server) as raw:
            raw.send(request)
            assert raw.refusal() == (400, "malformed_http")
    assert is_well(server)


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
def test_an_upgrade_is_ignored(server: FakeServer, protocol: str) -> None:
    """The request is answered as it stands, and so is the next one."""
    upgrade = LIVE.replace(b"\r\n\r\n", f"\r\nConnection: Upgrade\r\nUpgrade: {protocol}\r\n\r\n".encode())
    with Raw(server) as raw:
        raw.send(upgrade + upgrade + LIVE)
        assert [raw.answer()[0] for _ in range(3)] == [200, 200, 200]


# Time


def test_slow_headers_are_closed(quick: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    """Also on a connection that had a request before; the log counts them."""
    with caplog.at_level(logging.WARNING, "outrider.ingress"):
        with Raw(quick) as raw:
            raw.send(LIVE[:30])
            assert raw.refusal() == (408, "request_timeout")
        with Raw(quick) as raw:
            raw.send(LIVE)
            assert raw.answer()[0] == 200
            raw.send(LIVE[:30])
            assert raw.refusal() == (408, "request_timeout")
        quick.wait_until(lambda: "slow headers" in caplog.text)
    assert is_well(quick)


def test_a_silent_connection_is_closed(quick: FakeServer) -> None:
    """A client that never sends anything, or only empty lines."""
    with Raw(quick) as raw:
        assert raw.is_closed()
    with Raw(quick) as raw:
        raw.send(b"\r\n")
        assert raw.refusal() == (408, "request_timeout")
    assert is_well(quick)


def test_an_idle_connection_stays(quick: FakeServer) -> None:
    """Between requests the header deadline does not run: keep-alive has its own."""
    with Raw(quick) as idle:
        idle.send(LIVE)
        assert idle.answer()[0] == 200
        for _ in range(3):
            with Raw(quick) as silent:
                assert silent.is_closed()  # so the deadline has passed
        idle.send(LIVE)
        assert idle.answer()[0] == 200


def test_a_quiet_stream_stays() -> None:
    """No deadline runs while a stream is open, however long it is quiet."""
    gate = StepGate()
    with (
        serve_fake(gate=gate, limits=QUICK) as server,
        httpx.Client(base_url=server.url) as client,
        client.stream("POST", "/v1/sessions", json=SESSION) as response,
    ):
        for _ in range(5):
            with Raw(server) as silent:
                assert silent.is_closed()
        gate.open()
        assert b'"end"' in response.read()


@pytest.mark.parametrize("framing", ["Content-Length: 1000", "Transfer-Encoding: chunked"])
def test_a_slow_body_is_closed(quick: FakeServer, framing: str) -> None:
    """One that trickles, whether a route reads it or has refused it."""
    for path in ("/v1/verify", "/v1/sessions/x/drafts"):
        with Raw(quick) as raw:
            raw.send(post(path, b"1\r\n{\r\n" if "chunked" in framing else b"{", framing))
            status, _, _ = raw.answer()
            assert status == (408 if path == "/v1/verify" else 404)
            assert raw.is_closed()
    assert is_well(quick)


def test_a_stalled_event_loop_costs_nobody_a_connection() -> None:
    """Time in which the loop stood still is not the clients'."""

    class Loop:
        def __init__(self) -> None:
            self.now = 100.0
            self.calls: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

        def time(self) -> float:
            return self.now

        def call_at(self, due: float, call: Callable[..., None], *arguments: Any) -> None:
            self.calls.append((call, arguments))

    class Connection:
        def __init__(self) -> None:
            self.seen: list[tuple[float, float]] = []

        def check(self, now: float, late_s: float) -> None:
            self.seen.append((now, late_s))

    table, loop, connection = ConnectionTable(ConnectionLimits()), Loop(), Connection()
    table.checks.add(connection.check)
    table.start(loop)  # type: ignore[arg-type]
    for now in (100.6, 112.0, 112.6):
        loop.now = now
        call, arguments = loop.calls.pop()
        call(*arguments)
    assert connection.seen == [(100.6, 0.0), (112.0, pytest.approx(10.9)), (112.6, 0.0)]


# Connections


def test_connections_are_counted() -> None:
    """One more than the limit is refused at once; a closed one makes room."""
    with serve_fake(limits=ConnectionLimits(max_connections=3)) as server:
        kept = [Raw(server) for _ in range(3)]
        for raw in kept:
            raw.send(LIVE)
            assert raw.answer()[0] == 200
        with Raw(server) as refused:
            assert refused.refusal() == (503, "too_many_connections")
        kept.pop().__exit__()
        server.wait_until(lambda: len(server.server.table) == 2)
        with Raw(server) as raw:
            raw.send(LIVE)
            assert raw.answer()[0] == 200
        for raw in kept:
            raw.__exit__()


def test_one_client_leaves_room_for_others() -> None:
    """Connections are counted by address, and by network where one client has a whole network."""
    table = ConnectionTable(ConnectionLimits(max_connections=5, max_per_client=2))
    hosts = ("2001:db8::1", "2001:db8::2:0:0:2", "2001:db8::3", "2001:db8:0:1::1", "192.0.2.1", "::ffff:192.0.2.1")
    tickets = [table.admit(host) for host in hosts]
    assert [ticket is not None for ticket in tickets] == [True, True, False, True, True, True]
    assert table.admit("192.0.2.9") is None and len(table) == 5 and len(table.by_client) == 3
    for ticket in tickets:
        if ticket is not None:
            ticket.release()
            ticket.release()
    assert len(table) == len(table.by_client) == 0


def test_the_limit_on_open_files_bounds_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """The soft limit is raised where the hard one allows it."""
    resource = pytest.importorskip("resource")
    kept: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, bounds: kept.append(bounds))
    for soft, hard, expected in ((1024, 4096, 2048), (1024, 1024, 960), (65536, 65536, 2048)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, bounds=(soft, hard): bounds)
        assert reserve_files(2048) == expected
    assert kept == [(2112, 4096), (1024, 1024)]


def test_unfinished_bodies_are_bounded() -> None:
    """The bodies of one client that are still arriving hold no more than a few of the largest allowed."""
    limits = ConnectionLimits(max_body_bytes=40_000, max_client_bodies=1)
    with serve_fake(limits=limits) as server:
        table = server.server.table
        with Raw(server) as first, Raw(server) as second:
            first.send(post("/v1/verify", b"{" + b" " * 30_000, "Content-Length: 40000"))
            server.wait_until(lambda: table.body_bytes.total == 30_001)
            second.send(post("/v1/verify", b"{" + b" " * 30_000, "Content-Length: 40000"))
            assert second.refusal() == (503, "too_many_bytes")
            assert table.body_bytes.total == 30_001
            first.send(b" " * 9_999)
            assert first.answer()[0] == 400
            assert table.body_bytes.total == 0
            first.send(post("/v1/verify", b" " * 39_000))  # in several pieces of one read
            assert first.answer()[0] == 400
            assert table.body_bytes.total == 0
        assert is_well(server)


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

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        if fails:
            raise ValueError

    async def send(_: Message) -> None:
        raise ConnectionError

    scope: Scope = {"type": "http", "method": "GET", "path": "/" + "a" * 1000, "headers": []}
    served = ServedRequests(application, RequestTally(), lambda scope: "unmatched")
    with nullcontext() if not fails else pytest.raises(ConnectionError):
        asyncio.run(served(scope, None, send))  # type: ignore[arg-type]  # it reads nothing
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
    gate = StepGate()
    block = post("/v1/verify", b"{" + b" " * 1000 + b"}")
    with serve_fake(gate=gate, limits=ENOUGH) as server:
        with Raw(server) as raw:
            raw.send(post("/v1/sessions", json.dumps(SESSION).encode()))
            server.wait_until(lambda: server.core.engine.stats().running == 1)
            (protocol,) = server.server.server_state.connections
            assert isinstance(protocol, BoundedProtocol)
            raw.send(block)
            server.wait_until(lambda: len(protocol.pipeline) == 1)
            raw.socket.setblocking(False)
            sent = 0
            try:
                while sent < 256 << 20:
                    sent += raw.socket.send(block * 100)
            except BlockingIOError:
                pass
            assert protocol.flow.read_paused and len(protocol.pipeline) == 1
            assert sent < 256 << 20
        gate.open()
        assert is_well(server)


@pytest.mark.parametrize(
    "first",
    [
        post("/v1/sessions", json.dumps(SESSION).encode()),
        post("/v1/completions", json.dumps({"prompt": PROMPT, "max_tokens": 8, "stream": True}).encode()),
    ],
    ids=["session", "completion"],
)
def test_a_client_that_leaves_with_a_pipeline_frees_everything(first: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """The stream that runs learns of it, too, not only the last of the requests that wait behind it. Nothing is read
    while they wait, so a keep-alive finds the client gone.
    """
    gate = StepGate()  # no step ends, so only the client's leaving can free anything
    with serve_fake(ServerSettings(keep_alive_s=0.05), gate=gate, limits=ENOUGH) as server:
        with Raw(server) as raw:
            raw.send(first)
            server.wait_until(lambda: server.core.slots.num_taken == 1)
            (protocol,) = server.server.server_state.connections
            assert isinstance(protocol, BoundedProtocol)
            raw.send(LIVE * 3)
            server.wait_until(lambda: len(protocol.pipeline) == 3)
        server.wait_until(lambda: server.core.slots.num_taken == len(server.core.sessions) == 0)
        server.wait_until(lambda: not server.server.server_state.tasks)
        gate.open()
        assert is_well(server)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


# Answers


def test_answers_that_nobody_reads_end() -> None:
    """The write buffer fills, the route waits, and after a while the connection is cut."""
    limits = ConnectionLimits(write_s=0.1, max_pipelined=1000)
    with serve_fake(limits=limits) as server:
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, _, port = server.url.rpartition("/")[2].partition(":")
        raw.connect((host, int(port)))
        with raw:
            raw.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 600)
            server.wait_until(lambda: len(server.server.table) == 1)
            server.wait_until(lambda: len(server.server.table) == 0)
        server.wait_until(lambda: not server.server.server_state.tasks)
        assert is_well(server)


# TLS


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command")
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    files = ("-keyout", str(key), "-out", str(certificate))
    name = ("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1")
    subprocess.run([openssl, "req", "-x509", *curve, *files, *name], check=True, capture_output=True)
    return TlsFiles(certificate, key)


@contextmanager
def encrypted(server: FakeServer, tls: TlsFiles) -> Iterator[Raw]:
    """A connection after its handshake."""
    context = ssl.create_default_context(cafile=str(tls.certificate))
    with Raw(server) as plain, Raw(server, context.wrap_socket(plain.socket, server_hostname="127.0.0.1")) as raw:
        yield raw


def test_tls_has_the_same_limits(tls: TlsFiles) -> None:
    """Headers and time."""
    with serve_fake(limits=QUICK, tls=tls) as server:
        with encrypted(server, tls) as raw:
            raw.send(LIVE)
            assert raw.answer()[0] == 200
            raw.send(b"GET / HTTP/1.1\r\nX-A: " + b"a" * 40_000)
            assert raw.answer()[0] == 431
        with encrypted(server, tls) as raw:
            raw.send(LIVE[:30])
            assert raw.answer()[0] == 408
        server.wait_until(lambda: len(server.server.table) == 0)


def test_handshakes_have_a_deadline(tls: TlsFiles) -> None:
    """A client that connects and does not begin, or sends no TLS."""
    with serve_fake(limits=QUICK, tls=tls) as server:
        with Raw(server) as raw:
            assert raw.is_closed()
        with Raw(server) as raw:
            raw.send(LIVE)
            assert raw.is_closed() or raw.is_closed()
        server.wait_until(lambda: len(server.server.table) == 0)


def test_connections_count_from_before_the_handshake(tls: TlsFiles) -> None:
    """Otherwise those that never begin it would be without bound."""
    with serve_fake(limits=ConnectionLimits(max_connections=1), tls=tls) as server:
        with Raw(server):
            server.wait_until(lambda: len(server.server.table) == 1)
            with Raw(server) as refused:
                assert refused.is_closed()
        server.wait_until(lambda: len(server.server.table) == 0)
        with encrypted(server, tls) as raw:
            raw.send(LIVE)
            assert raw.answer()[0] == 200


# Pages


def status_of(answer: httpx.Response) -> tuple[int, str]:
    """Status, and code of an error."""
    error = answer.json().get("error") if answer.status_code >= 400 else None
    return answer.status_code, error["code"] if error else ""


@pytest.mark.parametrize(
    ("content_type", "expected"),
    [
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        (None, 415),
        ("application/jsonx", 415),
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("Application/JSON;charset=UTF-8", 200),
    ],
)
def test_bodies_are_announced_as_json(
    server: FakeServer, web: httpx.Client, content_type: str | None, expected: int
) -> None:
    """A page can post text to any server without its browser asking first; JSON it cannot."""
    headers = {} if content_type is None else {"content-type": content_type}
    for path, body in (("/v1/sessions", SESSION), ("/v1/verify", {"items": [{"prefix": [1]}]})):
        answer = web.post(server.url + path, content=json.dumps(body).encode(), headers=headers)
        assert answer.status_code == expected
        if expected == 415:
            assert status_of(answer)[1] == "unsupported_media_type"
    answer = web.post(server.url + "/v1/sessions/x/drafts", content=b"{}", headers=headers)
    assert answer.status_code == (404 if expected == 200 else 415)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1.evil.example"}, 403),
        ({"origin": "http://localhost@evil.example"}, 403),
        ({"origin": ""}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"origin": "http://localhost:3000", "sec-fetch-site": "cross-site"}, 200),
        ({"origin": "http://[::1]:3000"}, 200),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({}, 200),
    ],
)
def test_pages_of_other_sites_are_refused(
    server: FakeServer, web: httpx.Client, headers: dict[str, str], expected: int
) -> None:
    """The browser says whose page calls; no CORS header is ever sent."""
    answer = web.post(server.url + "/v1/sessions", json=SESSION, headers=headers)
    assert answer.status_code == expected
    if expected == 403:
        assert status_of(answer)[1] == "origin_not_allowed"
    assert not any(name.startswith("access-control") for name in answer.headers)
    assert web.get(server.url + "/health/live", headers=headers).status_code == 200
    if "origin" not in headers:  # following a link is no write
        assert web.get(server.url + "/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("192.168.1.1", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("evil.example@localhost", 403),
        ("[::1]evil.example", 403),
        ("[::1]:80.evil.example", 403),
        ("localhost:80:evil.example", 403),
        ("localhost:evil.example", 403),
        ("a" * 5000, 403),
        ("", 403),
        ("[::1", 403),
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("chat.localhost:1", 200),
        ("127.8.9.1", 200),
        ("[::1]:8000", 200),
    ],
)
def test_without_keys_the_host_is_loopback(server: FakeServer, web: httpx.Client, host: str, expected: int) -> None:
    """A page whose own name resolves to this machine still sends that name."""
    for method, path in (("GET", "/v1/models"), ("GET", "/openapi.json")):
        answer = web.request(method, server.url + path, headers={"host": host})
        assert status_of(answer) == (expected, "host_not_allowed" if expected == 403 else "")
    for probe in ("/health/live", "/health/ready", "/livez", "/readyz"):
        assert web.get(server.url + probe, headers={"host": host}).status_code == 200


def test_hosts_and_origins_can_be_allowed(web: httpx.Client) -> None:
    """With keys any host may be called unless a list is given; what the list names is taken beside loopback."""
    key = {"authorization": f"Bearer {KEY}"}
    cases: tuple[tuple[KeyRing, PagePolicy, str, int], ...] = (
        (KeyRing([KEY]), PagePolicy(is_keyless=False), "any.example", 200),
        (KeyRing([KEY]), PagePolicy(is_keyless=False, allowed_hosts=["Api.example"]), "api.example:443", 200),
        (KeyRing([KEY]), PagePolicy(is_keyless=False, allowed_hosts=["api.example"]), "any.example", 403),
        (KeyRing(), PagePolicy(is_keyless=True, allowed_hosts=["api.example", "::2"]), "[::2]:9", 200),
        (KeyRing(), PagePolicy(is_keyless=True, allowed_hosts=["*"]), "any.example", 200),
    )
    for keys, pages, host, expected in cases:
        with serve_fake(ServerSettings(keys=keys, pages=pages)) as server:
            answer = web.get(server.url + "/v1/models", headers={"host": host, **key})
            assert answer.status_code == expected
    pages = PagePolicy(is_keyless=True, allowed_origins=["https://chat.example/"], allowed_hosts=["own.example"])
    with serve_fake(ServerSettings(pages=pages)) as server:
        for origin, host, expected in (
            ("https://chat.example", "localhost", 200),
            ("https://chat.example:8443", "localhost", 403),
            ("https://own.example:8000", "own.example:8000", 200),
            ("https://own.example", "own.example:8000", 403),
        ):
            answer = web.get(server.url + "/v1/models", headers={"origin": origin, "host": host})
            assert answer.status_code == expected
    for wrong in ({"allowed_origins": ["chat.example"]}, {"allowed_hosts": ["http://x"]}, {"allowed_hosts": ["x:8"]}):
        with pytest.raises(ConfigError, match="expected"):
            PagePolicy(is_keyless=True, **wrong)


@pytest.mark.parametrize(
    ("options", "is_keyless", "allowed", "refused"),
    [
        ({}, True, "localhost", "server.example"),
        ({"host": "server.example"}, True, "server.example:8000", "other.example"),
        ({"host": "server.example"}, True, "192.0.2.1:8000", "192.0.2.2"),
        ({"host": "server.example", "allowed_host": ["api.example"]}, True, "server.example", "other.example"),
        ({"host": "0.0.0.0", "allowed_host": ["api.example"]}, True, "api.example", "other.example"),
        ({"host": "::"}, True, "any.example", None),
        ({"host": "server.example"}, False, "any.example", None),
        ({"host": "server.example", "allowed_host": ["api.example"]}, False, "api.example", "server.example"),
    ],
)
def test_the_options_decide_which_hosts_may_call(
    options: dict[str, Any], is_keyless: bool, allowed: str, refused: str | None
) -> None:
    """A wildcard address without keys takes any host: that is what --insecure-no-keys says. A name of --host may be
    called, and the address that it stands for.
    """
    address = options.get("host", "127.0.0.1").replace("server.example", "192.0.2.1")
    pages = page_policy_of(ServeOptions(bundle="x", **options), address, is_keyless=is_keyless)
    pages.require_host(allowed.encode())
    if refused is not None:
        with pytest.raises(RequestError, match=r"--allowed-host"):
            pages.require_host(refused.encode())


# Owners


def test_without_keys_the_owner_is_the_address() -> None:
    """A session is its address' own; with keys it is the key's, whatever the address and what headers claim."""

    async def owner(keys: KeyRing, client: tuple[str, int] | None) -> bytes:
        seen: list[bytes] = []

        async def app(scope: Any, *_: Any) -> None:
            seen.append(scope[OWNER])

        headers = [(b"host", b"localhost"), (b"x-forwarded-for", b"203.0.113.7"), (b"forwarded", b"for=203.0.113.7")]
        headers += [(b"authorization", f"Bearer {KEY}".encode()), (b"x-real-ip", b"203.0.113.7")]
        gate = Gate(app, GateSettings(keys), GatePaths())
        scope = {"type": "http", "path": "/v1/models", "method": "GET", "headers": headers, "client": client}
        await gate(scope, None, None)  # type: ignore[arg-type]
        return seen[0]

    addresses = [("192.0.2.1", 1), ("192.0.2.1", 2), ("192.0.2.2", 1), None]
    first, again, other, unknown = (asyncio.run(owner(KeyRing(), client)) for client in addresses)
    assert first == again and len({first, other, unknown}) == 3
    assert len({asyncio.run(owner(KeyRing([KEY]), client)) for client in addresses}) == 1


def test_another_address_does_not_own_the_session() -> None:
    """The session of another client is unknown, as that of another key is."""
    gate = StepGate()
    with (
        serve_fake(gate=gate) as server,
        httpx.Client(base_url=server.url) as client,
        client.stream("POST", "/v1/sessions", json=SESSION) as response,
    ):
        events = response.iter_lines()
        opened = json.loads(next(line for line in events if line.startswith("data: "))[6:])
        path = f"/v1/sessions/{opened['session']}/drafts"
        draft = {"base": 0, "paths": [target_tokens(PROMPT, 2)]}
        transport = httpx.HTTPTransport(local_address="127.0.0.2")
        with httpx.Client(base_url=server.url, transport=transport) as other:
            try:
                answer = other.post(path, json=draft)
            except httpx.ConnectError:
                pytest.skip("this machine has one loopback address")
        assert status_of(answer) == (404, "unknown_session")
        assert client.post(path, json=draft).status_code == 204


def test_a_client_is_an_address_or_a_network() -> None:
    """IPv6 hosts have a /64 to themselves."""
    assert client_network("192.0.2.1") == client_network("::ffff:192.0.2.1") == "192.0.2.1"
    assert client_network("2001:db8::1") == client_network("2001:db8::ffff:0:0:1") == "2001:db8::/64"
    assert client_network("2001:db8:0:1::1") != client_network("2001:db8::1")
    assert client_network("fe80::1%eth0") == client_network("fe80::2%eth0")
    assert client_network("no address") == "no address"


def test_tables_of_owners_do_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket that is full again is forgotten, an empty slot too; and there are never more than so many buckets."""
    now = 0.0
    limiter, slots = RateLimiter(2.0, clock=lambda: now), Slots(2)
    for number in range(1000):
        now += 0.01
        limiter.admit(b"%d" % number)
        slots.take(b"%d" % number)
        slots.release(b"%d" % number)
        with pytest.raises(RequestError):
            slots.take(b"%d" % number, 3)
    assert len(limiter) <= 201
    for _ in range(3):
        limiter.admit(b"999")
    with pytest.raises(RequestError):
        limiter.admit(b"999")  # a bucket that is not full is kept
    assert slots.num_taken == 0 and not slots._taken
    monkeypatch.setattr(limiter, "_most", 10)
    for number in range(100):
        limiter.admit(b"x%d" % number)
    assert len(limiter) <= 10


# uvicorn


def test_uvicorn_is_a_version_that_was_tried() -> None:
    """BoundedProtocol leans on uvicorn's internals: a new version is tried, then allowed in pyproject.toml."""
    import tomllib

    hook = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    extras = hook["tool"]["hatch"]["metadata"]["hooks"]["custom"]["optional-dependencies"]
    (needed,) = (Requirement(line) for line in extras["cloud"] if line.startswith("uvicorn"))
    assert version("uvicorn") in needed.specifier and any(bound.operator == "<" for bound in needed.specifier)


USED = (
    *("connection_made", "connection_lost", "data_received", "pause_writing", "resume_writing"),
    *("on_message_begin", "on_header", "on_headers_complete", "on_body", "on_message_complete", "on_response_complete"),
    *("_unset_keepalive_if_required", "_should_upgrade"),
)
"""Methods of HttpToolsProtocol that `BoundedProtocol` overrides or calls."""
USED_FIELDS = (
    *("parser", "pipeline", "flow", "cycle", "headers", "url", "transport", "loop", "scope"),
    "timeout_keep_alive_task",
)
"""Its fields that `BoundedProtocol` reads or replaces."""


def test_uvicorn_has_what_is_used() -> None:
    """The methods and fields of its protocol, and those of its server that `VerifierServer` replaces."""
    assert [name for name in USED if not callable(getattr(HttpToolsProtocol, name, None))] == []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        pass

    config = uvicorn.Config(app, http="httptools", ws="none", lifespan="off", log_config=None)
    protocol = HttpToolsProtocol(config, uvicorn.server.ServerState(), {}, asyncio.new_event_loop())
    protocol.loop.close()
    protocol.on_message_begin()
    assert [name for name in USED_FIELDS if name not in vars(protocol)] == []
    used = vars(protocol.config) | vars(uvicorn.Server(config))
    assert [name for name in ("server_state", "started", "should_exit", "ssl", "backlog") if name not in used] == []


def test_requests_run_on_the_bounded_protocol(server: FakeServer) -> None:
    """uvicorn's own is not in use by accident, and a whole session passes."""
    with httpx.Client(base_url=server.url) as client:
        assert run_session(client, dict(SESSION)).tokens == target_tokens(PROMPT, 8)
        assert all(isinstance(protocol, BoundedProtocol) for protocol in server.server.server_state.connections)
        assert server.server.server_state.connections
