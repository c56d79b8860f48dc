"""Sends requests on to replicas, over HTTP, as they came: bodies and streams pass byte by byte.

A request whose answer has not begun goes to another replica where the first is lost or refuses: the text is a function
of the request. An answer that has begun is cut, and the client goes on with it. Ray's own calls pickle what they carry;
nothing that a client sends goes through them.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Final

import aiohttp
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send
from yarl import URL

from outrider.cloud.replicas.members import Member, Members, expire
from outrider.cloud.replicas.trust import MAX_REMOVED, Caller, forwarded
from outrider.models.errors import RequestError
from outrider.models.http.bodies import Bodies, read_body
from outrider.models.http.errors import ERROR_CODE
from outrider.models.http.keys import KeyRing, key_is_removed
from outrider.models.http.request_context import HEADER as REQUEST_ID
from outrider.models.http.request_context import current_request
from outrider.models.http.security import ANYBODY, OWNER
from outrider.models.wire.protocol import TARGET_HEADER, ErrorAnswer
from outrider.models.wire.steady import PADDED_HEADER

_log = logging.getLogger("outrider.replicas")

_TARGET: Final = TARGET_HEADER.lower().encode()
_PASSED: Final = frozenset(
    {
        *(b"content-type", b"accept", b"prefer", b"user-agent", b"traceparent", b"tracestate"),
        *(b"range", b"if-range", b"if-none-match", b"cache-control", PADDED_HEADER.lower().encode()),
    }
)
"""Headers of a request that a replica needs. `Authorization`, `Host` and `Origin` are the front's to check."""
_HELD_BACK: Final = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"location", REQUEST_ID})
"""Headers of an answer that belong to the connection (RFC 9110, section 7.6.1), that may name a replica's address, or
that the front adds."""
_ANY_PATH: Final = "/v1/models"
"""For what the front says to a replica in the header."""
FORWARDED: Final = "outrider.forwarded"
"""Key of the ASGI scope that is True once a replica has the request: that one writes it to the audit log."""
LOST: Final = "outrider.lost"
"""Key of the ASGI scope that is True where the replica was lost in the middle of its answer."""
_ASKED_HASH: Final = re.compile(rb'"prefix_hash"\s*:\s*"([0-9A-Za-z_-]{1,64})"')
_GIVEN_HASH: Final = re.compile(rb'"prefix_hash":"([0-9A-Za-z_-]{1,64})"')
_NAMES_A_PREFIX: Final = ("/v1/sessions", "/v1/verify")
_OVERLAP_BYTES: Final = 96
"""A name that two chunks share is still found."""
_MAX_REFUSAL_BYTES: Final = 1 << 16
_MAX_DIGITS: Final = 7
_CONNECT_S: Final = 5.0
_DRAFT_S: Final = 10.0
_REMOVED_S: Final = 2.0
"""For streams of a removed key to end with the error; then they are cut."""
_IDLE_S: Final = 30.0
"""How long an idle connection to a replica is kept; the replica keeps it for longer."""
MAX_LOST: Final = 2
"""Replicas that may be lost while they have one request, before an answer: it may be what they die of."""
_ELSEWHERE: Final = frozenset({"shutting_down", "engine_failed", "overloaded", "too_many_connections"})
"""Refusals that another replica may not give. Several fronts may fill the connections of one."""


class _Lost(Exception):
    """The replica is gone. has_worked: it may have begun to work on the request."""

    def __init__(self, *, has_worked: bool) -> None:
        self.has_worked = has_worked


class _Left(Exception):
    """The client is gone."""


