"""Names each request, counts and times it, and answers what is raised below: the outermost layer of every server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.models.http.errors import ERROR_CODE, as_answer, error_response
from outrider.models.http.request_context import HEADER, enter_request, leave_request
from outrider.models.process.tally import RequestTally

OnOver = Callable[[Scope, int | None, float], None]
"""Called when a request is over: its scope, the answer's status (None: the client left before), seconds."""


def names_of_routes(patterns: Iterable[str], matched: Callable[[Scope], str]) -> Callable[[Scope], str]:
    """A `route_of` that also names the route of a request that was refused before the router saw it.

    The first two parts of its path decide, by one look into a table: a refused request costs no match against all
    routes. matched: names the route of a request that the router saw.
    """
    names: dict[str, str] = {}
    for pattern in patterns:
        names.setdefault(pattern.partition("{")[0], pattern)

    def route_of(scope: Scope) -> str:
        path: str = scope["path"]
        if "router" in scope:
            return matched(scope)
        return names.get(path) or names.get("/".join(path.split("/", 3)[:3]) + "/") or matched(scope)

    return route_of


class ServedRequests:
    """ASGI layer. A request is timed until its response begins. Its scope is emptied at its end.

    route_of: gives the pattern of the route that answers, never the path itself: paths have no end.
    """

    def __init__(
        self,
        app: ASGIApp,
        tally: RequestTally,
        route_of: Callable[[Scope], str],
        on_over: OnOver = lambda scope, status, took_s: None,
    ) -> None:
        self._app = app
        self._tally = tally
        self._route_of = route_of
        self._on_over = on_over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. An exception becomes an error's answer, or cuts a response that has begun."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started_s = time.perf_counter()
        header = HEADER, enter_request(scope).request_id.encode()
        status: int | None = None

        async def note_start(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._tally.answered(self._route_of(scope), scope["method"], status, time.perf_counter() - started_s)
                if (code := scope.get(ERROR_CODE)) is not None:
                    self._tally.failed(code)
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        try:
            await self._app(scope, receive, note_start)
        except (asyncio.CancelledError, ClientDisconnect):
            pass  # the server is closing (uvicorn would log a traceback), or the client left while its body was read
        except Exception as error:
            # Not the error itself: kept in a variable here it would be part of a circle with its own traceback.
            response = error_response(scope, as_answer(error))
            # After a response has begun, returning is enough: the server closes the connection and the client sees a
            # cut.
            if status is None:
                await response(scope, receive, note_start)
        finally:
            self._on_over(scope, status, time.perf_counter() - started_s)
            leave_request()
            # Routes leave circles through the scope, and a path of 64 KB would lie in them until the collector runs.
            method = scope["method"]
            scope.clear()
            scope["method"] = method  # uvicorn reads it where it answers itself, after an application that failed
