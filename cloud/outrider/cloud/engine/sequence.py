"""One sequence in the engine: its tokens, what of them is in the cache, what is pending, what was measured."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.cloud.engine.types import GenerateRequest, SequenceUsage, Sink
from outrider.cloud.pending.estimators import AcceptanceEstimator, DraftLag
from outrider.cloud.pending.policy import NO_WAIT, Wait
from outrider.cloud.pending.trie import DraftTrie


@dataclass(slots=True, eq=False)
class Sequence:
    """Owned by the engine's thread; other threads read `generated` (append-only) and nothing else.

    computed: how many of the tokens have valid keys and values in `blocks`; always under len(tokens).
    hashes: chain hash of each full block of committed tokens that was registered or matched.
    """

    id: int
    request: GenerateRequest
    sink: Sink
    acceptance: AcceptanceEstimator
    tokens: list[int]
    max_new: int  # tokens it may commit in all: what was asked for, or what the context has room for
    generated: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    computed: int = 0
    pending: DraftTrie = field(default_factory=DraftTrie)
    newest_base: int = -1  # of the drafts merged so far
    lag: DraftLag = field(default_factory=DraftLag)
    usage: SequenceUsage = field(default_factory=SequenceUsage)
    wait: Wait = NO_WAIT
    wait_started: float = 0.0
    wait_deadline: float = 0.0
    has_company: bool = False  # other sequences run too

    @property
    def num_missing(self) -> int:
        """Tokens that must be run before the next one can be picked; 1 when the sequence is decoding."""
        return len(self.tokens) - self.computed

    @property
    def num_wanted(self) -> int:
        """Tokens it may still commit."""
        return self.max_new - len(self.generated)

    def pending_path(self, limit: int) -> list[int]:
        """The likeliest pending path that is of use, at most `limit` tokens: the last wanted token needs no draft."""
        return self.pending.likeliest(max(0, min(limit, self.num_wanted - 1)))

    def own_draft(self, room: int) -> list[int]:
        """The drafted tokens that a /v1/verify item brought, as far as there is room for them beside its prompt."""
        return self.pending_path(min(len(self.request.draft), room)) if self.request.once else []
