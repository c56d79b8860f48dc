"""Tests the agent's smaller parts: events, messages, cancelled requests, and the proxy of the lab."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, aclosing, suppress
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.faulty_posts import FaultRates, FaultyPosts
from tests.faulty_proxy import FaultyProxy, ProxyOptions
from tests.hostile_answers import USAGE, event, opened
from tests.raw_client import post as raw_post
from tests.raw_server import RawServer, raw_server
from tests.serving import FakeServer
from tests.waiting import TIMEOUT_S, wait_until

from outrider.edge.link.delayed import DelayedClient
from outrider.edge.link.sender import DraftSender
from outrider.models.client.checks import EventParser
from outrider.models.client.client import ClientOptions, VerifierClient
from outrider.models.client.errors import EndpointLost, ProtocolBroken
from outrider.models.client.messages import DraftMessage
from outrider.models.errors import ConfigError, OutriderError, RequestError
from outrider.models.wire.protocol import Commit, SessionEnd, SessionEvent, SessionOpen, SessionRequest

STREAM = (
    b'data: {"type":"open","session":"s","model":"m","protocol":1,"step_ms":40.5}\n\n'
    b":\n\n"
    b'data: {"base":0,"tokens":[311]}\n\n'
    b'data: {"base":1,"tokens":[57,9],"accepted":1,"proposed":4,"newer":true}\n\n'
    b'data: {"type":"end","reason":"length","usage":{"prompt_tokens":1,"completion_tokens":3,"target_passes":2,'
    b'"accepted_prediction_tokens":1,"rejected_prediction_tokens":3}}\n\n'
)


@settings(deadline=None)
@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_are_the_same_however_the_stream_is_cut(cuts: list[int]) -> None:
    """TCP may split an event anywhere; comments and unknown keys are skipped."""
    parser, pieces = EventParser("http://x"), pairwise([0, *sorted(cuts), len(STREAM)])
    opened, *commits, ended = [event for start, end in pieces for event in parser.feed(STREAM[start:end])]
    assert isinstance(opened, SessionOpen) and opened.step_ms == 40.5
    assert commits == [Commit(base=0, tokens=[311]), Commit(base=1, tokens=[57, 9], accepted=1, proposed=4)]
    assert isinstance(ended, SessionEnd) and ended.reason == "length"


@pytest.mark.parametrize("data", [b"data: {nope\n\n", b'data: {"type":"party"}\n\n', b"data: 7\n\n"])
def test_what_is_no_event_is_refused(data: bytes) -> None:
    """It raises an error of the link that quotes it."""
    with pytest.raises(ProtocolBroken, match=r"http://x broke the protocol: it sent .*, which is not an event;"):
        list(EventParser("http://x").feed(data))


class Mailbag:
    """A `Posts` that keeps its messages; a gate holds deliveries back, and what is refused is lost."""

    def __init__(self, refused: frozenset[int] = frozenset()) -> None:
        self.got: list[int] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self._refused = refused

    async def post_drafts(self, session: str, message: DraftMessage) -> None:
        await self.gate.wait()
        if int(message.body) in self._refused:
            raise RequestError("too_many_requests", "refused", status=429)
        self.got.append(int(message.body))


async def delivered(sender: DraftSender) -> None:
    """Returns once nothing is in flight."""
    while sender._tasks:
        await asyncio.sleep(0)


def message(number: int) -> DraftMessage:
    """A draft message that the mailbag tells from others."""
    return DraftMessage("text/plain", str(number).encode())


async def test_where_too_many_messages_are_in_flight_the_sender_is_not_free() -> None:
    """It says once when it is free again; what would have been sent meanwhile goes into one message."""
    bag, freed = Mailbag(), list[bool]()
    bag.gate.clear()
    sender = DraftSender(lambda _: None, max_in_flight=2, on_free=lambda: freed.append(sender.is_free))
    for number in range(2):
        assert sender.is_free
        sender.send(bag, "s", message(number))
    assert not sender.is_free and not sender.is_free
    with pytest.raises(AssertionError, match="too many messages are in flight"):
        sender.send(bag, "s", message(2))
    bag.gate.set()
    await delivered(sender)
    assert freed == [True] and sender.is_free and sender.num_sent == 2
    sender.send(bag, "s", message(3))
    await delivered(sender)
    await sender.aclose()
    assert (freed, bag.got) == ([True], [0, 1, 3])  # nobody was turned away from the third


async def test_a_lost_message_is_reported_and_one_that_is_dropped_is_not() -> None:
    """Those that arrived are not reported either; round trips are of delivered messages."""
    bag, lost, times = Mailbag(frozenset({1})), list[int](), list[float]()
    sender = DraftSender(times.append, max_in_flight=9)

    def send(number: int) -> None:
        sender.send(bag, "s", message(number), lambda: lost.append(number))

    for number in range(3):
        send(number)
    await delivered(sender)
    assert (bag.got, lost, len(times), sender.num_failed) == ([0, 2], [1], 2, 1)
    bag.gate.clear()
    send(1)
    sender.drop()
    assert (sender.num_sent, sender.num_failed) == (4, 2) and sender.is_free
    send(1)
    await sender.aclose()
    assert (bag.got, lost, len(times)) == ([0, 2], [1], 2)


async def test_messages_to_a_lost_session_do_not_hold_back_those_of_the_next() -> None:
    """They may hang for as long as a server is silent; they count as failed."""
    stopped, live, times, freed = Mailbag(), Mailbag(), list[float](), list[bool]()
    stopped.gate.clear()
    sender = DraftSender(times.append, max_in_flight=2, on_free=lambda: freed.append(True))
    for number in range(2):
        sender.send(stopped, "s", message(number))
    assert not sender.is_free
    sender.drop()
    for number in (7, 8):
        assert sender.is_free
        sender.send(live, "t", message(number))
    while len(times) < 2:
        await asyncio.sleep(0)
    await sender.aclose()
    assert (stopped.got, live.got, sender.num_failed, freed) == ([], [7, 8], 2, [])


async def test_faults_of_messages_are_what_they_say() -> None:
    """Else tests of lost and doubled drafts would test nothing."""
    for rates, num_delivered in ((FaultRates(), 1), (FaultRates(drop=1.0), 0), (FaultRates(duplicate=1.0), 2)):
        bag = Mailbag()
        with suppress(EndpointLost):
            await FaultyPosts(bag, rates).post_drafts("s", message(7))
        assert bag.got == [7] * num_delivered


ONE = ClientOptions(max_connections=1, keep_alive_s=1.0)
"""A connection that is not given back shows at the next request: PoolTimeout."""


REQUEST = SessionRequest(prompt=[5, 6], max_tokens=3, ignore_eos=True)


async def post(client: VerifierClient) -> None:
    with suppress(OutriderError):  # no such session
        await client.post_drafts("none", DraftMessage("application/json", b"{}"))


async def read_text(client: VerifierClient) -> None:
    async with client.open_session(REQUEST) as events:
        assert [each async for each in events]


async def cut_after(num_turns: int, num_cuts: int, ask: Coroutine[Any, Any, object]) -> None:
    """Cancels the task after so many turns of the loop, then once more each turn."""
    task = asyncio.create_task(ask)
    for _ in range(num_turns):
        await asyncio.sleep(0)
    for _ in range(num_cuts):
        task.cancel()
        await asyncio.sleep(0)
    await asyncio.gather(task, return_exceptions=True)


async def test_texts_one_after_the_other_share_a_connection(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader stops at the session's end, before the body's: the rest is read for it. Without, each text connects."""
    monkeypatch.setattr("outrider.models.client.exchange._END_S", TIMEOUT_S)  # a busy machine may be slow
    seen: set[int] = set()
    async with VerifierClient(server.url, ONE) as client:
        for _ in range(3):
            async with client.open_session(REQUEST) as events, aclosing(events):
                assert [each.type async for each in until_end(events)][-1] == "end"
            (held,) = client._http._transport._pool.connections  # type: ignore[attr-defined]
            seen.add(id(held))
            assert held.is_idle() and len(seen) == 1


