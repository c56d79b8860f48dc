"""Decides who may call, and who owns a session: API keys, and what a browser says about the page that calls.

Only SHA-256 digests of keys are kept. Without keys the owner is the subject of the client's certificate where clients
show one, or else the client's address: then anybody may call who reaches the port, so `serve` refuses to listen beyond
loopback.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as AsgiScope

from outrider.models.errors import ConfigError, RequestError
from outrider.models.hosts import client_network, is_loopback
from outrider.models.http.errors import Throttled
from outrider.models.http.keys import KEY, ApiKey, Scope
from outrider.models.http.keys import KeyRing as KeyRing  # also for importers of this module
from outrider.models.http.limits import Pacer, RateLimiter
from outrider.models.wire.protocol import MAX_BODY_BYTES

OWNER: Final = "outrider.owner"
"""Key of the ASGI scope that holds the client's identity."""
SUBJECT: Final = "outrider.subject"
"""Key of the ASGI scope that holds the name on the client's verified certificate."""
METRICS_PATH: Final = "/metrics"

REQUESTS_PER_S: Final = 500.0
STRANGERS_PER_S: Final = 100.0
"""Of an address, where keys are needed and none is accepted: documents and refusals are all that these get."""
REQUESTS_BURST: Final = 16
REQUEST_WAIT_S: Final = 2.0
_LEAST_WAIT_S: Final = 1e-3
_PROBE_WAIT_S: Final = 0.5
"""Half of what Kubernetes' probes wait for an answer. All connections of an address together get 1,280 a second so."""

ANYBODY: Final = b""
"""The owner where neither a key nor an address is known."""

ANY_HOST: Final = "*"
"""In a list of allowed hosts: every name."""

WILDCARDS: Final = ("0.0.0.0", "::")
"""Addresses that stand for all of a machine's."""

JSON_MEDIA_TYPE: Final = b"application/json"
_LOOKED_AT: Final = frozenset(
    {b"authorization", b"content-length", b"content-type", b"host", b"origin", b"sec-fetch-site"}
)
_MAX_QUOTED_CHARS: Final = 100
_MAX_AUTHORITY_BYTES: Final = 300
"""No name of DNS with its port is longer."""
_AUTHORITY: Final = re.compile(rb"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:@/?#\\\s]+))(?::[0-9]*)?")
"""A name or an address, and a port: anything beside them, as in `[::1]evil.com`, makes it none."""


class PagePolicy:
    """Keeps pages in somebody's browser from calling: they cannot change `Host` and `Origin`.

    Without it any page could post to a server on its visitor's machine, or read from it under a name of its own that
    resolves to that machine (DNS rebinding). No CORS headers are sent.
    """

    def __init__(
        self, *, is_keyless: bool, allowed_hosts: Collection[str] = (), allowed_origins: Collection[str] = ()
    ) -> None:
        """allowed_hosts: names beside those of loopback; ANY_HOST for all. Where a key is needed and none is given,
        all: a page does not have the key. allowed_origins: beside the server's own and those of loopback. Raises
        ConfigError for what is no name and no origin.
        """
        for host in allowed_hosts:
            if "/" in host or host.count(":") == 1 or not host:
                raise ConfigError(f"an allowed host is {host!r}; expected a name or an address, without scheme or port")
        for origin in allowed_origins:
            scheme, _, authority = origin.rstrip("/").partition("://")
            if not (scheme and authority) or "/" in authority:
                raise ConfigError(f"an allowed origin is {origin!r}; expected one like https://chat.example.com")
        self._hosts = frozenset(host.lower().strip("[]") for host in allowed_hosts)
        self._checks_host = ANY_HOST not in self._hosts and (is_keyless or bool(self._hosts))
        self._origins = frozenset(map(plain_origin, allowed_origins))

    def require_host(self, host: bytes | None) -> None:
        """Raises RequestError 403 `host_not_allowed` if the request is for another server."""
        name = _name(host)
        if not self._checks_host or _is_loopback_name(name) or name in self._hosts:
            return
        shown = host[:_MAX_QUOTED_CHARS].decode("latin-1") if host else "missing"
        raise RequestError(
            "host_not_allowed",
            f"the request's Host is {shown}; expected localhost or a name that this server knows: start it with "
            "--allowed-host NAME",
            status=403,
        )

    def require_origin(self, origin: bytes | None, site: bytes | None, host: bytes | None, *, is_write: bool) -> None:
        """Raises RequestError 403 `origin_not_allowed` if a page of another site calls. site: Sec-Fetch-Site."""
        if origin is None:
            if site == b"cross-site" and is_write:
                raise _foreign_origin("another site")
            return
        origin = origin.lower()
        authority = origin.partition(b"://")[2]
        is_own = bool(authority) and host is not None and authority == host.lower()
        if not (is_own or origin.decode("latin-1") in self._origins or _is_loopback_name(_name(authority))):
            raise _foreign_origin(origin[:_MAX_QUOTED_CHARS].decode("latin-1"))


