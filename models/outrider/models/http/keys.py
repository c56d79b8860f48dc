"""Holds the API keys that a server accepts: digests, names, scopes and limits.

A key file has one key per line: a digest with attributes, as `outrider-cloud keys add` writes it, or the key itself.

    sha256:9f86d081884c7d65... name=alice scopes=generate,metrics requests-per-second=5 sessions=16
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from outrider.models.errors import ConfigError, RequestError
from outrider.models.wire.fields import MAX_PRIORITY

KEYS_VARIABLE: Final = "OUTRIDER_API_KEYS"
MIN_KEY_CHARS: Final = 16
DIGEST_PREFIX: Final = "sha256:"
KEY: Final = "outrider.key"
"""Key of the ASGI scope that holds the caller's `ApiKey`, where keys are required."""
_DIGEST: Final = re.compile("[0-9A-Fa-f]{64}")
_PLAIN: Final = re.compile(r"(?!(?i:sha)-?\d+:)[^\s=]+=*")
"""Base64 may end in `=`; `=` before the end makes an attribute, `sha265:` a digest that was mistyped."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


class Scope(StrEnum):
    """What a key allows: generating text (every route but /metrics), or reading /metrics."""

    GENERATE = "generate"
    METRICS = "metrics"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key without the key. digest: its SHA-256, which is also the owner.

    requests_per_second, sessions, tokens_per_minute: None takes the server's. priority: of its requests, at most.
    """

    digest: bytes
    name: str
    scopes: frozenset[Scope] = frozenset(Scope)
    requests_per_second: float | None = None
    sessions: int | None = None
    tokens_per_minute: int | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"a key's name is {self.name[:80]!r}; expected 1 to 64 letters, digits, '.', '_', '@' and '-'"
            )
        if not self.scopes:
            raise ConfigError(f"the key {self.name} has no scope; expected one or more of {', '.join(Scope)}")
        for what in ("requests_per_second", "sessions", "tokens_per_minute"):
            value = getattr(self, what)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{_shown(what)} of the key {self.name} is {value}; expected more than 0")
        if abs(self.priority) > MAX_PRIORITY:
            raise ConfigError(
                f"priority of the key {self.name} is {self.priority}; expected {-MAX_PRIORITY} to {MAX_PRIORITY}"
            )

    @classmethod
    def plain(cls, key: str) -> ApiKey:
        """A key that is given itself, with every scope and no limits of its own.

        Raises ConfigError for a short one, and for what looks like prose, attributes or a digest.
        """
        if not _PLAIN.fullmatch(key):
            raise ConfigError(f"neither a key nor `{DIGEST_PREFIX}...`; comments begin with #")
        if len(key) < MIN_KEY_CHARS:
            raise ConfigError(f"an API key has {len(key)} characters; expected {MIN_KEY_CHARS} or more")
        digest = hashlib.sha256(key.encode()).digest()
        return cls(digest, f"key-{digest.hex()[:8]}")

    @classmethod
    def parse(cls, line: str) -> ApiKey:
        """A line of a key file. Raises ConfigError, which never quotes it: a plain line is the key itself."""
        if not line.startswith(DIGEST_PREFIX):
            return cls.plain(line)
        digest, *attributes = line.split()
        spelled = digest.removeprefix(DIGEST_PREFIX)
        if not _DIGEST.fullmatch(spelled):
            raise ConfigError(f"a digest has {len(spelled)} characters; expected 64 hex digits")
        values: dict[str, Any] = {"digest": bytes.fromhex(spelled)}
        for attribute in attributes:
            name, is_given, value = attribute.partition("=")
            read = _READ.get(name)
            if read is None or not is_given or name.replace("-", "_") in values:
                raise ConfigError(f"an attribute is {attribute[:80]!r}; expected NAME=VALUE, once each of {_KNOWN}")
            try:
                values[name.replace("-", "_")] = read(value)
            except ValueError:
                raise ConfigError(f"{name} is {value[:80]!r}; expected {_EXPECTED[name]}") from None
        values.setdefault("name", f"key-{values['digest'].hex()[:8]}")
        values.setdefault("scopes", frozenset({Scope.GENERATE}))
        return cls(**values)

    def as_line(self) -> str:
        """The line of a key file."""
        parts = [DIGEST_PREFIX + self.digest.hex(), f"name={self.name}", f"scopes={','.join(sorted(self.scopes))}"]
        for each in fields(self)[3:]:
            if value := getattr(self, each.name):
                parts.append(
                    f"{_shown(each.name)}={value:g}" if isinstance(value, float) else f"{_shown(each.name)}={value}"
                )
        return " ".join(parts)

    def require(self, scope: Scope) -> None:
        """Raises RequestError 403 `scope_missing`."""
        if scope not in self.scopes:
            held = ", ".join(sorted(self.scopes))
            raise RequestError(
                "scope_missing",
                f"this API key has the scope {held}; the route needs {scope}: use another key",
                status=403,
            )


