"""Answers POST /v1/sessions/{id}/drafts, outside of the framework.

A device posts drafts many times a second while the model computes on the same core. So this one route stands in front
of the layers that all others pass, and does their work itself: it runs the gate, answers errors in the same shape, and
counts the request. The body, paths in JSON or the bytes of a tree, is parsed once, the engine takes
it, and the answer is a bare 204.
`openapi.py` documents the route with the others.

Since protocol version 3 a text's trees may also come up one long request (`draft_line`): its head passes the same
checks, its messages spend the same budgets, each is handed over like one that came alone.

A message beyond the budget of its session or owner is dropped before its body is read, which changes no text, and
answered 429 late: a client that floods waits on all its connections. So does one whose requests are refused before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import replace
from typing import Any, Final, Literal

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from outrider.cloud.api.state import Core, DraftLimits, ServerSettings, Session
from outrider.models.errors import RequestError
from outrider.models.http.bodies import BODY_PACE, parse, read_body
from outrider.models.http.errors import ERROR_CODE, Throttled, as_answer, error_response, method_not_allowed
from outrider.models.http.limits import Buckets, Pacer
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
from outrider.models.wire.draft_stream import DRAFTS_MEDIA_TYPE
from outrider.models.wire.draft_stream import MAX_TREE_BYTES as MAX_TREE_BYTES  # also for importers of this module
from outrider.models.wire.protocol import DraftRequest
from outrider.models.wire.tree_draft import TREE_MEDIA_TYPE, decode_tree

DRAFTS_PATH: Final = "/v1/sessions/{session_id}/drafts"
_PREFIX: Final = "/v1/sessions/"
_SUFFIX: Final = "/drafts"

_TREE: Final = TREE_MEDIA_TYPE.encode()
_LONG: Final = DRAFTS_MEDIA_TYPE.encode()
MEDIA_TYPES: Final = (JSON_MEDIA_TYPE, _TREE, _LONG)
"""What a body may be: paths, a tree, or a text's trees one after the other."""

MAX_DRAFT_BYTES: Final = 64 << 10
"""Ten times the longest message that is valid: parsing a longer one would only delay every stream."""

UNIT_BYTES = 256
"""More than most messages of a device have; parsing and merging take time by size."""
TREE_UNIT_BYTES = 64
"""The same for a tree: its nodes have three or four bytes, and each takes as long as a whole path's tokens."""

_TAKEN: Final = {"type": "http.response.start", "status": 204, "headers": []}
_STATUS: Final = "outrider.drafts.status"
"""Key of the ASGI scope that holds the status of an answer already sent."""
_TOOK_S: Final = "outrider.drafts.took_s"
"""Key of the ASGI scope that holds what the request's time counts as, where it is not that until the answer."""
_RECEIVE: Final = "outrider.receive"
"""Key of the ASGI scope that holds the server's own `receive`: the gate's ends a body that is longer than one message.
"""
_FREE: Final = frozenset({401, 403, 404, 405, 415})
"""Statuses of requests that are refused by their head, before they spend a budget."""


Answer = tuple[Message, bytes]
"""The message that begins an answer, and the body."""
Deliver = Callable[[Scope, Any, bytes, bool], Awaitable[Answer]]
"""Hands a message over: the request's scope, what has its session, the body, whether that is a tree."""
Spend = Callable[[int], bool]
"""Takes a message of a long request, of so many bytes, from the budgets; counts it where they are used up."""
DeliverLong = Callable[[Scope, Any, Receive, Spend], Awaitable[Answer]]
"""Hands a long request over: its scope, what has its session, what gives its body, and the budgets."""


def is_draft_path(scope: Scope) -> bool:
    """Whether the request is for `DraftsEndpoint`."""
    path: str = scope.get("path", "")
    return path.endswith(_SUFFIX) and path.startswith(_PREFIX) and scope["type"] == "http"


