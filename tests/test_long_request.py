"""The long request of drafts: its bytes, how a server reads and acknowledges it, and when a device does without."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.agents import VOCAB, asking, drafter, is_at_rest, truth
from tests.engine_harness import refused
from tests.fake_runtime import FakeBatchRuntime
from tests.faulty_proxy import AgainstLongRequests, FaultyProxy
from tests.fronts import replicas, serve_front
from tests.raw_client import Raw, post
from tests.serving import FakeServer, StepGate, read_all_events, serve_fake, target_tokens
from tests.waiting import TIMEOUT_S, wait_until

from outrider.cloud.api.state import DraftLimits, ServerSettings
from outrider.edge.drafting.depth import FixedDepth
from outrider.edge.lab.proxy import DelayProxy
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.link.sender import DraftSender
from outrider.edge.modes.stream import StreamAgent
from outrider.edge.results import GenerationResult
from outrider.models.client.client import ClientOptions, VerifierClient
from outrider.models.client.long_request import LongRequest
from outrider.models.client.messages import ByteCounts, DraftMessage
from outrider.models.ingress.connections import ConnectionLimits
from outrider.models.wire.draft_stream import DRAFTS_MEDIA_TYPE, MAX_TREE_BYTES, MessageReader, framed
from outrider.models.wire.protocol import Commit, SessionEnd, SessionEvent, SessionOpen, Taken
from outrider.models.wire.tree_draft import ROOT, TreeDraft

PROMPT = [5, 17, 99, 3]
ROUTE = "/v1/sessions/{session_id}/drafts"
SESSION = {"prompt": PROMPT, "max_tokens": 24, "ignore_eos": True}


# -- the bytes ---------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.binary(min_size=1, max_size=300), max_size=12), st.lists(st.integers(1, 40), min_size=1, max_size=30)
)
def test_messages_survive_however_their_bytes_are_cut(bodies: list[bytes], sizes: list[int]) -> None:
    """Each comes out once, whole and in order; between messages nothing is held."""
    data, reader, found = b"".join(map(framed, bodies)), MessageReader(), list[bytes]()
    while data:
        size, sizes = sizes[0], [*sizes[1:], sizes[0]]
        found += reader.feed(data[:size])
        data = data[size:]
    assert found == bodies and not reader.is_within


@pytest.mark.parametrize(
    ("data", "code"),
    [(b"\x00", "invalid_request"), (b"\x81\x30", "body_too_large"), (b"\xff\xff\xff", "body_too_large")],
)
def test_wrong_lengths_are_refused_at_their_first_bytes(data: bytes, code: str) -> None:
    """None, one more than the most, and a number of more than 14 bits; the most itself is waited for."""
    with refused(code):
        MessageReader().feed(data)
    reader = MessageReader()
    assert reader.feed(framed(bytes(MAX_TREE_BYTES))[:-1]) == [] and reader.is_within


# -- the server --------------------------------------------------------------------------------------------------------


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def tree(first: int = 0, tokens: list[int] | None = None) -> bytes:
    """A line of nodes after the prompt."""
    tokens = tokens or target_tokens(PROMPT, 3)
    parents = [ROOT, *range(first, first + len(tokens) - 1)]
    return framed(TreeDraft(0, first, tokens, parents, [13] * len(tokens)).encode())


@dataclass
class Line:
    """A session, and its long request as bytes."""

    raw: Raw
    events: Iterator[SessionEvent | Taken]
    session: str

    def send(self, data: bytes) -> None:
        self.raw.send(chunk(data))

    def exchange(self, data: bytes, number: int) -> None:
        """Sends a message that is acknowledged as the one of this number."""
        self.send(data)
        assert self.taken().taken[0] == number

    def taken(self) -> Taken:
        """The next event, which acknowledges."""
        event = next(self.events)
        assert isinstance(event, Taken)
        return event

    def refused(self) -> tuple[int, str, str | None]:
        """Status and code of the answer, and the code that the stream gives."""
        event = self.taken()
        status, _, body = self.raw.answer()
        return status, json.loads(body)["error"]["code"], None if event.error is None else event.error.code


@contextmanager
def begun(server: FakeServer, url: str | None = None) -> Iterator[Line]:
    """A session whose engine stands, with the head of its long request sent. url: of what stands before the server."""
    with (
        httpx.Client(base_url=url or server.url) as client,
        client.stream("POST", "/v1/sessions", json=SESSION) as stream,
        Raw(server if url is None else At(url)) as raw,  # type: ignore[arg-type]
    ):
        opened = next(events := read_all_events(stream))
        assert isinstance(opened, SessionOpen)
        raw.send(long_head(opened.session))
        yield Line(raw, events, opened.session)


@dataclass
class At:
    url: str


def long_head(session: str) -> bytes:
    head = post(f"/v1/sessions/{session}/drafts", b"", "Transfer-Encoding: chunked")
    return head.replace(b"application/json", DRAFTS_MEDIA_TYPE.encode())


def tokens_of(events: Iterator[SessionEvent | Taken]) -> list[int]:
    return [token for event in events if isinstance(event, Commit) for token in event.tokens]


def test_messages_are_acknowledged_on_the_stream_and_the_end_by_an_answer() -> None:
    """By an event of its own while nothing is committed, else by a commit; what was sent is drafted from."""
    with serve_fake(gate=StepGate()) as server, begun(server) as line:
        line.exchange(tree(), 1)
        for first in (3, 6):
            line.exchange(tree(first), first // 3 + 1)
        assert line.raw.answer(b"0\r\n\r\n")[0] == 204
        server.gate.open()
        commits = [event for event in line.events if isinstance(event, Commit)]
        assert [token for commit in commits for token in commit.tokens] == target_tokens(PROMPT, 24)
        assert sum(commit.accepted - commit.looked_up for commit in commits) >= 2
        assert not any(commit.taken for commit in commits)  # each message once


def test_a_commit_carries_the_acknowledgement() -> None:
    """One write for a step, though drafts come with each: nothing else is written beside commits that come soon."""
    with serve_fake(gate=StepGate()) as server, begun(server) as line:
        line.exchange(tree(), 1)
        line.send(tree(3))
        server.gate.open()
        *rest, end = line.events
        ((num, held_ms),) = [event.taken for event in rest if isinstance(event, Commit | Taken) and event.taken]
        assert num == 2 and 0.0 <= held_ms < 1e3 * TIMEOUT_S
        assert isinstance(end, SessionEnd) and line.raw.answer()[0] == 204  # with the session, before the body ends


def test_messages_over_the_budget_are_named_and_the_others_taken() -> None:
    """At once; the text is the target's. More than can be named end the request."""
    limits = DraftLimits(session_per_s=1000.0, session_burst=3.0, delay_s=0.0, finish_s=TIMEOUT_S)
    with serve_fake(ServerSettings(draft_limits=limits), gate=StepGate()) as server, begun(server) as line:
        line.send(b"".join(tree(first) for first in range(0, 18, 3)))
        event = line.taken()
        assert event.taken[0] == 6 and event.refused and event.refused[-1] == 6 and event.error is None
        line.exchange(tree(), 7)  # read after a pause
        line.send(tree() * 200)
        assert line.refused() == (429, "rate_limited", "rate_limited")
        assert server.core.metrics.num_dropped["session"] > 60
        server.gate.open()
        assert tokens_of(line.events) == target_tokens(PROMPT, 24)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (framed(b"\x05"), (400, "invalid_request")),
        (b"\x00", (400, "invalid_request")),
        (b"\xff\x7f" + bytes(200), (413, "body_too_large")),
        (tree(tokens=[1 << 20]), (400, "token_out_of_range")),
        (framed(TreeDraft(9, 0, [1], [ROOT], [5]).encode()), (400, "draft_ahead")),
        (tree()[:-1], (408, "request_timeout")),
        (framed(b'{"base":0,"paths":[[1]]}'), (400, "draft_ahead")),
        (tree() + bytes(9), (400, "invalid_request")),
    ],
    ids=["no tree", "empty", "too long", "no token", "ahead", "unfinished", "JSON", "zeros behind a message"],
)
def test_what_is_no_message_ends_the_request_and_not_the_session(data: bytes, found: tuple[int, str]) -> None:
    """With an error, and a reason on the stream; a second request is refused, single messages are taken."""
    limits = DraftLimits(finish_s=0.05)
    with serve_fake(ServerSettings(draft_limits=limits), gate=StepGate()) as server, begun(server) as line:
        line.send(data)
        assert line.refused() == (*found, found[1])
        with Raw(server) as again:
            assert again.answer(long_head(line.session) + chunk(tree()))[0] == 204  # at once, and nothing is taken
        path = f"{server.url}/v1/sessions/{line.session}/drafts"
        assert httpx.post(path, json={"base": 0, "paths": [[1]]}).status_code == 204
        server.gate.open()
        assert tokens_of(line.events) == target_tokens(PROMPT, 24)