def plain_origin(origin: str) -> str:
    """An origin as browsers write it: in lower case, without a slash at its end and without its scheme's own port."""
    scheme, separator, authority = origin.lower().rstrip("/").partition("://")
    return f"{scheme}{separator}{authority.removesuffix({'http': ':80', 'https': ':443'}.get(scheme, ''))}"


def _foreign_origin(shown: str) -> RequestError:
    return RequestError(
        "origin_not_allowed",
        f"a page of {shown} calls this server; to allow that, start it with --allowed-origin ORIGIN",
        status=403,
    )


def _name(authority: bytes | None) -> str:
    """The host of `host:port`, lower case; empty if there is none."""
    return _name_of(authority) if authority and len(authority) <= _MAX_AUTHORITY_BYTES else ""


# Every request asks, nearly always with the same host.
@lru_cache(maxsize=1024)
def _name_of(authority: bytes) -> str:
    found = _AUTHORITY.fullmatch(authority)
    return (found[1] or found[2]).decode("latin-1").lower() if found else ""


@lru_cache(maxsize=1024)
def _is_loopback_name(name: str) -> bool:
    """Whether it is a loopback address, localhost, or a name below it (RFC 6761, section 6.3)."""
    return is_loopback(name) or name.endswith(".localhost")


def address_of(scope: AsgiScope) -> bytes:
    """The client's address, or its network; ANYBODY where none is known."""
    return client_network(scope["client"][0]).encode() if scope.get("client") else ANYBODY


def _owner(scope: AsgiScope, key: ApiKey | None) -> bytes:
    if key is not None:
        return key.digest
    return scope[SUBJECT].owner if scope.get(SUBJECT) else address_of(scope)


@dataclass(frozen=True, slots=True)
class GateSettings:
    """Whom a server lets in, and how much of each.

    keys: the API keys. max_body_bytes: of one request. rate_per_s: requests that start work, per second and key; 0 is
    no limit. pages: which names and pages may call; None: PagePolicy's defaults.
    """

    keys: KeyRing = field(default_factory=KeyRing)
    max_body_bytes: int = MAX_BODY_BYTES
    rate_per_s: float = 0.0
    pages: PagePolicy | None = None


@dataclass(frozen=True, slots=True)
class GatePaths:
    """open: need no key. probes: neither a key nor a name that is allowed. costly: their POSTs count against the rate,
    and must be JSON.
    """

    open: frozenset[str] = frozenset()
    probes: frozenset[str] = frozenset()
    costly: frozenset[str] = frozenset()


