"""Holds what every route needs: engine, model, files to download, settings, open sessions, running downloads."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from outrider.cloud.api.admission import Admission
from outrider.cloud.api.audit import AuditLog
from outrider.cloud.api.bridge import Bridge
from outrider.cloud.api.draft_line import DraftLine
from outrider.cloud.api.metrics import Metrics, file_families, recent_families
from outrider.cloud.api.recent_texts import Recalled, RecentTexts
from outrider.cloud.api.stream import NewestTimes
from outrider.cloud.api.traces import Traces
from outrider.cloud.recent.store import RecentStore
from outrider.cloud.seam import Asker, GenerateRequest, ServingEngine
from outrider.models.bundle.manifest import Manifest
from outrider.models.errors import RequestError
from outrider.models.grammar.compiler import CompiledGrammar, GrammarCompiler
from outrider.models.http.answers import HeldAnswers, model_not_found
from outrider.models.http.bodies import Bodies
from outrider.models.http.call_plan import Dialect, Grammars, dialect_of
from outrider.models.http.encoding import MAX_THREADS, Workers
from outrider.models.http.errors import FieldError, Throttled
from outrider.models.http.limits import Slots
from outrider.models.http.security import GateSettings
from outrider.models.process.by_owner import Shares
from outrider.models.text.tokenizer import Tokenizer
from outrider.models.version import outrider_version
from outrider.models.wire.fields import require_ids
from outrider.models.wire.offered import OfferedDraft, OfferedFile
from outrider.models.wire.protocol import ModelFacts, ReadyAnswer

MAX_WAITING_RENDERS: Final = 64
"""Of an owner's conversations to render, each with its body."""
_DOWNLOAD_RETRY_S: Final = 5


@dataclass(frozen=True, slots=True)
class SharedFile:
    """A file that devices may download. place: where it lies, absolute; no part of it was a link at the start."""

    entry: OfferedFile
    place: Path


@dataclass(frozen=True, slots=True)
class DraftFiles:
    """A draft that is offered. files: by path, `manifest.json` among them."""

    entry: OfferedDraft
    files: Mapping[str, SharedFile]


@dataclass(frozen=True, slots=True)
class DownloadLimits:
    """Bounds on downloads. max_each, max_all: at a time, of one owner and in all.

    grace_s, min_rate: after grace_s a download must have run at min_rate bytes per second, or it is cut: it occupies a
    place. A device resumes it. refusal_s: a download that finds no place is refused so late, or a client could keep the
    server busy with refusals.
    """

    max_each: int = 4
    max_all: int = 32
    grace_s: float = 30.0
    min_rate: float = 4096.0
    refusal_s: float = 1.0


