"""Answers POST /v1/sessions/{id}/drafts, outside of the framework.

A device posts drafts many times a second while the model computes on the same core. So this one route stands in front
of the layers that all others pass, and does their work itself: it runs the gate, answers errors in the same shape, and
counts the request. The body, paths in JSON or the bytes of a tree, is parsed once, the engine takes
it, and the answer is a bare 204.
`openapi.py` documents the route with the others. One exception: a client that sends `Prefer: return=minimal` gets 409
for a stale draft without a body.

A message beyond the budget of its session or owner is dropped before its body is read, which changes no text, and
answered 429 late: a client that floods waits on all its connections. So does one whose requests are refused before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import replace
from typing import Any, Final

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from outrider.cloud.api.draft_budget import TREE_UNIT_BYTES, UNIT_BYTES, DraftBudget
from outrider.cloud.api.state import Core, ServerSettings, Session
from outrider.models.errors import RequestError
from outrider.models.http.bodies import parse, read_body
from outrider.models.http.errors import ERROR_CODE, Throttled, as_answer, error_response, method_not_allowed
from outrider.models.http.limits import Pacer
from outrider.models.http.request_context import HEADER, enter_request
from outrider.models.http.security import (
    ANYBODY,
    JSON_MEDIA_TYPE,
    OWNER,
    REQUEST_WAIT_S,
    REQUESTS_BURST,
    STRANGERS_PER_S,
    Gate,
    GatePaths,
    address_of,
    media_type_of,
)
from outrider.models.process.tally import RequestTally
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

_TAKEN: Final = {"type": "http.response.start", "status": 204, "headers": []}
# Without the length it would be sent in chunks, which takes more bytes.
_STALE: Final = {"type": "http.response.start", "status": 409, "headers": [(b"content-length", b"0")]}
_STATUS: Final = "outrider.drafts.status"
"""Key of the ASGI scope that holds the status of an answer already sent."""
_FREE: Final = frozenset({401, 403, 404, 405, 415})
"""Statuses of requests that are refused by their head, before they spend a budget."""


Answer = tuple[Message, bytes]
"""The message that begins an answer, and the body."""
Deliver = Callable[[Scope, Any, bytes, bool], Awaitable[Answer]]
"""Hands a message over: the request's scope, what has its session, the body, whether that is a tree."""


def is_draft_path(scope: Scope) -> bool:
    """Whether the request is for `DraftsEndpoint`."""
    path: str = scope.get("path", "")
    return path.endswith(_SUFFIX) and path.startswith(_PREFIX) and scope["type"] == "http"


class DraftsEndpoint:
    """ASGI application that takes drafts, within the budgets of their session and owner.

    find: gives what has the session with this id of this owner; raises RequestError 404 `unknown_session`. num_dropped:
    counts messages that were not taken, by the name of the budget that was used up.
    """

    def __init__(
        self,
        settings: ServerSettings,
        paths: GatePaths,
        tally: RequestTally,
        *,
        find: Callable[[str, bytes], Any],
        deliver: Deliver,
        num_dropped: MutableMapping[str, int],
    ) -> None:
        self._max_bytes = min(MAX_DRAFT_BYTES, settings.max_body_bytes)
        bounded = replace(settings, max_body_bytes=self._max_bytes)
        self._gate = Gate(self._take, bounded, paths, media_types=MEDIA_TYPES, is_paced=False)
        self._budget = DraftBudget(settings.draft_limits)
        self._delay_s = settings.draft_limits.delay_s
        self._refused = Pacer(STRANGERS_PER_S, REQUESTS_BURST)
        self._audit = settings.audit
        self._tally = tally
        self._find = find
        self._deliver = deliver
        self._num_dropped = num_dropped

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. Answers every error, as `ServedRequests` does for the other routes."""
        started_s = time.perf_counter()
        try:
            await self._gate(scope, receive, send)
        except (asyncio.CancelledError, ClientDisconnect):
            return  # the server is closing, or the client left while its body was read
        except Exception as error:
            await self._refuse(error, scope, receive, send)
        self._tally.answered(DRAFTS_PATH, scope["method"], scope[_STATUS], time.perf_counter() - started_s)
        if (code := scope.get(ERROR_CODE)) is not None:
            self._tally.failed(code)

    async def _take(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            raise method_not_allowed(scope["method"])
        session_id = scope["path"][len(_PREFIX) : -len(_SUFFIX)]
        owner = scope.get(OWNER, ANYBODY)
        session = self._find(session_id, owner)
        is_tree = _is_of(scope, _TREE)
        unit_bytes = TREE_UNIT_BYTES if is_tree else UNIT_BYTES
        max_bytes = min(MAX_TREE_BYTES, self._max_bytes) if is_tree else self._max_bytes
        num_bytes = next((int(value) for name, value in scope["headers"] if name == b"content-length"), max_bytes)
        spent = self._budget.spend(session_id, owner, num_bytes, unit_bytes)
        if spent is not None:
            self._num_dropped[spent] += 1
            await asyncio.sleep(self._delay_s)
            raise Throttled(
                "rate_limited", f"more drafts than the {spent}'s budget; this one was dropped", retry_after_s=1
            )
        body = await read_body(receive, max_bytes)
        start, content = await self._deliver(scope, session, body, is_tree)
        scope[_STATUS] = start["status"]
        await send(start)
        await send({"type": "http.response.body", "body": content})

    async def _refuse(self, error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
        # Not in `__call__`: a variable there would be part of a circle with its own traceback, left to the collector.
        answer = as_answer(error)
        if answer.status in _FREE:
            wait_s = self._refused.wait_s(scope.get(OWNER) or address_of(scope), REQUEST_WAIT_S)
            await asyncio.sleep(REQUEST_WAIT_S if wait_s is None else wait_s)
        if _STATUS not in scope:
            scope[_STATUS] = answer.status
            headers = {HEADER.decode(): enter_request(scope).request_id}
            allowed = {"allow": "POST"} if answer.status == 405 else {}
            await error_response(scope, answer, headers | allowed)(scope, receive, send)
            if self._audit is not None and answer.status in (401, 403, 429):
                refused = {"endpoint": DRAFTS_PATH, "status": answer.status, "end": answer.code}
                self._audit.refused(refused, is_counted_only=True)


def drafts_endpoint(core: Core, paths: GatePaths) -> DraftsEndpoint:
    """The endpoint of a server with an engine."""

    async def deliver(scope: Scope, session: Session, body: bytes, is_tree: bool) -> Answer:
        try:
            if is_tree:
                core.engine.draft_tree(session.sequence_id, decode_tree(body))
            else:
                draft = parse(DraftRequest, body)
                core.engine.draft(session.sequence_id, draft.base, draft.paths)
        except RequestError as error:
            if error.code != "stale_draft" or not _prefers_minimal(scope):
                raise
            return _STALE, b""
        return _TAKEN, b""

    return DraftsEndpoint(
        core.settings,
        paths,
        core.metrics,
        find=core.sessions.find,
        deliver=deliver,
        num_dropped=core.metrics.num_dropped,
    )


def _is_of(scope: Scope, media_type: bytes) -> bool:
    """Whether the body is announced as this; the gate has seen that it is one of MEDIA_TYPES."""
    content_type = next((value for name, value in scope["headers"] if name == b"content-type"), None)
    return content_type != JSON_MEDIA_TYPE and media_type_of(content_type) == media_type


def _prefers_minimal(scope: Scope) -> bool:
    """Whether the client asks for answers without a body where the status is enough (RFC 7240, section 4.2)."""
    return any(name == b"prefer" and b"return=minimal" in value for name, value in scope["headers"])
