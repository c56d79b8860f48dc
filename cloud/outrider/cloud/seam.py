"""Defines the seam between the HTTP API, which imports no engine, and engines: requests, events, stats, interface."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol

from outrider.cloud.distributions import Distributions
from outrider.models.errors import RequestError
from outrider.models.grammar.compiler import BuildElsewhere, CompiledGrammar
from outrider.models.picks.acceptance import PLAIN_TERMS, RuleTerms
from outrider.models.picks.rejection import Evidence
from outrider.models.picks.sampling import SamplingParams
from outrider.models.processors.chooser import TokenLogprobs
from outrider.models.processors.options import PLAIN, ProcessorOptions
from outrider.models.runtimes.base import ModelLimits
from outrider.models.wire.protocol import EndReason
from outrider.models.wire.tree_draft import TreeDraft

SequenceEndReason = EndReason | Literal["once"]


@dataclass(frozen=True, slots=True)
class PickOptions:
    """How the tokens of a sequence are picked.

    processors: of logits, before the pick. num_logprobs: likeliest tokens to report for each token; None: no logprobs.
    grammar: the texts that are allowed; None allows all. terms: how drafted tokens are accepted; engines that know only
    equality raise `unsupported_rule` for others.
    """

    params: SamplingParams
    processors: ProcessorOptions = PLAIN
    grammar: CompiledGrammar | None = None
    num_logprobs: int | None = None
    terms: RuleTerms = PLAIN_TERMS


@dataclass(frozen=True, slots=True)
class DraftHints:
    """What is known beforehand of a sequence's drafts; the text does not depend on it.

    draft: guesses to start with. evidence: of these, where the acceptance rule needs it. patience_ms: longest wait for
    a draft (0: never; None: the engine chooses). lag_ms: time from a commit to the drafts that know of it; a first
    guess, until it is measured. recent: what followed the same prompt before; ids may be anything. is_repeat: it was
    picked with the same options. is_predicted: it is the request's own prediction.
    """

    draft: tuple[int, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    patience_ms: float | None = None
    lag_ms: float | None = None
    recent: tuple[int, ...] = ()
    is_repeat: bool = False
    is_predicted: bool = False


@dataclass(frozen=True, slots=True)
class Asker:
    """The key or address that sent a request, and what it is due.

    owner: owners share the engine evenly and share no cache. salt: part of the key of everything that is kept of a
    text: requests of one owner with different salts share nothing, not even the prefixes that they name.
    priority: higher ones go first; among equals owners share evenly, and nobody starves.
    deadline_ms: time from `submit` after which the sequence ends: with its text so far, or, where it has none, with the
    error `deadline_exceeded`; None: no such bound.
    """

    owner: bytes = b""
    salt: bytes = b""
    priority: int = 0
    deadline_ms: float | None = None

    @property
    def client(self) -> bytes:
        """Who shares what was learned from earlier texts: the owner, or those of its requests with this salt."""
        return hashlib.sha256(self.owner).digest() + self.salt if self.salt else self.owner

    def name_of(self, prefix_hash: str) -> str:
        """The name under which a prefix is parked: its hash, which is of use with this salt only."""
        if not self.salt:
            return prefix_hash
        digest = hashlib.blake2b(prefix_hash.encode(), digest_size=32, key=hashlib.sha256(self.salt).digest())
        return f".{digest.hexdigest()}"  # longer than any hash that a client may send


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence to generate. prompt: ids of everything before the first token to generate.

    prefix_hash: the hash of a parked prefix that `prompt` continues; the engine raises `prefix_not_held` if it is gone.
    stored: what `ServingEngine.seek` found of the parked prefix; None where it is in memory, or nowhere.
    num_generated: so many of the last tokens before the first one to generate belong to the text, not to the prompt, as
    logit processors see it: a resumed session's. once: end after the first pass that commits (/v1/verify); the cache is
    then parked under `prefix_hash`. keep: park it at an end by length or stop. adapter: one of the engine's, by name.
    provisional: of a cascade, asks for events of unconfirmed tokens, too.
    """

    prompt: tuple[int, ...]
    pick: PickOptions
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    hints: DraftHints = DraftHints()
    asker: Asker = Asker()
    prefix_hash: str | None = None
    stored: Any = None
    num_generated: int = 0
    once: bool = False
    keep: bool = False
    adapter: str | None = None
    provisional: bool = False

    def is_parked_after(self, reason: SequenceEndReason) -> bool:
        """Whether the cache is kept after this end for what continues the sequence."""
        if self.once:
            return reason in ("once", "length")
        return self.keep and reason in ("stop", "length")


@dataclass(frozen=True, slots=True)
class CommitEvent:
    """`tokens` were committed after `base` others; the target accepted `accepted` of `proposed` drafted tokens.

    looked_up: of those accepted, how many a source of the verifier's own guessed. logprobs: of each token, where the
    request asks for them. tested: drafted tokens judged, where the rule needs evidence.
    """

    base: int
    tokens: tuple[int, ...]
    accepted: int
    proposed: int
    looked_up: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    tested: int | None = None


