"""Generates by stop-and-wait: drafts a block, has it verified, takes the answer, drafts the next.

The plain twin of stream mode, and what the published systems do: every block costs a round trip. Kept because it is
short, because its text must equal stream mode's, and because it is hard to beat on a very short round trip.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from outrider.edge.drafting.belief import Belief
from outrider.edge.drafting.cached_text import Logits
from outrider.edge.drafting.calibration import Guess, sampled_guess
from outrider.edge.drafting.depth import DepthController
from outrider.edge.drafting.drafter import Drafter
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.link.origin import Served, TextOrigin
from outrider.edge.modes.recorder import Recorder, trace_result
from outrider.edge.results import GenerationRequest, GenerationResult, Mode, OnTokens
from outrider.models.client import tracing
from outrider.models.client.client import VerifierClient
from outrider.models.client.errors import refusal_error
from outrider.models.errors import RequestError
from outrider.models.picks.acceptance import LEAST_LOG, PLAIN_TERMS, DeltaCalibrator, Rule, RuleTerms, log_probability
from outrider.models.picks.rejection import NUM_IDS, WHOLE, SparseDistribution, draw, probabilities, sparse
from outrider.models.picks.sampling import SamplingParams, pick
from outrider.models.wire.verify import VerifyItem, VerifyRequest, VerifyResult


def propose_drawn(logits: Logits, params: SamplingParams, position: int, num_ids: int = NUM_IDS) -> list[Guess]:
    """For rejection: one guess, drawn from a distribution of `num_ids` ids that goes with it."""
    q = sparse(logits, params, num_ids)
    return [sampled_guess(draw(q, params.seed, position), q.weights[0] / WHOLE, q)]


def propose_picked(logits: Logits, params: SamplingParams, position: int) -> list[Guess]:
    """For tolerance: one guess, the draft's pick, with its log-probability."""
    token = pick(logits, params, position)
    log_q = max(LEAST_LOG, log_probability(logits, params, token))
    warm = replace(params, temperature=1.0) if params.is_greedy else params
    return [sampled_guess(token, float(probabilities(logits, warm).max()), log_q)]


logger = logging.getLogger(__name__)

Guesser = Callable[[Sequence[Sequence[int]]], list[list[Guess]]]
"""One guess after each branch at most."""


