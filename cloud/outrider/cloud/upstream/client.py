"""Talks to the upstream verifier over httpx. Belongs to one event loop. Knows no mid-size model.

Streams and drafts have connections of their own: texts that wait for a slow upstream hold no draft back.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from http.cookiejar import DefaultCookiePolicy
from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from outrider.cloud.upstream.errors import UpstreamLost, UpstreamRefused
from outrider.cloud.upstream.events import EventReader, check_result
from outrider.models.errors import ConfigError
from outrider.models.exchange import Exchange, LeftSteps, close
from outrider.models.hosts import is_loopback
from outrider.models.protocol import (
    TARGET_HEADER,
    DraftRequest,
    ErrorAnswer,
    ModelFacts,
    SessionEvent,
    SessionOpen,
    SessionRequest,
    VerifyAnswer,
    VerifyRequest,
    VerifyResult,
)
from outrider.models.version import outrider_version

if TYPE_CHECKING:
    import httpx

Answer = TypeVar("Answer", bound=BaseModel)

MAX_STREAMS: Final = 4096
"""Open sessions; the engine lets fewer in."""
MAX_POSTS: Final = 64
"""Connections for drafts."""
MAX_ANSWER_BYTES: Final = 1 << 18
CONNECT_S: Final = 5.0
HEAD_S: Final = 30.0
"""For the head of an answer, and for a short answer as a whole."""
VERIFY_S: Final = 600.0
"""For a verification, which may wait in a queue."""
POST_S: Final = 10.0
_NUM_MISSED: Final = 3  # keep-alives in a row without which it counts as stopped
_SILENCE_S: Final = 120.0  # of a server that does not say how often it writes
_PASSING: Final = frozenset({404, 408, 410, 425, 429})  # and all from 500 on
_ASK: Final = [
    ("Content-Type", "application/json"),
    ("Accept-Encoding", "identity"),
    ("User-Agent", f"outrider-cloud/{outrider_version()}"),
    # What upstream keeps is found by its key alone: that is this server's, not a client's.
    ("Cache-Control", "no-store"),
]
_DRAFTS: Final = [("Content-Type", "application/json"), ("Prefer", "return=minimal")]


def upstream_url(text: str) -> str:
    """The base URL for `text`: http where no scheme is given. Raises ConfigError for what is no address."""
    url = text.strip() if "://" in text else f"http://{text.strip()}"
    try:
        parts = urlsplit(url)
        is_address = bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or parts.scheme not in ("http", "https") or parts.query or parts.fragment or " " in url:
        raise ConfigError("--upstream is not an address; expected http://host:port or https://host")
    if "@" in parts.netloc:
        raise ConfigError("--upstream has a password in it; give the key by OUTRIDER_UPSTREAM_KEY")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


class UpstreamClient:
    """One upstream verifier. Every method raises UpstreamLost where another try may help, else UpstreamRefused."""

    def __init__(self, url: str, key: str | None = None) -> None:
        import httpx

        self.url = upstream_url(url)
        self._errors = httpx.TransportError
        is_local = is_loopback(urlsplit(self.url).hostname or "")
        if key and not is_local and self.url.startswith("http:"):
            raise ConfigError("the upstream key would cross the network in clear; give --upstream an https address")
        headers = {"Authorization": f"Bearer {key}"} if key else {}

        def made(max_connections: int) -> httpx.AsyncClient:
            client = httpx.AsyncClient(
                verify=ssl.create_default_context() if self.url.startswith("https:") else True,
                timeout=httpx.Timeout(HEAD_S, connect=CONNECT_S),
                limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=MAX_POSTS),
                trust_env=not is_local,
            )
            client.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=[]))
            for name in list(client.headers):
                del client.headers[name]
            client.headers.update(headers)
            return client

        self._streams, self._posts = made(MAX_STREAMS), made(MAX_POSTS)
        self._left = LeftSteps()

    async def aclose(self) -> None:
        """Closes every connection."""
        await self._left.aclose()
        await self._streams.aclose()
        await self._posts.aclose()

    async def facts(self) -> ModelFacts:
        """GET /v1/model."""
        return _parsed(ModelFacts, await self._exchange("GET", "/v1/model", None, HEAD_S))

    async def verify(self, request: VerifyRequest, vocab_size: int) -> VerifyResult:
        """POST /v1/verify, with one item. Raises UpstreamRefused for the item's own error, too."""
        answer = _parsed(VerifyAnswer, await self._exchange("POST", "/v1/verify", request, VERIFY_S))
        if len(answer.results) != 1:
            raise UpstreamLost(f"the upstream verifier answered 1 item with {len(answer.results)} results")
        result = answer.results[0]
        if result.error is not None:
            raise UpstreamRefused(result.error.code, result.error.message)
        check_result(request.items[0], result, vocab_size)
        return result

    async def post_drafts(self, session: str, request: DraftRequest) -> None:
        """POST /v1/sessions/{id}/drafts. A stale draft is no error."""
        exchange, url = Exchange(self._left), f"{self.url}/v1/sessions/{session}/drafts"
        body, traced = request.model_dump_json().encode(), {"trace": exchange.trace}
        async with self._guarded(POST_S):
            answer = await exchange.run(self._posts.post(url, content=body, headers=_DRAFTS, extensions=traced))
            if answer.status_code not in (204, 409):
                raise UpstreamLost(f"the upstream verifier answered drafts with HTTP {answer.status_code}")

    @asynccontextmanager
    async def open_session(
        self, request: SessionRequest, target: str | None, vocab_size: int
    ) -> AsyncIterator[AsyncGenerator[SessionEvent, None]]:
        """POST /v1/sessions; gives its events. Leaving the context ends the session."""
        wish = [(TARGET_HEADER, target)] if target and re.fullmatch(r"[!-~]{1,64}", target) else []
        content = request.model_dump_json(exclude_defaults=True).encode()
        exchange, headers = Exchange(self._left), [*_ASK, *wish]
        built = self._streams.build_request(
            "POST", f"{self.url}/v1/sessions", content=content, headers=headers, extensions={"trace": exchange.trace}
        )
        reader = EventReader(request.max_tokens, vocab_size)
        try:
            async with self._guarded(CONNECT_S + HEAD_S):
                response = await exchange.send(self._streams, built)
            async with self._guarded(HEAD_S):
                await exchange.run(_require_success(response))
            yield self._events(exchange, reader)
        finally:
            await exchange.aclose(is_ending=reader.is_over)

    async def _events(self, exchange: Exchange, reader: EventReader) -> AsyncGenerator[SessionEvent, None]:
        silence_s = _SILENCE_S
        while True:
            try:
                async with asyncio.timeout(silence_s):
                    chunk = await exchange.next_chunk()
            except TimeoutError:
                raise UpstreamLost(f"the upstream verifier sent nothing for {silence_s:.3g} s") from None
            except self._errors as error:
                raise UpstreamLost(f"the upstream verifier: {type(error).__name__}") from error
            if not chunk:
                return
            for event in reader.feed(chunk):
                if isinstance(event, SessionOpen) and event.keep_alive_s is not None:
                    silence_s = _NUM_MISSED * min(60.0, max(0.1, event.keep_alive_s)) + 1.0
                yield event

    async def _exchange(self, method: str, path: str, message: BaseModel | None, limit_s: float) -> bytes:
        import httpx

        content = message.model_dump_json(exclude_defaults=True).encode() if message is not None else None
        timeout = httpx.Timeout(limit_s, connect=CONNECT_S)
        exchange = Exchange(self._left)
        request = self._streams.build_request(
            method,
            self.url + path,
            content=content,
            headers=_ASK,
            timeout=timeout,
            extensions={"trace": exchange.trace},
        )
        async with self._guarded(limit_s):
            return await exchange.run(self._answer(request))

    async def _answer(self, request: httpx.Request) -> bytes:
        response = await self._streams.send(request, stream=True)
        try:
            await _require_success(response)
            return await _read(response)
        finally:
            await close(response)

    @asynccontextmanager
    async def _guarded(self, limit_s: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError:
            raise UpstreamLost(f"the upstream verifier did not answer within {limit_s:.3g} s") from None
        except self._errors as error:
            raise UpstreamLost(f"the upstream verifier: {type(error).__name__}") from error


async def _read(response: httpx.Response) -> bytes:
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            raise UpstreamLost(f"the upstream verifier's answer has more than {MAX_ANSWER_BYTES} bytes")
    return bytes(body)


async def _require_success(response: httpx.Response) -> None:
    status = response.status_code
    if status == 200:
        return
    body = await _read(response)
    try:
        error = ErrorAnswer.model_validate_json(body).error
        code, message = error.code, error.message[:600]
    except ValidationError:
        code, message = "http_error", f"HTTP {status}"
    if (status >= 500 or status in _PASSING) and code != "prefix_not_held":
        after = response.headers.get("retry-after", "")
        wait_s = min(60.0, float(after)) if re.fullmatch("[0-9]{1,9}", after) else 0.0
        raise UpstreamLost(f"the upstream verifier answered {status} {code}: {message}", wait_s)
    raise UpstreamRefused(code, message)


def _parsed(kind: type[Answer], body: bytes) -> Answer:
    try:
        return kind.model_validate_json(body)
    except ValidationError:
        raise UpstreamLost(f"the upstream verifier's answer is not a {kind.__name__}; check the address") from None
