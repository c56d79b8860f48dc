"""Collects a generation's commits into its result and passes them to a callback."""

from __future__ import annotations

import time
from collections.abc import Callable

from outrider.edge.results import GenerationRequest, GenerationResult, HeldPrefix, Mode, OnTokens, Source, TokenBatch
from outrider.models.client import tracing
from outrider.models.client.messages import ByteCounts
from outrider.models.picks.acceptance import Rule
from outrider.models.processors.chooser import TokenLogprobs
from outrider.models.wire.protocol import TextCut

Clock = Callable[[], float]


class Recorder:
    """The result of a generation in progress. `clock` gives seconds; times count from the recorder's creation."""

    def __init__(self, mode: Mode, on_tokens: OnTokens | None = None, clock: Clock = time.perf_counter) -> None:
        self._mode = mode
        self._on_tokens = on_tokens
        self._clock = clock
        self._started = clock()
        self._tokens: list[int] = []
        self._sources: list[Source] = []
        self._arrivals: list[float] = []
        self._depths: list[tuple[int, int]] = []
        self._num_passes = 0
        self._num_accepted = 0
        self._num_tested = 0
        self._num_proposed = 0
        self.num_drafted = 0
        self.num_sent = 0
        self.hits: dict[int, int] = {}
        self.draft_error: str | None = None
        self.num_posts = 0
        self.num_failed_posts = 0
        self.num_sessions = 0
        self.waited_ms = 0.0
        self.cached_prompt_tokens = 0
        self.num_prompt_sent = 0
        self.num_recent = 0
        self.held: HeldPrefix | None = None
        self.cut: TextCut | None = None
        self.rule = Rule.COUPLED

    def commit(
        self,
        tokens: tuple[int, ...],
        accepted: int,
        proposed: int,
        *,
        may_reject: bool = True,
        ranks: tuple[int, ...] = (),
        alternatives: frozenset[int] = frozenset(),
        logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> None:
        """Records one target pass and passes on its tokens.

        may_reject: False where what it ran beyond the accepted ones were other branches of a tree, and its own pick
        after them contradicts no first guess. ranks, alternatives, logprobs: as in
        `TokenBatch`.
        """
        at_s = self._clock() - self._started
        accepted = min(accepted, len(tokens))
        self._tokens.extend(tokens)
        self._sources.extend(Source.DRAFT if i < accepted else Source.TARGET for i in range(len(tokens)))
        self._arrivals.extend([at_s] * len(tokens))
        self._num_passes += 1
        self._num_accepted += accepted
        self._num_proposed += proposed
        # A pass that commits only accepted drafts ended at a stop token or the length: it rejected nothing.
        tested = accepted + (may_reject and accepted < proposed and accepted < len(tokens))
        self._num_tested += tested
        if self._on_tokens is not None and tokens:
            self._on_tokens(
                TokenBatch(tokens, accepted, at_s, proposed, tested, ranks, alternatives, logprobs=logprobs)
            )

    def depth(self, depth: int) -> None:
        """Records the depth from the next token on."""
        if not self._depths or self._depths[-1][1] != depth:
            self._depths.append((len(self._tokens), depth))

    def finish(self, reason: str, wire: ByteCounts) -> GenerationResult:
        """The result."""
        return GenerationResult(
            mode=self._mode,
            tokens=tuple(self._tokens),
            sources=tuple(self._sources),
            arrival_s=tuple(self._arrivals),
            finish_reason=reason,
            num_passes=self._num_passes,
            num_accepted=self._num_accepted,
            num_tested=self._num_tested,
            num_proposed=self._num_proposed,
            num_drafted=self.num_drafted,
            num_sent=self.num_sent,
            hits=self.hits,
            num_posts=self.num_posts,
            num_failed_posts=self.num_failed_posts,
            num_sessions=max(1, self.num_sessions),
            waited_ms=self.waited_ms,
            cached_prompt_tokens=self.cached_prompt_tokens,
            num_prompt_sent=self.num_prompt_sent,
            num_recent=self.num_recent,
            held=self.held,
            wire=wire,
            draft_error=self.draft_error,
            depths=tuple(self._depths),
            cut=self.cut,
            rule=self.rule,
        )


def trace_result(span: tracing.Span, request: GenerationRequest, result: GenerationResult) -> None:
    """Puts a generation's numbers into its span: no token of it."""
    span.set(
        outrider__mode=result.mode.value,
        outrider__prompt_tokens=len(request.prompt),
        outrider__tokens=len(result.tokens),
        outrider__passes=result.num_passes,
        outrider__accepted=result.num_accepted,
        outrider__proposed=result.num_proposed,
        outrider__drafted=result.num_drafted,
        outrider__sent=result.num_sent,
        outrider__sessions=result.num_sessions,
        outrider__finish_reason=result.finish_reason,
        outrider__ttft_ms=result.ttft_ms if result.tokens else None,
        outrider__draft_failed=result.draft_error is not None,
    )
