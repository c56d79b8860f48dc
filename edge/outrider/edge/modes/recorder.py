"""Collects a generation's commits into its result and passes them to a callback."""

from __future__ import annotations

import time
from collections.abc import Callable

from outrider.edge.devices.energy import EnergySpan
from outrider.edge.results import GenerationRequest, GenerationResult, Mode, OnTokens, Source, TokenBatch
from outrider.models.client import tracing
from outrider.models.client.messages import ByteCounts
from outrider.models.picks.acceptance import Rule
from outrider.models.processors.chooser import TokenLogprobs

Clock = Callable[[], float]


class Recorder:
    """Collects one generation. `clock` gives seconds; times count from the recorder's creation.

    result: its counts, as they grow; what only the caller knows, it sets there. Tokens and times come with `finish`.
    """

    def __init__(
        self,
        mode: Mode,
        on_tokens: OnTokens | None = None,
        clock: Clock = time.perf_counter,
        rule: Rule = Rule.COUPLED,
    ) -> None:
        self.result = GenerationResult(mode, (), (), (), "", 0, 0, 0, 0, num_sessions=0, rule=rule)
        self._on_tokens = on_tokens
        self._clock = clock
        self._energy = EnergySpan()  # before the text's time begins: a process's first one makes the meter
        self._started = clock()
        self._tokens: list[int] = []
        self._sources: list[Source] = []
        self._arrivals: list[float] = []
        self._depths: list[tuple[int, int]] = []

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
        self.result.num_passes += 1
        self.result.num_accepted += accepted
        self.result.num_proposed += proposed
        # A pass that commits only accepted drafts ended at a stop token or the length: it rejected nothing.
        tested = accepted + (may_reject and accepted < proposed and accepted < len(tokens))
        self.result.num_tested += tested
        if self._on_tokens is not None and tokens:
            self._on_tokens(
                TokenBatch(tokens, accepted, at_s, proposed, tested, ranks, alternatives, logprobs=logprobs)
            )

    def depth(self, depth: int) -> None:
        """Records the depth from the next token on."""
        if not self._depths or self._depths[-1][1] != depth:
            self._depths.append((len(self._tokens), depth))

    def finish(self, reason: str, wire: ByteCounts) -> GenerationResult:
        """The result, whole."""
        result = self.result
        result.tokens, result.sources = tuple(self._tokens), tuple(self._sources)
        result.arrival_s, result.depths = tuple(self._arrivals), tuple(self._depths)
        result.finish_reason, result.wire = reason, wire
        result.num_sessions = max(1, result.num_sessions)
        result.joules = self._energy.joules
        return result


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
