"""Holds one sequence in the engine: its tokens, which of them are in the cache, and its pending drafts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.cloud.pending.pending_drafts import PendingDrafts
from outrider.cloud.seam import GenerateRequest, SequenceUsage, Sink
from outrider.models.processors.chooser import TokenChooser


@dataclass(slots=True, eq=False)
class SequenceState:
    """A sequence. The engine's thread owns it; other threads read `generated` (append-only), nothing else.

    computed: how many of the tokens have valid keys and values in `blocks`; always under len(tokens).
    hashes: chain hash of each full block of committed tokens that was registered or matched.
    chain: chain hashes of its full blocks as far as they were ever needed; tokens do not change, so neither do these.
    turn: who goes first of an owner's sequences: the lowest. It rises when the sequence runs tokens.
    queued_at, turn_began: the engine's step at which it was queued, and at which it first committed since it has
    blocks; None before. submitted_s: when it was submitted; None once it has left the queue for the first time.
    due_at: when its deadline passes, by the engine's clock; infinite for no deadline.
    stored: keys and values of its first blocks, from disk, until it has blocks for them.
    chooser: chooses its tokens where a plain pick is not enough; None: it is.
    is_muted: its drafts raised, so it has no more. next_sink: that of the newest rewind, which the engine's thread may
    not have seen yet.
    """

    id: int
    request: GenerateRequest
    sink: Sink
    tokens: list[int]
    drafts: PendingDrafts
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    chain: list[bytes] = field(default_factory=list)
    computed: int = 0
    turn: int = 0
    queued_at: int = 0
    turn_began: int | None = None
    submitted_s: float | None = None
    due_at: float = math.inf
    stored: NDArray[np.uint8] | None = None
    chooser: TokenChooser | None = None
    is_muted: bool = False
    next_sink: Sink | None = None
    usage: SequenceUsage = field(default_factory=SequenceUsage)

    @property
    def priority(self) -> int:
        """The higher, the sooner it is served."""
        return self.request.asker.priority

    @property
    def owner(self) -> bytes:
        """Who asks."""
        return self.request.asker.owner

    @property
    def num_counted(self) -> int:
        """Token ids that it holds, as the queue's bound counts them: its tokens, and those in its processors."""
        return len(self.tokens) + self.request.pick.processors.num_ids

    @property
    def generated(self) -> list[int]:
        """The tokens committed after the prompt."""
        return self.drafts.committed

    @property
    def num_missing(self) -> int:
        """Tokens that must be run before the next one can be picked; 1 when the sequence is decoding."""
        return len(self.tokens) - self.computed

    @property
    def num_wanted(self) -> int:
        """The same, and the draft that a /v1/verify item brought."""
        return self.num_missing + len(self.drafts.own_draft(self.drafts.num_left).tokens)
