"""Checks a verifier's address. Imports no HTTP library, so that a configuration is read without one."""

from __future__ import annotations

from typing import Final
from urllib.parse import unquote, urlsplit, urlunsplit

from outrider.models.errors import ConfigError

_PORTS: Final = {"http": ":80", "https": ":443"}
"""Which scheme needs no such port in its addresses."""


def verifier_url(text: str, what: str = "the cloud's address") -> str:
    """The base URL for `text`: http where no scheme is given, without the /v1 of OpenAI clients.

    Scheme and host are in lower case and the scheme's own port is left out, so that one server has one address: its
    key, its certificate and what it once sent are found by it. Raises ConfigError for what is no address, called
    `what` there.
    """
    url = text.strip() if "://" in text else f"http://{text.strip()}"
    try:
        parts = urlsplit(url)
        is_address = bool(parts.hostname) and parts.port != 0  # .port raises for what is no number
    except ValueError:
        is_address = False
    is_plain = is_address and not parts.query and not parts.fragment and "@" not in parts.path
    if not is_plain or parts.scheme not in _PORTS or " " in url:
        raise ConfigError(f"{what} is {without_password(text)!r}; expected http://host:port or https://host")
    login, at, host = parts.netloc.rpartition("@")
    netloc = login + at + host.lower().removesuffix(_PORTS[parts.scheme])
    return urlunsplit((parts.scheme, netloc, parts.path.rstrip("/").removesuffix("/v1").rstrip("/"), "", ""))


def split_login(url: str) -> tuple[str, str | None]:
    """A `verifier_url` without its user name and password, and these as user:password; None where it has none."""
    parts = urlsplit(url)
    login, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, None
    user, _, password = login.partition(":")
    return urlunsplit(parts._replace(netloc=host)), f"{unquote(user)}:{unquote(password)}"


def without_password(url: str) -> str:
    """The address for people: a user name and password in it become `***`, also where it is no valid address."""
    before, at, rest = url.rpartition("@")
    scheme, has_scheme, _ = before.partition("://")
    return f"{scheme}://***@{rest}" if at and has_scheme else f"***@{rest}" if at else url
