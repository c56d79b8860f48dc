"""Answers POST /v1/sessions/{id}/drafts, outside of the framework.

A device posts drafts many times a second while the model computes on the same core. So this one route stands in front
of the layers that all others pass, and does their work itself: it runs the gate and the body limit, answers errors in
the same shape, and counts the request. The body, paths in JSON or the bytes of a tree, is parsed once, the engine takes
it, and the answer is a bare 204.
`openapi.py` documents the route with the others. One exception: a client that sends `Prefer: return=minimal` gets 409
for a stale draft without a body.

A message beyond the budget of its session or owner is dropped before its body is read, which changes no text, and
answered 429 late: a client that floods waits on all its connections. So does one whose requests are refused before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.cloud.api.draft_budget import TREE_UNIT_BYTES, UNIT_BYTES, DraftBudget
from outrider.cloud.api.state import Core
from outrider.models.errors import RequestError
from outrider.models.http.bodies import parse
from outrider.models.http.errors import ERROR_CODE, Throttled, as_answer, error_response, method_not_allowed
from outrider.models.http.limits import body_too_large
from outrider.models.http.request_context import HEADER, enter_request
from outrider.models.http.security import ANYBODY, JSON_MEDIA_TYPE, OWNER, PacedRefusals, media_type_of
from outrider.models.wire.protocol import DraftRequest
from outrider.models.wire.tree_draft import TREE_MEDIA_TYPE, decode_tree

DRAFTS_PATH: Final = "/v1/sessions/{session_id}/drafts"
_PREFIX: Final = "/v1/sessions/"
_SUFFIX: Final = "/drafts"

_TREE: Final = TREE_MEDIA_TYPE.encode()
MEDIA_TYPES: Final = (JSON_MEDIA_TYPE, _TREE)
"""What a body may be: paths, or a tree."""

MAX_DRAFT_BYTES: Final = 64 << 10
"""Ten times the longest message that is valid: parsing a longer one would only delay every stream."""
MAX_TREE_BYTES: Final = 6 << 10
"""The longest tree has less."""

_START: Final = {"type": "http.response.start", "status": 204, "headers": []}
# Without the length it would be sent in chunks, which takes more bytes.
_STALE: Final = {"type": "http.response.start", "status": 409, "headers": [(b"content-length", b"0")]}
_BODY: Final = {"type": "http.response.body", "body": b""}
_STATUS: Final = "outrider.drafts.status"
"""Key of the ASGI scope that holds the status of an answer already sent."""


def is_draft_path(scope: Scope) -> bool:
    """Whether the request is for `DraftsEndpoint`."""
    path: str = scope.get("path", "")
    return path.endswith(_SUFFIX) and path.startswith(_PREFIX) and scope["type"] == "http"


class DraftsEndpoint:
    """ASGI application that takes drafts. gate: makes the layer that checks who calls, as for every other route."""

    def __init__(self, core: Core, gate: Callable[[ASGIApp], ASGIApp], budget: DraftBudget) -> None:
        self._core = core
        self._gated = PacedRefusals(gate(self._take))
        self._budget = budget
        self._max_bytes = min(MAX_DRAFT_BYTES, core.settings.max_body_bytes)
        self._delay_s = core.settings.draft_limits.delay_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. Answers every error, as `ErrorBoundary` does for the other routes."""
        started_s = time.perf_counter()
        try:
            if (_announced(scope) or 0) > self._max_bytes:
                raise body_too_large(self._max_bytes)
            await self._gated(scope, receive, send)
        except (asyncio.CancelledError, ClientDisconnect):
            return  # the server is closing, or the client left while its body was read
        except Exception as error:
            await _answer(error, scope, receive, send)
        audit = self._core.settings.audit
        if audit is not None and scope[_STATUS] in (401, 403, 429):
            refused = {"endpoint": DRAFTS_PATH, "status": scope[_STATUS], "end": scope.get(ERROR_CODE)}
            audit.refused(refused, is_counted_only=True)
        metrics = self._core.metrics
        metrics.answered(DRAFTS_PATH, scope["method"], scope[_STATUS], time.perf_counter() - started_s)
        if (code := scope.get(ERROR_CODE)) is not None:
            metrics.failed(code)

    async def _take(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            raise method_not_allowed(scope["method"])
        core = self._core
        session_id = scope["path"][len(_PREFIX) : -len(_SUFFIX)]
        owner = scope.get(OWNER, ANYBODY)
        session = core.sessions.find(session_id, owner)
        is_tree = _is_of(scope, _TREE)
        unit_bytes = TREE_UNIT_BYTES if is_tree else UNIT_BYTES
        max_bytes = min(MAX_TREE_BYTES, self._max_bytes) if is_tree else self._max_bytes
        num_bytes = _announced(scope)
        spent = self._budget.spend(session_id, owner, max_bytes if num_bytes is None else num_bytes, unit_bytes)
        if spent is not None:
            core.metrics.num_dropped.add(spent)
            await asyncio.sleep(self._delay_s)
            raise Throttled(
                "rate_limited", f"more drafts than the {spent}'s budget; this one was dropped", retry_after_s=1
            )
        body = await self._read(receive, max_bytes)
        start = _START
        try:
            if is_tree:
                core.engine.draft_tree(session.sequence_id, decode_tree(body))
            else:
                draft = parse(DraftRequest, body)
                core.engine.draft(session.sequence_id, draft.base, draft.paths)
        except RequestError as error:
            if error.code != "stale_draft" or not _prefers_minimal(scope):
                raise
            start = _STALE
        scope[_STATUS] = start["status"]
        await send(start)
        await send(_BODY)

    async def _read(self, receive: Receive, max_bytes: int) -> bytes:
        """The body. Raises RequestError 413 once it is too long."""
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            part: bytes = message.get("body", b"")
            body += part
            if len(body) > max_bytes:
                raise body_too_large(max_bytes)
            if not message.get("more_body"):
                return body


async def _answer(error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
    # Not in `__call__`: a variable there would be part of a circle with its own traceback, left to the collector.
    request = enter_request(next((value for name, value in scope["headers"] if name == HEADER), None))
    answer = as_answer(error)
    if _STATUS not in scope:
        scope[_STATUS] = answer.status
        headers = {HEADER.decode(): request.request_id} | ({"allow": "POST"} if answer.status == 405 else {})
        await error_response(answer, headers)(scope, receive, send)


def _announced(scope: Scope) -> int | None:
    """Bytes of the body by its Content-Length; None where it has none."""
    return next((int(value) for name, value in scope["headers"] if name == b"content-length"), None)


def _is_of(scope: Scope, media_type: bytes) -> bool:
    """Whether the body is announced as this; the gate has seen that it is one of MEDIA_TYPES."""
    content_type = next((value for name, value in scope["headers"] if name == b"content-type"), None)
    return content_type != JSON_MEDIA_TYPE and media_type_of(content_type) == media_type


def _prefers_minimal(scope: Scope) -> bool:
    """Whether the client asks for answers without a body where the status is enough (RFC 7240, section 4.2)."""
    return any(name == b"prefer" and b"return=minimal" in value for name, value in scope["headers"])
