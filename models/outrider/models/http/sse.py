"""Server-sent events: the bytes of each, and the response that streams them.

    data: {"type":"open","session":"mJ0rXnVw5Q2Z","model":"reference","protocol":1}
    data: {"base":0,"tokens":[311]}
    data: {"base":1,"tokens":[57,2210,9],"accepted":2,"proposed":4}
    data: {"type":"end","reason":"length","usage":{...}}

Commits are most of what goes down, so they carry no `type` (an event without one is a commit), and neither `accepted`
nor `proposed` when nothing was proposed. Events that are ready together leave in one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Final

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.cloud.api.bridge import Mailbox, closed_on_disconnect
from outrider.cloud.engine.types import CommitEvent

KEEP_ALIVE: Final = b":\n\n"
"""A comment: readers skip it, proxies see life, and a vanished client is noticed."""

_HEADERS: Final = [
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]


def encode_commit(event: CommitEvent) -> bytes:
    """`protocol.Commit` as an event. Written by hand: this runs once per sequence and step."""
    tokens = ",".join(map(str, event.tokens))
    if event.proposed:
        return (
            f'data: {{"base":{event.base},"tokens":[{tokens}],'
            f'"accepted":{event.accepted},"proposed":{event.proposed}}}\n\n'
        ).encode()
    return f'data: {{"base":{event.base},"tokens":[{tokens}]}}\n\n'.encode()


def encode(message: BaseModel) -> bytes:
    """Any other message as an event; what is None is left out."""
    return b"data: %s\n\n" % message.model_dump_json(exclude_none=True).encode()


class EventStream(Response):
    """Streams what `chunks` yields until it ends or the client leaves.

    The client's leaving closes `mailbox`, on which `chunks` waits. `on_close` is called in any case, once. When nothing
    was written for `keep_alive_s` the mailbox is poked, upon which `chunks` is expected to yield KEEP_ALIVE.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        mailbox: Mailbox,
        on_close: Callable[[], None],
        *,
        keep_alive_s: float,
    ) -> None:
        self._chunks = chunks
        self._mailbox = mailbox
        self._on_close = on_close
        self._keep_alive_s = keep_alive_s
        self.status_code = 200
        self.background = None
        self.raw_headers = list(_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        self._arm()
        try:
            async with closed_on_disconnect(self._mailbox, receive):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async for chunk in self._chunks:
                    self._has_written = True
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._timer.cancel()
            self._on_close()

    def _arm(self) -> None:
        self._has_written = False
        self._timer = asyncio.get_running_loop().call_later(self._keep_alive_s, self._tick)

    def _tick(self) -> None:
        if not self._has_written:
            self._mailbox.poke()
        self._arm()
