"""Holds what every route of the local endpoint needs."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from outrider.edge.devices.power import PowerWatch
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.assemble import eased, make_agent
from outrider.edge.modes.stream import AgentOptions, StreamAgent
from outrider.edge.results import Mode
from outrider.edge.retrieval.documents import DOCS_TOKENS
from outrider.edge.retrieval.grounding import Library
from outrider.edge.serve.lent_drafts import DraftSequences, Loan
from outrider.edge.serve.metrics import LocalMetrics
from outrider.edge.serve.unverified import UnverifiedAnswers
from outrider.edge.serve.upstream import Upstream, conversation_to_render
from outrider.models.client.errors import EndpointUnfit
from outrider.models.counted import counted
from outrider.models.errors import CloudError, OutriderError, RequestError, TokenizerMismatch
from outrider.models.grammar.compiler import GrammarCompiler
from outrider.models.http.answers import HeldAnswers, model_not_found
from outrider.models.http.bodies import Bodies
from outrider.models.http.call_plan import Grammars, dialect_of
from outrider.models.http.encoding import Workers, encode_chat
from outrider.models.http.errors import internal_error
from outrider.models.http.openai import Conversation
from outrider.models.http.security import GateSettings
from outrider.models.process.by_owner import Shares
from outrider.models.runtimes.ngram import QuotedText
from outrider.models.text.tokenizer import Tokenizer
from outrider.models.visible import visible
from outrider.models.wire.protocol import ModelFacts

_log = logging.getLogger("outrider.serve")

Found = TypeVar("Found")

NO_VERIFIER: Final = "no_verifier"
_OWN_KEY: Final = frozenset({401, 403})
"""What a verifier answers because of the device's own key or address: the client cannot put it right."""


def shutting_down() -> RequestError:
    """The error 503 while the server ends."""
    return RequestError("shutting_down", "the server is shutting down; retry in a moment", status=503)


_ANY_POSITIONS = 1 << 20


@dataclass(frozen=True, slots=True)
class LocalSettings(GateSettings):
    """How the endpoint treats its clients, and how it drafts.

    max_requests: texts at a time, of all clients. max_own: of one client. keep_alive_s: silence on a stream after which
    a comment is sent. allowed_origins: whose pages also get CORS headers. any_user: without keys, other users of this
    machine may call too. shows_details: whether errors may name the verifiers.
    docs_tokens: of passages in one prompt, at most. shows_metrics: whether there is /metrics. model: the target's or an
    adapter's name, for requests that name none; None: the target's.
    """

    max_requests: int = 16
    max_own: int = 16
    keep_alive_s: float = 5.0
    allowed_origins: tuple[str, ...] = ()
    any_user: bool = False
    shows_details: bool = True
    depth: str = "auto"
    options: AgentOptions = field(default_factory=AgentOptions)
    docs_tokens: int = DOCS_TOKENS
    shows_metrics: bool = False
    model: str | None = None


class TextSlots(Shares[bytes]):
    """The texts that run, of each client and in all. Lives on one event loop."""

    def take(self, owner: bytes, count: int) -> None:
        """Takes places. Raises RequestError, and takes none, where too few are free: 429 if they are the client's own,
        else 503; 400 for more than there are.
        """
        if count > (most := min(self.max_each, self.max_all)):
            raise RequestError(
                "invalid_parameter", f"the request asks for {count} texts at once; expected at most {most} here"
            )
        if self.add(owner, count):
            return
        if (own := self[owner]) + count > self.max_each:
            raise RequestError(
                "too_many_requests",
                f"this client has {counted(own, 'text')} in work and asks for {count} more; at most "
                f"{self.max_each} may be. Retry when some have ended",
                status=429,
            )
        raise RequestError(
            "overloaded", f"{self.total} of {self.max_all} texts are in work; retry in a moment", status=503
        )


@dataclass(frozen=True, slots=True)
class OfflineSettings:
    """What writes where no cloud answers. name: the draft's. max_positions: its longest text."""

    name: str
    max_positions: int | None = None