class Forwarder:
    """ASGI application that has its answers from replicas. Belongs to one event loop; `aclose` closes connections."""

    def __init__(self, members: Members, max_body_bytes: int, keys: KeyRing) -> None:
        self._members = members
        self._keys = keys
        self._clients: set[_Client] = set()
        self._bodies = Bodies(max_body_bytes)
        self._session: aiohttp.ClientSession | None = None

    async def aclose(self) -> None:
        """Closes all connections to replicas."""
        if self._session is not None:
            await self._session.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. Raises RequestError 503 `no_replica` where no replica is left, 404 `not_found` for what is no path."""
        # `*`, or the authority of CONNECT: after a replica's address it would read as a part of that.
        if not (_path(scope).startswith("/") and scope["path"].startswith("/")):
            raise RequestError(
                "not_found", "the request's target is no path; /openapi.json lists all paths", status=404
            )
        caller = Caller.of(scope)
        has_body = scope["method"] not in ("GET", "HEAD", "DELETE")
        body = await read_body(receive) if has_body else b""
        answer: aiohttp.ClientResponse | None = None
        client = _Client(receive, caller.owner)
        self._clients.add(client)
        try:
            if OWNER in scope and not self._keys.may_generate(caller.owner):  # removed while the body came
                raise key_is_removed()
            async with client.watched():
                with self._bodies.hold(caller.owner, body):
                    member, answer = await self._begin(scope, caller, body, client)
                del body
                await self._pass_on(scope, member, answer, client, send)
        except _Left:
            pass
        except _Lost:
            assert answer is not None
            _log.warning("replica %s was lost in the middle of an answer, which is cut", member.report.tag)
            scope[FORWARDED], scope[LOST], scope[ERROR_CODE] = False, True, "replica_lost"
        finally:
            self._clients.discard(client)
            if answer is not None:
                answer.close()

    async def fetch(self, member: Member, path: str) -> bytes:
        """The body of a GET that the front asks for itself. Raises OSError where there is none."""
        try:
            async with asyncio.timeout(_DRAFT_S), self._ask(member, "GET", path, b"", Caller(), {}) as answer:
                if answer.status != 200:
                    raise OSError(f"HTTP {answer.status}")
                return await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise OSError(str(error)) from None

    async def end_removed(self, owners: Collection[bytes]) -> None:
        """Ends the work of owners whose key was removed: by their replicas, with an error; else it is cut."""
        theirs = [tuple(owners)[start : start + MAX_REMOVED] for start in range(0, len(owners), MAX_REMOVED)]
        asked = [self._tell(member, Caller(removed=some)) for member in self._members for some in theirs]
        await asyncio.gather(*asked)
        await asyncio.sleep(_REMOVED_S)
        for client in tuple(self._clients):
            if client.owner in owners and not self._keys.may_generate(client.owner):
                client.end(key_is_removed())

    async def _tell(self, member: Member, caller: Caller) -> None:
        try:
            async with asyncio.timeout(_DRAFT_S), self._ask(member, "GET", _ANY_PATH, b"", caller, {}):
                pass
        except (aiohttp.ClientError, OSError, TimeoutError):
            _log.warning("replica %s has not heard of removed keys; their streams are cut", member.report.tag)

    async def draft(self, scope: Scope, member: Member, body: bytes) -> tuple[Message, bytes]:
        """The answer to a draft message, which is sent on once: one that is lost slows its text and changes nothing.

        Raises RequestError 404 `unknown_session` where its session's replica is lost.
        """
        try:
            async with (
                asyncio.timeout(_DRAFT_S),
                self._ask(member, "POST", _path(scope), body, Caller.of(scope), _passed(scope)) as answer,
            ):
                content = await answer.content.read(_MAX_REFUSAL_BYTES)
                return {"type": "http.response.start", "status": answer.status, "headers": _headers(answer)}, content
        except (aiohttp.ClientError, OSError, TimeoutError):
            raise unknown_session() from None

    async def long_drafts(self, scope: Scope, member: Member, receive: Receive) -> tuple[Message, bytes]:
        """The answer to a long request of drafts, whose body is sent on as it comes: the replica bounds and counts its
        messages, and ends it with its session. What the replica does not read is not read here either.

        Raises ClientDisconnect, and RequestError 404 `unknown_session` where its session's replica is lost.
        """
        has_left = False

        async def pieces() -> AsyncIterator[bytes]:
            nonlocal has_left
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    has_left = True
                    raise ConnectionAbortedError  # the replica is to see a cut, not an end
                yield message.get("body", b"")
                if not message.get("more_body"):
                    return

        try:
            async with self._ask(member, "POST", _path(scope), pieces(), Caller.of(scope), _passed(scope)) as answer:
                content = await answer.content.read(_MAX_REFUSAL_BYTES)
                return {"type": "http.response.start", "status": answer.status, "headers": _headers(answer)}, content
        except (aiohttp.ClientError, OSError, TimeoutError):
            if has_left:
                raise ClientDisconnect from None
            raise unknown_session() from None

    def _ask(
        self,
        member: Member,
        method: str,
        path: str,
        body: bytes | AsyncIterator[bytes],
        caller: Caller,
        headers: dict[str, str],
    ) -> aiohttp.client._RequestContextManager:
        if self._session is None:  # made on the loop that uses it
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
                auto_decompress=False,
                skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
            )
        return self._session.request(
            method,
            _url(member, path),
            data=body or None,
            headers=headers | {"Authorization": forwarded(member.report.secret, caller)},
            allow_redirects=False,
        )

    async def _begin(
        self, scope: Scope, caller: Caller, body: bytes, client: _Client
    ) -> tuple[Member, aiohttp.ClientResponse]:
        """The first answer that is no reason to ask another replica. Raises RequestError where there is none."""
        path: str = scope["path"]
        session_id = path.removeprefix("/v1/sessions/") if path.startswith("/v1/sessions/") else None
        target = next((value.decode("latin-1") for name, value in scope["headers"] if name == _TARGET), None)
        found = _ASKED_HASH.search(body) if path in _NAMES_A_PREFIX else None
        held = found[1].decode() if found else None
        tried: list[Member] = []
        num_lost = 0
        refusal: RequestError | None = None
        while True:
            if session_id is not None:
                member = self._members.of_session(session_id)
                if member is None or tried:
                    raise unknown_session()
            else:
                member = self._members.choose(caller.owner, target=target, held=held, tried=tried)
            if member is None or num_lost >= MAX_LOST:
                scope[FORWARDED] = refusal is not None
                raise refusal or no_replica()
            tried.append(member)
            try:
                async with client.exchange(member):
                    scope[FORWARDED] = True
                    answer = await self._ask(member, scope["method"], _path(scope), body, caller, _passed(scope))
                    if answer.status != 503 or session_id is not None:
                        return member, answer
                    try:
                        refusal = await _refusal(answer)
                    finally:
                        answer.close()
            except _Lost as lost:
                member.is_suspect, scope[FORWARDED] = True, False
                num_lost += lost.has_worked
                continue
            if refusal.code not in _ELSEWHERE:
                raise refusal

    async def _pass_on(
        self, scope: Scope, member: Member, answer: aiohttp.ClientResponse, client: _Client, send: Send
    ) -> None:
        names_prefixes = scope["path"] in _NAMES_A_PREFIX
        headers = [each for each in _headers(answer) if each[0] != REQUEST_ID]  # the front's own is the same
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        end = b""
        async with client.exchange(member):
            async for chunk in answer.content.iter_any():
                if names_prefixes:
                    # Only an end names a prefix, or a result: most chunks are commits.
                    for name in _GIVEN_HASH.findall(end + chunk):
                        self._members.hold(scope.get(OWNER, ANYBODY), name.decode(), member)
                    end = chunk[-_OVERLAP_BYTES:]
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Client:
    """The client of one request: whether it is still there, and the exchange that ends when it leaves."""

    def __init__(self, receive: Receive, owner: bytes) -> None:
        self.owner = owner
        self._receive = receive
        self._has_left = False
        self._error: RequestError | None = None
        self._exchange: asyncio.Timeout | None = None

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Notices inside when the client leaves. The request's body must have been read before."""
        watching = asyncio.get_running_loop().create_task(self._watch())
        try:
            yield
        finally:
            watching.cancel()

    @asynccontextmanager
    async def exchange(self, member: Member) -> AsyncIterator[None]:
        """An exchange with a replica. Raises _Left where the client leaves, _Lost where the replica is lost.

        Raises RequestError where `end` has.
        """
        if self._has_left:
            raise _Left
        try:
            async with asyncio.timeout(None) as self._exchange:
                with member.serving(self._exchange):
                    yield
        except TimeoutError:
            if self._has_left:
                raise _Left from None
            raise self._error or _Lost(has_worked=True) from None
        except aiohttp.ClientConnectorError:
            raise _Lost(has_worked=False) from None
        except (aiohttp.ClientError, ConnectionError):
            raise _Lost(has_worked=True) from None
        finally:
            self._exchange = None

    def end(self, error: RequestError) -> None:
        """Ends the exchange with an error, or cuts the answer that has begun."""
        self._error = error
        if self._exchange is not None:
            expire(self._exchange)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._has_left = True
        if self._exchange is not None:
            expire(self._exchange)


