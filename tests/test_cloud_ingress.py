"""What reaches the server before a route runs is bounded: headers, time, connections."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest
from packaging.requirements import Requirement
from tests.engine_harness import Clock
from tests.raw_client import ENOUGH, LIVE, QUICK, SESSION, Raw, is_well, post
from tests.serving import FakeServer, StepGate, serve_fake

from outrider.models.ingress.connections import ConnectionLimits, ConnectionTable, reserve_files


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
        assert raw.answer(b"GET /v1/" + b"%" * 4092 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")[0] == 404
    with Raw(server) as raw:
        assert raw.refusal(b"GET /v1/" + b"%" * 4093 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n") == (414, "url_too_long")


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
        # What follows a chunked body.
        post("/v1/verify", b"2\r\n{}\r\n0\r\n" + b"x: y\r\n" * 20_000, "Transfer-Encoding: chunked"),
        post("/v1/verify", b"2\r\n{}\r\n0\r\nx: " + b"y" * (1 << 20), "Transfer-Encoding: chunked"),
    ],
    ids=[
        *("64 MiB header", "40 kB header", "101 headers", "200,000 headers", "long URL", "long name", "empty lines"),
        *("many trailers", "a long trailer"),
    ],
)
def test_headers_beyond_the_limit_are_refused(server: FakeServer, head: bytes) -> None:
    """Counted as they arrive, so that nothing is read to its end."""
    with Raw(server) as raw:
        raw.send(head)
        if len(head) <= 1 << 16:  # beyond that the connection is cut, and the refusal may be lost
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
        assert raw.answer(head + b"\r\n")[0] == 200
        for start in range(0, len(head), 1000):
            raw.send(head[start : start + 1000])
        assert raw.answer(b"\r\n")[0] == 200


def test_large_headers_after_a_body_count_too(server: FakeServer) -> None:
    """The headers of one request are bounded behind a large body of another."""
    with Raw(server) as raw:
        raw.send(post("/v1/verify", b" " * 100_000) + b"GET / HTTP/1.1\r\nX: " + b"a" * 40_000 + b"\r\n\r\n")
        assert raw.answer()[0] in (0, 400)  # the connection may end before the first is answered
        assert raw.is_closed() or raw.answer()[0] in (0, 431)
    assert is_well(server)


CHUNKS = b"2\r\n{}\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("request_", "status", "code"),
    [
        # Taken as plain chunks a gzip body would be refused as wrong JSON, and a proxy may read it otherwise.
        *(
            (post("/v1/verify", CHUNKS, *codings), 501, "unsupported_transfer_encoding")
            for codings in (
                ("Transfer-Encoding: gzip, chunked",),
                ("Transfer-Encoding: gzip", "Transfer-Encoding: chunked"),
                ("Transfer-Encoding: Identity, Chunked",),
            )
        ),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "malformed_http"),
        (b"GET \xff HTTP/1.1\r\n\r\n", 400, "malformed_http"),
        (b"CONNECT a:1 HTTP/1.1\r\n\r\n", 400, "malformed_http"),
        (post("/v1/verify", b"zz\r\n", "Transfer-Encoding: chunked"), 400, "malformed_http"),
    ],
)
def test_what_is_not_http_and_codings_are_refused(server: FakeServer, request_: bytes, status: int, code: str) -> None:
    """In the shape of every other error."""
    with Raw(server) as raw:
        assert raw.refusal(request_) == (status, code)
    assert is_well(server)


def test_a_trailer_is_no_header(server: FakeServer) -> None:
    """What a proxy has checked are headers; one that comes after the body in the same packet counted as one."""
    head = b"POST /v1/verify HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    with Raw(server) as raw:
        assert raw.answer(head + b"Content-Type: application/json\r\n\r\n")[0] == 415
        assert raw.answer(post("/v1/verify", b"{}"))[0] == 400  # the connection goes on


def test_an_upgrade_is_ignored(server: FakeServer) -> None:
    """The request is answered as it stands, and so is the next one."""
    for protocol in (b"websocket", b"h2c"):
        upgrade = LIVE.replace(b"\r\n\r\n", b"\r\nConnection: Upgrade\r\nUpgrade: " + protocol + b"\r\n\r\n")
        with Raw(server) as raw:
            assert [raw.answer(data)[0] for data in (upgrade + upgrade + LIVE, b"", b"")] == [200, 200, 200]


# Time


def test_slow_headers_are_closed(quick: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    """Also on a connection that had a request before, of a client that never sends anything, or only empty lines; the
    log counts them.
    """
    with caplog.at_level(logging.WARNING, "outrider.ingress"):
        for sent in (LIVE[:30], b"\r\n"):
            with Raw(quick) as raw:
                assert raw.refusal(sent) == (408, "request_timeout")
        with Raw(quick) as raw:
            assert raw.answer(LIVE)[0] == 200 and raw.refusal(LIVE[:30]) == (408, "request_timeout")
        with Raw(quick) as raw:
            assert raw.is_closed()
        quick.wait_until(lambda: "slow headers" in caplog.text)
    assert is_well(quick)


def test_an_idle_connection_and_a_quiet_stream_stay() -> None:
    """Between requests the header deadline does not run: keep-alive has its own. Nor does one while a stream is open,
    however long it is quiet.
    """
    with (
        serve_fake(gate=StepGate(), limits=QUICK) as server,
        httpx.Client(base_url=server.url) as client,
        client.stream("POST", "/v1/sessions", json=SESSION) as response,
        Raw(server) as idle,
    ):
        assert idle.answer(LIVE)[0] == 200
        for _ in range(5):
            with Raw(server) as silent:
                assert silent.is_closed()  # so the deadline has passed
        assert idle.answer(LIVE)[0] == 200
        server.gate.open()
        assert b'"end"' in response.read()


@pytest.mark.parametrize("framing", ["Content-Length: 1000", "Transfer-Encoding: chunked"])
def test_a_slow_body_is_closed(quick: FakeServer, framing: str) -> None:
    """One that trickles, whether a route reads it or has refused it."""
    for path in ("/v1/verify", "/v1/sessions/x/drafts"):
        with Raw(quick) as raw:
            status, _, _ = raw.answer(post(path, b"1\r\n{\r\n" if "chunked" in framing else b"{", framing))
            assert status == (408 if path == "/v1/verify" else 404)
            assert raw.is_closed()
    assert is_well(quick)


def test_a_stalled_event_loop_costs_nobody_a_connection() -> None:
    """Time in which the loop stood still is not the clients'."""
    clock, check, table = Clock(), Mock(), ConnectionTable(ConnectionLimits())
    loop = Mock(time=clock)
    table.checks.add(check)
    table.start(loop)
    for at_s in (100.6, 112.0, 112.6):
        clock.now = at_s
        _, call, *arguments = loop.call_at.call_args.args
        call(*arguments)
    assert [each.args for each in check.call_args_list] == [(100.6, 0.0), (112.0, pytest.approx(10.9)), (112.6, 0.0)]