def test_two_at_a_time_are_refused_and_the_first_goes_on() -> None:
    """Messages are numbered in the one."""
    with serve_fake(gate=StepGate()) as server, begun(server) as line, Raw(server) as second:
        line.exchange(tree(), 1)
        status, _, body = second.answer(long_head(line.session) + chunk(tree()))
        assert (status, json.loads(body)["error"]["code"]) == (409, "second_long_request")
        line.exchange(tree(3), 2)


def test_a_long_request_is_no_slow_body_until_it_is_answered() -> None:
    """A body that is as quiet on another route is refused meanwhile; one that goes on after the answer is cut."""
    limits = ConnectionLimits(body_grace_s=0.05, linger_s=0.2)
    with serve_fake(limits=limits, gate=StepGate()) as server, begun(server) as line:
        line.exchange(tree(), 1)
        for _ in range(3):
            with Raw(server) as slow:
                assert slow.answer(post("/v1/sessions", b"", "Content-Length: 100"))[0] == 408
        line.exchange(tree(3), 2)
        with Raw(server) as behind:  # a body behind a long request in one packet is none
            head = long_head(line.session) + b"0\r\n\r\n"
            behind.send(head + post("/v1/sessions", b"", "Content-Length: 100"))
            assert [behind.answer()[0] for _ in range(2)] == [409, 408]
        server.gate.open()
        assert tokens_of(line.events) == target_tokens(PROMPT, 24) and line.raw.answer()[0] == 204
        assert line.raw.is_closed()