@dataclass(frozen=True, slots=True)
class ForwardedKey(ApiKey):
    """A caller whom the server in front has checked. is_known: it has a key, whose name and limits these are.

    network, subject: the client's, as the server in front found them.
    """

    is_known: bool = False
    network: str | None = None
    subject: str | None = None


def _shown(field: str) -> str:
    return field.replace("_", "-")


_READ: Final[dict[str, Callable[[str], Any]]] = {
    "name": str,
    "scopes": lambda text: frozenset(map(Scope, text.split(","))),
    "requests-per-second": float,
    "sessions": int,
    "tokens-per-minute": int,
    "priority": int,
}
_KNOWN: Final = ", ".join(_READ)
_EXPECTED: Final = dict.fromkeys(_READ, "a whole number") | {
    "scopes": f"one or more of {','.join(Scope)}, separated by commas",
    "requests-per-second": "a number",
}


def read_key_lines(path: Path) -> list[ApiKey]:
    """The keys of a file; blank lines and lines that begin with # are skipped.

    Raises ConfigError, with the line's number, for a file that has none, has one twice, or cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key file {path} cannot be read: {error}") from None
    keys: list[ApiKey] = []
    seen: dict[str | bytes, ApiKey] = {}
    for number, line in enumerate(map(str.strip, lines), start=1):
        if line and not line.startswith("#"):
            try:
                key = ApiKey.parse(line)
                if any(seen.setdefault(each, key) != key for each in (key.name, key.digest)):
                    raise ConfigError(f"{key.name} has the name or the digest of an earlier line; expected others")
            except ConfigError as error:
                raise ConfigError(f"the key file {path}, line {number}: {error}") from None
            keys.append(key)
    return keys


class KeyRing:
    """The accepted keys; without any, no key is required. Any thread may call it."""

    def __init__(self, keys: Iterable[str | ApiKey] = ()) -> None:
        self.path: Path | None = None
        """The key file, if there is one."""
        self._fixed = [ApiKey.plain(key) if isinstance(key, str) else key for key in keys]
        self._by_digest = {key.digest: key for key in self._fixed}

    @classmethod
    def load(cls, path: Path | None) -> KeyRing:
        """Keys from the file `path`, and from the environment variable OUTRIDER_API_KEYS, separated by commas.

        Raises ConfigError if the file has none or cannot be read, or for what is no key in the variable.
        """
        keys = [key.strip() for key in os.environ.get(KEYS_VARIABLE, "").split(",") if key.strip()]
        try:
            ring = cls(keys)
        except ConfigError as error:
            raise ConfigError(f"{KEYS_VARIABLE}: {error}") from None
        ring.path = path
        ring.reload()
        return ring

    def reload(self) -> Collection[bytes]:
        """Reads the file again; returns owners that may no longer generate. Raises ConfigError and keeps the keys."""
        if self.path is None:
            return ()
        from_file = read_key_lines(self.path)
        if not from_file:
            raise ConfigError(f"the key file {self.path} has no key; write one per line")
        before = self._by_digest
        self._by_digest = {key.digest: key for key in (*self._fixed, *from_file)}
        return [digest for digest in before if not self.may_generate(digest)]

    def __len__(self) -> int:
        return len(self._by_digest)

    def of_owner(self, owner: bytes) -> ApiKey | None:
        """The key of an owner; None where there is none (any more)."""
        return self._by_digest.get(owner)

    def may_generate(self, owner: bytes) -> bool:
        """Whether work of this owner may go on: its key is there and has the scope, or no keys are required."""
        key = self._by_digest.get(owner)
        return not self._by_digest or (key is not None and Scope.GENERATE in key.scopes)

    def sessions_of(self, owner: bytes) -> int | None:
        """The owner's own limit of open sequences, if it has one."""
        key = self.of_owner(owner)
        return None if key is None else key.sessions

    def find(self, authorization: bytes | None) -> ApiKey | None:
        """The key of the Authorization header's bytes; None without keys. Raises RequestError 401 `unauthorized`.

        Digests are looked up, not keys: how long that takes says nothing about a key.
        """
        if not self._by_digest:
            return None
        scheme, _, key = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not key:
            raise RequestError(
                "unauthorized", "an API key is required: send the header `Authorization: Bearer <key>`", status=401
            )
        found = self._by_digest.get(hashlib.sha256(key.strip()).digest())
        if found is None:
            raise RequestError("unauthorized", "this API key is not accepted", status=401)
        return found


def key_is_removed() -> RequestError:
    """The error 401 of work whose key was removed while it ran."""
    return RequestError("unauthorized", "this API key was removed, or may no longer generate", status=401)