class DownloadSlots(Shares[bytes]):
    """The downloads that run."""

    def __init__(self, limits: DownloadLimits) -> None:
        super().__init__(limits.max_each, limits.max_all)
        self._refusal_s = limits.refusal_s

    @asynccontextmanager
    async def place(self, owner: bytes) -> AsyncIterator[None]:
        """Holds a place. Raises RequestError 429 or 503 `too_many_downloads` where none is free, after `refusal_s`."""
        if not self.add(owner):
            refusal = self._refusal(owner)
            await asyncio.sleep(self._refusal_s)
            raise refusal
        try:
            yield
        finally:
            self.add(owner, -1)

    def _refusal(self, owner: bytes) -> RequestError:
        if self[owner] >= self.max_each:
            return Throttled(
                "too_many_downloads",
                f"this client has {self[owner]} downloads; at most {self.max_each} may run. Retry when one has ended",
                retry_after_s=_DOWNLOAD_RETRY_S,
            )
        return RequestError(
            "too_many_downloads",
            f"{self.max_all} downloads run, which is the most that this server allows; retry later",
            status=503,
        )


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Messages per second of a session and of an owner, and how many may come at once; delay_s: how late the answer to
    a dropped message comes. What a message counts as is said by `draft_posts.DraftBudget`.

    A device posts once per commit, so 500 times a second at steps of 2 ms, and while it drafts ahead once per 4 ms. An
    owner's budget serves 256 sessions (`--max-sessions`) at steps of 32 ms; it is about half of what the event loop can
    take.

    finish_s: for a message of a long request that has begun to arrive; the request itself lasts as long as its session.
    """

    session_per_s: float = 500.0
    session_burst: float = 250.0
    owner_per_s: float = 8000.0
    owner_burst: float = 4000.0
    delay_s: float = 0.25
    finish_s: float = 10.0


@dataclass(frozen=True, slots=True)
class ServerSettings(GateSettings):
    """How the server treats its clients.

    max_sessions: sequences that one key may have open in sessions and completions. tokens_per_minute: of prompts (not
    cached) and texts, per key; None is no limit. A key's own limits come before these. keep_alive_s: silence on a
    stream after which a comment is sent; `open` reports it. draft_limits: budgets of draft messages. download_limits:
    bounds on downloads. audit: the audit log. reloads: files that were read again, by name and result.
    traces: what records spans; None: nothing does. session_prefix: how the ids of its sessions begin, where several
    replicas stand behind one address. allow_tolerance: requests may ask for the lossy acceptance rule. metrics_age_s:
    for which /metrics answers the same text where many ask. needs_steady: only steady sessions are served.
    """

    max_sessions: int = 256
    tokens_per_minute: int | None = None
    keep_alive_s: float = 5.0
    draft_limits: DraftLimits = field(default_factory=DraftLimits)
    download_limits: DownloadLimits = field(default_factory=DownloadLimits)
    audit: AuditLog | None = None
    reloads: Mapping[tuple[str, str], int] = field(default_factory=dict)
    traces: Traces | None = None
    session_prefix: str = ""
    allow_tolerance: bool = False
    metrics_age_s: float = 1.0
    needs_steady: bool = False


@dataclass(frozen=True, slots=True)
class NamedModel:
    """What a request may name: the served model, or an adapter of it.

    target: identity of what picks the tokens. adapter: its name in the engine; None: the model itself.
    """

    name: str
    target: str
    adapter: str | None = None

    def asker(self, owner: bytes, salt: str | None = None) -> Asker:
        """Who asks. What is kept of an adapter's text is of use to that adapter only."""
        own = (salt or "").encode()
        # No client's salt begins with this byte: it is UTF-8.
        return Asker(owner, own if self.adapter is None else b"\xff" + self.target.encode() + own)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model behind the engine, as clients see it. manifest: its bundle's; None for a model without a bundle.

    target: identity of what picks the tokens, equal for replicas only; "": made from name and tokenizer, for a model
    without a bundle. mid: of a cascade, the name of the model that verifies first. facts: what the target's own server
    says of it, where that is another one. adapters: of the model, by the name that requests give: identity of each.
    dialect: how it writes tool calls and reasoning.
    """

    name: str
    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    manifest: Manifest | None = None
    target: str = ""
    mid: str | None = None
    facts: ModelFacts | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)
    created_s: int = field(default_factory=lambda: int(time.time()))
    dialect: Dialect = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dialect", dialect_of(self.tokenizer))
        if not self.target:
            digest = hashlib.sha256(f"no bundle\n{self.name}\n{self.tokenizer.fingerprint}".encode()).hexdigest()
            object.__setattr__(self, "target", digest[:16])

    def named(self, asked: str | None) -> NamedModel:
        """What a request names; unset or "" is the model itself. Raises RequestError 404 `model_not_found`."""
        if not asked or asked == self.name:
            return NamedModel(self.name, self.target)
        if (target := self.adapters.get(asked)) is None:
            raise model_not_found(self.name)
        return NamedModel(asked, target, asked)


@dataclass(frozen=True, slots=True)
class Session:
    """An open session: the engine's sequence, the owner's key, and the long request of its drafts."""

    sequence_id: int
    owner: bytes
    line: DraftLine = field(default_factory=DraftLine, compare=False)


class SessionTable(dict[str, Session]):
    """Open sessions by their id, which is a secret: 72 random bits."""

    def find(self, session_id: str, owner: bytes) -> Session:
        """The session, if it is the owner's. Raises RequestError 404 `unknown_session` otherwise."""
        session = self.get(session_id)
        if session is None or session.owner != owner:
            raise RequestError(
                "unknown_session",
                "there is no such session: it has ended, or another server has it. To continue the text, open "
                "a session with the prompt and the tokens committed so far",
                status=404,
            )
        return session


