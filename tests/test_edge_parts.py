"""Tests the agent's smaller parts: events, faults, the proxy, a generation's record, and what importing it loads."""

from __future__ import annotations

import asyncio
import gc
import math
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.edge.drafting.drafter import ModelDrafter, Proposal
from outrider.edge.drafting.worker import DraftRun, DraftWorker
from outrider.edge.lab.faults import FaultRates, FaultyPosts
from outrider.edge.lab.proxy import DelayProxy, ProxyOptions
from outrider.edge.link.errors import ProtocolBroken
from outrider.edge.link.sender import DraftSender
from outrider.edge.link.sse import EventParser
from outrider.edge.modes.recorder import Recorder
from outrider.edge.results import ByteCounts, Mode, Source, TokenBatch
from outrider.models.errors import ConfigError
from outrider.models.protocol import Commit, DraftRequest, SessionEnd, SessionEvent, SessionOpen
from outrider.models.runtimes.fake import FakeSequenceRuntime
from outrider.models.sampling import SamplingParams

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
    parser, events = EventParser("http://x"), list[SessionEvent]()
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
    """A `Posts` that keeps its messages; a gate holds deliveries back."""

    def __init__(self) -> None:
        self.got: list[int] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def post_drafts(self, session: str, request: DraftRequest) -> None:
        await self.gate.wait()
        self.got.append(request.base)


def message(base: int) -> DraftRequest:
    """A draft message with this base."""
    return DraftRequest(base=base, paths=[[1]])


def test_where_too_many_messages_are_in_flight_only_the_newest_waits() -> None:
    """A message repeats the whole belief, so those in between are useless."""

    async def scenario() -> tuple[list[int], int]:
        bag, times = Mailbag(), list[float]()
        bag.gate.clear()
        sender = DraftSender(times.append, max_in_flight=2)
        for base in range(5):
            sender.send(bag, "s", message(base))
        bag.gate.set()
        while len(times) < 3:
            await asyncio.sleep(0)
        await sender.aclose()
        return bag.got, sender.num_sent

    assert asyncio.run(scenario()) == ([0, 1, 4], 3)


def test_messages_to_a_lost_session_do_not_hold_back_those_of_the_next() -> None:
    """They may hang for as long as a server is silent; they count as failed."""

    async def scenario() -> tuple[list[int], list[int], int]:
        stopped, live, times = Mailbag(), Mailbag(), list[float]()
        stopped.gate.clear()
        sender = DraftSender(times.append, max_in_flight=2)
        for base in range(5):
            sender.send(stopped, "s", message(base))
        sender.drop()
        for base in (7, 8):
            sender.send(live, "t", message(base))
        while len(times) < 2:
            await asyncio.sleep(0)
        await sender.aclose()
        return stopped.got, live.got, sender.num_failed

    assert asyncio.run(scenario()) == ([], [7, 8], 2)