@dataclass(slots=True)
class LocalCore:
    """What the routes share. is_draining: the server is ending and takes no new work. tasks: the running texts.

    library: documents whose passages go before every prompt; None: only documents that a request brings.
    power: says when texts are drafted with half the work. offline: None: a text without a cloud is an error.
    draft_facts: the facts of a text that the draft writes alone. salt_key: a secret of this process.
    """

    tokenizer: Tokenizer
    fingerprint: str
    upstream: Upstream
    drafts: DraftSequences
    settings: LocalSettings = field(default_factory=LocalSettings)
    placement: str = ""
    library: Library | None = None
    power: PowerWatch = field(default_factory=PowerWatch)
    offline: OfflineSettings | None = None
    unverified: UnverifiedAnswers = field(default_factory=UnverifiedAnswers)
    is_draining: bool = False
    metrics: LocalMetrics = field(default_factory=LocalMetrics)
    workers: Workers = field(default_factory=Workers)
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    draft_facts: ModelFacts | None = field(init=False, default=None)
    places: TextSlots = field(init=False)
    grammars: Grammars = field(init=False)
    bodies: Bodies = field(init=False)
    held_answers: HeldAnswers = field(default_factory=HeldAnswers)
    salt_key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def cache_salt(self, owner: bytes) -> str | None:
        """Keeps clients with keys apart at the verifier, which knows one: this device. Without keys there is one."""
        return hmac.digest(self.salt_key, owner, "sha256")[:16].hex() if len(self.settings.keys) else None

    def request_error(self, error: Exception) -> RequestError:
        """What the client gets for this one; the log has the verifiers' addresses always."""
        if isinstance(error, RequestError) and error.status not in _OWN_KEY:
            if error.origin is None or self.settings.shows_details:
                return error
            _log.warning("%s: %s", error.code, visible(str(error)))
            return RequestError(error.code, error.message, status=error.status, retry_after_s=error.retry_after_s)
        if not isinstance(error, OutriderError):
            return internal_error()
        if isinstance(error, TokenizerMismatch):
            code, status, words = "tokenizer_mismatch", 502, "the draft was made for another target"
        elif isinstance(error, RequestError):
            code, status, words = "verifier_refused", 502, "the verifier refuses this device"
        elif isinstance(error, CloudError):
            code, status, words = NO_VERIFIER, 503, "no verifier can answer now"
        else:
            code, status, words = "device_failed", 500, "the device failed on this request"
        _log.warning("%s: %s", code, visible(str(error)))
        shown = str(error) if self.settings.shows_details else f"{words}; the log of this server says why"
        return RequestError(code, shown, status=status)

    async def target_facts(self, model: str | None = None) -> ModelFacts:
        """The target's facts, or an adapter's of it. model: the one that a request names; None or "": the endpoint's.

        Raises RequestError, also where no such model is served.
        """
        asked = model or self.settings.model
        return _named(await self._served(asked), asked)

    async def _served(self, asked: str | None, *, is_brief: bool = False) -> ModelFacts:
        """The target's own facts, new ones where nothing that is known has the name `asked`. Raises RequestError.

        is_brief: as in `Upstream.facts`.
        """
        try:
            facts = await self.upstream.facts(is_brief=is_brief)
            if asked and facts.named(asked) is None:
                facts = await self.upstream.facts(is_fresh=True, is_brief=is_brief)
        except OutriderError as error:
            raise self.request_error(error) from None
        return facts

    async def facts_or_draft(self, model: str | None = None) -> ModelFacts:
        """As `target_facts`. Where no cloud answers, with --offline-ok, the draft's: it writes alone."""
        asked = model or self.settings.model
        served = await self.served_or_draft(asked)
        return served if served is self.draft_facts else _named(served, asked)

    async def served_or_draft(self, asked: str | None = None) -> ModelFacts:
        """The target's own facts, or the draft's, whether or not the target has a model named `asked`."""
        try:
            return await self._served(asked, is_brief=self.draft_facts is not None)
        except RequestError as error:
            if error.code != NO_VERIFIER or self.draft_facts is None:
                raise
            return self.draft_facts

    async def or_draft(
        self, facts: ModelFacts, work: Callable[[ModelFacts], Awaitable[Found]]
    ) -> tuple[Found, ModelFacts]:
        """What `work` returns with these facts, or with the draft's where it finds no cloud; and the facts that it had.

        Raises as `work` does where the draft may not go on.
        """
        began = self.upstream.clock()
        try:
            return await work(facts), facts
        except CloudError as error:
            draft = self.draft_facts
            if isinstance(error, EndpointUnfit) or draft is None or not draft.has_chat_template:
                raise
            self.upstream.lost(began)
            return await work(draft), draft

    async def rendered(self, owner: bytes, conversation: Conversation, facts: ModelFacts) -> list[int]:
        """A conversation's token ids, by the target's chat template; without a cloud by the draft bundle's own."""
        if facts is self.draft_facts:
            return await self.workers.run(owner, encode_chat, self.tokenizer, facts.max_positions - 1, conversation)
        content = await self.workers.run(owner, conversation_to_render, conversation, self.fingerprint)
        return (await self.upstream.render(content, facts)).tokens

    def stream_agent(self, endpoints: Endpoints, loan: Loan, quoted: Sequence[QuotedText] = ()) -> StreamAgent:
        """What generates one text with a lent draft. quoted: documents that the text may quote."""
        options = self.settings.options if self.power.reason is None else eased(self.settings.options)
        agent = make_agent(
            Mode.STREAM,
            endpoints,
            loan.drafter,
            self.settings.depth,
            options,
            self.drafts.scheduler,
            loan.estimates,
            quoted,
        )
        assert isinstance(agent, StreamAgent)
        return agent

    def __post_init__(self) -> None:
        self.places = TextSlots(self.settings.max_own, self.settings.max_requests)
        self.bodies = Bodies(self.settings.max_body_bytes)
        compiler = partial(GrammarCompiler, self.tokenizer, self.tokenizer.size, self.tokenizer.eos_token_ids)
        self.grammars = Grammars(compiler, is_needed=False)
        if self.offline is not None:
            dialect = dialect_of(self.tokenizer)
            self.draft_facts = ModelFacts(
                name=self.offline.name,
                tokenizer=self.fingerprint,
                vocab_size=self.tokenizer.size,
                max_positions=self.offline.max_positions or _ANY_POSITIONS,
                eos_token_ids=sorted(self.tokenizer.eos_token_ids),
                has_chat_template=self.tokenizer.has_chat_template,
                tool_calls=dialect.tools,
                has_reasoning=dialect.has_reasoning,
            )

    async def aclose(self) -> None:
        """Ends all texts, closes the connections and the threads, and releases the draft."""
        self.is_draining = True
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.workers.close()
        await self.upstream.aclose()
        await asyncio.to_thread(self.drafts.close)


def _named(served: ModelFacts, asked: str | None) -> ModelFacts:
    named = served.named(asked) if asked else served
    if named is None:
        raise model_not_found(served.name)
    return named
