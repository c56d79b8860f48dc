"""Checks a verifier's address. Imports no HTTP library, so that a configuration is read without one."""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit

from outrider.models.errors import ConfigError


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


def without_password(url: str) -> str:
    """The address for people: a user name and password in it become `***`."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return url.rpartition("@")[2]
    if "@" not in parts.netloc:
        return url
    return urlunsplit(parts._replace(netloc="***@" + parts.netloc.rpartition("@")[2]))
