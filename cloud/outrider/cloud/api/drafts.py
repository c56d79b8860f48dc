"""Answers POST /v1/sessions/{id}/drafts, below the framework.

A device posts drafts many times a second while the model computes on the same core, so this one route is a plain ASGI
layer: the body is parsed once, the engine takes it, and the answer is a bare 204. `openapi.py` documents the route with
the others, and its errors have the same shape. One exception: a client that sends `Prefer: return=minimal` gets 409 for
a stale draft without a body.
"""

from __future__ import annotations

from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.cloud.api.metrics import ROUTE
from outrider.cloud.api.state import Core
from outrider.models.errors import RequestError
from outrider.models.http.errors import error_response, method_not_allowed
from outrider.models.http.requests import parse, read_body
from outrider.models.http.security import ANYBODY, OWNER
from outrider.models.protocol import DraftRequest

DRAFTS_PATH: Final = "/v1/sessions/{session_id}/drafts"
_PREFIX: Final = "/v1/sessions/"
_SUFFIX: Final = "/drafts"

_START: Final = {"type": "http.response.start", "status": 204, "headers": []}
_STALE: Final = {"type": "http.response.start", "status": 409, "headers": []}
_BODY: Final = {"type": "http.response.body", "body": b""}


def _prefers_minimal(scope: Scope) -> bool:
    """Whether the client asks for answers without a body where the status is enough (RFC 7240, section 4.2)."""
    return any(name == b"prefer" and b"return=minimal" in value for name, value in scope["headers"])


class DraftsEndpoint:
    """ASGI layer that takes drafts and passes everything else on. RequestError goes up to the error boundary."""

    def __init__(self, app: ASGIApp, core: Core) -> None:
        self._app = app
        self._core = core

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        path: str = scope.get("path", "")
        if not (path.endswith(_SUFFIX) and path.startswith(_PREFIX)):
            return await self._app(scope, receive, send)
        scope[ROUTE] = DRAFTS_PATH
        if scope["method"] != "POST":
            return await error_response(method_not_allowed(scope["method"]), {"allow": "POST"})(scope, receive, send)
        core = self._core
        session = core.sessions.find(path[len(_PREFIX) : -len(_SUFFIX)], scope.get(OWNER, ANYBODY))
        draft = parse(DraftRequest, await read_body(receive))
        try:
            core.engine.draft(session.sequence_id, draft.base, draft.paths)
        except RequestError as error:
            if error.code != "stale_draft" or not _prefers_minimal(scope):
                raise
            await send(_STALE)
        else:
            await send(_START)
        await send(_BODY)
