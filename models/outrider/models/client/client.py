"""Talks to one verifier: the client's side of the wire.

Knows the protocol, not what it is used for.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import inf
from typing import Any, Final, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from outrider.models.client import tracing
from outrider.models.client.address import verifier_url as verifier_url  # also for importers of this module
from outrider.models.client.checks import (
    MAX_STEADY_S,
    EventParser,
    SessionCheck,
    check_model,
    check_rendered,
    check_result,
    check_times,
)
from outrider.models.client.errors import EndpointLost, EndpointUnfit, ProtocolBroken, lost, short, silent
from outrider.models.client.exchange import Exchange
from outrider.models.client.http_endpoint import MAX_ANSWER_BYTES, Headers, HttpEndpoint, longest_silence_s
from outrider.models.client.http_endpoint import ClientOptions as ClientOptions
from outrider.models.client.long_request import LongRequest
from outrider.models.client.messages import DraftMessage
from outrider.models.errors import RequestError
from outrider.models.version import outrider_version
from outrider.models.wire.draft_stream import DRAFTS_MEDIA_TYPE
from outrider.models.wire.protocol import (
    LONG_SINCE,
    TARGET_HEADER,
    Commit,
    ModelFacts,
    ReadyAnswer,
    RenderAnswer,
    SessionEvent,
    SessionOpen,
    SessionRequest,
    Taken,
)
from outrider.models.wire.steady import PADDED_HEADER, padded
from outrider.models.wire.tree_draft import TREE_MEDIA_TYPE
from outrider.models.wire.verify import VerifyAnswer, VerifyRequest

Answer = TypeVar("Answer", bound=BaseModel)
# Some gateways refuse requests without it. Drafts go without: they are many, and to a session that is open already.
_SELF = ("User-Agent", f"outrider/{outrider_version()}")
# Without a word on encodings a server might compress, and a few bytes could become gigabytes.
PLAIN: Headers = [("Accept-Encoding", "identity"), _SELF]
_JSON: Headers = [("Content-Type", "application/json")]
_ASK: Headers = [*_JSON, *PLAIN]
_NO_STORE = ("Cache-Control", "no-store")
# Older servers answer 409 to a draft that comes too late; the status alone is enough (RFC 7240): words would outweigh
# the tokens.
_MINIMAL = ("Prefer", "return=minimal")
_DRAFT_HEADERS: Headers = [*_JSON, _MINIMAL]
_TREE_HEADERS: Headers = [("Content-Type", TREE_MEDIA_TYPE), _MINIMAL]
_LONG_HEADERS: Headers = [("Content-Type", DRAFTS_MEDIA_TYPE)]
MAX_POSTS: Final = 8
"""Single messages in flight, each on a connection of its own."""
MAX_UNACKNOWLEDGED: Final = 48
"""Messages of a long request in flight: some per step and round trip. A server names up to 64 that it drops."""
MOST_UNHEARD: Final = 3
OFF_S: Final = 600.0
"""After so many long requests in a row without an acknowledgement texts do without for this long."""
_LEAST_CONNECTIONS: Final = 3
"""For a stream, its long request, and a message beside them."""

_UNSTEADY: Final = "the verifier at {url} knows no steady sessions: upgrade it, or leave out --steady"
MAX_RENDERED_BYTES: Final = 1 << 22
"""The ids of half a million tokens."""


class _Lines(dict[str, LongRequest]):
    """The long requests of open sessions, by session. num_unheard: of those in a row without any acknowledgement.
    off_until: when one is tried again. needs_steady: the server serves steady sessions only.
    """

    num_unheard, off_until, needs_steady = 0, -inf, False

    @property
    def is_off(self) -> bool:
        """Whether the way to this server seems to pass none."""
        return time.monotonic() < self.off_until

    def unusable(self, is_refused: bool) -> None:
        """One was refused, or not acknowledged while the stream went on. A single one may only have been late."""
        self.num_unheard += 1
        if is_refused or self.num_unheard >= MOST_UNHEARD:
            self.off_until = time.monotonic() + OFF_S


class VerifierClient(HttpEndpoint):
    """One verifier.

    Every method raises EndpointLost where trying again (elsewhere) may help, TokenizerMismatch and RequestError where
    the server refuses the request itself, with the server's own words.
    """

    def __init__(
        self,
        url: str,
        options: ClientOptions | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(url, options, transport)
        self._lines = _Lines()  # shared by the clients of `for_one_text`

    async def ready(self) -> ReadyAnswer:
        """GET /health/ready."""
        return self._parse(ReadyAnswer, await self._exchange("GET", "/health/ready", headers=PLAIN))

    async def model_facts(self) -> ModelFacts:
        """GET /v1/model: the facts of the model that is asked for. Raises EndpointUnfit where it is not served."""
        facts = self._parse(ModelFacts, await self._exchange("GET", "/v1/model", headers=PLAIN))
        if (model := self._options.model) is None:
            return facts
        if (named := facts.named(model)) is None:
            served = ", ".join([facts.name, *facts.adapters])
            raise EndpointUnfit(f"the verifier at {self.url} serves no model {model!r}; it serves {short(served)}")
        return named

    async def served(self) -> tuple[str, str | None]:
        """Name and target of the model that is asked for, as they are now."""
        if self._options.model is None:
            ready = await self.ready()
            return ready.model, ready.target
        facts = await self.model_facts()
        return facts.name, facts.target

    async def render(self, conversation: bytes) -> RenderAnswer:
        """POST /v1/render, with a body of JSON, an object: the token ids of a conversation."""
        if (model := self._options.model) is not None:
            conversation = b'{"model":%b,%b' % (json.dumps(model).encode(), conversation[1:])
        with tracing.call("POST /v1/render", self.url) as span:
            headers = [*_ASK, *span.headers]
            if self._is_steady:
                conversation, headers = padded(conversation), [*headers, (PADDED_HEADER, "1")]
            body = await self._exchange(
                "POST", "/v1/render", conversation, headers=headers, max_bytes=MAX_RENDERED_BYTES
            )
        answer = self._parse(RenderAnswer, body)
        check_rendered(self.url, answer)
        return answer

    async def verify(self, request: VerifyRequest, target: str | None = None) -> VerifyAnswer:
        """POST /v1/verify. May take as long as the server is alive and `call_timeout_s` lasts.

        target: as for `open_session`.
        """
        limit_s = self._options.call_timeout_s
        if self._is_steady:
            raise RequestError("steady_required", "the text has to be steady, and /v1/verify is not; stream it instead")
        if (model := self._options.model) is not None:
            request = request.model_copy(update={"model": model})
        with tracing.call("POST /v1/verify", self.url) as span:
            headers = [*_ASK, *_wish(target), *span.headers]
            call = asyncio.create_task(self._exchange("POST", "/v1/verify", request, headers=headers, limit_s=limit_s))
            try:
                await self._watch(call)
                answer = self._parse(VerifyAnswer, call.result())
            finally:
                await _ended(call)
        if len(answer.results) != len(request.items):
            raise ProtocolBroken(self.url, f"{len(answer.results)} results answer {len(request.items)} items")
        check_model(self.url, request.model, answer.model)
        check_times(self.url, answer)
        for item, result in zip(request.items, answer.results, strict=True):
            if result.error is None:
                check_result(self.url, item, result, self._options.vocab_size)
        return answer

    @property
    def _is_steady(self) -> bool:
        return self._options.is_steady or self._lines.needs_steady

    def max_in_flight(self, session: str) -> int:
        """How many calls of `post_drafts` may run at a time for this session."""
        return MAX_UNACKNOWLEDGED if self._long_request(session) is not None else MAX_POSTS

    def frames(self, session: str) -> LongRequest | None:
        """The long request of a steady session: a message goes when it has room, and nowhere else. Else None."""
        line = self._lines.get(session)
        return line if line is not None and line.pace is not None else None

    def _long_request(self, session: str) -> LongRequest | None:
        """The session's, while it takes messages; that of a steady session always."""
        line = self._lines.get(session)
        return line if line is not None and (line.is_open or line.pace is not None) else None

    async def post_drafts(self, session: str, message: DraftMessage) -> float:
        """Sends a draft message; returns, once it is acknowledged, the ms for which the server held that back.

        Trees go up the session's long request while that works, else each is a POST /v1/sessions/{id}/drafts. The 409
        of an older server for a draft that comes too late is no error: newer commits are already on their way.
        """
        line = self._long_request(session)
        if line is not None and message.media_type == TREE_MEDIA_TYPE:
            return await line.post(message.body)
        if self._is_steady:
            raise EndpointLost(f"{self.url}: a steady session has no place for this message")
        headers = _TREE_HEADERS if message.media_type == TREE_MEDIA_TYPE else _DRAFT_HEADERS
        await self._exchange("POST", f"/v1/sessions/{session}/drafts", message.body, headers=headers, passes=409)
        return 0.0

    def _begin_long(self, opened: SessionOpen, took_s: float) -> LongRequest | None:
        """The long request of a session; nothing is sent before its first message. took_s: from request to `open`."""
        shared, pace = self._lines, opened.steady
        if (
            opened.protocol < LONG_SINCE
            or opened.session in shared
            or (shared.is_off and pace is None)
            or not self._is_traced  # what stands in for a network waits for a body's end
            or self._options.max_connections < _LEAST_CONNECTIONS
        ):
            return None

        async def start(pieces: AsyncIterator[bytes]) -> None:
            exchange = Exchange(self._left, is_traced=self._is_traced)
            path = f"/v1/sessions/{opened.session}/drafts"
            request = self._build("POST", path, exchange, pieces, _LONG_HEADERS)
            async with self._deadline(None):
                await exchange.run(self._answer(request, MAX_ANSWER_BYTES, None))

        step_s, unusable = (opened.step_ms or 0.0) / 1e3, shared.unusable
        line = LongRequest(self.url, start, self.wire, rtt_s=took_s, step_s=step_s, on_unusable=unusable, pace=pace)
        shared[opened.session] = line
        return line

    def _end_long(self, line: LongRequest, *, is_cut: bool) -> None:
        """Of a session that is over, or given up."""
        for session in [name for name, each in self._lines.items() if each is line]:
            del self._lines[session]
        if line.num_taken:
            self._lines.num_unheard = 0
        line.end(is_cut=is_cut)
        if line.task is not None:
            self._left.add(line.task)

    @asynccontextmanager
    async def open_session(
        self, request: SessionRequest, target: str | None = None
    ) -> AsyncIterator[AsyncGenerator[SessionEvent, None]]:
        """POST /v1/sessions; gives the stream of SessionOpen, Commit..., SessionEnd.

        target: the one that began the text, where it goes on: an address with several replicas chooses by it.

        Leaving the context before the end closes the connection, which ends the session. The iterator raises
        EndpointLost when the stream is cut before its SessionEnd or goes silent, ProtocolBroken for what no server of
        this protocol sends.
        """
        with tracing.call("POST /v1/sessions", self.url) as span:
            no_store = [_NO_STORE] if self._options.no_store else []
            headers = [*_ASK, *no_store, *_wish(target), *span.headers]
            check: SessionCheck | None = None
            began_s = time.perf_counter()
            line: LongRequest | None = None

            def begin(opened: SessionOpen) -> LongRequest | None:
                nonlocal line
                line = self._begin_long(opened, time.perf_counter() - began_s)
                return line

            exchange, request = await self._ask_session(request, headers)
            try:
                check = SessionCheck(self.url, request, self._options.vocab_size)
                yield self._events(exchange, check, begin)
            finally:
                is_over = check is not None and check.is_over
                if line is not None:
                    self._end_long(line, is_cut=not is_over)
                await exchange.aclose(is_ending=is_over)

    async def _ask_session(self, request: SessionRequest, headers: Headers) -> tuple[Exchange, SessionRequest]:
        """What has the stream that answers, and the request as it was sent. Close the exchange."""
        if self._options.model is not None:
            request = request.model_copy(update={"model": self._options.model})
        content: SessionRequest | bytes = request
        if self._is_steady:
            request = request.model_copy(update={"steady": True})
            content = padded(request.model_dump_json(exclude_defaults=True).encode())
        exchange = Exchange(self._left, is_traced=self._is_traced)
        try:
            asked = self._build("POST", "/v1/sessions", exchange, content, headers)
            response = await self._head(exchange, asked)
            # `open` says how long the stream may be silent, and `_events` bounds it: httpx reads this anew for a body.
            asked.extensions["timeout"]["read"] = longest_silence_s(inf)
            if response.status_code != 200:
                raise ProtocolBroken(self.url, f"it answered HTTP {response.status_code}; expected an event stream")
        except BaseException as error:
            await exchange.aclose()
            if not isinstance(error, RequestError):
                raise
            if request.steady and error.code == "invalid_parameter" and str(error).startswith("steady"):
                raise EndpointUnfit(_UNSTEADY.format(url=self.url)) from None
            if request.steady or error.code != "steady_required":
                raise
        else:
            return exchange, request
        self._lines.needs_steady = True
        return await self._ask_session(request, headers)

    async def _events(
        self, exchange: Exchange, check: SessionCheck, begin: Callable[[SessionOpen], LongRequest | None]
    ) -> AsyncGenerator[SessionEvent, None]:
        parser, silence_s = EventParser(self.url), self._silence_s
        now = asyncio.get_running_loop().time
        line_until = now() + silence_s
        line: LongRequest | None = None
        while True:
            try:
                async with asyncio.timeout_at(line_until):
                    chunk = await exchange.next_chunk()
            except TimeoutError:
                await self._close_idle()
                raise silent(self.url, silence_s) from None
            except (httpx.TransportError, ssl.SSLError) as e:
                raise lost(self.url, e, is_answering=True) from e
            if not chunk:
                return
            self.wire.body_down += len(chunk)
            for event in parser.feed(chunk):
                check(event)
                if isinstance(event, Commit | Taken):
                    if line is not None:
                        line.follow(event)
                    if isinstance(event, Taken):
                        continue
                elif isinstance(event, SessionOpen):
                    line = begin(event)
                    if event.steady is not None:
                        parser.max_idle_bytes = int(MAX_STEADY_S * 1e3 / event.steady.every_ms * event.steady.down)
                    silence_s = self._options.stream_timeout_s
                    if event.keep_alive_s is not None:
                        silence_s = longest_silence_s(event.keep_alive_s)
                yield event
            if b"\n" in chunk:  # bytes of an endless line are no sign of life
                line_until = now() + silence_s

    async def _watch(self, call: asyncio.Task[bytes]) -> None:
        """Returns when `call` is done; meanwhile asks now and then whether the server is alive.

        A verification may wait in a queue for longer than a live server is silent, and its answer comes at once or not
        at all. Raises EndpointLost when the server does not answer.
        """
        while not (await asyncio.wait({call}, timeout=self._options.keep_alive_s))[0]:
            probe = asyncio.create_task(self._probe())
            try:
                await asyncio.wait({call, probe}, return_when=asyncio.FIRST_COMPLETED)
                if not call.done():
                    probe.result()
            finally:
                await _ended(probe)

    async def _probe(self) -> None:
        """Any answer is a sign of life. What is missing of the longest silence has passed before."""
        limit_s = self._silence_s - self._options.keep_alive_s
        try:
            await self._exchange("GET", "/health/live", headers=PLAIN, limit_s=limit_s)
        except (ProtocolBroken, RequestError):
            pass  # an answer
        except EndpointLost as e:
            if e.status is None:
                raise silent(self.url, self._silence_s) from e

    def _parse(self, kind: type[Answer], body: bytes) -> Answer:
        try:
            return kind.model_validate_json(body)
        except ValidationError as e:
            raise ProtocolBroken(self.url, f"its answer is not a {kind.__name__}: {short(e.errors()[0]['msg'])}") from e


def _wish(target: str | None) -> Headers:
    return [(TARGET_HEADER, target)] if target is not None and re.fullmatch(r"[!-~]{1,64}", target) else []


async def _ended(task: asyncio.Task[Any]) -> None:
    """Cancels the task if it still runs, and waits for its end."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