async def test_a_body_that_does_not_end_costs_its_connection_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next text connects anew; nobody waits for longer than a moment, and closing the client in it is safe."""
    data, closed = opened(300) + event(type="end", reason="stop", usage=USAGE), list[bytes]()

    def reply(server: RawServer, connection: socket.socket) -> None:
        connection.sendall(data)
        closed.append(connection.recv(1))  # b"" once the other side closes

    with raw_server(reply) as server:
        async with VerifierClient(server.url, ONE) as client:
            for _ in range(2):
                async with client.open_session(REQUEST) as events, aclosing(events):
                    assert [each.type async for each in until_end(events)] == ["open", "end"]
        monkeypatch.setattr("outrider.models.client.exchange._END_S", TIMEOUT_S)
        async with VerifierClient(server.url, ONE) as client:
            stack = client.open_session(REQUEST)
            events = await stack.__aenter__()
            assert [each.type async for each in until_end(events)] == ["open", "end"]
            leaving = asyncio.create_task(stack.__aexit__(None, None, None))
            await asyncio.sleep(0)
        await leaving
        await asyncio.to_thread(wait_until, lambda: closed == [b""] * 3)


async def until_end(events: AsyncIterator[SessionEvent]) -> AsyncIterator[SessionEvent]:
    """Stops where a session ends, as an agent does."""
    async for each in events:
        yield each
        if isinstance(each, SessionEnd):
            return


@pytest.mark.parametrize("num_cuts", [1, 3])
@pytest.mark.parametrize("ask", [post, read_text])
async def test_a_cancelled_request_gives_its_connection_back_wherever_it_was(
    server: FakeServer, ask: Callable[[VerifierClient], Coroutine[Any, Any, object]], num_cuts: int
) -> None:
    """httpcore loses it at the turns at which it takes the connection, and at those at which it gives it back."""
    for num_turns in range(40):
        async with VerifierClient(server.url, ONE) as client:
            for _ in range(2):  # without a connection, then with one
                await cut_after(num_turns, num_cuts, ask(client))
                assert (await client.ready()).status == "ready", num_turns
    server.wait_until(server.is_empty)


async def test_a_caller_does_not_wait_for_what_it_left() -> None:
    """A server that does not answer holds back neither the cancelled caller nor the end of the client."""
    asked, over = threading.Event(), threading.Event()

    def hang(server: RawServer, connection: socket.socket) -> None:
        asked.set()
        if connection.recv(1) == b"":  # until the client closes
            over.set()

    with raw_server(hang) as server:
        async with VerifierClient(server.url, ONE) as client:
            task = asyncio.create_task(post(client))
            await asyncio.to_thread(asked.wait, TIMEOUT_S)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert await asyncio.to_thread(over.wait, TIMEOUT_S)  # the connection is closed at once


async def test_over_another_transport_a_cancellation_reaches_the_request() -> None:
    asked, cut = asyncio.Event(), asyncio.Event()

    async def hang(request: httpx.Request) -> httpx.Response:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            cut.set()
        raise AssertionError

    async with VerifierClient("http://127.0.0.1:1", transport=httpx.MockTransport(hang)) as client:
        task = asyncio.create_task(post(client))
        await asked.wait()
        task.cancel()
        await cut.wait()


async def test_a_delayed_link_keeps_order_and_errors(server: FakeServer) -> None:
    """Events come in order, each late; errors are raised as before, and leaving early ends the session."""
    request = SessionRequest(prompt=[5, 6], max_tokens=8, ignore_eos=True)
    loop = asyncio.get_running_loop()
    async with VerifierClient(server.url) as client:
        began = loop.time()
        async with DelayedClient(client, 0.2).open_session(request) as events:
            first, *commits, last = [event async for event in events]
        assert isinstance(first, SessionOpen) and isinstance(last, SessionEnd) and loop.time() - began >= 0.2
        bases = [event.base for event in commits if isinstance(event, Commit)]
        assert bases == sorted(bases) and len(bases) == len(commits)
        async with DelayedClient(client, 0.01).open_session(request.model_copy(update={"max_tokens": 500})) as events:
            assert isinstance(await anext(events), SessionOpen)
        await asyncio.to_thread(server.wait_until, server.is_empty)
    with pytest.raises(EndpointLost):
        async with VerifierClient("http://127.0.0.1:9") as far, DelayedClient(far, 0.01).open_session(request):
            pass


def echo(server: RawServer, connection: socket.socket) -> None:
    """Answers with the request's body."""
    connection.sendall(server.asked[connection][1])


