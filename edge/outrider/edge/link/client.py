"""Talks to one verifier endpoint over httpx: the agent's side of the wire.

Small messages on connections that stay open (asyncio sets TCP_NODELAY), no header that HTTP does not need, and every
byte of body and headers counted. This module knows the protocol, not what it is used for.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ValidationError

from outrider.edge.link.sse import EventParser
from outrider.edge.results import ByteCounts
from outrider.models.errors import CloudError, ConfigError, OutriderError, RequestError, TokenizerMismatch
from outrider.models.hosts import is_loopback
from outrider.models.protocol import (
    DraftRequest,
    ErrorAnswer,
    ErrorBody,
    ReadyAnswer,
    SessionEvent,
    SessionRequest,
    VerifyAnswer,
    VerifyRequest,
)

Answer = TypeVar("Answer", bound=BaseModel)
Headers = list[tuple[str, str]]
_JSON: Headers = [("Content-Type", "application/json")]
# A stale draft is answered 409, and the status alone is enough (RFC 7240): words would outweigh the tokens.
_DRAFT_HEADERS: Headers = [*_JSON, ("Prefer", "return=minimal")]
# Answers that another endpoint, or the same one a little later, may not give.
_PASSING_STATUS = frozenset({404, 408, 410, 429, 500, 502, 503, 504})


class EndpointLost(CloudError):
    """This endpoint cannot be reached, is overloaded, or lost the session; another attempt may succeed.

    is_absent: nothing answers at its address.
    """

    def __init__(self, message: str, *, is_absent: bool = False) -> None:
        super().__init__(message)
        self.is_absent = is_absent


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Key, timeouts and connections of an endpoint.

    connect_timeout_s, timeout_s: for connecting and for a plain answer. stream_timeout_s: longest silence of a session
    (a queue, a long prefill) before it counts as cut. max_connections: one for the stream, the rest for drafts in
    flight.
    """

    api_key: str | None = None
    connect_timeout_s: float = 5.0
    timeout_s: float = 30.0
    stream_timeout_s: float = 120.0
    max_connections: int = 12


