"""Keeps cancellations away from httpcore where they would cost a connection of its pool.

httpcore 1.0 protects its cleaning up from cancellations of anyio only. A task that asyncio cancels while httpcore takes
a connection, or gives one back, leaves it in use for good, and after as many as the pool has, every request ends in
PoolTimeout. So each step of an exchange runs in a task of its own. A cancelled caller leaves at once; its step is cut
while httpcore sends or reads, where it closes the connection; anything else ends by itself, within httpx's timeouts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

if TYPE_CHECKING:
    import httpx  # servers do without it

T = TypeVar("T")
_END_S: Final = 0.05
"""A server writes the end of a body right after the last event."""

# Events of httpcore's tracing. Between these the only awaits are of the socket, and httpcore closes what fails there.
_OPENS: Final = frozenset({"http11.send_request_headers.started", "http11.receive_response_body.started"})
_SHUTS: Final = frozenset(
    {
        "http11.receive_response_headers.complete",
        "http11.receive_response_body.complete",
        "http11.response_closed.started",
    }
)


class LeftSteps:
    """The steps of one client whose callers were cancelled."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def add(self, task: asyncio.Task[Any]) -> None:
        """Keeps a step until it ends. Its error concerns nobody."""
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def aclose(self) -> None:
        """Cancels what still runs: for when the whole pool is closed."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()


class Exchange:
    """One request and its answer, in steps one after the other. Call `aclose` in the end.

    is_traced: whether the transport is httpcore's; a step over any other is cut at once.
    """

    def __init__(self, left: LeftSteps, *, is_traced: bool = True) -> None:
        self._left = left
        self._can_cut = not is_traced
        self._is_cut = False
        self._step: asyncio.Task[Any] | None = None
        self._response: httpx.Response | None = None
        self._chunks: AsyncGenerator[bytes, None] | None = None

    async def trace(self, event: str, info: object) -> None:
        """Follows httpcore: the request's extension `trace`."""
        if event in _OPENS:
            if self._is_cut:
                raise asyncio.CancelledError  # closes the connection, as a cancellation from outside would
            self._can_cut = True
        elif event in _SHUTS:
            self._can_cut = False

    async def run(self, step: Coroutine[Any, Any, T]) -> T:
        """The step's result. A cancelled caller does not wait for its end."""
        self._step = task = asyncio.create_task(step)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            self._left.add(task)
            task.add_done_callback(self._forget)
            self._is_cut = True
            if self._can_cut:
                task.cancel()  # once: a second one could reach the cleaning up
            raise
        self._forget(task)
        try:
            return task.result()
        finally:
            del task  # else its error, whose traceback has this frame, would have itself

    def _forget(self, step: asyncio.Task[Any]) -> None:
        """A step that has ended has the answer or an error, which has the request, whose `trace` is this exchange's: a
        body would stay until the collector runs.
        """
        if self._step is step:
            self._step = None

    async def send(self, http: httpx.AsyncClient, request: httpx.Request) -> httpx.Response:
        """The answer's head; `aclose` closes the answer."""
        return await self.run(self._send(http, request))

    async def next_chunk(self) -> bytes:
        """More of the body of the answer that `send` returned; empty at its end."""
        return await self.run(self._next_chunk())

    async def aclose(self, *, is_ending: bool = False) -> None:
        """Closes the answer that `send` returned; after a cancelled step, as soon as that has ended.

        is_ending: nothing but the body's end is missing, which is awaited for a moment: the connection can then serve
        the next request.
        """
        is_running = self._step is not None and not self._step.done()
        if self._response is None and not is_running:
            return
        task = asyncio.create_task(self._close(_END_S if is_ending and not is_running else 0.0))
        self._left.add(task)
        if not is_running:
            await asyncio.wait({task})

    async def _send(self, http: httpx.AsyncClient, request: httpx.Request) -> httpx.Response:
        self._response = await http.send(request, stream=True)
        return self._response

    async def _next_chunk(self) -> bytes:
        assert self._response is not None
        self._chunks = self._chunks or chunks_of(self._response)
        return await anext(self._chunks, b"")

    async def _close(self, end_s: float) -> None:
        try:
            if end_s:
                with suppress(Exception):  # what comes, if anything does, concerns nobody
                    async with asyncio.timeout(end_s):
                        await self.next_chunk()
        finally:
            if self._step is not None:  # could not be cut
                await asyncio.wait({self._step})
            if self._chunks is not None:
                await self._chunks.aclose()
            if self._response is not None:
                await close(self._response)
            self._chunks = self._response = None


async def close(response: httpx.Response) -> None:
    """Once, in the end. Lets go of the stream too: it has the answer, which has the request, whose body would stay
    until the collector runs.
    """
    await response.aclose()
    del response.stream


async def chunks_of(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """The body as it comes, never decoded."""
    stream = cast("httpx.AsyncByteStream", response.stream)
    async for chunk in stream:
        if chunk:
            yield chunk
