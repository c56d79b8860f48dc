"""API keys: who may call, and which session belongs to whom.

Only SHA-256 digests are kept. Comparison takes the same time whichever key matches, and whether one does. Without keys
everybody is one owner, which is why `serve` then refuses to listen beyond loopback.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.models.errors import ConfigError, RequestError
from outrider.models.http.limits import RateLimiter

KEYS_VARIABLE: Final = "OUTRIDER_API_KEYS"
MIN_KEY_CHARS: Final = 16
OWNER: Final = "outrider.owner"
"""Key of the ASGI scope under which the caller's identity travels."""

ANYBODY: Final = b""
_HEALTH_PATHS: Final = frozenset({"/health/live", "/health/ready", "/health", "/healthz", "/livez", "/readyz"})
_OPEN_PATHS: Final = _HEALTH_PATHS | {"/openapi.json", "/docs"}
_COSTLY_PATHS: Final = frozenset({"/v1/sessions", "/v1/verify", "/v1/completions", "/v1/chat/completions"})


class KeyRing:
    """The keys that are let in; none means that no key is asked for."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests: list[bytes] = []
        for key in keys:
            if len(key) < MIN_KEY_CHARS:
                raise ConfigError(f"an API key has {len(key)} characters; expected {MIN_KEY_CHARS} or more")
            self._digests.append(hashlib.sha256(key.encode()).digest())

    @classmethod
    def load(cls, path: Path | None) -> KeyRing:
        """Keys from `path`, one a line (blank lines and lines that begin with # are skipped), and from the environment
        variable OUTRIDER_API_KEYS, separated by commas. Raises ConfigError if the file has none or cannot be read.
        """
        keys = [key.strip() for key in os.environ.get(KEYS_VARIABLE, "").split(",") if key.strip()]
        if path is not None:
            try:
                lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"the key file {path} cannot be read: {error}") from None
            from_file = [line for line in lines if line and not line.startswith("#")]
            if not from_file:
                raise ConfigError(f"the key file {path} has no key; write one a line")
            keys += from_file
        return cls(keys)

    def __len__(self) -> int:
        return len(self._digests)

    def owner(self, authorization: bytes | None) -> bytes:
        """Who calls, from the Authorization header's bytes. Raises RequestError 401 `unauthorized`."""
        if not self._digests:
            return ANYBODY
        scheme, _, key = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not key:
            raise RequestError(
                "unauthorized", "an API key is needed: send the header `Authorization: Bearer <key>`", status=401
            )
        digest = hashlib.sha256(key.strip()).digest()
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(known, digest)
        if not found:
            raise RequestError("unauthorized", "this API key is not known here", status=401)
        return digest


class Gate:
    """ASGI layer that identifies the caller, and holds back one who calls too often.

    Drafts are not counted against the rate: they belong to a session, and sessions are counted and bounded.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, limiter: RateLimiter) -> None:
        self._app = app
        self._keys = keys
        self._limiter = limiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http":
            path = scope["path"]
            if path not in _OPEN_PATHS:
                owner = self._keys.owner(_header(scope, b"authorization"))
                scope[OWNER] = owner
                if path in _COSTLY_PATHS and scope["method"] == "POST":
                    self._limiter.spend(owner)
        await self._app(scope, receive, send)


def _header(scope: Scope, wanted: bytes) -> bytes | None:
    for name, value in scope["headers"]:
        if name == wanted:
            found: bytes = value
            return found
    return None


def require_safe_host(host: str, keys: KeyRing, *, is_insecure_allowed: bool) -> None:
    """Raises ConfigError if `host` can be reached from elsewhere while nobody needs a key."""
    if len(keys) or is_insecure_allowed or is_loopback(host):
        return
    raise ConfigError(
        f"refusing to listen on {host} without API keys: anybody who reaches this port could use the model. Give "
        f"--api-key-file (or {KEYS_VARIABLE}), listen on 127.0.0.1, or insist with --insecure-no-keys"
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`; a name other than localhost counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
