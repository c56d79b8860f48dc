"""Tests event streams whose clients read slowly or not at all: their way around tasks, and what waits."""

from __future__ import annotations

import asyncio
import gc
import re
import socket
import warnings
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, cast

import httpx
import pytest
from starlette.types import Message
from tests.serving import PROMPT, read_events, run_session, serve_fake, target_tokens
from tests.waiting import TIMEOUT_S

from outrider.cloud.api.bridge import Bridge
from outrider.cloud.api.draft_line import DraftLine
from outrider.cloud.api.steady_stream import SteadyStream
from outrider.cloud.api.stream import SERVER_SEND, NewestTimes, SessionStream, StepTimes
from outrider.cloud.api.traces import SequenceWatch
from outrider.cloud.seam import CommitEvent, EndEvent, EngineStats, SequenceUsage, Totals
from outrider.models.http import answers, openai
from outrider.models.http.shapes import CompletionShape, Delta
from outrider.models.http.sse import EventStream, Inbox
from outrider.models.ingress.sockets import open_socket
from outrider.models.process.by_owner import Shares
from outrider.models.process.tally import RequestTally
from outrider.models.wire.protocol import Commit, SessionOpen, parse_event
from outrider.models.wire.steady import SteadyPace


class SlowConnection:
    """A server's `send` that waits while the client does not read, as uvicorn's does."""

    def __init__(self) -> None:
        self.can_write, self.left, self.is_broken = asyncio.Event(), asyncio.Event(), False
        self.written: list[Message] = []

    async def send(self, message: Message) -> None:
        await self.can_write.wait()
        if self.is_broken:
            raise OSError("the connection is broken")
        self.written.append(message)

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.written)


async def settle() -> None:
    """Lets everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


class Streaming:
    """A SessionStream over a SlowConnection, with a sink that stands for the engine.

    steady: of a SteadyStream. is_read: whether the client reads at first.
    """

    def __init__(self, keep_alive_s: float = 60.0, steady: SteadyPace | None = None, is_read: bool = True) -> None:
        self.connection = SlowConnection()
        if is_read:
            self.connection.can_write.set()
        self.times, self.num_closed, mailbox = StepTimes(40.0, 1.0), 0, Bridge().mailbox()
        self.sink = mailbox.sink()
        self.stream = (SessionStream if steady is None else SteadyStream)(
            SessionOpen(session="s", model="m", step_ms=40.0, draft_token_ms=1.0, steady=steady),
            mailbox,
            SequenceWatch(RequestTally(), {}, 0.0),
            self._close,
            keep_alive_s=keep_alive_s,
            step_times=lambda: self.times,
            line=DraftLine(),
        )
        scope: dict[str, Any] = {"type": "http", SERVER_SEND: self.connection.send}
        self.task = asyncio.create_task(self.stream(scope, self.connection.receive, self.connection.send))

    def _close(self) -> None:
        self.num_closed += 1

    async def commit(self, *tokens: int) -> None:
        """One event a token; everything runs that can."""
        for token in tokens:
            self.sink(CommitEvent(token, (token,), 0, 0))
        await settle()

    async def left(self) -> None:
        """The client has left, and the stream has ended."""
        self.connection.left.set()
        await self.task


async def test_a_client_that_has_left_before_its_answer_begins_costs_nothing() -> None:
    """Nor a warning of Python's, that something was never awaited."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        streaming = Streaming(is_read=False)
        await streaming.left()
        assert streaming.num_closed == 1 and not streaming.connection.written
        del streaming
        await settle()
        gc.collect()
    assert not found


async def test_a_commit_has_the_times_of_a_step_where_they_have_changed_much() -> None:
    """Once: later commits are as short as before, until they change again."""
    streaming = Streaming()
    for token, times in enumerate([(40.0, 1.0), (41.0, 1.5), (40.0, 26.6), (40.0, 26.6), (60.0, 26.6), (60.0, 1)]):
        streaming.times = StepTimes(*times)
        await streaming.commit(token)
    streaming.sink(EndEvent("length", SequenceUsage()))
    await settle()
    events = [parse_event(line[6:]) for line in streaming.connection.body.split(b"\n\n") if line]
    told = [(event.step_ms, event.draft_token_ms) for event in events if isinstance(event, Commit)]
    assert told == [(None, None), (None, None), (40.0, 26.6), (None, None), (60.0, 26.6), (60.0, 1.0)]


def test_the_engine_is_asked_for_its_times_by_time_and_not_by_commits() -> None:
    """Thousands of streams commit in a second; gathering the engine's figures takes longer than a commit."""
    now, found = [0.0], [EngineStats(Totals(), 0, 0, 0, 0, 1, 1, 0.0, 40.0, 1.0)]
    newest = NewestTimes(lambda: found.pop(), lambda: now[0])
    assert {newest() for _ in range(100)} == {StepTimes(40.0, 1.0)}
    now[0], found[:] = 0.6, [EngineStats(Totals(), 0, 0, 0, 0, 1, 1, 0.0, 50.0, 2.0)]
    assert newest() == newest() == StepTimes(50.0, 2.0)