def test_the_front_of_replicas_passes_a_long_request_on() -> None:
    """As it comes: acknowledged before it ends; the replica's refusal reaches the client."""
    gate = StepGate()
    with replicas(1, gate=gate) as group, serve_front(group) as front, begun(group[0].server, front.url) as line:
        line.exchange(tree(), 1)
        line.send(b"\x00")
        assert line.refused() == (400, "invalid_request", "invalid_request")
        gate.open()
        assert tokens_of(line.events) == target_tokens(PROMPT, 24)


# -- the device --------------------------------------------------------------------------------------------------------


def posts(server: FakeServer) -> dict[int, int]:
    """Answers to draft requests so far, by status."""
    return {status: num for (route, _, status), num in server.core.metrics.requests.items() if route == ROUTE}


def generate(
    url: str, num_texts: int = 1, options: ClientOptions | None = None
) -> tuple[list[GenerationResult], VerifierClient]:
    """Texts one after the other by one agent."""

    async def scenario() -> tuple[list[GenerationResult], VerifierClient]:
        async with VerifierClient(url, options) as client:
            agent = StreamAgent(Endpoints([client]), drafter(0.8), FixedDepth(4))
            return [await agent.generate(asking(seed, max_tokens=40)) for seed in range(num_texts)], client

    return asyncio.run(asyncio.wait_for(scenario(), 2 * TIMEOUT_S))


@contextmanager
def serve_paced(count: Callable[[FakeServer], int], settings: ServerSettings | None = None) -> Iterator[FakeServer]:
    """A server each of whose steps waits a little for one draft more, so that every text has some."""
    running: list[FakeServer] = []

    def on_step(_: object) -> None:
        if running:
            before = count(running[0])
            with suppress(AssertionError):
                wait_until(lambda: count(running[0]) > before, 0.05)

    with serve_fake(settings, runtime=FakeBatchRuntime(vocab_size=VOCAB, on_step=on_step)) as server:
        running.append(server)
        yield server


