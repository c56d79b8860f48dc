"""Gives each request an id, and knows which request, trace and session the running code works for.

The id goes out as `X-Request-Id`, in errors and in log lines. A client's own is taken over if it is short and has only
letters, digits and `._-`: it stands in log lines.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER: Final = b"x-request-id"
MAX_CHARS: Final = 64
_CLEAN: Final = re.compile(rb"[A-Za-z0-9._-]{1,%d}" % MAX_CHARS)
_ID_BYTES: Final = 8


@dataclass(slots=True)
class RequestContext:
    """What log lines name. session: a hash of the session's id, which is a secret. trace_id: 32 hexadecimal digits."""

    request_id: str
    trace_id: str | None = None
    session: str | None = None


_current: ContextVar[RequestContext | None] = ContextVar("outrider_request", default=None)


def current_request() -> RequestContext | None:
    """The request that the running code works for; None outside of one."""
    return _current.get()


def enter_request(request_id: bytes | None) -> RequestContext:
    """Makes a new request the current one of this task. request_id: as the client sent it."""
    if request_id is not None and _CLEAN.fullmatch(request_id):
        found = RequestContext(request_id.decode("ascii"))
    else:
        found = RequestContext(secrets.token_hex(_ID_BYTES))
    _current.set(found)
    return found


def session_tag(session_id: str) -> str:
    """What stands for a session in log lines: whoever reads them must not be able to post drafts to it."""
    return hashlib.sha256(session_id.encode()).hexdigest()[:12]


class RequestIds:
    """ASGI layer that gives requests their ids. It stands outside of all others."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        context = enter_request(next((value for name, value in scope["headers"] if name == HEADER), None))
        header = HEADER, context.request_id.encode()

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        try:
            await self._app(scope, receive, with_id)
        finally:
            _current.set(None)