async def test_events_that_a_client_does_not_read_wait_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a write waits, later events collect, and none of them is copied for another; they follow in order and in
    pieces, and the end closes the response. The opening is such a write, too.
    """
    monkeypatch.setattr("outrider.cloud.api.stream._PIECE", 50)
    streaming = Streaming(is_read=False)
    connection = streaming.connection
    await streaming.commit(0)
    assert b'"tokens":[0]' in streaming.stream._backlog
    connection.can_write.set()
    await settle()
    assert b'"tokens":[0]' in connection.body
    connection.can_write.clear()
    num_before = len(connection.written)
    waiting: Any = streaming.stream._backlog
    for token in range(1, 6):
        await streaming.commit(token)
        assert streaming.stream._backlog is waiting
    streaming.sink(EndEvent("length", SequenceUsage()))
    await settle()
    assert len(connection.written) == num_before
    connection.can_write.set()
    await settle()
    assert re.findall(rb'"tokens":\[(\d)\]|"reason":"length"', connection.body) == [*b"0 1 2 3 4 5".split(), b""]
    assert connection.written[-1]["more_body"] is False
    assert max(len(message["body"]) for message in connection.written[num_before:]) == 50
    await streaming.left()
    assert streaming.num_closed == 1


@pytest.mark.parametrize("is_read", [True, False], ids=["later", "the opening, too"])
async def test_a_client_that_does_not_read_is_cut(is_read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once more waits than the server holds."""
    monkeypatch.setattr("outrider.models.http.sse.MOST_WAITING", 900)
    streaming = Streaming(is_read=is_read)
    await settle()
    streaming.connection.can_write.clear()
    await streaming.commit(*range(20))
    assert not streaming.task.done()
    await streaming.commit(*range(100))
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(streaming.task, TIMEOUT_S)
    assert streaming.num_closed == 1


async def test_a_completion_whose_client_does_not_read_is_taken_as_it_comes_and_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slow client gets all of it, whatever waits is counted, and more than is allowed cuts the stream."""
    monkeypatch.setattr("outrider.models.http.sse.MOST_WAITING", 900)
    held = Shares[str](500)
    for num_chunks, is_whole in ((13, True), (15, False)):
        connection, reader, num_closed = SlowConnection(), Inbox[bytes](), list[int]()

        async def chunks(reader: Inbox[bytes] = reader) -> AsyncIterator[bytes]:
            while not reader.is_closed:
                for chunk in await reader.take():
                    yield chunk

        hold = partial(held.add, "an owner")
        stream = EventStream(chunks(), reader, lambda: num_closed.append(1), keep_alive_s=60.0, hold=hold)  # noqa: B023
        task = asyncio.create_task(stream({"type": "http"}, connection.receive, connection.send))
        sent = [b"%100d" % number for number in range(num_chunks)]
        for chunk in sent:
            reader.put(chunk)
            await settle()
        if is_whole:
            assert held["an owner"] == 400 and not connection.written
            reader.close()
            connection.can_write.set()
            await task
            assert connection.body == b"".join(sent) and not connection.written[-1]["more_body"]
        else:
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(task, TIMEOUT_S)
        assert held.total == 0 and num_closed == [1]


async def test_a_wake_up_is_one_write_and_a_client_that_leaves_while_a_write_waits_ends_the_session() -> None:
    """Events that arrive together leave together. Nothing goes on waiting, and later events are dropped."""
    others, streaming = asyncio.all_tasks(), Streaming()
    await settle()
    num_before = len(streaming.connection.written)
    await streaming.commit(0, 1, 2)
    assert len(streaming.connection.written) == num_before + 1
    assert streaming.connection.body.count(b'"tokens"') == 3
    streaming.connection.can_write.clear()
    await streaming.commit(3, 4)
    await streaming.left()
    await streaming.commit(5)
    assert streaming.num_closed == 1 and asyncio.all_tasks() == others


async def test_a_connection_that_fails_ends_the_session() -> None:
    """An error of the server's `send` is logged, and the stream is closed."""
    streaming = Streaming()
    await settle()
    streaming.connection.is_broken = True
    await streaming.commit(0)
    await asyncio.wait([streaming.task])
    assert streaming.num_closed == 1


def test_a_client_that_is_cut_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after any lost connection: it reads what had gone out before, and the rest in another session."""
    monkeypatch.setattr("outrider.models.http.sse.MOST_WAITING", 1 << 15)

    def open_small(host: str, port: int) -> socket.socket:
        opened = open_socket(host, port)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
        return opened

    monkeypatch.setattr("tests.serving.open_socket", open_small)
    transport = httpx.HTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 15)])
    body = {"prompt": PROMPT, "max_tokens": 800, "ignore_eos": True, "logprobs": 20}
    with serve_fake() as server, httpx.Client(base_url=server.url, transport=transport) as client:
        tokens: list[int] = []
        with client.stream("POST", "/v1/sessions", json=body) as response:
            server.wait_until(server.is_empty)
            with pytest.raises(httpx.RemoteProtocolError):
                for event in read_events(response):
                    tokens += getattr(event, "tokens", [])
        assert 0 < len(tokens) < 800
        with httpx.Client(base_url=server.url) as again:
            rest = run_session(again, body | {"prompt": [*PROMPT, *tokens], "max_tokens": 800 - len(tokens)})
        assert tokens + rest.tokens == target_tokens(PROMPT, 800)


async def test_a_stream_of_many_texts_is_written_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a wake-up brings goes out in pieces where it takes long to write; others have their turn between them."""

    class Texts:
        async def deltas(self) -> AsyncIterator[list[Delta]]:
            yield [Delta(index, "zip") for index in range(3)]

    seen = list[str]()

    async def other() -> None:
        while True:
            seen.append("other")
            await asyncio.sleep(0)

    monkeypatch.setattr(answers, "_TURN_S", -1.0)
    beside = asyncio.create_task(other())
    body = openai.CompletionRequest.model_validate({"prompt": "a", "stream": True})
    async for piece in answers._stream(cast(Any, Texts()), CompletionShape("fake", 1, None), body):
        seen.append("done" if piece == answers.DONE else "text")
    beside.cancel()
    assert seen == ["text", "other", "text", "other", "text", "done"]
