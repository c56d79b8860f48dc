"""Configures the engine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from outrider.cloud.pending.policy import Policy
from outrider.models.wire.protocol import MAX_VERIFY_ITEMS

_TOKENS_PER_PLACE = 8


class TreeForm(StrEnum):
    """What a step verifies of a sequence's drafted tree: its likeliest path, or any part of it."""

    AUTO = "auto"
    LINE = "line"
    TREE = "tree"


@dataclass(frozen=True, slots=True)
class SpillConfig:
    """Where parked prefixes go on disk, and for how long.

    target: identity of what computes the keys and values, the processor's kind included; files of another are never
    found. always: prefixes are written when they are parked, for other replicas; otherwise when they lose their blocks.
    """

    directory: Path
    target: str
    max_bytes: int = 1 << 30
    max_s: float = 3600.0
    always: bool = False


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the engine runs.

    max_running: places, that is, sequences in one step. step_tokens: token budget of a step; a prompt is prefilled in
      chunks that fit; None: room for some drafts of each sequence, at least 256.
    max_queue: sequences that may wait for a place; beyond it, owners with more than their share of them are refused.
    max_draft: drafted tokens verified per sequence and step.
    max_parked: sequences per owner whose cache is kept for the /v1/verify call or the session that continues them; as
      many as one call can have. max_parked_s: for how long.
    looks_up: guess by prompt lookup where a device has sent nothing.
    form: auto verifies trees where the runtime is right with them; tree requires such a runtime.
    spill: keeps parked prefixes on disk; None: they end with their blocks.
    share_prefixes: reuse KV blocks by hash. share_between_owners: also those of other owners' prompts.
    """

    max_running: int = 32
    step_tokens: int | None = None
    max_queue: int = 1024
    max_draft: int = 32
    max_parked: int = MAX_VERIFY_ITEMS
    max_parked_s: float = 600.0
    looks_up: bool = False
    share_prefixes: bool = True
    share_between_owners: bool = False
    policy: Policy = Policy.AUTO
    form: TreeForm = TreeForm.AUTO
    spill: SpillConfig | None = None

    @property
    def token_budget(self) -> int:
        """Tokens in a step, at most."""
        return self.step_tokens or max(256, _TOKENS_PER_PLACE * self.max_running)