class Gate:
    """ASGI layer that lets requests in. It checks, in this order: the client's pace, the body's size, `Host`, `Origin`,
    the key and its scope, the media type, the rate. Raises RequestError.

    Requests of one client wait for each other, by `Pacer`. A client is a key that is accepted, a certificate, or else
    an address: the keyed clients of one proxy are apart from each other and from whoever sends no key through it.
    Probes have a turn of their own, and are never refused.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: GateSettings,
        paths: GatePaths,
        *,
        media_types: Sequence[bytes] = (),
        is_paced: bool = True,
        on_admitted: Callable[[AsgiScope], None] = lambda scope: None,
    ) -> None:
        """media_types: all POSTs must be one of these; without any, those of paths that are not costly are left to the
        router, which knows that there is no such route. is_paced: False where requests are spaced elsewhere.
        on_admitted: called with the scope of a request that is let in.
        """
        self._app = app
        self._keys = settings.keys
        self._pages = settings.pages or PagePolicy(is_keyless=not len(settings.keys))
        self._limiter = RateLimiter(settings.rate_per_s)
        self._max_body_bytes = settings.max_body_bytes
        self._paths = paths
        self._media_types = tuple(media_types)
        self._is_paced = is_paced
        self._on_admitted = on_admitted
        self._requests = Pacer(REQUESTS_PER_S, REQUESTS_BURST)
        self._strangers = Pacer(STRANGERS_PER_S, REQUESTS_BURST)
        self._probes = Pacer(REQUESTS_PER_S, REQUESTS_BURST)

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http":
            headers: dict[bytes, bytes] = {}
            for name, value in scope["headers"]:
                if name in _LOOKED_AT:
                    headers.setdefault(name, value)
            is_probe = scope["path"] in self._paths.probes
            if self._is_paced and (wait_s := self._wait_s(scope, headers, is_probe=is_probe)) > _LEAST_WAIT_S:
                await asyncio.sleep(wait_s)
            if scope["method"] not in ("GET", "HEAD", "DELETE"):
                receive = self._bounded(receive, headers)
            if not is_probe:
                self._check(scope, headers)
            self._on_admitted(scope)
        await self._app(scope, receive, send)

    def _wait_s(self, scope: AsgiScope, headers: dict[bytes, bytes], *, is_probe: bool) -> float:
        """How long the request waits for others of its client. Raises RequestError 429 `rate_limited` where more wait
        than are answered in two seconds.
        """
        if is_probe:
            found = self._probes.wait_s(address_of(scope), _PROBE_WAIT_S)
            return _PROBE_WAIT_S if found is None else found
        try:
            owner = _owner(scope, self._keys.find(headers.get(b"authorization")))
            found = self._requests.wait_s(owner, REQUEST_WAIT_S)
        except RequestError:  # no key that is accepted
            found = self._strangers.wait_s(address_of(scope), REQUEST_WAIT_S)
        if found is None:
            raise Throttled("rate_limited", "too many requests per second; retry later", retry_after_s=2)
        return found

    def _bounded(self, receive: Receive, headers: dict[bytes, bytes]) -> Receive:
        """Gives the body while it is not too large. Raises RequestError 413 for one that is announced as that."""
        max_bytes, num_bytes = self._max_body_bytes, 0
        if int(headers.get(b"content-length", b"0")) > max_bytes:
            raise body_too_large(max_bytes)

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > max_bytes:
                raise body_too_large(max_bytes)
            return message

        return counted

    def _check(self, scope: AsgiScope, headers: dict[bytes, bytes]) -> None:
        """Finds the owner. Raises RequestError for one who may not call."""
        method, path, host = scope["method"], scope["path"], headers.get(b"host")
        self._pages.require_host(host)
        if b"origin" in headers or b"sec-fetch-site" in headers:
            is_write = method not in ("GET", "HEAD")
            self._pages.require_origin(headers.get(b"origin"), headers.get(b"sec-fetch-site"), host, is_write=is_write)
        if path in self._paths.open:
            return
        key = self._keys.find(headers.get(b"authorization"))
        if key is not None:
            scope[KEY] = key
            key.require(Scope.METRICS if path == METRICS_PATH else Scope.GENERATE)
        owner = scope[OWNER] = _owner(scope, key)
        if method == "POST":
            is_costly = path in self._paths.costly
            if is_costly or self._media_types:
                _require_media_type(headers.get(b"content-type"), self._media_types or (JSON_MEDIA_TYPE,))
            if is_costly:
                self._limiter.admit(owner, None if key is None else key.requests_per_second)


def body_too_large(max_bytes: int) -> RequestError:
    """The error 413 of a body over `max_bytes`."""
    return RequestError("body_too_large", f"the body is larger than {max_bytes} bytes; send less at a time", status=413)


def media_type_of(content_type: bytes | None) -> bytes:
    """A Content-Type without its parameters, in lower case; empty if there is none."""
    return (content_type or b"").partition(b";")[0].strip().lower()


def _require_media_type(content_type: bytes | None, expected: Sequence[bytes]) -> None:
    """Raises RequestError 415 `unsupported_media_type` for a body that is announced as something else.

    A page may post text to any server; for JSON, or a type that forms do not have, its browser asks the server first.
    """
    if content_type in expected:
        return
    media_type = media_type_of(content_type)
    if media_type not in expected:
        shown = media_type[:_MAX_QUOTED_CHARS].decode("latin-1") or "missing"
        raise RequestError(
            "unsupported_media_type",
            f"the request's Content-Type is {shown}; send `Content-Type: {expected[0].decode()}`",
            status=415,
        )


def page_policy(
    host: str, address: str, allowed_hosts: Collection[str], allowed_origins: Collection[str], *, is_keyless: bool
) -> PagePolicy:
    """The policy of a server that listens on `host`, which stands for `address`; the URL that it prints has that."""
    hosts = set(allowed_hosts)
    if is_keyless and address not in WILDCARDS:
        hosts |= {host, address}
    elif is_keyless and not hosts:
        hosts.add(ANY_HOST)  # the names of all its addresses are not known
    return PagePolicy(is_keyless=is_keyless, allowed_hosts=hosts, allowed_origins=allowed_origins)


def require_safe_host(host: str, keys: KeyRing, *, is_insecure_allowed: bool) -> None:
    """Raises ConfigError if other machines can reach `host` and neither a key nor a certificate is required."""
    if len(keys) or is_insecure_allowed or is_loopback(host):
        return
    raise ConfigError(
        f"refusing to listen on {host} without API keys: anybody who reaches this port could use the model. Give "
        f"--api-key-file or --tls-client-ca, or --insecure-no-keys to allow it"
    )
