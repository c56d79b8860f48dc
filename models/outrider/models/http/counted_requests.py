"""Counts the requests of a server and their errors, and times them until their responses begin."""

from __future__ import annotations

import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.models.http.errors import ERROR_CODE
from outrider.models.process.tally import RequestTally


class CountedRequests:
    """ASGI layer. route_of: gives the pattern of the route that answers, never the path itself: paths have no end."""

    def __init__(self, app: ASGIApp, tally: RequestTally, route_of: Callable[[Scope], str]) -> None:
        self._app = app
        self._tally = tally
        self._route_of = route_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started_s = time.perf_counter()

        async def note_start(message: Message) -> None:
            if message["type"] == "http.response.start":
                took_s = time.perf_counter() - started_s
                self._tally.answered(self._route_of(scope), scope["method"], message["status"], took_s)
                if (code := scope.get(ERROR_CODE)) is not None:
                    self._tally.failed(code)
            await send(message)

        await self._app(scope, receive, note_start)