class DraftBudget:
    """Token buckets of sessions and owners.

    A message counts as one for each UNIT_BYTES of its body that it has begun; TREE_UNIT_BYTES of a tree.
    """

    def __init__(self, limits: DraftLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self.sessions, self.owners = Buckets(clock), Buckets(clock)

    def spend(
        self, session_id: str, owner: bytes, num_bytes: int = 0, unit_bytes: int = UNIT_BYTES
    ) -> Literal["session", "owner"] | None:
        """Takes a message of `num_bytes` from both buckets and returns None; or names the bucket that is empty.

        A long message may take more than there is: the bucket fills up from below 0 then.
        """
        limits, cost = self._limits, max(1, -(-num_bytes // unit_bytes))
        if self.sessions.spend(session_id, cost, limits.session_per_s, limits.session_burst, 1.0) < 1.0:
            return "session"
        if self.owners.spend(owner, cost, limits.owner_per_s, limits.owner_burst, 1.0) < 1.0:
            self.sessions.spend(session_id, -cost, limits.session_per_s, limits.session_burst)
            return "owner"
        return None


class DraftsEndpoint:
    """ASGI application that takes drafts, within the budgets of their session and owner.

    find: gives what has the session with this id of this owner; raises RequestError 404 `unknown_session`. num_dropped:
    counts messages that were not taken, by the name of the budget that was used up. deliver_long: for requests that
    last as long as their session.
    """

    def __init__(
        self,
        settings: ServerSettings,
        paths: GatePaths,
        tally: RequestTally,
        *,
        find: Callable[[str, bytes], Any],
        deliver: Deliver,
        deliver_long: DeliverLong,
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
        self._deliver, self._deliver_long = deliver, deliver_long
        self._num_dropped = num_dropped

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. Answers every error, as `ServedRequests` does for the other routes."""
        started_s = time.perf_counter()
        scope[_RECEIVE] = receive
        try:
            await self._gate(scope, receive, send)
        except (asyncio.CancelledError, ClientDisconnect):
            return  # the server is closing, or the client left while its body was read
        except Exception as error:
            await self._refuse(error, scope, receive, send)
        finally:
            del scope[_RECEIVE]  # it has the scope
        took_s = scope.get(_TOOK_S, time.perf_counter() - started_s)
        self._tally.answered(DRAFTS_PATH, scope["method"], scope[_STATUS], took_s)
        if (code := scope.get(ERROR_CODE)) is not None:
            self._tally.failed(code)

    async def _take(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            raise method_not_allowed(scope["method"])
        session_id = scope["path"][len(_PREFIX) : -len(_SUFFIX)]
        owner = scope.get(OWNER, ANYBODY)
        session = self._find(session_id, owner)
        if _is_of(scope, _LONG):
            return await self._take_long(scope, session, session_id, send)
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
        await self._answer(scope, send, await self._deliver(scope, session, body, is_tree))

    async def _take_long(self, scope: Scope, session: Any, session_id: str, send: Send) -> None:
        owner = scope.get(OWNER, ANYBODY)

        def spend(num_bytes: int) -> bool:
            spent = self._budget.spend(session_id, owner, num_bytes, TREE_UNIT_BYTES)
            if spent is not None:
                self._num_dropped[spent] += 1
            return spent is None

        if (pace := scope.get(BODY_PACE)) is not None:
            pace.is_long = True
        scope[_TOOK_S] = 0.0  # it lasts as long as its text, and nobody waits for the answer
        await self._answer(scope, send, await self._deliver_long(scope, session, scope[_RECEIVE], spend))

    @staticmethod
    async def _answer(scope: Scope, send: Send, answer: Answer) -> None:
        start, content = answer
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
        if session.line.pace is not None:
            raise RequestError(
                "steady_required", "the session is steady: send its drafts up one long request, in frames"
            )
        if is_tree:
            core.engine.draft_tree(session.sequence_id, decode_tree(body))
        else:
            draft = parse(DraftRequest, body)
            core.engine.draft(session.sequence_id, draft.base, draft.paths)
        return _TAKEN, b""

    limits = core.settings.draft_limits
    pause_s = 1.0 / limits.session_per_s if limits.session_per_s else limits.delay_s

    async def deliver_long(scope: Scope, session: Session, receive: Receive, spend: Spend) -> Answer:
        def take(body: bytes) -> bool:
            if not spend(len(body)):
                return False
            try:
                core.engine.draft_tree(session.sequence_id, decode_tree(body))
            except RequestError as error:
                if error.code == "draft_not_taken":
                    return False
                if error.code != "unknown_session":  # the session's end ends the request
                    raise
            return True

        if not spend(0):
            await asyncio.sleep(limits.delay_s)
            words = "more drafts than the session's or its owner's budget; send single messages"
            raise session.line.refuse(Throttled("rate_limited", words, retry_after_s=1))
        await session.line.read(receive, take, finish_s=limits.finish_s, pause_s=pause_s)
        return _TAKEN, b""

    return DraftsEndpoint(
        core.settings,
        paths,
        core.metrics,
        find=core.sessions.find,
        deliver=deliver,
        deliver_long=deliver_long,
        num_dropped=core.metrics.num_dropped,
    )


def _is_of(scope: Scope, media_type: bytes) -> bool:
    """Whether the body is announced as this; the gate has seen that it is one of MEDIA_TYPES."""
    content_type = next((value for name, value in scope["headers"] if name == b"content-type"), None)
    return content_type != JSON_MEDIA_TYPE and media_type_of(content_type) == media_type
