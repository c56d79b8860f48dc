"""Delays what an endpoint sends and gets, on the device's side of the link, to show a longer round trip."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from outrider.models.client.client import VerifierClient
from outrider.models.client.messages import DraftMessage
from outrider.models.wire.protocol import SessionEvent, SessionRequest


class DelayedClient(VerifierClient):
    """For one text, as `VerifierClient.for_one_text`: every message takes half of `delay_s` longer each way.

    Messages do not wait for each other: each is late by its own delay, as on a long line.
    """

    def __init__(
        self, client: VerifierClient, delay_s: float, *, no_store: bool = False, model: str | None = None
    ) -> None:
        vars(self).update(vars(client.for_one_text(no_store=no_store, model=model)))
        self._half_s = delay_s / 2

    async def _exchange(self, *args: Any, **kwargs: Any) -> bytes:
        await asyncio.sleep(self._half_s)
        body = await super()._exchange(*args, **kwargs)
        await asyncio.sleep(self._half_s)
        return body

    async def post_drafts(self, session: str, message: DraftMessage) -> float:
        """As `VerifierClient.post_drafts`; what goes up a long request is delayed here, all else by `_exchange`."""
        if self._long_request(session) is None:
            return await super().post_drafts(session, message)
        await asyncio.sleep(self._half_s)
        held_ms = await super().post_drafts(session, message)
        await asyncio.sleep(self._half_s)
        return held_ms

    @asynccontextmanager
    async def open_session(
        self, request: SessionRequest, target: str | None = None
    ) -> AsyncIterator[AsyncGenerator[SessionEvent, None]]:
        """As `VerifierClient.open_session`."""
        await asyncio.sleep(self._half_s)
        async with super().open_session(request, target) as events, aclosing(self._late(events)) as late:
            yield late

    async def _late(self, events: AsyncGenerator[SessionEvent, None]) -> AsyncGenerator[SessionEvent, None]:
        now = asyncio.get_running_loop().time
        line = asyncio.Queue[tuple[float, SessionEvent | Exception | None]]()

        async def read() -> None:
            last: Exception | None = None
            try:
                async with aclosing(events):
                    async for event in events:
                        line.put_nowait((now() + self._half_s, event))
            except Exception as error:
                last = error
            line.put_nowait((now() + self._half_s, last))

        reader = asyncio.create_task(read())
        try:
            while True:
                due, item = await line.get()
                await asyncio.sleep(max(0.0, due - now()))
                if item is None:
                    return
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            reader.cancel()
            await asyncio.wait({reader})