def unknown_session() -> RequestError:
    """The error 404 where no replica has the session."""
    return RequestError(
        "unknown_session",
        "there is no such session: it has ended, or its replica has. To continue the text, open a session with the "
        "prompt and the tokens committed so far",
        status=404,
    )


def no_replica() -> RequestError:
    """The error 503 where no replica takes work."""
    return RequestError("no_replica", "no replica takes work now; retry in a moment", status=503)


async def _refusal(answer: aiohttp.ClientResponse) -> RequestError:
    """A replica's answer 503 as an error, with the time that the replica measured for a retry."""
    try:
        error = ErrorAnswer.model_validate_json(await answer.content.read(_MAX_REFUSAL_BYTES)).error
    except ValueError:
        return no_replica()
    after = answer.headers.get("retry-after", "")
    # Digits only: a date is allowed there, and replicas send none.
    retry_after_s = int(after) if after.isascii() and after.isdigit() and len(after) < _MAX_DIGITS else None
    return RequestError(error.code, error.message, status=503, retry_after_s=retry_after_s)


def _path(scope: Scope) -> str:
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope["query_string"]
    return (raw + b"?" + query if query else raw).decode("latin-1")


def _url(member: Member, path: str) -> URL:
    """A replica's URL. Nothing in the path can reach into its host and port."""
    at = URL(member.report.url)
    path, _, query = path.partition("?")
    return URL.build(scheme=at.scheme, authority=at.raw_authority, path=path, query_string=query, encoded=True)


def _passed(scope: Scope) -> dict[str, str]:
    passed = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _PASSED}
    if (request := current_request()) is not None:
        passed[REQUEST_ID.decode()] = request.request_id
    return passed


def _headers(answer: aiohttp.ClientResponse) -> list[tuple[bytes, bytes]]:
    return [(lower, value) for name, value in answer.raw_headers if (lower := name.lower()) not in _HELD_BACK]
