"""Tests the agent's smaller parts: events, faults, the proxy, a generation's record, and what importing it loads."""

from __future__ import annotations

import asyncio
import functools
import gc
import math
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.faulty_posts import FaultRates, FaultyPosts
from tests.faulty_proxy import FaultyProxy, ProxyOptions

from outrider.edge.link.sender import DraftSender
from outrider.edge.modes.recorder import Recorder
from outrider.edge.results import Mode, Source, TokenBatch
from outrider.models.client.checks import EventParser
from outrider.models.client.errors import ProtocolBroken
from outrider.models.client.messages import ByteCounts, DraftMessage
from outrider.models.errors import ConfigError, RequestError
from outrider.models.wire.protocol import Commit, SessionEnd, SessionEvent, SessionOpen, Taken

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
    parser, events = EventParser("http://x"), list[SessionEvent | Taken]()
    edges = [0, *sorted(cuts), len(STREAM)]
    for start, end in pairwise(edges):
        events += parser.feed(STREAM[start:end])
    opened, first, second, ended = events
    assert isinstance(opened, SessionOpen) and opened.step_ms == 40.5
    assert first == Commit(base=0, tokens=[311])
    assert second == Commit(base=1, tokens=[57, 9], accepted=1, proposed=4)
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
        number = int(message.body)
        if number in self._refused:
            raise RequestError("too_many_requests", "refused", status=429)
        self.got.append(number)


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
    assert freed == [True]  # nobody was turned away
    await sender.aclose()
    assert bag.got == [0, 1, 3]


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


def test_faults_are_reproducible_and_counted() -> None:
    """The same seed drops the same messages; the sender reports each, counts them and continues."""

    async def scenario(rates: FaultRates) -> tuple[list[int], int]:
        bag, lost = Mailbag(), list[int]()
        faulty, sender = FaultyPosts(bag, rates, seed=3), DraftSender(lambda _: None, max_in_flight=1000)
        for number in range(200):
            sender.send(faulty, "s", message(number), functools.partial(lost.append, number))
        await delivered(sender)
        await sender.aclose()
        assert sorted({*bag.got, *lost}) == [*range(200)] and len(lost) == sender.num_failed
        return bag.got, sender.num_failed

    got, failed = asyncio.run(scenario(FaultRates(drop=0.3)))
    assert asyncio.run(scenario(FaultRates(drop=0.3))) == (got, failed)
    assert 30 < failed < 90 and len(got) == 200 - failed
    doubled, _ = asyncio.run(scenario(FaultRates(duplicate=1.0)))
    assert sorted(doubled) == sorted([*range(200)] * 2)
    late, _ = asyncio.run(scenario(FaultRates(delay=1.0, max_delay_s=0.002)))
    assert sorted(late) == [*range(200)] and late != sorted(late)
    with pytest.raises(ConfigError, match="drop"):
        FaultRates(drop=1.5)


@contextmanager
def echo_server() -> Iterator[tuple[str, int]]:
    """Echoes every connection's bytes until it closes, one after the other."""

    class Echo(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                while data := self.request.recv(4096):
                    self.request.sendall(data)

    with socketserver.TCPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield ("127.0.0.1", server.server_address[1])
        server.shutdown()
        thread.join()


def test_the_proxy_delivers_every_byte_in_order_and_counts_both_ways() -> None:
    """Chunks in flight keep their order; closing one side closes the other."""
    sent = b"".join(b"%05d," % i for i in range(2000))
    with echo_server() as address, FaultyProxy(*address, ProxyOptions(rtt_ms=4.0)) as proxy:
        with socket.create_connection(("127.0.0.1", proxy.port)) as client:
            for start in range(0, len(sent), 97):
                client.sendall(sent[start : start + 97])
            client.shutdown(socket.SHUT_WR)
            got = b"".join(iter(lambda: client.recv(4096), b""))
        assert got == sent
        assert (proxy.bytes_up, proxy.bytes_down) == (len(sent), len(sent))


def test_the_proxy_takes_another_round_trip() -> None:
    """What comes after the change takes the new one; an impossible one is refused."""
    with echo_server() as address, FaultyProxy(*address, ProxyOptions(rtt_ms=60_000.0)) as proxy:
        with pytest.raises(ConfigError, match="rtt_ms is -1"):
            proxy.set_rtt_ms(-1.0)
        proxy.set_rtt_ms(0.0)
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=20.0) as client:
            client.sendall(b"x")
            assert client.recv(10) == b"x"


def test_a_cut_closes_what_is_open_and_nothing_else() -> None:
    """The client sees its connection end; the next one works."""
    with echo_server() as address, FaultyProxy(*address) as proxy:
        with socket.create_connection(("127.0.0.1", proxy.port)) as client:
            client.sendall(b"x")
            assert client.recv(10) == b"x"
            proxy.cut()
            with pytest.raises(ConnectionError):
                if client.recv(10) == b"":
                    raise ConnectionResetError
        with socket.create_connection(("127.0.0.1", proxy.port)) as client:
            client.sendall(b"y")
            assert client.recv(10) == b"y"
        assert (proxy.num_cuts, proxy.num_connections) == (1, 2)


