"""Defines the seam between the HTTP API and an engine: requests, events, stats, and the engine's interface.

The API imports this module and no engine. `engine.thread.EngineThread` is the first `ServingEngine`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol

from outrider.models.errors import RequestError
from outrider.models.protocol import EndReason
from outrider.models.runtimes.base import ModelLimits
from outrider.models.sampling import SamplingParams
from outrider.models.tree_draft import TreeDraft

SequenceEndReason = EndReason | Literal["once"]


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence to generate. prompt: ids of everything before the first token to generate.

    patience_ms: longest wait for a draft (0: never; None: the engine chooses). draft: guesses to start with.
    once: end after the first pass that commits (this is /v1/verify); the cache is then parked under `prefix_hash`.
    keep: park the cache where the sequence ends by its length or after a stop id.
    draft_lag_ms: time from a commit to the drafts that know of it; a first guess, until it is measured.
    prefix_hash: the hash of a parked prefix that `prompt` continues; the engine raises `prefix_not_held` if it is gone.
    owner: who asks (a key, or an address): owners share the engine evenly and share no cache.
    earlier: what followed the same prompt before; a hint, whose ids may be anything. is_repeat: it was picked with
    these `params`.
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
    owner: bytes = b""
    keep: bool = False
    earlier: tuple[int, ...] = ()
    is_repeat: bool = False

    def is_parked_after(self, reason: SequenceEndReason) -> bool:
        """Whether the cache is kept after this end for what continues the sequence."""
        if self.once:
            return reason in ("once", "length")
        return self.keep and reason in ("stop", "length")


@dataclass(frozen=True, slots=True)
class CommitEvent:
    """`tokens` were committed after `base` others; the target accepted `accepted` of `proposed` drafted tokens.

    looked_up: of those accepted, how many prompt lookup guessed, or an earlier text.
    """

    base: int
    tokens: tuple[int, ...]
    accepted: int
    proposed: int
    looked_up: int = 0


@dataclass(slots=True)
class SequenceUsage:
    """What one sequence took; `protocol.Usage` is its wire form."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    target_passes: int = 0
    accepted_tokens: int = 0
    rejected_tokens: int = 0
    cached_prompt_tokens: int = 0
    waited_s: float = 0.0
    looked_up_tokens: int = 0

    def count_pass(self, committed: int, proposed: int, accepted: int, looked_up: int = 0) -> None:
        """Counts one forward pass that committed tokens; looked_up: accepted tokens that were looked up."""
        self.looked_up_tokens += looked_up
        self.completion_tokens += committed
        self.target_passes += 1
        self.accepted_tokens += accepted
        self.rejected_tokens += proposed - accepted

    def add(self, other: SequenceUsage) -> None:
        """Adds what another sequence took."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass(frozen=True, slots=True)
class EndEvent:
    """The sequence is over and everything it held is free again.

    reason: "once" ends a `once` request after its pass; with "error", `error` says what failed.
    prefix_hash: where the cache was parked, for a `once` or a `keep` request.
    """

    reason: SequenceEndReason
    usage: SequenceUsage
    error: RequestError | None = None
    prefix_hash: str | None = None


Event = CommitEvent | EndEvent
# Called on the engine's thread, never blocks, never raises.
Sink = Callable[[Event], None]


def _shown(text: str, **default: Any) -> Any:
    """A field with the text that /metrics shows for it."""
    return field(metadata={"help": text}, **default)


@dataclass(slots=True)
class Totals:
    """Counts and seconds since the engine's start. A pass is one sequence's share of a step that committed tokens.

    Each field is a counter of /metrics; its help text stands here.
    """

    steps: int = _shown("Engine steps.", default=0)
    step_tokens: int = _shown("Tokens run through the model.", default=0)
    committed: int = _shown("Tokens committed.", default=0)
    proposed: int = _shown("Drafted tokens verified; with accepted, the acceptance rate as a ratio of sums.", default=0)
    accepted: int = _shown("Drafted tokens accepted.", default=0)
    lookup_proposed: int = _shown("Of the drafted tokens verified, those that were looked up.", default=0)
    lookup_accepted: int = _shown("Of the drafted tokens accepted, those that were looked up.", default=0)
    passes: int = _shown("Target passes that committed tokens.", default=0)
    preempted: int = _shown("Sequences whose blocks went to older ones.", default=0)
    finished: int = _shown("Sequences that ended, for any reason.", default=0)
    faults: int = _shown("Steps that failed in the model or the engine; the log says where.", default=0)
    tree_steps: int = _shown("Engine steps that verified drafts that branch.", default=0)
    prefix_hit_tokens: int = _shown("Prompt tokens whose cache was shared.", default=0)
    spilled: int = _shown("Parked prefixes written to --spill-dir.", default=0)
    restored: int = _shown("Prefixes read back from --spill-dir.", default=0)
    spill_faults: int = _shown("Files of --spill-dir that failed a check; prefixes that were not written.", default=0)
    waited_s: float = _shown("Seconds that sequences waited for drafts.", default=0.0)
    model_s: float = _shown("Seconds in the model.", default=0.0)
    overhead_s: float = _shown("Seconds of engine steps outside the model.", default=0.0)

    def count_step(self, num_tokens: int, *, model_s: float, overhead_s: float) -> None:
        """Counts one step of the engine: time inside the model, and around it."""
        self.steps += 1
        self.step_tokens += num_tokens
        self.model_s += model_s
        self.overhead_s += overhead_s

    def count_pass(
        self, committed: int, proposed: int, accepted: int, lookup_proposed: int = 0, lookup_accepted: int = 0
    ) -> None:
        """Counts one sequence's pass."""
        self.lookup_proposed += lookup_proposed
        self.lookup_accepted += lookup_accepted
        self.passes += 1
        self.committed += committed
        self.proposed += proposed
        self.accepted += accepted


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for /metrics and /health/ready. Each field but `totals` is a gauge; None: not measured yet."""

    totals: Totals
    running: int = _shown("Sequences in the batch.")
    queued: int = _shown("Sequences that wait for admission.")
    parked: int = _shown("Prefixes kept for the verify call or the session that continues them.")
    parked_blocks: int = _shown("Blocks that parked prefixes hold: not free, but given up when a sequence needs them.")
    num_blocks: int = _shown("Blocks of the KV cache.")
    free_blocks: int = _shown("Blocks that a new sequence could have.")
    patience_ms: float = _shown("Longest wait for a draft that the engine now chooses, milliseconds.")
    step_ms: float | None = _shown("Measured decode step with nothing drafted, milliseconds.")
    draft_token_ms: float | None = _shown("Measured extra time of a drafted token in a step, milliseconds.")
    failed: int = _shown("1 while the engine cannot work and /health/ready answers 503, else 0.", default=0)
    trees: int = _shown("1 where steps may verify drafts that branch, 0 where only paths: --tree.", default=0)


class ServingEngine(Protocol):
    """An engine as the HTTP API sees it. Any thread may call any method; sinks run on the engine's own thread."""

    @property
    def limits(self) -> ModelLimits:
        """Vocabulary, and the longest sequence that model and cache can hold."""
        ...

    def calibrate(self) -> None:
        """Measures what a step costs. Blocking; call it once, before `start`. Raises ConfigError."""
        ...

    def start(self) -> None:
        """Lets requests in. Call it once."""
        ...

    def submit(self, request: GenerateRequest, sink: Sink) -> int:
        """Queues a sequence and returns its id; events go to `sink`, the last one an EndEvent.

        Raises RequestError: `overloaded`, `empty_prompt`, `context_length_exceeded`, `token_out_of_range`,
        `prefix_not_held`, `shutting_down`, `engine_failed`.
        """
        ...

    def draft(self, sequence_id: int, base: int, paths: Sequence[Sequence[int]]) -> None:
        """Adds guesses of what follows the first `base` tokens that the sequence committed, likeliest path first.

        Raises RequestError: `unknown_session`, `draft_ahead`, `token_out_of_range`, `stale_draft`.
        """
        ...

    def draft_tree(self, sequence_id: int, message: TreeDraft) -> None:
        """Adds guesses of what follows the first `message.base` tokens, as a part of a tree.

        Raises RequestError as `draft` does.
        """
        ...

    def cancel(self, sequence_id: int) -> None:
        """Ends a sequence early; does nothing if it is over."""
        ...

    def stats(self) -> EngineStats:
        """A snapshot; cheap."""
        ...

    def stop(self, *, drain_s: float = 0.0) -> None:
        """Refuses new work, lets running sequences finish for up to `drain_s` seconds, then ends the rest. Blocking."""
        ...
