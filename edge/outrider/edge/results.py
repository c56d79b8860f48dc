"""Defines the request for a generation and its result, the same for every mode."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from outrider.models.client.messages import ByteCounts
from outrider.models.errors import ConfigError, RequestError
from outrider.models.grammar.compiler import CompiledGrammar
from outrider.models.grammar.spec import GrammarSpec
from outrider.models.picks.acceptance import Rule
from outrider.models.picks.sampling import SamplingParams
from outrider.models.processors.chooser import TokenLogprobs
from outrider.models.processors.options import PLAIN, ProcessorOptions, fields_of
from outrider.models.processors.processor_plan import ProcessorPlan
from outrider.models.wire.protocol import TextCut


class Mode(StrEnum):
    """How the agent and the cloud share the work. The text is the same in every mode."""

    STREAM = "stream"  # drafts are streamed; the target waits for them only while that pays
    STOP_AND_WAIT = "stop-and-wait"  # one block in flight; the plain twin
    CLOUD_ONLY = "cloud-only"  # no drafts


class Source(StrEnum):
    """Who produced a token first. All but the unverified are the target's own choice."""

    DRAFT = "draft"  # drafted on the device, accepted by the target
    TARGET = "target"
    UNVERIFIED = "unverified"  # the draft's alone, while no cloud answered: only with --offline-ok


class Origin(StrEnum):
    """Who guessed a token of a batch, more finely. In every case it is the target's own choice."""

    PICK = "pick"  # drafted, accepted: the draft's own pick, or a copied passage
    ALTERNATIVE = "alternative"  # drafted, accepted: another of the draft's guesses
    TARGET = "target"


