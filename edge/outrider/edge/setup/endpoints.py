"""Reads the `[[endpoint]]` tables and key files: a cloud's address, its name and its key. Writes private files."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from outrider.edge.setup.config_file import ENDPOINT, ConfigFile, described
from outrider.models.cache_folder import expanded
from outrider.models.client.address import split_login, verifier_url, without_password
from outrider.models.client.certificate import ClientCertificate
from outrider.models.errors import ConfigError
from outrider.models.hosts import is_loopback

MAX_BYTES: Final = 4096


class SeveralLines(ConfigError):
    """The file does not hold one line: it may be a list of keys."""


def read_key_file(path: Path, *, is_posix: bool = os.name == "posix") -> str:
    """The key: the file's one line, without spaces around it.

    Raises ConfigError, which never holds the key: the file is missing or not one line, or, on POSIX systems, belongs to
    another user or can be read by others. Windows' access lists are not checked.
    """
    try:
        with path.open("rb") as file:
            # Of the open file: another one could take its name meanwhile.
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"the key file {path} is not a regular file; name a file that holds one key")
            if is_posix:
                _require_private(path, found)
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the key file {path} cannot be read: {error.strerror}; name another in key_file") from None
    lines = [line.strip() for line in data.splitlines() if line.strip()]
    if len(data) > MAX_BYTES or len(lines) != 1:
        raise SeveralLines(
            f"the key file {path} holds {len(lines) if len(data) <= MAX_BYTES else 'too many'} lines; expected one "
            "line with the key"
        )
    if not all(0x21 <= byte <= 0x7E for byte in lines[0]):
        raise ConfigError(f"the key in {path} has spaces or characters beyond ASCII; expected the key alone")
    return lines[0].decode("ascii")


def require_private(path: Path, *, is_posix: bool = os.name == "posix") -> None:
    """Raises ConfigError where other users can read the file. One that cannot be looked at is left to its reader."""
    with suppress(OSError):
        found = path.stat()
        if is_posix and stat.S_ISREG(found.st_mode):  # the shell's own pipes are private
            _require_private(path, found)


def _require_private(path: Path, found: os.stat_result) -> None:
    if found.st_mode & 0o077:
        raise ConfigError(
            f"the key file {path} can be read or written by other users (mode {stat.S_IMODE(found.st_mode):04o}); "
            f"expected 0600: run `chmod 600 {path}`"
        )
    if found.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"the key file {path} belongs to another user (uid {found.st_uid}); expected a file of yours")


def write_private(path: Path, content: bytes) -> None:
    """Writes a file for its owner's eyes only. What was there before stays until all is written. Raises OSError."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


class Endpoint(BaseModel):
    """One cloud. key_file: holds its key, which goes to no other address. allow_http: send it without encryption."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)

    url: str
    name: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    key_file: Annotated[str, Field(min_length=1)] | None = None
    allow_http: bool = False

    @field_validator("url")
    @classmethod
    def _is_address(cls, url: str) -> str:
        try:
            return verifier_url(url)
        except ConfigError:
            raise ValueError(
                f"is {without_password(url)!r}; expected an address such as https://cloud.example.com"
            ) from None

    @model_validator(mode="after")
    def _keeps_its_key(self) -> Endpoint:
        if self.key_file is not None and not self.allow_http and is_plain_http(self.url):
            raise ValueError(
                f"would send its key without encryption to {without_password(self.url)}; expected https, or "
                "allow_http = true"
            )
        return self


def is_plain_http(url: str) -> bool:
    """Whether a key sent there can be read on the network."""
    parts = urlsplit(url)
    return parts.scheme == "http" and not is_loopback(parts.hostname or "")


def read_endpoints(config: ConfigFile) -> tuple[Endpoint, ...]:
    """The file's endpoints, in its order. Raises ConfigError naming the line of the first mistake."""
    found = config.document.get(ENDPOINT, [])
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise config.error((ENDPOINT,), f"is {described(found)}; expected tables, each begun by [[{ENDPOINT}]]")
    endpoints = tuple(_read(config, index, raw) for index, raw in enumerate(found))
    for name in ("url", "name"):
        seen: dict[str, int] = {}
        for index, endpoint in enumerate(endpoints):
            value = getattr(endpoint, name)
            if value is not None and seen.setdefault(value, index) != index:
                raise config.error(
                    (ENDPOINT, index, name), f"is that of endpoint[{seen[value]}] too; expected another {name}"
                )
    return endpoints


