"""Exchanges messages with one server over httpx: bounds on time and size, errors, and every byte counted.

Small messages on connections that stay open (asyncio sets TCP_NODELAY), and no header that HTTP does not need. Knows
HTTP and how a server reports an error, not what is asked.
"""

from __future__ import annotations

import asyncio
import copy
import ssl
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from http.cookiejar import DefaultCookiePolicy
from typing import Any, Final, Self
from urllib.parse import urlsplit
from urllib.request import getproxies

import httpx
from pydantic import BaseModel, ValidationError

from outrider.models.client.address import split_login, verifier_url
from outrider.models.client.certificate import ClientCertificate, system_tls
from outrider.models.client.errors import (
    EndpointLost,
    EndpointWrong,
    ProtocolBroken,
    lost,
    naming_a_wrong_proxy,
    refusal_error,
    retry_after_s,
    short,
    silent,
)
from outrider.models.client.exchange import Exchange, LeftSteps, chunks_of, close
from outrider.models.client.messages import ByteCounts
from outrider.models.errors import OutriderError, RequestError
from outrider.models.hosts import is_loopback
from outrider.models.wire.protocol import ErrorAnswer, ErrorBody, ReadyAnswer

Headers = list[tuple[str, str]]

MAX_ANSWER_BYTES: Final = 1 << 18
"""An answer with 256 results has half of it."""
MAX_ERROR_BYTES: Final = 1 << 16
"""No more is read of an error's body."""
PIECE_BYTES: Final = 1 << 14
"""Of a longer body that is written at a time: the bound on a write is one for each piece."""
LEAST_UP_BYTES_S: Final = 8 << 10
"""Longer bodies have the time that they take at this rate: an uplink may be as slow."""
CONNECT_GROWTH: Final = 2.0
"""A connection after one that was not made in time has so many times its time: two round trips of 2 s, as TLS 1.2 takes
them, need more than 2.5 s. More would be waited in vain where no server is.
"""
NUM_MISSED: Final = 3
"""Keep-alives in a row without which a server counts as stopped."""
MARGIN_S: Final = 1.0
"""For the network, beyond the last of them."""
KEEP_ALIVE_RANGE_S: Final = (0.1, 60.0)
"""Bounds on what a server says about its keep-alives: one that says "hourly" could not be noticed to stop."""


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Key, timeouts and connections of an endpoint.

    connect_timeout_s, write_timeout_s: for connecting at first, and for sending a piece of a request. keep_alive_s: a
    live server answers within three times this, or shows within that time that it is alive; for a stream, what its
    `open` says counts.
    stream_timeout_s: longest silence of a stream whose server does not say how often it writes (an older one).
    call_timeout_s: longest verification by a server that is alive. max_connections: one for the stream and one for its
    long request of drafts, the rest for single messages in flight. certificate: what the device shows to servers that
    ask for one.
    is_steady: opens sessions that are sent in frames at a fixed pace, and no others.
    no_store: asks servers to keep no text of a session, and to draft it from none that they kept.
    login: user:password of a proxy in front, where there is no key; the address may have it instead. vocab_size: of the
    target, where it is known: no other ids are taken. tls: settings of https; None: the system's, with the certificate.
    model: name of the model to ask for, such as an adapter's; None: the server's own.
    """

    api_key: str | None = field(default=None, repr=False)
    connect_timeout_s: float = 2.5
    write_timeout_s: float = 30.0
    keep_alive_s: float = 5.0
    stream_timeout_s: float = 120.0
    call_timeout_s: float = 600.0
    max_connections: int = 12
    certificate: ClientCertificate | None = None
    no_store: bool = False
    is_steady: bool = False
    login: str | None = field(default=None, repr=False)
    vocab_size: int | None = None
    tls: ssl.SSLContext | None = None
    model: str | None = None


class HttpEndpoint:
    """One server. Use as an async context manager, or call `aclose`; belongs to one event loop.

    No answer makes it wait or grow without bound.
    """

    def __init__(
        self,
        url: str,
        options: ClientOptions | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        options = options or ClientOptions()
        # Whatever shows or keeps the address has it without a password.
        self.url, login = split_login(verifier_url(url))
        self.is_local = is_loopback(urlsplit(self.url).hostname or "")
        self._options = options
        self._silence_s = longest_silence_s(options.keep_alive_s)
        self._connect_timeout_s = options.connect_timeout_s
        limits = httpx.Limits(
            max_connections=options.max_connections,
            max_keepalive_connections=options.max_connections,
            keepalive_expiry=60.0,
        )
        is_tls = transport is None and self.url.startswith("https:")
        with naming_a_wrong_proxy():
            self._http = httpx.AsyncClient(
                verify=(options.tls or system_tls(options.certificate)) if is_tls else True,
                limits=limits,
                transport=transport,
                trust_env=not self.is_local,
            )
        # A server could fill memory and every later request with cookies.
        self._http.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        # httpx adds Accept, Accept-Encoding, Connection and User-Agent to every message; drafts need none of them.
        for name in list(self._http.headers):
            del self._http.headers[name]
        self._login, self._has_key = login or options.login, bool(options.api_key)
        if self._has_key:
            self._http.headers["Authorization"] = f"Bearer {options.api_key}"
        elif self._login:
            self._http.headers["Authorization"] = f"Basic {b64encode(self._login.encode()).decode()}"
        self._owns_connections = True
        self._left = LeftSteps()
        self._is_traced = transport is None or isinstance(transport, httpx.AsyncHTTPTransport)
        self.wire = ByteCounts()
        """Bytes so far; take differences."""

    def for_one_text(self, *, no_store: bool = False, model: str | None = None) -> Self:
        """The same endpoint over the same connections, with bytes counted apart; closing it closes nothing.

        no_store, model: as in ClientOptions, for this text.
        """
        own = copy.copy(self)
        no_store, model = no_store or self._options.no_store, model or self._options.model
        own._options = replace(self._options, no_store=no_store, model=model)
        own._owns_connections = False
        own._connect_timeout_s = self._options.connect_timeout_s  # of failures in a row for this text
        own.wire = ByteCounts()
        return own

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes every connection; safe to call twice."""
        if self._owns_connections:
            await self._left.aclose()
            await self._http.aclose()

    async def _exchange(
        self,
        method: str,
        path: str,
        message: BaseModel | bytes | None = None,
        headers: Headers | None = None,
        limit_s: float | None = None,
        max_bytes: int = MAX_ANSWER_BYTES,
        passes: int | None = None,
    ) -> bytes:
        """The answer's body. limit_s: for the whole exchange, and for silence in it; None: as every answer.

        passes: a status that is no error here.
        """
        exchange = Exchange(self._left, is_traced=self._is_traced)
        request = self._build(method, path, exchange, message, headers, limit_s)
        async with self._deadline(limit_s or _limit_s(request)):
            return await exchange.run(self._answer(request, max_bytes, passes))

    async def _head(self, exchange: Exchange, request: httpx.Request) -> httpx.Response:
        """The head of an answer that reports no error; `exchange` has the body."""
        async with self._deadline(_limit_s(request)):
            response = await exchange.send(self._http, request)
        self._count(response)
        async with self._deadline(_limit_s(request)):
            await exchange.run(self._require_success(response))
        return response

    async def _answer(self, request: httpx.Request, max_bytes: int, passes: int | None) -> bytes:
        response = await self._http.send(request, stream=True)
        try:
            self._count(response)
            if response.status_code != passes:
                await self._require_success(response)
            return await self._read(response, max_bytes)
        finally:
            await close(response)

    @asynccontextmanager
    async def _deadline(self, limit_s: float | None) -> AsyncIterator[None]:
        """Turns failures of the transport, and its running out of time, into EndpointLost."""
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError:
            await self._close_idle()
            raise EndpointLost(f"{self.url}: no whole answer came within {limit_s or 0.0:.3g} s") from None
        except httpx.ReadTimeout as e:
            await self._close_idle()
            raise silent(self.url, self._silence_s) from e
        except (httpx.TransportError, ssl.SSLError) as e:
            if isinstance(e, httpx.ConnectTimeout):
                self._connect_timeout_s = CONNECT_GROWTH * self._options.connect_timeout_s
            elif isinstance(e, httpx.WriteTimeout):
                await self._close_idle()
            if await self._is_tls(e):
                found = f"{self.url}: what answers there speaks TLS"
                raise EndpointWrong(f"{found}; use https{self.url.removeprefix('http')}") from e
            raise lost(self.url, e) from e
        except AttributeError as e:
            # anyio asks a connection for its peer that was reset while it was being opened.
            if "getpeername" not in str(e):
                raise
            raise EndpointLost(f"{self.url}: the connection was reset") from e

    async def _close_idle(self) -> None:
        """Closes the connections that wait for a request. Where one is dead, as after a change of this device's
        network, all may be, and each would cost the longest silence.
        """
        pool = getattr(self._http._transport_for_url(httpx.URL(self.url)), "_pool", None)  # httpx has no call for it
        for connection in pool.connections if pool is not None else ():
            if connection.is_idle():
                await connection.aclose()

    async def _is_tls(self, error: httpx.TransportError | ssl.SSLError) -> bool:
        """Whether TLS answers at an http address that has never answered HTTP: asks, since a TLS server closes the
        connection of a plain client without a word, or with bytes that are none of HTTP.
        """
        parts = urlsplit(self.url)
        is_cut = isinstance(error, httpx.ReadError | httpx.RemoteProtocolError)
        if parts.scheme != "http" or self.wire.headers_down or not is_cut or getproxies().keys() & {"http", "all"}:
            return False
        context = ssl.create_default_context()  # a certificate that it refuses is TLS, too
        try:
            async with asyncio.timeout(self._options.connect_timeout_s):
                _, writer = await asyncio.open_connection(parts.hostname, parts.port or 80, ssl=context)
        except ssl.SSLCertVerificationError:
            return True
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

    async def _require_success(self, response: httpx.Response) -> None:
        """Raises the error that the answer reports, and ProtocolBroken for a redirect or a compressed body."""
        status = response.status_code
        if 300 <= status < 400:
            location = short(response.headers.get("location", "nowhere"))
            raise ProtocolBroken(self.url, f"it redirects to {location}", "give the verifier's own address")
        if (coding := response.headers.get("content-encoding", "identity")).lower() != "identity":
            raise ProtocolBroken(self.url, f"its answer is encoded as {short(coding)!r}; asked for was 'identity'")
        if status >= 400:
            body = await self._read(response, MAX_ERROR_BYTES, is_cut=True)
            raise self._refusal(status, body, response.headers)  # of no name: this frame is in its traceback

    async def _read(self, response: httpx.Response, max_bytes: int, *, is_cut: bool = False) -> bytes:
        """The body. is_cut: leaves out what is beyond `max_bytes`, which else raises ProtocolBroken."""
        body = bytearray()
        async with aclosing(chunks_of(response)) as chunks:
            async for chunk in chunks:
                self.wire.body_down += len(chunk)
                body += chunk
                if len(body) > max_bytes:
                    if not is_cut:
                        raise ProtocolBroken(self.url, f"its answer has more than {max_bytes} bytes")
                    break
        return bytes(body[:max_bytes])

    def _build(
        self,
        method: str,
        path: str,
        exchange: Exchange,
        message: BaseModel | bytes | AsyncIterator[bytes] | None = None,
        headers: Headers | None = None,
        silence_s: float | None = None,
    ) -> httpx.Request:
        content = message.model_dump_json(exclude_defaults=True).encode() if isinstance(message, BaseModel) else message
        body = content if isinstance(content, bytes) and len(content) > PIECE_BYTES else b""
        timeout = httpx.Timeout(
            (self._silence_s if silence_s is None else silence_s) + len(body) / LEAST_UP_BYTES_S,
            connect=self._connect_timeout_s,
            write=self._options.write_timeout_s,
        )
        extra: dict[str, Any] = {"timeout": timeout, "extensions": {"trace": exchange.trace}}
        request = self._http.build_request(method, self.url + path, content=content, headers=headers or (), **extra)
        if body:
            request.stream = _Pieces(body)
        self.wire.body_up += len(content) if isinstance(content, bytes) else 0  # pieces count as they go
        line = len(method) + len(request.url.raw_path) + len("  HTTP/1.1\r\n")
        self.wire.headers_up += line + _header_bytes(request.headers)
        return request

    def _count(self, response: httpx.Response) -> None:
        line = len(f"HTTP/1.1 {response.status_code} {response.reason_phrase}\r\n")
        self.wire.headers_down += line + _header_bytes(response.headers)
        self._connect_timeout_s = self._options.connect_timeout_s

    def _refusal(self, status: int, body: bytes, headers: httpx.Headers) -> OutriderError:
        error = _reported(status, body)
        if status == 401:
            # The server's words name an HTTP header; users of the agent set a variable.
            needed = "does not accept this API key: correct" if self._has_key else "requires an API key: set"
            words = f"The verifier at {self.url} {needed} OUTRIDER_API_KEY."
            if self._login and not self._has_key:
                words = (
                    f"{self.url} does not accept the user name and password of its address: correct them, or set a key "
                    "with OUTRIDER_API_KEY instead."
                )
            return RequestError(error.code, words, status=status)
        refusal = refusal_error(self.url, error, status)
        if isinstance(refusal, EndpointLost):
            refusal.retry_after_s = retry_after_s(headers.get("retry-after"))
        return refusal


