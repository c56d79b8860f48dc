"""Describes the upstream verifier to the texts of a cascade, and words their requests for it."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outrider.cloud.seam import GenerateRequest
from outrider.cloud.upstream.client import UpstreamClient
from outrider.models.processors.options import fields_of
from outrider.models.wire.protocol import ModelFacts, SessionRequest
from outrider.models.wire.verify import VerifyItem


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
        **_ends(request, upstream.facts),
        **asdict(request.pick.params),
        **_choice_fields(request, len(confirmed)),
        logprobs=request.pick.num_logprobs,
    )


def wire_item(request: GenerateRequest, facts: ModelFacts) -> VerifyItem:
    """The item of a /v1/verify call upstream."""
    return VerifyItem(
        prefix=list(request.prompt),
        draft=list(request.hints.draft),
        max_tokens=request.max_tokens,
        **_ends(request, facts),
        **asdict(request.pick.params),
        **_choice_fields(request, 0),
    )


def _ends(request: GenerateRequest, facts: ModelFacts) -> dict[str, Any]:
    """What ends the text: upstream adds the target's own ids, which the request has too, or ignores in part."""
    own = set(facts.eos_token_ids)
    has_own = own <= request.stop_ids
    return {"stop_ids": sorted(request.stop_ids - own if has_own else request.stop_ids), "ignore_eos": not has_own}


def _choice_fields(request: GenerateRequest, num_confirmed: int) -> dict[str, Any]:
    """Rules and grammar as the wire has them, and how much of the prompt they see as text."""
    num_generated = request.num_generated + num_confirmed
    found = fields_of(request.pick.processors, num_generated)
    if request.pick.grammar is not None:
        found["grammar"] = request.pick.grammar.spec.to_wire()
    return found | {"generated": num_generated}
