"""Connects to the upstream verifier. Knows no mid-size model."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from outrider.models.client.address import split_login, verifier_url
from outrider.models.client.client import ClientOptions, VerifierClient
from outrider.models.errors import ConfigError
from outrider.models.hosts import is_loopback

MAX_STREAMS: Final = 4096
"""Open sessions; the engine lets fewer in."""
MAX_POSTS: Final = 64
"""Connections for drafts."""
_CONNECT_S: Final = 5.0


def upstream_url(text: str) -> str:
    """The base URL for `text`: http where no scheme is given. Raises ConfigError for what is no address."""
    url = verifier_url(text, "the address of --upstream")
    if split_login(url)[1] is not None:
        raise ConfigError("--upstream has a password in it; give the key by OUTRIDER_UPSTREAM_KEY")
    return url


@dataclass(frozen=True, slots=True)
class UpstreamClient:
    """Clients of one upstream verifier, for one event loop: with connections of their own, so that texts that wait for
    a slow upstream hold no draft back.
    """

    streams: VerifierClient
    posts: VerifierClient

    @classmethod
    def to(cls, url: str, key: str | None = None, vocab_size: int | None = None) -> UpstreamClient:
        """vocab_size: of the target, where it is known. Raises ConfigError."""
        url = upstream_url(url)
        parts = urlsplit(url)
        if key and parts.scheme == "http" and not is_loopback(parts.hostname or ""):
            raise ConfigError("the upstream key would cross the network in clear; give --upstream an https address")

        def made(max_connections: int, write_s: float, keep_alive_s: float) -> VerifierClient:
            options = ClientOptions(
                api_key=key,
                connect_timeout_s=_CONNECT_S,
                write_timeout_s=write_s,
                keep_alive_s=keep_alive_s,
                max_connections=max_connections,
                no_store=True,  # what upstream keeps is found by its key alone: that is this server's, not a client's
                vocab_size=vocab_size,
                tls=ssl.create_default_context() if parts.scheme == "https" else None,
            )
            return VerifierClient(url, options)

        # Drafts are given up after 11 s: a text has few posts at a time, and the next one repeats what was lost.
        return cls(made(MAX_STREAMS, 30.0, 5.0), made(MAX_POSTS, 2.0, 1.0))

    async def aclose(self) -> None:
        """Closes every connection."""
        await self.streams.aclose()
        await self.posts.aclose()
