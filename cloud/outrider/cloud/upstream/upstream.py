"""Connects to the upstream verifier, describes it to the texts of a cascade, and words their requests for it."""

from __future__ import annotations

import hmac
import ssl
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from outrider.cloud.seam import GenerateRequest
from outrider.models.client.address import split_login, verifier_url
from outrider.models.client.client import ClientOptions, VerifierClient
from outrider.models.errors import ConfigError
from outrider.models.hosts import is_loopback
from outrider.models.processors.options import fields_of
from outrider.models.wire.protocol import ModelFacts, SessionRequest
from outrider.models.wire.verify import VerifyItem

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


@dataclass(frozen=True, slots=True)
class UpstreamRetry:
    """When a text is given up: after so many failures without a commit between them that went on for so long."""

    max_failures: int = 6
    max_outage_s: float = 20.0
    first_pause_s: float = 0.05
    max_pause_s: float = 2.0


@dataclass(slots=True)
class CascadeCounts:
    """Counts of all texts. provisional: tokens that the mid-size verifier committed first; confirmed, void: of these.

    returns: times that it went back; passes: of the target that committed; losses: of sessions upstream.
    """

    provisional: int = 0
    confirmed: int = 0
    void: int = 0
    returns: int = 0
    passes: int = 0
    losses: int = 0


@dataclass(frozen=True, slots=True)
class Upstream:
    """The target's verifier. facts: what it said at the start. salt: a secret of this process."""

    client: UpstreamClient
    facts: ModelFacts
    salt: bytes
    retry: UpstreamRetry
    counts: CascadeCounts

    def cache_salt(self, client: bytes) -> str:
        """Divides upstream's caches between the clients here, who share one key there; says nothing of them."""
        return hmac.digest(self.salt, client, "sha256")[:16].hex()


def wire_request(request: GenerateRequest, confirmed: Sequence[int], upstream: Upstream) -> SessionRequest:
    """The session upstream that goes on with the text."""
    return SessionRequest(
        prompt=[*request.prompt, *confirmed],
        max_tokens=request.max_tokens - len(confirmed),
        cache_salt=upstream.cache_salt(request.asker.client),
        **_choice_fields(request, upstream.facts, len(confirmed)),
        logprobs=request.pick.num_logprobs,
    )


def wire_item(request: GenerateRequest, facts: ModelFacts) -> VerifyItem:
    """The item of a /v1/verify call upstream."""
    return VerifyItem(
        prefix=list(request.prompt),
        draft=list(request.hints.draft),
        max_tokens=request.max_tokens,
        **_choice_fields(request, facts, 0),
    )


def _choice_fields(request: GenerateRequest, facts: ModelFacts, num_confirmed: int) -> dict[str, Any]:
    """Sampling parameters, rules and grammar as the wire has them, how much of the prompt they see as text, and what
    ends the text: upstream adds the target's own ids, which the request has too, or ignores in part.
    """
    own, num_generated = set(facts.eos_token_ids), request.num_generated + num_confirmed
    has_own = own <= request.stop_ids
    found = asdict(request.pick.params) | fields_of(request.pick.processors, num_generated)
    if request.pick.grammar is not None:
        found["grammar"] = request.pick.grammar.spec.to_wire()
    stop_ids = sorted(request.stop_ids - own if has_own else request.stop_ids)
    return found | {"generated": num_generated, "stop_ids": stop_ids, "ignore_eos": not has_own}
