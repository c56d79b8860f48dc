"""Tests a client on networks that are slow, or change: connections, long bodies, how long a server is waited for."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterable
from contextlib import closing, suppress
from types import SimpleNamespace
from typing import Any

import httpcore
import httpx
import pytest
from tests.agents import Clock
from tests.hostile_answers import STREAM, event, opened
from tests.raw_server import RawServer, raw_server

from outrider.models.client import client as client_module
from outrider.models.client import http_endpoint
from outrider.models.client.client import ClientOptions, VerifierClient
from outrider.models.client.errors import EndpointLost
from outrider.models.wire.protocol import Commit, SessionOpen, SessionRequest

READY = b'{"status":"ready","model":"m"}'
LONG = json.dumps({"messages": [{"role": "user", "content": "a" * 100_000}]}).encode()


def answer(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


class Stream(httpcore.AsyncNetworkStream):
    """A connection that answers `data` after `delay_s`; notes each write and its bound, and the bounds on reads."""

    def __init__(self, data: bytes = answer(READY), delay_s: float = 0.0) -> None:
        self._data, self._delay_s = data, delay_s
        self.writes: list[tuple[bytes, float | None]] = []
        self.reads: list[float | None] = []

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self.writes.append((buffer, timeout))

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        self.reads.append(timeout)
        await asyncio.sleep(self._delay_s)
        data, self._data = self._data, b""
        return data

    async def aclose(self) -> None:
        pass


class Network(httpcore.AsyncNetworkBackend):
    """Connects to one of `streams` after the other, at once, or never where it is None; notes how long it may take."""

    def __init__(self, *streams: Stream | None) -> None:
        self._streams = list(streams)
        self.bounds: list[float | None] = []

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        self.bounds.append(timeout)
        if (stream := self._streams.pop(0)) is None:
            raise httpcore.ConnectTimeout
        return stream


def client_over(network: Network, options: ClientOptions | None = None) -> VerifierClient:
    transport = httpx.AsyncHTTPTransport()
    transport._pool._network_backend = network
    return VerifierClient("http://verifier", options, transport)


async def test_a_connection_after_one_that_failed_has_twice_the_time() -> None:
    """Within bounds. One that is made, or another text, begins again with the shortest: where nothing is, it is found
    soon.
    """
    last = Stream(answer(READY).replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
    network = Network(*[None] * 4, last, *[None] * 6)
    async with client_over(network) as client:
        for _ in range(4):
            with pytest.raises(EndpointLost, match="ConnectTimeout"):
                await client.ready()
        assert (await client.ready()).status == "ready"
        for text in (client.for_one_text(), client.for_one_text()):
            with pytest.raises(EndpointLost, match="ConnectTimeout"):
                await text.ready()
        for _ in range(2):
            await asyncio.gather(
                client.ready(), client.ready(), return_exceptions=True
            )  # at the same time: one failure
    assert network.bounds == [2.5, 5.0, 5.0, 5.0, 5.0, 2.5, 2.5, 2.5, 2.5, 5.0, 5.0]


@pytest.mark.parametrize("is_text", [True, False])
async def test_a_long_prompt_has_the_time_that_a_slow_uplink_takes(
    is_text: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces, each with the bound on a write; the answer's bounds grow with the body, whose length is announced."""
    monkeypatch.setattr(http_endpoint, "MARGIN_S", 0.0)
    stream = Stream(STREAM if is_text else answer(b'{"tokens":[5],"model":"m"}'), 0.5)  # else it would have 0.4 s
    options = ClientOptions(connect_timeout_s=0.05, write_timeout_s=0.05, keep_alive_s=0.0)
    async with client_over(Network(stream), options) as client:
        if is_text:
            async with client.open_session(SessionRequest(prompt=[100_000] * 20_000, max_tokens=5)):
                pass
        else:
            assert (await client.render(LONG)).tokens == [5]
    (head, _), *pieces = stream.writes
    body = b"".join(piece for piece, _ in pieces)
    assert max(len(piece) for piece, _ in pieces) == 16384 and b"content-length: %d\r\n" % len(body) in head.lower()
    assert {bound for _, bound in stream.writes} == {0.05} and b"transfer-encoding" not in head.lower()
    assert is_text == (b"100000,100000" in body) and len(body) > 100_000
    assert stream.reads[0] == pytest.approx(0.3 + len(body) / 8192)


async def test_of_connections_that_died_together_one_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a change of the device's network: nothing closes them, and each would cost the longest silence."""
    monkeypatch.setattr(http_endpoint, "MARGIN_S", 0.0)
    num_connected = num_lost = 0
    is_dead, all_asked = False, asyncio.Event()

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
        connection.sendall(opened(300, keep_alive_s=60))
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
    monkeypatch.setattr(client_module, "time", SimpleNamespace(monotonic=clock))
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