# Connections


def test_connections_are_counted() -> None:
    """One more than the limit is refused at once; a closed one makes room."""
    with serve_fake(limits=ConnectionLimits(max_connections=3)) as server, Raw(server) as first, Raw(server) as second:
        with Raw(server) as third:
            assert [raw.answer(LIVE)[0] for raw in (first, second, third)] == [200, 200, 200]
            with Raw(server) as refused:
                assert refused.refusal() == (503, "too_many_connections")
        server.wait_until(lambda: len(server.server.table) == 2)
        with Raw(server) as raw:
            assert raw.answer(LIVE)[0] == 200


def test_one_client_leaves_room_for_others() -> None:
    """Connections are counted by address, and by network where one client has a whole network: IPv6 hosts have a /64 to
    themselves.
    """
    table = ConnectionTable(ConnectionLimits(max_connections=8, max_per_client=2))
    hosts = ("2001:db8::1", "2001:db8::2:0:0:2", "2001:db8::3", "2001:db8:0:1::1", "192.0.2.1", "::ffff:192.0.2.1")
    tickets = [table.admit(host) for host in (*hosts, "fe80::1%eth0", "fe80::2%eth0", "no address")]
    assert [ticket is not None for ticket in tickets] == [True, True, False, *[True] * 6]
    networks = {"2001:db8::/64": 2, "2001:db8:0:1::/64": 1, "192.0.2.1": 2, "fe80::/64": 2, "no address": 1}
    assert table.admit("192.0.2.9") is None and len(table) == 8 and table.by_client._of == networks
    for ticket in filter(None, tickets):
        ticket.release()
        ticket.release()
    assert len(table) == len(table.by_client) == 0


def test_probes_in_the_machine_have_a_place() -> None:
    """Clients elsewhere take all connections but one of 128: a liveness probe that is refused restarts the server."""
    table = ConnectionTable(ConnectionLimits(max_connections=256, max_per_client=256))
    tickets = [table.admit("192.0.2.1") for _ in range(256)]
    assert tickets.count(None) == 2 and table.admit("192.0.2.2") is None
    machine = [table.admit(host) for host in ("127.0.0.1", "::ffff:127.0.0.1", "::1")]
    assert [ticket is None for ticket in machine] == [False, False, True]


def test_the_limit_on_open_files_bounds_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """The soft limit is raised where the hard one allows it."""
    resource, raise_to = pytest.importorskip("resource"), Mock()
    monkeypatch.setattr(resource, "setrlimit", raise_to)
    for soft, hard, expected in ((1024, 4096, 2048), (1024, 1024, 960), (65536, 65536, 2048)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, bounds=(soft, hard): bounds)
        assert reserve_files(2048) == expected
    assert [each.args[1] for each in raise_to.call_args_list] == [(2112, 4096), (1024, 1024)]


def test_unfinished_bodies_are_bounded() -> None:
    """The bodies of one client that are still arriving hold no more than a few of the largest allowed."""
    part = post("/v1/verify", b"{" + b" " * 30_000, "Content-Length: 40000")
    with serve_fake(limits=ConnectionLimits(max_body_bytes=40_000, max_client_bodies=1)) as server:
        held = server.server.table.body_bytes
        with Raw(server) as first, Raw(server) as second:
            first.send(part)
            server.wait_until(lambda: held.total == 30_001)
            second.send(part)
            assert second.refusal() == (503, "too_many_bytes") and held.total == 30_001
            # The rest, and a body in several pieces of one read.
            for data in (b" " * 9_999, post("/v1/verify", b" " * 39_000)):
                assert first.answer(data)[0] == 400 and held.total == 0
        assert is_well(server)


# uvicorn


def test_uvicorn_is_a_version_that_was_tried() -> None:
    """BoundedProtocol leans on uvicorn's internals: a new version is tried, then allowed in pyproject.toml."""
    import tomllib

    hook = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    extras = hook["tool"]["hatch"]["metadata"]["hooks"]["custom"]["optional-dependencies"]
    (needed,) = (Requirement(line) for line in extras["cloud"] if line.startswith("uvicorn"))
    assert version("uvicorn") in needed.specifier and any(bound.operator == "<" for bound in needed.specifier)