def num_taken(server: FakeServer) -> int:
    """Messages of the long requests that are open."""
    return sum(session.line._num for session in list(server.core.sessions.values()))


def test_the_drafts_of_a_text_are_one_request() -> None:
    """It carries them all, and its connection serves the next text; acknowledgements measure the round trip."""
    with serve_paced(num_taken) as server:
        results, client = generate(server.url, 2)
        wait_until(lambda: is_at_rest(server) and sum(posts(server).values()) == 2)
        assert posts(server) == {204: 2}
    for seed, result in enumerate(results):
        assert result.tokens == truth(asking(seed, max_tokens=40)) and result.num_posts > 0
    assert any(result.num_failed_posts < result.num_posts for result in results)  # the last have no commit to wait for
    assert not client._lines and not client._lines.is_off


@pytest.mark.parametrize(("how", "least_met", "num_texts"), [("buffers", 3, 4), ("refuses", 1, 4), ("cuts", 0, 2)])
def test_a_proxy_that_passes_no_long_request_costs_no_draft(how: str, least_met: int, num_texts: int) -> None:
    """The rest of the text uses single messages. After a refusal that comes in time, or three texts, the next does not
    try again; the text is the same.
    """
    with serve_paced(lambda server: posts(server).get(204, 0)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with AgainstLongRequests(how, host, int(port)) as proxy:
            results, client = generate(proxy.url, num_texts)
            num_met = proxy.num_met
    for seed, result in enumerate(results):
        assert result.tokens == truth(asking(seed, max_tokens=40)) and result.num_posts > 0
    assert results[0].num_failed_posts > 0
    assert (least_met <= num_met <= 3 and client._lines.is_off) or how == "cuts"


class _Older(FaultyProxy):
    """Has a server of today say that it speaks protocol 2."""

    def _parts(self, data: bytes, *, is_up: bool) -> Any:
        return super()._parts(data if is_up else data.replace(b'"protocol":3', b'"protocol":2'), is_up=is_up)


def test_old_servers_and_old_devices_get_single_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of today with protocol 2, and a device that knows nothing else with a server of today: it sees no field
    that it does not know.
    """
    seen: list[bytes] = []

    class Reading(DelayProxy):
        def _parts(self, data: bytes, *, is_up: bool) -> Any:
            if not is_up:
                seen.append(data)
            return super()._parts(data, is_up=is_up)

    with serve_paced(lambda server: sum(posts(server).values())) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with _Older("127.0.0.1", int(port)) as proxy:
            (result,), _ = generate(proxy.url)
        assert result.tokens == truth(asking(0, max_tokens=40)) and 1 < sum(posts(server).values()) <= result.num_posts
        monkeypatch.setattr(VerifierClient, "_begin_long", lambda *_: None)
        with Reading(host, int(port)) as reading:
            (result,), _ = generate(reading.url)
        assert result.tokens == truth(asking(0, max_tokens=40)) and result.num_posts > 1
        assert b"accepted" in b"".join(seen) and b"taken" not in b"".join(seen)


def test_a_loop_whose_time_stands_still_measures_no_negative_round_trip() -> None:
    """uvloop reads its clock once in a turn; a time of the turn before would make a message seem long held back."""

    class Late(asyncio.SelectorEventLoop):
        late_s = 1.0

        def time(self) -> float:
            return super().time() - self.late_s

    async def scenario() -> None:
        async def start(pieces: AsyncIterator[bytes]) -> None:
            loop.late_s = 0.0  # the turn is over
            async for _ in pieces:
                line.follow(Taken(taken=(1, 0.0)))

        sender = DraftSender(times.append)
        line = LongRequest("http://x", start, ByteCounts(), rtt_s=0.0, step_s=0.0, on_unusable=lambda is_refused: None)
        up: Any = SimpleNamespace(post_drafts=lambda _, message: line.post(message.body))
        sender.send(up, "session", DraftMessage("", b"a tree"))
        await asyncio.gather(*sender._tasks)
        line.end(is_cut=True)

    loop, times = Late(), list[float]()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(scenario())
    assert len(times) == 1 and times[0] >= 0.0