def test_a_cut_after_a_mark_delivers_it_and_loses_the_rest() -> None:
    """Also where all was read at once; the next number counts from there."""
    with echo_server() as address, FaultyProxy(*address, ProxyOptions(rtt_ms=20.0)) as proxy:
        with pytest.raises(ConfigError, match="comes \\(3, 0\\) times; expected one byte or more, 1 time or more"):
            proxy.cut_after(b"ab", 3, 0)
        proxy.cut_after(b"ab", 3, 2)
        received: list[bytes] = []
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", proxy.port), timeout=20.0) as client:
                client.sendall(b"ab-ab-ab-ab")
                parts: list[bytes] = []
                with suppress(ConnectionError):
                    while part := client.recv(10):
                        parts.append(part)
                received.append(b"".join(parts))
        assert received == [b"ab-ab-ab", b"ab-ab"] and proxy.num_cuts == 2
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=20.0) as client:
            client.sendall(b"ab-ab-ab-ab")
            assert client.recv(20) == b"ab-ab-ab-ab"


def test_connections_share_the_rate_of_a_throttled_link() -> None:
    """400 bytes of each of two connections at 64 kbit/s: 50 ms for each way of one, and 50 ms behind the other."""
    for first_kbit_s in (64.0, 0.0):
        with ExitStack() as stack:
            address = stack.enter_context(echo_server())
            proxy = stack.enter_context(FaultyProxy(*address, ProxyOptions(kbit_s=first_kbit_s)))
            connect = functools.partial(socket.create_connection, ("127.0.0.1", proxy.port))
            clients = [stack.enter_context(connect()) for _ in range(2)]
            proxy.throttle(64.0)
            began_s = time.monotonic()
            for client in clients:
                client.sendall(b"x" * 400)
                client.shutdown(socket.SHUT_WR)
            for client in clients:
                assert b"".join(iter(functools.partial(client.recv, 4096), b"")) == b"x" * 400
            assert time.monotonic() - began_s >= 0.145
    with pytest.raises(ConfigError, match=r"kbit_s is -1\.0"):
        ProxyOptions(kbit_s=-1.0)


def test_a_connection_that_comes_while_the_proxy_ends_is_closed() -> None:
    """A socket left open would be a ResourceWarning, which is an error here."""

    def connect_until_refused(port: int) -> None:
        with suppress(OSError), ExitStack() as stack:
            while True:
                stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                connected.set()

    with echo_server() as address:
        for _ in range(5):
            connected = threading.Event()
            with FaultyProxy(*address) as proxy:
                client = threading.Thread(target=connect_until_refused, args=(proxy.port,))
                client.start()
                assert connected.wait(10.0)
            client.join()
    gc.collect()


def test_a_result_tells_rates_as_ratios_of_sums() -> None:
    """Tested tokens are the accepted ones and the first rejected one; passes, gaps and bytes follow from the record."""
    now = [10.0]
    batches: list[TokenBatch] = []
    recorder = Recorder(Mode.STREAM, batches.append, lambda: now[0])
    for at, tokens, accepted, proposed in ((10.5, (1,), 0, 0), (10.6, (2, 3, 4), 2, 5), (10.7, (5, 6), 1, 1)):
        now[0] = at
        recorder.commit(tokens, accepted, proposed)
    recorder.depth(4)
    result = recorder.finish("length", ByteCounts(600, 120, 9, 9))
    assert result.tokens == (1, 2, 3, 4, 5, 6)
    assert [source is Source.DRAFT for source in result.sources] == [False, True, True, False, True, False]
    assert result.acceptance_rate == pytest.approx(3 / 4)
    assert (result.num_proposed, result.num_passes, result.tokens_per_pass) == (6, 3, 2.0)
    assert result.ttft_ms == pytest.approx(500.0)
    assert result.tokens_per_s == pytest.approx(5 / 0.2)
    assert result.gap_ms(50) == pytest.approx(0.0) and result.gap_ms(99) == pytest.approx(100.0)
    assert (result.bytes_up_per_token, result.bytes_down_per_token) == (100.0, 20.0)
    assert [batch.num_accepted for batch in batches] == [0, 2, 1]
    tree = Recorder(Mode.STREAM)
    tree.commit((1, 2, 3), 2, 9, may_reject=False)  # the rest were other branches
    tree.commit((4,), 0, 6)
    assert tree.finish("length", ByteCounts()).acceptance_rate == pytest.approx(2 / 3)
    empty = Recorder(Mode.CLOUD_ONLY).finish("length", ByteCounts())
    assert math.isnan(empty.tokens_per_s) and empty.acceptance_rate is None


def test_importing_the_agent_loads_nothing_heavy() -> None:
    """No module of outrider.edge loads torch, transformers, onnx, openvino, server or export code."""
    code = (
        "import pkgutil, sys, importlib, outrider.edge as e\n"
        "for m in pkgutil.iter_modules(e.__path__): importlib.import_module('outrider.edge.' + m.name)\n"
        "heavy = ('torch', 'transformers', 'onnx', 'optimum', 'openvino', 'fastapi', 'uvicorn', 'outrider.export')\n"
        "bad = [n for n in sys.modules if n in heavy or n.startswith('outrider.export.')\n"
        "       or (n.startswith('outrider.cloud.') and n != 'outrider.models.wire.protocol')]\n"
        "print(bad); sys.exit(bool(bad))"
    )
    paths = [path for path in sys.path if path]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}\n{code}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
