"""Cancelled requests give their connections back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any

import httpx
import pytest
from tests.serving import serve_fake
from tests.waiting import TIMEOUT_S

from outrider.models.client import exchange
from outrider.models.client.client import ClientOptions, VerifierClient
from outrider.models.client.messages import DraftMessage
from outrider.models.errors import OutriderError
from outrider.models.wire.protocol import SessionEnd, SessionEvent, SessionOpen, SessionRequest, Usage

ONE = ClientOptions(max_connections=1, keep_alive_s=1.0)
"""A connection that is not given back shows at the next request: PoolTimeout."""
Ask = Callable[[VerifierClient], Coroutine[Any, Any, object]]


async def post(client: VerifierClient) -> None:
    with suppress(OutriderError):  # no such session
        await client.post_drafts("none", DraftMessage("application/json", b"{}"))


async def read_text(client: VerifierClient) -> None:
    async with client.open_session(SessionRequest(prompt=[5, 6], max_tokens=3, ignore_eos=True)) as events:
        async for _ in events:
            pass


async def cut_after(num_turns: int, num_cuts: int, ask: Coroutine[Any, Any, object]) -> None:
    """Cancels the task after so many turns of the loop, then once more each turn."""
    task = asyncio.create_task(ask)
    for _ in range(num_turns):
        await asyncio.sleep(0)
    for _ in range(num_cuts):
        task.cancel()
        await asyncio.sleep(0)
    await asyncio.gather(task, return_exceptions=True)


def test_texts_one_after_the_other_share_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader stops at the session's end, before the body's: the rest is read for it. Without, each text connects."""
    monkeypatch.setattr(exchange, "_END_S", TIMEOUT_S)  # a busy machine may be slow

    async def check(url: str) -> None:
        request = SessionRequest(prompt=[5, 6], max_tokens=3, ignore_eos=True)
        seen: set[int] = set()
        async with VerifierClient(url, ONE) as client:
            pool = client._http._transport._pool  # type: ignore[attr-defined]
            for _ in range(3):
                async with client.open_session(request) as events, aclosing(events):
                    assert [event.type async for event in until_end(events)][-1] == "end"
                (held,) = pool.connections
                assert held.is_idle()
                seen.add(id(held))
        assert len(seen) == 1

    with serve_fake() as server:
        asyncio.run(check(server.url))


def test_a_body_that_does_not_end_costs_its_connection_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next text connects anew; nobody waits for longer than a moment, and closing the client in it is safe."""
    counts = ("prompt_tokens", "completion_tokens", "target_passes", "accepted_prediction_tokens")
    usage = Usage.model_validate(dict.fromkeys((*counts, "rejected_prediction_tokens"), 0))
    sent = [SessionOpen(session="a", model="m"), SessionEnd(reason="stop", usage=usage)]
    body = b"".join(b"data: %s\n\n" % event.model_dump_json(exclude_none=True).encode() for event in sent)

    served: list[asyncio.Future[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.get_running_loop().create_future())
        number = len(served) - 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + body)
        await reader.read()  # until the other side closes
        writer.close()
        await writer.wait_closed()
        served[number].set_result(None)

    async def check() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        request = SessionRequest(prompt=[5, 6], max_tokens=3)
        async with server:
            async with VerifierClient(url, ONE) as client:
                for _ in range(2):
                    async with client.open_session(request) as events, aclosing(events):
                        assert [event.type async for event in until_end(events)] == ["open", "end"]
            monkeypatch.setattr(exchange, "_END_S", TIMEOUT_S)
            async with VerifierClient(url, ONE) as client:
                stack = client.open_session(request)
                events = await stack.__aenter__()
                async for _ in until_end(events):
                    pass
                leaving = asyncio.create_task(stack.__aexit__(None, None, None))
                await asyncio.sleep(0)
            await leaving
            assert len(served) == 3
            await asyncio.gather(*served)

    asyncio.run(check())


async def until_end(events: AsyncIterator[SessionEvent]) -> AsyncIterator[SessionEvent]:
    """Stops where a session ends, as an agent does."""
    async for event in events:
        yield event
        if isinstance(event, SessionEnd):
            return


@pytest.mark.parametrize("num_cuts", [1, 3])
@pytest.mark.parametrize("ask", [post, read_text])
def test_a_cancelled_request_gives_its_connection_back_wherever_it_was(ask: Ask, num_cuts: int) -> None:
    """httpcore loses it at the turns at which it takes the connection, and at those at which it gives it back."""

    async def check(url: str) -> None:
        for num_turns in range(40):
            async with VerifierClient(url, ONE) as client:
                for _ in range(2):  # without a connection, then with one
                    await cut_after(num_turns, num_cuts, ask(client))
                    assert (await client.ready()).status == "ready", num_turns

    with serve_fake() as server:
        asyncio.run(check(server.url))
        server.wait_until(server.is_empty)


def test_a_caller_does_not_wait_for_what_it_left() -> None:
    """A server that does not answer holds back neither the cancelled caller nor the end of the client."""

    async def check() -> None:
        asked, over = asyncio.Event(), asyncio.Event()

        async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            asked.set()
            await reader.read()  # until the client closes
            over.set()
            writer.close()

        server = await asyncio.start_server(hang, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, VerifierClient(url, ONE) as client:
            task = asyncio.create_task(post(client))
            await asked.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await over.wait()  # the connection is closed at once, not after a time-out

    asyncio.run(check())


def test_over_another_transport_a_cancellation_reaches_the_request() -> None:
    async def check() -> None:
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

    asyncio.run(check())