_NOT_READY: Final = {"draining": "the server is shutting down", "failed": "the server's engine cannot work"}


def _reported(status: int, body: bytes) -> ErrorBody:
    """The error that an answer reports."""
    with suppress(ValidationError):
        return ErrorAnswer.model_validate_json(body).error
    with suppress(ValidationError):
        state = ReadyAnswer.model_validate_json(body).status
        if status == 503 and state in _NOT_READY:
            return ErrorBody(code=state, message=_NOT_READY[state])
    return ErrorBody(code="http_error", message=f"HTTP {status} that is not an Outrider answer")


class _Pieces(httpx.AsyncByteStream):
    """A long body, a piece at a time."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self._body), PIECE_BYTES):
            yield self._body[start : start + PIECE_BYTES]


def _limit_s(request: httpx.Request) -> float:
    """For an answer's head, whatever the server does, also where it sends a byte now and then."""
    bounds = request.extensions["timeout"]
    return float(bounds["connect"] + bounds["write"] + bounds["read"])


def _header_bytes(headers: httpx.Headers) -> int:
    return sum(len(name) + len(value) + len(": \r\n") for name, value in headers.raw) + len("\r\n")


def longest_silence_s(keep_alive_s: float) -> float:
    """How long a server that says that it writes every `keep_alive_s` may be silent before it counts as stopped."""
    least_s, most_s = KEEP_ALIVE_RANGE_S
    return NUM_MISSED * min(most_s, max(least_s, keep_alive_s)) + MARGIN_S