@dataclass(frozen=True, slots=True)
class HeldPrefix:
    """First tokens of a text that a server holds: it takes their hash in their place, once.

    url: the server that gave the hash; no other gets it. length: in tokens.
    """

    url: str
    name: str
    length: int


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One text to generate.

    prompt: token ids, at least one. stop_ids: end after one of these, too, not only after the server's own end
    tokens.
    ignore_eos: do not end at the server's own end tokens, unless stop_ids lists them.
    tokenizer: the agent's tokenizer fingerprint, checked by the server.
    held: the beginning of the prompt that a server holds; only stream mode uses it. keeps_prefix: the server is to hold
    prompt and text for the next request. processors: of logits, before the pick. num_generated: so many of
    the prompt's last tokens belong to the text. end_ids: the target's own end tokens, where they are known; only
    drafting uses them. stop: the server ends the text at one of these strings; which characters are shown is the
    caller's. num_logprobs: likeliest tokens to report for each token; None: no logprobs. prediction: what the text may
    repeat. grammar: the texts that are allowed; None allows all. draft_grammar: the same for the draft's vocabulary;
    None: it drafts without. priority: at the server; None: the key's. due_s: its deadline, by `time.monotonic`.
    salt: the server shares what it keeps of this text only with texts of the same one.
    """

    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = 128
    stop_ids: frozenset[int] | None = None
    ignore_eos: bool = False
    tokenizer: str | None = None
    held: HeldPrefix | None = None
    keeps_prefix: bool = False
    processors: ProcessorOptions = PLAIN
    num_generated: int = 0
    end_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    num_logprobs: int | None = None
    prediction: tuple[int, ...] = ()
    grammar: GrammarSpec | None = None
    draft_grammar: CompiledGrammar | None = None
    priority: int | None = None
    due_s: float = math.inf
    salt: str | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ConfigError("the prompt has no tokens; expected at least one")
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}; expected at least 1")
        if self.held is not None and self.held.length >= len(self.prompt):
            raise ConfigError(f"{self.held.length} of {len(self.prompt)} tokens are held; expected at least one more")

    def after(self, tokens: Sequence[int]) -> GenerationRequest:
        """For the rest of the text, which begins with these tokens; it must have a rest."""
        return dataclasses.replace(
            self,
            prompt=(*self.prompt, *tokens),
            max_tokens=self.max_tokens - len(tokens),
            num_generated=self.num_generated + len(tokens),
        )

    def wire_fields(self, num_known: int) -> dict[str, Any]:
        """The fields that every message with this request repeats: sampling parameters, processors, what ends the text.

        num_known: tokens of the text that the message counts to its prompt.
        """
        grammar: dict[str, Any] = {}
        if self.grammar is not None:
            grammar = {"generated": self.num_generated + num_known, "grammar": self.grammar.to_wire()}
        return {
            "stop_ids": sorted(self.stop_ids) if self.stop_ids is not None else None,
            "ignore_eos": self.ignore_eos,
            **dataclasses.asdict(self.params),
            **fields_of(self.processors, self.num_generated + num_known),
            **grammar,
        }

    @property
    def left_ms(self) -> float:
        """What is left of the deadline; infinite without one."""
        return 1e3 * (self.due_s - time.monotonic())

    def service_fields(self) -> dict[str, Any]:
        """The fields that say when the server serves it, and for whom. Raises RequestError 504 after the deadline."""
        if (left_ms := self.left_ms) <= 0.0:
            words = "the request's deadline_ms passed before its text began; allow more time"
            raise RequestError("deadline_exceeded", words, status=504)
        deadline_ms = left_ms if left_ms < math.inf else None
        return {"priority": self.priority, "deadline_ms": deadline_ms, "cache_salt": self.salt}

    @property
    def plan(self) -> ProcessorPlan:
        """What changes the rows of a draft, so that it picks as the target does."""
        ends = ends_of(self.stop_ids, self.end_ids, self.ignore_eos)
        return ProcessorPlan(self.processors, ends, self.num_generated, self.draft_grammar)


def ends_of(stop_ids: frozenset[int] | None, own: frozenset[int], ignore_eos: bool) -> frozenset[int]:
    """The ids after which a text ends: the target's `own` end tokens and the request's."""
    chosen = stop_ids or frozenset()
    return chosen if ignore_eos else chosen | own


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Tokens committed together: the first `num_accepted` were drafted. at_s: seconds since the request.

    num_proposed: drafted tokens that the target ran for them. num_tested: those that it compared with its own choice.
    ranks: of the device's guesses of the first tokens (0: the draft's own pick; 8: prompt lookup's); it had not guessed
    the others. alternatives: indices of accepted tokens that were not the draft's own pick.
    is_unverified: the draft wrote them alone; no target has seen them. logprobs: of each token, where the request asks.
    """

    tokens: tuple[int, ...]
    num_accepted: int
    at_s: float
    num_proposed: int = 0
    num_tested: int = 0
    ranks: tuple[int, ...] = ()
    alternatives: frozenset[int] = frozenset()
    is_unverified: bool = False
    logprobs: tuple[TokenLogprobs, ...] = ()

    def origin(self, index: int) -> Origin:
        """Who guessed the token."""
        if index >= self.num_accepted:
            return Origin.TARGET
        return Origin.ALTERNATIVE if index in self.alternatives else Origin.PICK


OnTokens = Callable[[TokenBatch], None]