class Core:
    """What every group of routes shares.

    is_draining: the server is shutting down and takes no new work. is_dead: the engine has failed for good, so the
    process ends.
    """

    def __init__(
        self,
        engine: ServingEngine,
        model: ServedModel,
        settings: ServerSettings,
        drafts: tuple[DraftFiles, ...] = (),
        recent: RecentStore | None = None,
        tokenizer_files: Mapping[str, SharedFile] | None = None,
    ) -> None:
        """drafts: what devices may download. recent: texts that requests may repeat; None keeps none.

        tokenizer_files: of the target's tokenizer, by name; None shares none.
        """
        self.engine = engine
        self.model = model
        self.settings = settings
        self.drafts = drafts
        self.tokenizer_files = tokenizer_files
        self.recent = recent
        self.slots = Slots(settings.max_sessions, settings.keys.sessions_of)
        self.bridge = Bridge()
        self.bodies = Bodies(settings.max_body_bytes)
        self.workers = Workers()
        self.renders = Slots(MAX_THREADS)
        self.held_answers = HeldAnswers()
        self.downloads = DownloadSlots(settings.download_limits)
        self.sessions = SessionTable()
        self.is_draining = self.is_dead = False
        self.step_times = NewestTimes(engine.stats)
        self.admission = Admission(
            engine, settings.keys, settings.tokens_per_minute, needs_steady=settings.needs_steady
        )
        vocab_size, elsewhere = engine.limits.vocab_size, engine.grammar_builder
        self.grammars = Grammars(lambda: GrammarCompiler(model.tokenizer, vocab_size, sorted(model.eos_ids), elsewhere))
        self._recall = RecentTexts(recent, model.target) if recent is not None else None
        facts = {"version": outrider_version(), "model_name": model.name, "target": model.target}
        self.metrics = Metrics(engine.stats, lambda: len(self.sessions), facts, settings.metrics_age_s)
        self.metrics.add_families(lambda: file_families(self.metrics, settings.reloads, settings.audit))
        if recent is not None:
            self.metrics.add_families(lambda: recent_families(recent.stats()))

    def ready(self) -> ReadyAnswer:
        """Whether new work is welcome, and the load. Any thread may ask."""
        stats = self.engine.stats()
        return ReadyAnswer(
            status="failed"
            if self.is_dead
            else "draining"
            if self.is_draining
            else "failed"
            if stats.failed
            else "ready",
            model=self.model.name,
            queue_depth=stats.queued,
            running=stats.running,
            free_block_share=stats.free_blocks / stats.num_blocks,
            step_ms=stats.step_ms,
            draft_token_ms=stats.draft_token_ms,
            target=self.model.target,
        )

    @property
    def max_prompt(self) -> int:
        """Tokens of the longest prompt that leaves room for a token of the answer."""
        return self.engine.limits.max_positions - 1

    async def recall(self, request: GenerateRequest, *, is_allowed: bool = True) -> Recalled:
        """The request, with the earlier text after its prompt where texts are kept and there is one.

        is_allowed: False keeps nothing of the request, and uses nothing.
        """
        if self._recall is None or not is_allowed:
            return Recalled(request)
        return await self._recall.recall(request)

    def stop_set(
        self,
        stop_ids: list[int] | None,
        ignore_eos: bool,
        grammar: CompiledGrammar | None = None,
        name: str = "stop_ids",
    ) -> frozenset[int]:
        """The ids after which a sequence ends: these, and the model's own unless `ignore_eos` leaves them out; a
        grammar that ends the text has them always.

        Raises RequestError 400 `token_out_of_range`.
        """
        chosen, own = frozenset(stop_ids or ()), self.model.eos_ids
        require_ids(chosen, name, self.engine.limits.vocab_size)
        if ignore_eos and grammar is None:
            return chosen
        return chosen | own

    def require_tokenizer(self, fingerprint: str | None) -> None:
        """Raises RequestError 409 `tokenizer_mismatch` if the caller's tokenizer is another."""
        own = self.model.tokenizer.fingerprint
        if fingerprint is not None and fingerprint != own:
            raise FieldError(
                "tokenizer_mismatch",
                f"the agent's tokenizer is {fingerprint[:12]}, that of {self.model.name} is {own[:12]}: token ids "
                "would mean different text. Use a draft made for this target",
                param="tokenizer",
                status=409,
            )