class CloudClient:
    """One endpoint. Use as an async context manager, or call `aclose`; belongs to one event loop.

    Every method raises EndpointLost where trying again (elsewhere) may help, TokenizerMismatch and RequestError where
    the server refuses the request itself, with the server's own words.
    """

    def __init__(
        self,
        url: str,
        options: ClientOptions | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        options = options or ClientOptions()
        self.url = verifier_url(url)
        self.is_local = is_loopback(urlsplit(self.url).hostname or "")
        self._stream_timeout = httpx.Timeout(
            options.timeout_s, connect=options.connect_timeout_s, read=options.stream_timeout_s
        )
        limits = httpx.Limits(
            max_connections=options.max_connections,
            max_keepalive_connections=options.max_connections,
            keepalive_expiry=60.0,
        )
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(options.timeout_s, connect=options.connect_timeout_s),
            limits=limits,
            transport=transport,
            trust_env=not self.is_local,
        )
        # httpx adds Accept, Accept-Encoding, Connection and User-Agent to every message; none is needed.
        for name in list(self._http.headers):
            del self._http.headers[name]
        self._has_key = bool(options.api_key)
        if self._has_key:
            self._http.headers["Authorization"] = f"Bearer {options.api_key}"
        self._body_up = self._body_down = self._headers_up = self._headers_down = 0

    async def __aenter__(self) -> CloudClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes every connection; safe to call twice."""
        await self._http.aclose()

    @property
    def wire(self) -> ByteCounts:
        """Bytes so far; take differences."""
        return ByteCounts(self._body_up, self._body_down, self._headers_up, self._headers_down)

    async def ready(self) -> ReadyAnswer:
        """GET /health/ready."""
        return _parse(ReadyAnswer, await self._exchange("GET", "/health/ready"))

    async def verify(self, request: VerifyRequest) -> VerifyAnswer:
        """POST /v1/verify."""
        return _parse(VerifyAnswer, await self._exchange("POST", "/v1/verify", request))

    async def post_drafts(self, session: str, request: DraftRequest) -> None:
        """POST /v1/sessions/{id}/drafts. A stale draft is no error: newer commits are already on their way."""
        await self._exchange("POST", f"/v1/sessions/{session}/drafts", request, headers=_DRAFT_HEADERS)

    async def end_session(self, session: str) -> None:
        """DELETE /v1/sessions/{id}; a session that is gone already is fine."""
        try:
            await self._exchange("DELETE", f"/v1/sessions/{session}")
        except EndpointLost:
            pass  # gone, or unreachable: the server frees it when the stream's connection closes

    @asynccontextmanager
    async def open_session(self, request: SessionRequest) -> AsyncIterator[AsyncGenerator[SessionEvent, None]]:
        """POST /v1/sessions; gives the stream of SessionOpen, Commit..., SessionEnd.

        Leaving the context before the end closes the connection, which ends the session. The iterator raises
        EndpointLost when the stream is cut before its SessionEnd.
        """
        http_request = self._build("POST", "/v1/sessions", request, self._stream_timeout)
        try:
            response = await self._http.send(http_request, stream=True)
        except httpx.TransportError as e:
            raise _lost(self.url, e) from e
        try:
            self._count(response)
            if response.status_code != 200:
                try:
                    body = await response.aread()
                except httpx.TransportError as e:
                    raise _lost(self.url, e) from e
                self._body_down += len(body)
                raise self._refusal(response.status_code, body)
            yield self._events(response)
        finally:
            await response.aclose()

    async def _events(self, response: httpx.Response) -> AsyncGenerator[SessionEvent, None]:
        parser = EventParser()
        try:
            async for chunk in response.aiter_raw():
                self._body_down += len(chunk)
                for event in parser.feed(chunk):
                    yield event
        except httpx.TransportError as e:
            raise _lost(self.url, e) from e

    async def _exchange(
        self, method: str, path: str, message: BaseModel | None = None, headers: Headers | None = None
    ) -> bytes:
        try:
            response = await self._http.send(self._build(method, path, message, headers=headers))
        except httpx.TransportError as e:
            raise _lost(self.url, e) from e
        self._count(response)
        self._body_down += len(response.content)
        is_stale = headers is _DRAFT_HEADERS and response.status_code == 409
        if response.status_code >= 300 and not is_stale:
            raise self._refusal(response.status_code, response.content)
        return response.content

    def _build(
        self,
        method: str,
        path: str,
        message: BaseModel | None = None,
        timeout: httpx.Timeout | None = None,
        headers: Headers | None = None,
    ) -> httpx.Request:
        content = message.model_dump_json(exclude_defaults=True).encode() if message is not None else None
        extra: dict[str, Any] = {"timeout": timeout} if timeout is not None else {}
        request = self._http.build_request(
            method, self.url + path, content=content, headers=headers or (_JSON if content else None), **extra
        )
        self._body_up += len(content) if content else 0
        line = len(method) + len(request.url.raw_path) + len("  HTTP/1.1\r\n")
        self._headers_up += line + _header_bytes(request.headers)
        return request

    def _count(self, response: httpx.Response) -> None:
        line = len(f"HTTP/1.1 {response.status_code} {response.reason_phrase}\r\n")
        self._headers_down += line + _header_bytes(response.headers)

    def _refusal(self, status: int, body: bytes) -> OutriderError:
        try:
            error = ErrorAnswer.model_validate_json(body).error
        except ValidationError:
            error = ErrorBody(code="http_error", message=f"HTTP {status} that is not an Outrider answer")
        if status == 401:
            # The server's words name an HTTP header; users of the agent set a variable.
            needed = "does not accept this API key: correct" if self._has_key else "requires an API key: set"
            return RequestError(error.code, f"The verifier at {self.url} {needed} OUTRIDER_API_KEY.", status=status)
        return refusal_error(self.url, error, status)


def _header_bytes(headers: httpx.Headers) -> int:
    return sum(len(name) + len(value) + len(": \r\n") for name, value in headers.raw) + len("\r\n")


def verifier_url(text: str) -> str:
    """The base URL for `text`: http where no scheme is given, without the /v1 of OpenAI clients.

    Raises ConfigError for what is no address.
    """
    url = text.strip() if "://" in text else f"http://{text.strip()}"
    try:
        parts = urlsplit(url)
        is_address = bool(parts.hostname) and parts.port != 0  # .port raises for what is no number
    except ValueError:
        is_address = False
    if not is_address or parts.scheme not in ("http", "https") or parts.query or parts.fragment or " " in url:
        raise ConfigError(f"the cloud's address is {text!r}; expected http://host:port or https://host")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _parse(kind: type[Answer], body: bytes) -> Answer:
    try:
        return kind.model_validate_json(body)
    except ValidationError as e:
        raise CloudError(
            f"the cloud's answer is not a {kind.__name__}: {e.errors()[0]['msg']}; compare the versions"
        ) from e


def _lost(url: str, error: httpx.TransportError) -> EndpointLost:
    words = f"{url}: {type(error).__name__}: {error}" if str(error) else f"{url}: {type(error).__name__}"
    return EndpointLost(words, is_absent=isinstance(error, httpx.ConnectError | httpx.ConnectTimeout))


def refusal_error(url: str, error: ErrorBody, status: int) -> OutriderError:
    """The exception for an error that the server reported: whether trying again makes sense is in its type."""
    if error.code == "tokenizer_mismatch":
        return TokenizerMismatch(error.message)
    if status in _PASSING_STATUS:
        return EndpointLost(f"{url}: {error.code}: {error.message}")
    return RequestError(error.code, f"{error.message} (from {url})", status=status)
