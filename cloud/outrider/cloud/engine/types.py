"""What goes into the engine and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from outrider.models.errors import RequestError
from outrider.models.sampling import SamplingParams


class Policy(StrEnum):
    """What the engine optimizes when it decides whether to wait for a draft; see `policy.py`."""

    AUTO = "auto"  # latency, until work queues up; then capacity
    STREAM = "stream"  # latency: tokens per second of each session
    VERIFY = "verify"  # capacity: the fewest target passes


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the engine runs.

    max_running: sequences in one step. step_tokens: token budget of a step; a prompt is prefilled in chunks that fit.
    max_queue: sequences that may wait for admission. max_draft: drafted tokens verified per sequence and step.
    max_parked: sequences whose cache is kept for the next /v1/verify call. share_prefixes: reuse KV blocks by hash.
    """

    max_running: int = 32
    step_tokens: int = 256
    max_queue: int = 1024
    max_draft: int = 16
    max_parked: int = 64
    share_prefixes: bool = True
    policy: Policy = Policy.AUTO


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence to generate. prompt: ids of everything before the first wanted token.

    patience_ms: longest wait for a draft (0: never; None: the engine chooses). draft: guesses to start with.
    once: end after the first pass that commits (this is /v1/verify); the cache is then parked under `prefix_hash`.
    draft_lag_ms: how long after a commit drafts that know of it are expected; a first guess, until it is measured.
    prefix_hash: the hash of a parked prefix that `prompt` continues; the engine raises `prefix_not_held` if it is gone.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    patience_ms: float | None = None
    draft: tuple[int, ...] = ()
    once: bool = False
    prefix_hash: str | None = None
    draft_lag_ms: float | None = None


@dataclass(frozen=True, slots=True)
class CommitEvent:
    """`tokens` were committed after `base` others; `accepted` of `proposed` drafted tokens were right in this pass."""

    base: int
    tokens: tuple[int, ...]
    accepted: int
    proposed: int


@dataclass(slots=True)
class SequenceUsage:
    """What one sequence took; see `protocol.Usage`."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    target_passes: int = 0
    accepted_tokens: int = 0
    rejected_tokens: int = 0
    cached_prompt_tokens: int = 0
    waited_s: float = 0.0

    def count_pass(self, committed: int, proposed: int, accepted: int) -> None:
        """One forward pass that committed tokens."""
        self.completion_tokens += committed
        self.target_passes += 1
        self.accepted_tokens += accepted
        self.rejected_tokens += proposed - accepted


@dataclass(frozen=True, slots=True)
class EndEvent:
    """The sequence is over and everything it held is back.

    reason: "stop", "length", "context", "once", "cancelled", "shutdown" or "error" (then `error` says what).
    prefix_hash: where the cache was parked, for a `once` request.
    """

    reason: str
    usage: SequenceUsage
    error: RequestError | None = None
    prefix_hash: str | None = None


Event = CommitEvent | EndEvent
# Called on the engine's thread, never blocks, never raises.
Sink = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for /metrics and /health/ready. Totals count since the start."""

    running: int
    queued: int
    parked: int
    parked_blocks: int
    num_blocks: int
    free_blocks: int
    steps_total: int
    step_tokens_total: int
    committed_total: int
    proposed_total: int
    accepted_total: int
    passes_total: int
    preempted_total: int
    finished_total: int
    faults_total: int
    prefix_hit_tokens_total: int
    waited_s_total: float
    model_s_total: float
    overhead_s_total: float
    step_ms: float | None
    draft_token_ms: float | None
    patience_ms: float = field(default=0.0)
