"""Opens a cascade, for `outrider-cloud serve MID --upstream URL`, and shows its counters at /metrics."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from prometheus_client.core import Metric

from outrider.cloud.api.metrics import Metrics
from outrider.cloud.api.state import ServedModel
from outrider.cloud.seam import ServingEngine
from outrider.cloud.server.target import LoadedTarget, Target
from outrider.cloud.upstream.engine import CascadeEngine
from outrider.cloud.upstream.upstream import UpstreamClient, upstream_url
from outrider.models.client.errors import EndpointLost
from outrider.models.errors import ConfigError, RequestError, TokenizerMismatch
from outrider.models.wire.protocol import ModelFacts

UPSTREAM_KEY_VARIABLE: Final = "OUTRIDER_UPSTREAM_KEY"
_MAX_KEY_BYTES: Final = 4096


class CascadeTarget(Target):
    """The target of an upstream verifier, drafted by a mid-size one here. Raises OutriderError where they do not fit.

    key: for the upstream verifier. name: of the model in the API; None: upstream's.
    """

    def __init__(self, mid: Target, url: str, key: str | None, name: str | None) -> None:
        self._mid = mid
        self._url = upstream_url(url)
        self._key = key
        self._facts = fetch_facts(self._url, key)
        self.model = cascade_model(mid.model, self._facts, name)
        # What drafts for the mid-size model agree with is what it passes on.
        self.path, self.source_name, self.num_gpus = mid.path, mid.source_name, mid.num_gpus

    @contextmanager
    def load(self) -> Iterator[LoadedTarget]:
        """Loads the mid-size verifier."""
        with self._mid.load() as loaded:
            client = UpstreamClient.to(self._url, self._key, self._facts.vocab_size)
            engine = CascadeEngine(loaded.engine, client, self._facts)
            yield LoadedTarget(engine, f"{loaded.summary}; it verifies first for {self._facts.name} at {self._url}")


def fetch_facts(url: str, key: str | None) -> ModelFacts:
    """What the upstream verifier says of its model. Raises ConfigError where it does not answer, or refuses the key."""

    async def asked() -> ModelFacts:
        client = UpstreamClient.to(url, key)
        try:
            return await client.streams.model_facts()
        finally:
            await client.aclose()

    try:
        return asyncio.run(asked())
    except RequestError as refused:
        advice = (
            f"set {UPSTREAM_KEY_VARIABLE}, or correct it" if refused.code == "unauthorized" else "check the address"
        )
        raise ConfigError(f"the upstream verifier at {url} refuses: {refused.code}; {advice}") from None
    except EndpointLost as lost:
        raise ConfigError(f"the upstream verifier: {lost}; start it first, or check the address") from None


def cascade_model(mid: ServedModel, facts: ModelFacts, name: str | None) -> ServedModel:
    """The target as clients see it. Raises TokenizerMismatch, and ConfigError for an upstream without an identity."""
    own = mid.tokenizer.fingerprint
    if facts.tokenizer != own:
        raise TokenizerMismatch(
            f"the tokenizer of {mid.name} is {own[:12]}, that of {facts.name} upstream is {facts.tokenizer[:12]}; "
            "serve a model of the same family"
        )
    if facts.target is None:
        raise ConfigError(f"{facts.name} upstream names no target; update the server there")
    if facts.mid is not None:
        raise ConfigError(f"the upstream verifier is a cascade itself, before {facts.name}; name the last verifier")
    if facts.has_chat_template != mid.tokenizer.has_chat_template:
        raise ConfigError(
            f"only one of {mid.name} and {facts.name} upstream has a chat template; export both from the same family"
        )
    return replace(
        mid,
        name=name or facts.name,
        eos_ids=frozenset(facts.eos_token_ids),
        target=facts.target,
        mid=mid.name,
        facts=facts,
    )


def upstream_key() -> str | None:
    """The key of the environment, from which it goes. Raises ConfigError, which never holds it."""
    key = os.environ.pop(UPSTREAM_KEY_VARIABLE, "").strip()
    if len(key) > _MAX_KEY_BYTES or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{UPSTREAM_KEY_VARIABLE} is no key; expected printable ASCII without spaces")
    return key or None


def show_cascade(metrics: Metrics, engine: ServingEngine) -> None:
    """Adds the counters of a cascade's engine to /metrics."""
    assert isinstance(engine, CascadeEngine)
    counts = engine.counts

    def families() -> Iterator[Metric]:
        kinds = {"provisional": counts.provisional, "confirmed": counts.confirmed, "contradicted": counts.void}
        help_text = "Tokens that the mid-size verifier committed first, and what the target said of them."
        yield metrics.counter("cascade_tokens", help_text, ("kind",), {(kind,): n for kind, n in kinds.items()})
        for name, help_text, number in (
            ("returns", "Times that the mid-size verifier went back to the target's text.", counts.returns),
            ("passes", "Passes of the target upstream that committed tokens.", counts.passes),
            ("losses", "Sessions upstream that were cut, refused for now or not answered.", counts.losses),
        ):
            yield metrics.counter(f"cascade_{name}", help_text, (), {(): number})

    metrics.add_families(families)