def _read(config: ConfigFile, index: int, raw: dict[str, Any]) -> Endpoint:
    try:
        endpoint = Endpoint.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = (ENDPOINT, index, *first["loc"])
        if first["type"] == "extra_forbidden":
            known = ", ".join(Endpoint.model_fields)
            raise config.error(where, f"is no key of an endpoint; expected one of {known}") from None
        if first["type"] == "missing":
            raise config.error((ENDPOINT, index), f"has no {first['loc'][0]}; expected one of each endpoint") from None
        problem = str(first["ctx"]["error"]) if "error" in first.get("ctx", {}) else None
        raise config.error(where, problem or f"does not fit: {first['msg']}") from None
    if endpoint.key_file is None:
        return endpoint
    return endpoint.model_copy(update={"key_file": str(beside(config.path, endpoint.key_file))})


def beside(config: Path, name: str) -> Path:
    """A path of the configuration: `~` is the home directory, a relative path begins beside the file."""
    return config.parent / expanded(name)


@dataclass(frozen=True, slots=True)
class Keys:
    """Which key goes to which address. general: from --api-key, OUTRIDER_API_KEY or key_file.

    is_asked: the general key comes from a flag or the environment, so it is meant for the one address in use.
    is_http_allowed: it may go over http:// beyond this machine (--allow-http). certificate: shown to every server that
    asks for one; it is no secret.
    """

    general: str | None = None
    is_asked: bool = False
    endpoints: tuple[Endpoint, ...] = ()
    is_http_allowed: bool = False
    certificate: ClientCertificate | None = None

    def for_url(self, url: str, urls: Sequence[str]) -> str | None:
        """The key to send to `url`. Raises as `key_of`, and ConfigError where the key would go without encryption."""
        key = self.key_of(url, urls)
        address, login = split_login(verifier_url(url))
        if (key or login) and is_plain_http(address) and not self.allows_http(url):
            raise ConfigError(
                f"the {'key' if key else 'password'} would go to {address} without encryption, where everyone on the "
                "way can read it; use https, or allow it with --allow-http"
            )
        return key

    def key_of(self, url: str, urls: Sequence[str]) -> str | None:
        """The key for `url`, one of `urls` in use; None: none.

        An endpoint's own key goes nowhere else, and several configured endpoints never get the general key. Raises
        ConfigError for a key file that cannot be used, and for a key beside a password in the address: a request has
        one of them.
        """
        key, own = self.general, self.endpoint_of(url)
        is_meant = key is not None and self.is_asked and len(urls) == 1
        if own is not None and own.key_file is not None and not is_meant:
            key = read_key_file(Path(own.key_file))
        elif own is not None and len(self.endpoints) > 1 and not is_meant:
            key = None
        if key is not None and split_login(verifier_url(url))[1] is not None:
            raise ConfigError(
                f"the address {without_password(url)} has a user name and password, and there is a key for it; leave "
                "one of them out"
            )
        return key

    def allows_http(self, url: str) -> bool:
        """Whether a key may go to this address without encryption."""
        own = self.endpoint_of(url)
        return self.is_http_allowed or (own is not None and own.allow_http)

    def endpoint_of(self, url: str) -> Endpoint | None:
        """The configured endpoint of an address."""
        return next((each for each in self.endpoints if each.url == verifier_url(url)), None)