@dataclass(frozen=True, slots=True)
class ProvisionalEvent:
    """A cascade's mid-size verifier committed `tokens` after `base` others; the target has not confirmed them.

    They replace earlier provisional tokens from `base` on. Sent only for requests that ask: `provisional`.
    """

    base: int
    tokens: tuple[int, ...]


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


Event = CommitEvent | ProvisionalEvent | EndEvent
# Called on the engine's thread, never blocks, never raises.
Sink = Callable[[Event], None]


def _shown(name: str, text: str, **default: Any) -> Any:
    """A field with the name, after "outrider_", and the text that /metrics shows for it."""
    return field(metadata={"name": name, "help": text}, **default)


@dataclass(slots=True)
class Totals:
    """Counts and seconds since the engine's start. A pass is one sequence's share of a step that committed tokens.

    Each field is a counter of /metrics; its name (vLLM's where vLLM has it) and help text stand here. Fields without
    are shown by `Distributions`.
    """

    steps: int = _shown("engine_steps", "Engine steps.", default=0)
    step_tokens: int = _shown("engine_step_tokens", "Tokens run through the model.", default=0)
    committed: int = _shown("generation_tokens", "Tokens committed.", default=0)
    passes: int = _shown("target_passes", "Target passes that committed tokens.", default=0)
    drafts: int = _shown("spec_decode_num_drafts", "Target passes that verified drafted tokens.", default=0)
    proposed: int = _shown("spec_decode_num_draft_tokens", "Drafted tokens verified.", default=0)
    accepted: int = _shown("spec_decode_num_accepted_tokens", "Drafted tokens accepted.", default=0)
    tested: int = _shown(
        "spec_decode_num_tested_tokens",
        "Drafted positions that the target reached: accepted ones, and the first rejected one of each pass.",
        default=0,
    )
    wasted: int = _shown(
        "spec_decode_num_wasted_tokens", "Drafted tokens verified and not accepted: wasted nodes.", default=0
    )
    lookup_proposed: int = _shown(
        "spec_decode_num_lookup_draft_tokens", "Of the drafted tokens verified, those that were looked up.", default=0
    )
    lookup_accepted: int = _shown(
        "spec_decode_num_lookup_accepted_tokens",
        "Of the drafted tokens accepted, those that were looked up.",
        default=0,
    )
    rejection_sequences: int = _shown("rejection_sequences", "Sequences whose rule is rejection.", default=0)
    tolerance_sequences: int = _shown(
        "tolerance_sequences", "Sequences whose rule is tolerance: their texts are not the target's.", default=0
    )
    tolerated: int = _shown(
        "tolerated_tokens",
        "Drafted tokens accepted by tolerance though the target would have picked another.",
        default=0,
    )
    draft_nodes: int = _shown(
        "draft_nodes_received", "Drafted nodes of devices that became pending; the rest were stale.", default=0
    )
    tree_steps: int = _shown("engine_tree_steps", "Engine steps that verified drafts that branch.", default=0)
    prompt_tokens: int = _shown("prompt_tokens", "Prompt tokens of sequences that left the queue.", default=0)
    prefix_queried_tokens: int = _shown("prefix_cache_queries", "Prompt tokens looked up in the cache.", default=0)
    prefix_hit_tokens: int = _shown("prefix_cache_hits", "Prompt tokens found in the cache.", default=0)
    preempted: int = _shown("num_preemptions", "Sequences whose blocks went to older ones.", default=0)
    faults: int = _shown(
        "engine_faults", "Steps that failed in the model or the engine; the log says where.", default=0
    )
    spilled: int = _shown("kv_cache_spilled", "Parked prefixes written to files.", default=0)
    restored: int = _shown("kv_cache_restored", "Parked prefixes read from files.", default=0)
    spill_faults: int = _shown(
        "kv_cache_spill_faults", "Files of parked prefixes that could not be written or used.", default=0
    )
    model_s: float = _shown("engine_model_seconds", "Seconds in the model.", default=0.0)
    overhead_s: float = _shown("engine_overhead_seconds", "Seconds of engine steps outside the model.", default=0.0)
    finished: int = 0

    def count_step(self, num_tokens: int, *, model_s: float, overhead_s: float) -> None:
        """Counts one step of the engine: time inside the model, and around it."""
        self.steps += 1
        self.step_tokens += num_tokens
        self.model_s += model_s
        self.overhead_s += overhead_s

    def count_pass(
        self,
        committed: int,
        proposed: int,
        accepted: int,
        lookup_proposed: int = 0,
        lookup_accepted: int = 0,
        *,
        tested: int,
    ) -> None:
        """Counts one sequence's pass. tested: drafted positions that the target reached."""
        self.passes += 1
        self.committed += committed
        if proposed:
            self.drafts += 1
            self.proposed += proposed
            self.accepted += accepted
            self.tested += tested
            self.wasted += proposed - accepted
            self.lookup_proposed += lookup_proposed
            self.lookup_accepted += lookup_accepted


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot for /metrics and /health/ready. Fields with a help text are gauges; None: not measured yet.

    Fields in milliseconds are shown in seconds. distributions: the engine's own, still counting.
    """

    totals: Totals
    running: int = _shown("num_requests_running", "Sequences in the batch.")
    queued: int = _shown("num_requests_waiting", "Sequences that wait for admission.")
    parked: int = _shown(
        "kv_cache_parked_prefixes", "Prefixes kept for the verify call or the session that continues them."
    )
    parked_blocks: int = _shown(
        "kv_cache_parked_blocks",
        "Blocks that parked prefixes hold: not free, but given up when a sequence needs them.",
    )
    num_blocks: int = _shown("kv_cache_blocks", "Blocks of the KV cache.")
    free_blocks: int = _shown("kv_cache_free_blocks", "Blocks that a new sequence could have.")
    patience_ms: float = _shown("draft_patience_seconds", "Longest wait for a draft that the engine now chooses.")
    step_ms: float | None = _shown("decode_step_seconds", "Measured decode step with nothing drafted.")
    draft_token_ms: float | None = _shown("draft_token_seconds", "Measured extra time of a drafted token in a step.")
    failed: int = _shown(
        "engine_failed", "1 while the engine cannot work and /health/ready answers 503, else 0.", default=0
    )
    trees: int = _shown(
        "engine_trees", "1 where steps may verify drafts that branch, 0 where only paths: --tree.", default=0
    )
    distributions: Distributions = field(default_factory=Distributions)


class ServingEngine(Protocol):
    """An engine as the HTTP API sees it. Any thread may call any method; sinks run on the engine's own thread."""

    @property
    def limits(self) -> ModelLimits:
        """Vocabulary, and the longest sequence that model and cache can hold."""

    @property
    def grammar_builder(self) -> BuildElsewhere | None:
        """Builds grammars where the engine makes its masks, if that is in other processes."""
        return None

    def calibrate(self) -> None:
        """Measures what a step costs. Blocking; call it once, before `start`. Raises ConfigError."""

    def start(self) -> None:
        """Lets requests in. Call it once."""

    def submit(self, request: GenerateRequest, sink: Sink) -> int:
        """Queues a sequence and returns its id; events go to `sink`, the last one an EndEvent.

        Raises RequestError: `overloaded`, `empty_prompt`, `context_length_exceeded`, `token_out_of_range`,
        `prefix_not_held`, `shutting_down`, `engine_failed`.
        """

    def seek(self, owner: bytes, name: str, done: Callable[[Any], None]) -> bool:
        """Looks outside of memory for a parked prefix; `done` gets what `GenerateRequest.stored` takes, on any thread.

        Never blocks. False, and `done` is not called, where there is nothing to wait for.
        """
        return False

    def draft(self, sequence_id: int, base: int, paths: Sequence[Sequence[int]]) -> None:
        """Adds guesses of what follows the first `base` tokens that the sequence committed, likeliest path first.

        What contradicts newer commits, or ends there, is dropped.

        Raises RequestError: `unknown_session`, `draft_ahead`, `token_out_of_range`, and `draft_not_taken` where the
        engine is too far behind with reading drafts: nothing of it is known then.
        """

    def draft_tree(self, sequence_id: int, message: TreeDraft) -> None:
        """Adds guesses of what follows the first `message.base` tokens, as a part of a tree.

        Raises RequestError as `draft` does.
        """

    def cancel(self, sequence_id: int, reason: SequenceEndReason = "cancelled") -> None:
        """Ends a sequence early; does nothing if it is over. reason: "stop" where its text is whole. Parks nothing."""

    def rewind(self, sequence_id: int, base: int, tokens: Sequence[int], sink: Sink) -> bool:
        """Replaces what a sequence generated after its first `base` tokens by `tokens`, at least one.

        Its events go to `sink` from then on; a sequence that ended before has only its end there, "cancelled".
        Drafts that are pending are dropped. False, and nothing is changed, where the engine cannot.
        """
        return False

    def stats(self) -> EngineStats:
        """A snapshot; cheap."""

    def on_death(self, act: Callable[[str], None]) -> None:
        """Has `act` called with the reason, on any thread, once the engine has failed for good; at once if it has.

        Only a new process can serve again. An engine that recovers by itself never calls it.
        """
        return

    def stop(self, *, drain_s: float = 0.0) -> None:
        """Refuses new work, lets running sequences finish for up to `drain_s` seconds, then ends the rest. Blocking."""