def proxied(server: RawServer, rtt_ms: float = 0.0) -> FaultyProxy:
    return FaultyProxy("127.0.0.1", int(server.url.rpartition(":")[2]), ProxyOptions(rtt_ms))


def whole(client: socket.socket) -> bytes:
    """All that comes once nothing more is sent."""
    client.shutdown(socket.SHUT_WR)
    return b"".join(iter(lambda: client.recv(4096), b""))


def test_the_proxy_delivers_every_byte_in_order_and_counts_both_ways() -> None:
    """Chunks in flight keep their order; closing one side closes the other. What comes after a change of the round trip
    takes the new one; an impossible one is refused.
    """
    body = b"".join(b"%05d," % i for i in range(2000))
    sent = raw_post("/", body)
    with raw_server(echo) as server, proxied(server, 60_000.0) as proxy:
        with pytest.raises(ConfigError, match="rtt_ms is -1"):
            proxy.set_rtt_ms(-1.0)
        proxy.set_rtt_ms(4.0)
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=20.0) as client:
            for start in range(0, len(sent), 97):
                client.sendall(sent[start : start + 97])
            assert whole(client) == body
        assert (proxy.bytes_up, proxy.bytes_down) == (len(sent), len(body))


def test_connections_share_the_rate_of_a_throttled_link() -> None:
    """400 bytes of each of two connections at 64 kbit/s: 50 ms for each way of one, and 50 ms behind the other."""
    with raw_server(echo) as server, proxied(server) as proxy:
        at = ("127.0.0.1", proxy.port)
        with socket.create_connection(at) as one, socket.create_connection(at) as other:
            proxy.throttle(64.0)
            began_s = time.monotonic()
            for client in (one, other):
                client.sendall(raw_post("/", b"x" * 400))
            assert whole(one) == whole(other) == b"x" * 400
            assert time.monotonic() - began_s >= 0.145


def test_a_connection_that_comes_while_the_proxy_ends_is_closed() -> None:
    """A socket left open would be a ResourceWarning, which is an error here."""

    def connect_until_refused(port: int) -> None:
        with suppress(OSError), ExitStack() as stack:
            while True:
                stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                connected.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        for _ in range(5):
            connected = threading.Event()
            with FaultyProxy(*listener.getsockname()) as proxy:
                client = threading.Thread(target=connect_until_refused, args=(proxy.port,))
                client.start()
                assert connected.wait(10.0)
            client.join()
    gc.collect()