@dataclass(slots=True)
class GenerationResult:
    """One generation: finished, or as far as a `Recorder` has it.

    tokens: those that the target committed. sources: who produced each. arrival_s: seconds from the request to each.
    num_passes: target passes that committed (the one that ends the prefill included).
    num_proposed: drafted tokens that the target ran. num_tested: those that it compared with its own choice (not those
    after a rejected one); num_accepted: those that were equal. num_drafted: positions that the draft guessed at on the
    device; num_sent: guesses sent; hits: tokens of the text that the device had guessed, by rank (0: the draft's own
    pick; 8: prompt lookup's; 9: a document's); num_posts: messages sent; num_failed_posts: messages lost. num_sessions:
    1 plus the number of resumptions. depths: (index of the token, depth) at each change. finish_reason: "stop",
    "length", "context" or "deadline". draft_error: why drafting ended early, if it did. waited_ms: time that the target
    waited for drafts. cached_prompt_tokens: of the prompt, those that the first session found in the server's cache.
    num_prompt_sent: of the prompt, those that were sent to open it. num_recent: tokens of the text that this prompt got
    before, which the server drafted from. num_turns: passes that device and target took in turns; turns: which way was
    chosen, and why; empty without drafts, and where the target is not on this machine.
    held: what the server holds now, where the request asked for it. cut: where a stop string ends the text, as the last
    session counts; None where none does. rule: by which the target accepted. joules: what this device's processor took
    while the text ran, other programs included; None where the system does not count it.

    A stop string that completes with the last of max_tokens is not seen where the stream is cut right after it: then
    finish_reason is "length", and cut None.
    """

    mode: Mode
    tokens: tuple[int, ...]
    sources: tuple[Source, ...]
    arrival_s: tuple[float, ...]
    finish_reason: str
    num_passes: int
    num_accepted: int
    num_tested: int
    num_proposed: int
    num_drafted: int = 0
    num_sent: int = 0
    hits: Mapping[int, int] = field(default_factory=dict)
    num_posts: int = 0
    num_turns: int = 0
    turns: str = ""
    num_failed_posts: int = 0
    num_sessions: int = 1
    waited_ms: float = 0.0
    cached_prompt_tokens: int = 0
    num_prompt_sent: int = 0
    num_recent: int = 0
    held: HeldPrefix | None = None
    draft_error: str | None = None
    wire: ByteCounts = field(default_factory=ByteCounts)
    depths: tuple[tuple[int, int], ...] = ()
    cut: TextCut | None = None
    rule: Rule = Rule.COUPLED
    joules: float | None = None

    @property
    def is_lossy(self) -> bool:
        """Whether the text may differ from the target's, also in distribution."""
        return self.rule is Rule.TOLERANCE

    @property
    def ttft_ms(self) -> float:
        """Time to the first token, ms; NaN without tokens."""
        return self.arrival_s[0] * 1e3 if self.arrival_s else float("nan")

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first commit, per second from then on; NaN when everything arrived at once.

        The prompt's prefill is not included: see `ttft_ms`.
        """
        later = sum(1 for at in self.arrival_s if at > self.arrival_s[0])
        return later / (self.arrival_s[-1] - self.arrival_s[0]) if later else float("nan")

    @property
    def gaps_ms(self) -> tuple[float, ...]:
        """Inter-token latencies, ms: 0 between tokens that arrive together."""
        return tuple((b - a) * 1e3 for a, b in zip(self.arrival_s, self.arrival_s[1:], strict=False))

    def gap_ms(self, percentile: int) -> float:
        """A percentile (1 to 99) of the inter-token latencies, ms; NaN with fewer than two gaps."""
        gaps = self.gaps_ms
        return statistics.quantiles(gaps, n=100, method="inclusive")[percentile - 1] if len(gaps) > 1 else float("nan")

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / tested drafted tokens: the chance that a drafted token is accepted when those before it are."""
        return self.num_accepted / self.num_tested if self.num_tested else None

    @property
    def accepted_share(self) -> float:
        """Share of the text that came from accepted drafts; 0 without tokens."""
        return self.num_accepted / max(1, len(self.tokens))

    @property
    def tokens_per_joule(self) -> float | None:
        """Tokens of the text over `joules`."""
        return len(self.tokens) / self.joules if self.joules else None

    @property
    def tokens_per_pass(self) -> float:
        """Mean tokens that a target pass commits."""
        return len(self.tokens) / max(1, self.num_passes)

    @property
    def passes_per_token(self) -> float:
        """Target passes per committed token."""
        return self.num_passes / max(1, len(self.tokens))

    @property
    def bytes_up_per_token(self) -> float:
        """Body bytes sent per generated token, the prompt included."""
        return self.wire.body_up / max(1, len(self.tokens))

    @property
    def bytes_down_per_token(self) -> float:
        """Body bytes received per generated token."""
        return self.wire.body_down / max(1, len(self.tokens))
