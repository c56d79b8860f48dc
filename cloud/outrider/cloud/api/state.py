"""Holds what every route needs: the engine, the model that it serves, the settings, and the open sessions."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field

from outrider.cloud.api.bridge import Bridge
from outrider.cloud.api.download_places import DownloadLimits, DraftFiles, Places
from outrider.cloud.api.draft_budget import DraftLimits
from outrider.cloud.api.metrics import Metrics
from outrider.cloud.seam import ServingEngine
from outrider.models.errors import RequestError
from outrider.models.http.errors import FieldError
from outrider.models.http.limits import Slots
from outrider.models.http.requests import Bodies
from outrider.models.http.security import KeyRing, PagePolicy
from outrider.models.manifest import Manifest
from outrider.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How the server treats its clients.

    keys: the API keys. max_sessions: sequences that one key may have open in sessions and completions.
    rate_per_s: requests that start work, per second and key; 0 is no limit. max_patience_ms: bound on every session's
    patience. keep_alive_s: silence on a stream after which a comment is sent; `open` reports it. pages:
    which names and pages may call; None: PagePolicy's defaults. draft_limits: budgets of draft messages.
    download_limits: bounds on downloads of drafts. session_prefix: how the ids of its sessions begin, where several
    replicas stand behind one address.
    """

    keys: KeyRing = field(default_factory=KeyRing)
    max_body_bytes: int = 1 << 20  # parsing more than this would delay every stream
    max_sessions: int = 256
    rate_per_s: float = 0.0
    max_patience_ms: float | None = None
    keep_alive_s: float = 5.0
    pages: PagePolicy | None = None
    draft_limits: DraftLimits = field(default_factory=DraftLimits)
    download_limits: DownloadLimits = field(default_factory=DownloadLimits)
    session_prefix: str = ""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model behind the engine, as clients see it. manifest: its bundle's; None for a model without a bundle.

    target: identity of what picks the tokens, equal for replicas only; "": made from name and tokenizer, for a model
    without a bundle.
    """

    name: str
    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    manifest: Manifest | None = None
    target: str = ""
    created_s: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        if not self.target:
            digest = hashlib.sha256(f"no bundle\n{self.name}\n{self.tokenizer.fingerprint}".encode()).hexdigest()
            object.__setattr__(self, "target", digest[:16])


@dataclass(frozen=True, slots=True)
class Session:
    """An open session: the engine's sequence and the owner's key."""

    sequence_id: int
    owner: bytes


class SessionTable:
    """Open sessions by their id, which is a secret: 72 random bits."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, session_id: str, session: Session) -> None:
        """Adds a session."""
        self._sessions[session_id] = session

    def remove(self, session_id: str) -> None:
        """Removes a session."""
        self._sessions.pop(session_id, None)

    def find(self, session_id: str, owner: bytes) -> Session:
        """The session, if it is the owner's. Raises RequestError 404 `unknown_session` otherwise."""
        session = self._sessions.get(session_id)
        if session is None or session.owner != owner:
            raise RequestError(
                "unknown_session",
                "there is no such session: it has ended, or another server has it. To continue the text, open "
                "a session with the prompt and the tokens committed so far",
                status=404,
            )
        return session


@dataclass(slots=True)
class Core:
    """What every group of routes shares.

    drafts: what devices may download. is_draining: the server is shutting down and takes no new work.
    """

    engine: ServingEngine
    model: ServedModel
    settings: ServerSettings
    slots: Slots
    drafts: tuple[DraftFiles, ...] = ()
    metrics: Metrics = field(init=False)
    bridge: Bridge = field(default_factory=Bridge)
    bodies: Bodies = field(init=False)
    downloads: Places = field(init=False)
    sessions: SessionTable = field(default_factory=SessionTable)
    is_draining: bool = False

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.engine.stats, lambda: len(self.sessions))
        self.downloads = Places(self.settings.download_limits)
        self.bodies = Bodies(self.settings.max_body_bytes)

    def stop_set(self, stop_ids: list[int] | None, ignore_eos: bool) -> frozenset[int]:
        """The ids after which a sequence ends. Raises RequestError 400 `token_out_of_range`."""
        chosen = self.model.eos_ids if stop_ids is None else frozenset(stop_ids)
        vocab_size = self.engine.limits.vocab_size
        beyond = [token for token in chosen if token >= vocab_size]
        if beyond:
            raise FieldError(
                "token_out_of_range",
                f"stop_ids holds {beyond[0]}; the vocabulary ends at {vocab_size - 1}",
                param="stop_ids",
            )
        return chosen - self.model.eos_ids if ignore_eos else chosen

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