def test_faults_are_reproducible_and_counted() -> None:
    """The same seed drops the same messages; the sender counts them and continues."""

    async def scenario(rates: FaultRates) -> tuple[list[int], int]:
        bag = Mailbag()
        faulty, sender = FaultyPosts(bag, rates, seed=3), DraftSender(lambda _: None, max_in_flight=1000)
        for base in range(200):
            sender.send(faulty, "s", message(base))
        while sender._tasks:
            await asyncio.sleep(0)
        await sender.aclose()
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
    """Echoes every connection's bytes until it closes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    try:
                        while data := connection.recv(4096):
                            connection.sendall(data)
                    except OSError:
                        pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_the_proxy_delivers_every_byte_in_order_and_counts_both_ways() -> None:
    """Chunks in flight keep their order; closing one side closes the other."""
    sent = b"".join(b"%05d," % i for i in range(2000))
    with echo_server() as address, DelayProxy(*address, ProxyOptions(rtt_ms=4.0)) as proxy:
        with socket.create_connection(("127.0.0.1", proxy.port)) as client:
            for start in range(0, len(sent), 97):
                client.sendall(sent[start : start + 97])
            client.shutdown(socket.SHUT_WR)
            got = b"".join(iter(lambda: client.recv(4096), b""))
        assert got == sent
        assert (proxy.bytes_up, proxy.bytes_down) == (len(sent), len(sent))


def test_a_cut_closes_what_is_open_and_nothing_else() -> None:
    """The client sees its connection end; the next one works."""
    with echo_server() as address, DelayProxy(*address) as proxy:
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
            with DelayProxy(*address) as proxy:
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
    empty = Recorder(Mode.CLOUD_ONLY).finish("length", ByteCounts())
    assert math.isnan(empty.tokens_per_s) and empty.acceptance_rate is None


def test_importing_the_agent_loads_nothing_heavy() -> None:
    """No module of outrider.edge loads torch, transformers, onnx, openvino, server or export code."""
    code = (
        "import pkgutil, sys, importlib, outrider.edge as e\n"
        "for m in pkgutil.iter_modules(e.__path__): importlib.import_module('outrider.edge.' + m.name)\n"
        "heavy = ('torch', 'transformers', 'onnx', 'optimum', 'openvino', 'fastapi', 'uvicorn', 'outrider.export')\n"
        "bad = [n for n in sys.modules if n in heavy or n.startswith('outrider.export.')\n"
        "       or (n.startswith('outrider.cloud.') and n != 'outrider.models.protocol')]\n"
        "print(bad); sys.exit(bool(bad))"
    )
    paths = [path for path in sys.path if path]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}\n{code}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("token_ms", "answer", "woken_at"),
    [(0.0, 3, [3]), (2.0, 3, [3, 5]), (5.0, 0, [1, 2, 3, 4, 5, 6]), (5.0, 3, [1, 2, 3, 4, 5, 6]), (2.0, 0, [2, 4, 6])],
)
def test_a_run_sends_its_answer_whole_and_lets_no_token_wait_long(
    token_ms: float, answer: int, woken_at: list[int]
) -> None:
    """Wakes when the answer is complete, else every 4 ms unless it will soon be complete; tokens take token_ms each."""

    class Ticking(ModelDrafter):
        def propose(self) -> Proposal | None:
            now[0] += token_ms / 1e3
            return super().propose()

    now, woken = [0.0], list[int]()

    async def scenario() -> None:
        drafter = Ticking(FakeSequenceRuntime(vocab_size=50))
        run = DraftRun(keep=3, tail=(), limit=6, ahead=(), answer=answer)
        worker = DraftWorker(
            drafter, (1, 2, 3), SamplingParams(), lambda ahead: True, lambda: None, 0.004, lambda: round(now[0], 6)
        )
        # The worker's thread wakes the loop; only the times of these calls count here.
        worker._loop = types.SimpleNamespace(  # type: ignore[assignment]
            call_soon_threadsafe=lambda wake: woken.append(len(run.proposals)),
            run_in_executor=worker._loop.run_in_executor,
        )
        await worker.submit(run)
        worker.close()

    asyncio.run(scenario())
    assert woken == woken_at


def test_a_draft_pauses_after_a_token_that_it_does_not_have() -> None:
    """A target that is padded further may pick one; the draft goes on where that token is rewound."""
    drafter = ModelDrafter(FakeSequenceRuntime(vocab_size=300), 12)
    drafter.begin([1, 2, 3], SamplingParams())
    assert drafter.propose() is not None
    drafter.extend([300])
    assert drafter.propose() is None and drafter.propose() is None and drafter.length == 5
    drafter.extend([4])
    assert drafter.propose() is None
    drafter.rewind(4)
    assert drafter.propose() is not None
    drafter.begin([1, 310, 3], SamplingParams())
    assert drafter.propose() is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_of_the_drafts_embedding_is_never_proposed(temperature: float) -> None:
    """Draft and target may be padded differently: the target may not have an id that no tokenizer knows."""
    params = SamplingParams(temperature=temperature, seed=3)
    known, proposed = 12, {}
    for num_ids in (None, known):
        drafter = ModelDrafter(FakeSequenceRuntime(vocab_size=300), num_ids)
        drafter.begin([1, 2, 3], params)
        proposals = [drafter.propose() for _ in range(40)]
        proposed[num_ids] = [proposal.token for proposal in proposals if proposal is not None]
    assert max(proposed[None]) >= known  # without num_ids it proposes padding
    assert max(proposed[known]) < known and len(proposed[known]) == 40