@dataclass(frozen=True, slots=True)
class StopAndWaitAgent:
    """Generates over /v1/verify, one text at a time. drafter: None verifies empty blocks (one token per round trip).

    terms: how the target accepts; a rule that needs evidence needs a draft with a model.
    """

    endpoints: Endpoints
    drafter: Drafter | None
    depth: DepthController
    estimates: Estimates
    clock: Callable[[], float] = time.perf_counter
    terms: RuleTerms = PLAIN_TERMS
    calibrator: DeltaCalibrator = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "calibrator", DeltaCalibrator(self.terms.delta, self.terms.acceptance))

    async def generate(self, request: GenerationRequest, on_tokens: OnTokens | None = None) -> GenerationResult:
        """Generates one text; raises as `StreamAgent.generate`. A drafter that fails only ends the drafting."""
        with tracing.span("text") as span:
            result = await self._generate(request, on_tokens)
            trace_result(span, request, result)
            return result

    async def _generate(self, request: GenerationRequest, on_tokens: OnTokens | None) -> GenerationResult:
        recorder = Recorder(Mode.STOP_AND_WAIT, on_tokens, self.clock, self.terms.rule)
        wire_before = self.endpoints.wire
        belief, text, prefix_hash, reason = Belief(self.estimates.calibration.chance), TextOrigin(), None, None
        hits: Counter[int] = Counter()
        drafter = self.drafter
        while reason is None:
            block: list[Guess] = []
            if drafter is not None:
                try:
                    block = await self._draft(drafter, request, belief)
                except Exception as error:  # each runtime has its own types
                    # Without a draft the text is the same, only slower: go on, and report it.
                    logger.warning("drafting failed and is off for this text: %s", error, exc_info=error)
                    recorder.result.draft_error, drafter = f"{type(error).__name__}: {error}", None
            recorder.result.num_drafted += len(block)
            recorder.result.num_sent += len(block)
            try:
                result = await self._verify(request, belief, block, text, prefix_hash)
            except RequestError as error:
                if error.code != "deadline_exceeded" or not belief.known:
                    raise
                reason = "deadline"
                break
            for index in range(result.tested or 0):
                self.calibrator.observe(index < result.accepted)
            belief.tree.add_path(block)
            outcome = belief.on_commit(len(belief.known), result.tokens)
            # The server may run fewer drafted tokens than were sent: the rest is drafted again, not kept.
            belief.tree.clear()
            self.estimates.on_commit(outcome, None)
            hits.update(node.rank for node in outcome.hits)
            self.depth.observe(outcome)
            if drafter is not None:
                drafter.extend(outcome.tokens)
            recorder.depth(len(block))
            # An equal token beyond the accepted ones is the target's own: it ran no more drafts, or the text ends.
            num_ran = result.accepted if len(outcome.hits) > result.accepted else len(block)
            num_run = num_ran if result.tested is None else result.tested
            recorder.commit(outcome.tokens, result.accepted, num_run)
            prefix_hash, reason = result.prefix_hash, result.finish_reason
            if reason is None and len(belief.known) >= request.max_tokens:
                reason = "length"
        recorder.result.hits = dict(hits)
        return recorder.finish(reason, self.endpoints.wire - wire_before)

    async def _draft(self, drafter: Drafter, request: GenerationRequest, belief: Belief) -> list[Guess]:
        if not belief.known:
            await asyncio.to_thread(drafter.begin, request.prompt, request.params, request.plan)
        room = request.max_tokens - len(belief.known) - 1
        count = min(self.depth.block(), room)
        if count < 1:
            return []
        guess: Guesser = partial(drafter.guess, width=1)
        if self.terms.rule.needs_evidence:
            propose = propose_picked if self.terms.rule is Rule.TOLERANCE else propose_drawn
            guess = partial(drafter.guess_by, propose=propose)
        started = self.clock()
        is_over = threading.Event()
        try:
            block = await asyncio.to_thread(_block, drafter, guess, count, is_over)
        finally:
            is_over.set()  # a thread cannot be cancelled; without this, Ctrl-C would wait for a long prompt
        if belief.known and block:  # the first block's time includes the prompt
            self.estimates.on_drafted((self.clock() - started) * 1e3 / len(block), 1)
        return block

    async def _verify(
        self,
        request: GenerationRequest,
        belief: Belief,
        block: Sequence[Guess],
        text: TextOrigin,
        prefix_hash: str | None,
    ) -> VerifyResult:
        """Verifies a block, with the hash of the prefix, or with all tokens if the server no longer holds it."""
        whole = VerifyItem(
            prefix=[*request.prompt, *belief.known],
            draft=[guess.token for guess in block],
            max_tokens=request.max_tokens - len(belief.known),
            **request.wire_fields(len(belief.known)),
            **self._rule_fields(block),
        )
        if prefix_hash is not None:
            try:
                by_hash = whole.model_copy(update={"prefix": [], "prefix_hash": prefix_hash})
                return await self._ask(request, by_hash, text)
            except RequestError as e:
                if e.code != "prefix_not_held":
                    raise
        return await self._ask(request, whole, text)

    def _rule_fields(self, block: Sequence[Guess]) -> dict[str, Any]:
        terms = self.terms
        if terms.rule is Rule.REJECTION:
            qs = [guess.evidence for guess in block if isinstance(guess.evidence, SparseDistribution)]
            pairs = [[number for pair in zip(q.ids, q.weights, strict=True) for number in pair] for q in qs]
            return {"rule": terms.rule, "draft_q": pairs}
        if terms.rule is Rule.TOLERANCE:
            log_qs = [round(guess.evidence, 3) for guess in block if isinstance(guess.evidence, float)]
            return {"rule": terms.rule, "draft_log_q": log_qs, "delta": self.calibrator.delta}
        return {} if terms.rule is Rule.COUPLED else {"rule": terms.rule}

    async def _ask(self, request: GenerationRequest, item: VerifyItem, text: TextOrigin) -> VerifyResult:
        async def ask(client: VerifierClient) -> VerifyResult:
            self.estimates.use(client.url)
            asked_at = self.clock()
            target = text.target if item.prefix_hash is None else None  # whoever holds the prefix has that target
            envelope = VerifyRequest(items=[item], tokenizer=request.tokenizer, **request.service_fields())
            answer = await client.verify(envelope, target)
            took_ms = (self.clock() - asked_at) * 1e3
            served = Served(client.url, answer.model or "a model without a name", answer.target)
            text.require_same(served)
            (result,) = answer.results
            if result.error is not None:
                raise refusal_error(client.url, result.error, 400)
            text.took_tokens(served)
            self.estimates.on_times(answer.step_ms, answer.draft_token_ms)
            verified_ms = self.estimates.step_ms + len(item.draft) * self.estimates.extra_ms
            self.estimates.on_posted(max(0.0, took_ms - verified_ms))
            return result

        return await self.endpoints.call(ask, text)


def _block(drafter: Drafter, guess: Guesser, count: int, is_over: threading.Event) -> list[Guess]:
    """A path of at most `count` guesses; ends early once nobody waits for it."""
    block: list[Guess] = []
    while drafter.is_behind and not is_over.is_set():
        drafter.read_on()
    while len(block) < count and not is_over.is_set():
        (guesses,) = guess([[each.token for each in block]])
        if not guesses:
            break
        block.append(guesses[0])
    return block
