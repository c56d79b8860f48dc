"""Generates the texts of one completion call, drafted on the device, and turns their commits into text.

Has the target check an answer that the draft wrote alone, too: POST /v1/outrider/verify.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.offline import OfflineText, OfflineWriter, whole_result
from outrider.edge.modes.stream import StreamAgent
from outrider.edge.results import GenerationRequest, GenerationResult, OnTokens, TokenBatch
from outrider.edge.serve.lent_drafts import Loan
from outrider.edge.serve.state import LocalCore, shutting_down
from outrider.edge.serve.unverified import KeptAnswer, KeptText, VerifiedAnswer, VerifiedChoice, compared
from outrider.models.errors import CloudError, OutriderError, RequestError
from outrider.models.faults import log_fault
from outrider.models.http.answer_text import TextStyle
from outrider.models.http.answers import CallTexts, Choice, choice_params
from outrider.models.http.encoding import check_tokens
from outrider.models.http.shapes import Delta
from outrider.models.http.sse import Inbox
from outrider.models.runtimes.ngram import QuotedText
from outrider.models.text.predicted import PredictionFollower
from outrider.models.wire.protocol import ModelFacts

_log = logging.getLogger("outrider.serve")


_USAGE_S: Final = 0.5
"""For the end of a session that the server cuts at a stop string, too: it says what of the prompt was cached."""


@dataclass(slots=True, kw_only=True)
class _Text(Choice):
    """A text. quoted: documents that it may quote. style: how it is cut and shown. facts: its target's, or the draft's.

    task: while it runs. is_cut: its stop string came, and the end of its session has not. written: where the draft may
    write alone.
    """

    request: GenerationRequest
    quoted: Sequence[QuotedText]
    style: TextStyle
    facts: ModelFacts
    task: asyncio.Task[None] | None = None
    is_cut: bool = False
    written: OfflineText = field(default_factory=OfflineText)


_Event = TokenBatch | GenerationResult | RequestError


class LocalTexts(CallTexts[_Text, _Event]):
    """The texts of one call, one per choice."""

    def __init__(self, core: LocalCore, owner: bytes, num_choices: int) -> None:
        """With places for its texts, none of them begun. Raises RequestError 429 or 503."""
        if core.is_draining:
            raise shutting_down()
        super().__init__(owner, Inbox())
        self.core = core
        self.answer_id = ""
        self.model: str | None = None  # as the request names it
        self.adapter: str | None = None
        self.arrived_s = time.monotonic()  # of the request
        self.no_store = False  # as in ClientOptions
        core.places.take(owner, num_choices)
        self._num_places = num_choices

    def begin(
        self,
        requests: Sequence[GenerationRequest],
        style: TextStyle,
        facts: ModelFacts,
        quoted: Sequence[Sequence[QuotedText]] = (),
        num_each: int = 1,
    ) -> None:
        """Begins a text for each request. style: how they are cut and shown. facts: their target's.

        quoted: for each request, documents that its text may quote. Raises RequestError, and begins none, for a prompt
        that does not fit the target.
        """
        for request in requests:  # first: what a draft keeps of a prompt grows with it
            check_tokens(facts.max_positions, request.prompt)
        self.num_each, self.adapter = num_each, facts.adapter
        for request, documents in zip(requests, quoted or [()] * len(requests), strict=True):
            for index in range(num_each):
                each = replace(request, params=choice_params(request.params, index)) if index else request
                assembler = style.assembler(self.core.tokenizer, request.prompt)
                follower = PredictionFollower(request.prediction) if request.prediction else None
                num_prompt = len(request.prompt)
                self.choices.append(
                    _Text(assembler, follower, num_prompt, request=each, quoted=documents, style=style, facts=facts)
                )
        for index in range(0, len(self.choices), num_each):
            self._begin(index)

    @contextmanager
    def closing_on_error(self) -> Iterator[None]:
        """Closes the texts where what prepares them fails. Raises RequestError in place of our other errors."""
        try:
            yield
        except OutriderError as error:
            self.close()
            if isinstance(error, CloudError):
                self.core.upstream.forget_facts()
            raise self.core.request_error(error) from None
        except BaseException:
            self.close()
            raise

    def _begin(self, index: int) -> None:
        choice = self.choices[index]
        choice.has_begun = True
        choice.task = asyncio.get_running_loop().create_task(self._generate(index, choice))
        self._num_places -= 1  # the task's own from here
        self.core.tasks.add(choice.task)
        choice.task.add_done_callback(partial(self._on_done, index))

    def _on_done(self, index: int, task: asyncio.Task[None]) -> None:
        # Here and not in the task: one that is cancelled before it runs gives nothing back.
        self.core.tasks.discard(task)
        self.choices[index].task = None  # a cancelled one has the traceback of where it was, and that has this
        self.core.places.add(self.owner, -1)
        if task.cancelled() and self.core.is_draining:
            self.reader.put((index, shutting_down()))

    async def _generate(self, index: int, choice: _Text) -> None:
        core, metrics, request = self.core, self.core.metrics, choice.request
        tokens: list[int] = []
        timer = metrics.commit_timer(self.arrived_s)

        def on_tokens(batch: TokenBatch) -> None:
            tokens.extend(batch.tokens)
            if not batch.is_unverified:
                timer.committed(len(batch.tokens))
                metrics.committed(batch)
            self.reader.put((index, batch))

        try:
            with self._lend(request) as loan:
                agent = core.stream_agent(self._endpoints(), loan, choice.quoted)
                self._watch(agent)
                try:
                    # The draft alone has no logprobs of the target.
                    if core.offline is not None and loan.can_write and request.num_logprobs is None:
                        result = await self._generate_offline_ok(index, choice, agent, on_tokens)
                    else:
                        result = await agent.generate(request, on_tokens, core.upstream.origin(choice.facts))
                        core.upstream.confirm(choice.facts)
                    loan.has_failed = result.draft_error is not None
                finally:
                    loan.text = [*request.prompt, *tokens]
            timer.ended()
            if choice.has_stopped:  # the server's word is missing where the stream is cut before its end
                result.finish_reason = "stop"
            metrics.ended(result)
            self.reader.put((index, result))
        except asyncio.CancelledError:  # a stop string, or the client has left
            if choice.has_stopped:
                timer.ended()
            metrics.texts["stop" if choice.has_stopped else "cancelled"] += 1
            raise
        except Exception as error:
            metrics.texts["failed"] += 1
            if not isinstance(error, OutriderError):
                log_fault(error)
            if isinstance(error, CloudError):
                core.upstream.forget_facts()
            self.reader.put((index, core.request_error(error)))

    # What a text of the page does otherwise.

    def _lend(self, request: GenerationRequest) -> AbstractContextManager[Loan]:
        return self.core.drafts.lend(self.owner, request.prompt)

    def _endpoints(self) -> Endpoints:
        return self.core.upstream.endpoints(no_store=self.no_store, model=self.adapter)

    def _watch(self, agent: StreamAgent) -> None:
        pass

    async def _generate_offline_ok(
        self, index: int, choice: _Text, agent: StreamAgent, on_tokens: OnTokens
    ) -> GenerationResult:
        core, request, facts = self.core, choice.request, choice.facts
        is_up = facts is not core.draft_facts
        assert core.offline is not None and agent.drafter is not None
        stop_ids, max_positions = frozenset(facts.eos_token_ids), core.offline.max_positions
        writer = OfflineWriter(agent, agent.drafter, stop_ids, max_positions=max_positions, text=choice.written)
        origin = core.upstream.origin(facts) if is_up else None
        began = core.upstream.clock()
        text = await writer.generate(request, on_tokens, origin, is_up=is_up)
        if text.local:
            if is_up:
                core.upstream.lost(began)  # the next text need not try as long
            self._keep(index, choice)
        elif is_up:
            core.upstream.confirm(facts)
        return whole_result(text)

    def _keep(self, index: int, choice: _Text) -> None:
        """Keeps what the draft wrote alone, up to the stop string that ended the text."""
        text, facts, core = choice.written, choice.facts, self.core
        end = choice.assembler.num_tokens if choice.has_stopped else len(text.tokens)
        if local := tuple(text.tokens[len(text.verified) : end]):
            _log.warning("a text of %d tokens has %d unverified ones", end, len(local))
            began = core.upstream.origin(facts).began if text.verified else None
            # Nobody else has the draft's name.
            model = self.model if facts is not core.draft_facts or self.model != facts.name else None
            request = replace(choice.request, due_s=math.inf)  # the client asks for the check when it likes
            kept = KeptText(request, tuple(text.verified), local, began, choice.style, model, self.no_store)
            core.unverified.keep(self.answer_id, self.owner, index, kept)

    def close(self) -> None:
        """Ends what still runs: its session in the cloud, and its draft; may be called twice."""
        for choice in self.choices:
            if choice.task is not None:
                choice.task.cancel()
        self.core.places.add(self.owner, -self._num_places)
        self._num_places = 0

    def _take(self, index: int, event: _Event) -> list[Delta]:
        choice = self.choices[index]
        if choice.is_over:
            return []  # committed between the stop string and the cancellation
        if choice.is_cut:
            if isinstance(event, GenerationResult):
                choice.num_cached = event.cached_prompt_tokens
            self._finish(choice)
            return []
        if isinstance(event, RequestError):
            raise event
        if isinstance(event, TokenBatch):
            choice.drafted.count(event.num_proposed, event.num_accepted)
            num_unverified = len(event.tokens) if event.is_unverified else 0
            deltas = choice.push(index, event.tokens, event.logprobs, num_unverified)
            if choice.has_stopped and choice.request.stop and not num_unverified:  # the server ends the text, too
                choice.is_cut = True
                asyncio.get_running_loop().call_later(_USAGE_S, self._finish, choice)
            elif choice.has_stopped:
                self._keep(index, choice)
                self._finish(choice)
            return deltas
        choice.is_over = True
        choice.num_cached = event.cached_prompt_tokens
        return choice.finish(index, is_stop=event.finish_reason == "stop")

    def _finish(self, choice: _Text) -> None:
        """Ends a text that is whole, whatever its session does."""
        if not choice.is_over:
            choice.is_over = True
            if choice.task is not None:
                choice.task.cancel()
            self.reader.poke()


async def verify_answer(core: LocalCore, owner: bytes, answer: str, kept: KeptAnswer, no_store: bool) -> VerifiedAnswer:
    """The target's text of each choice, one after the other, and how far the draft's agrees. no_store: of this check.

    Raises RequestError 429 or 503 where no place is free or the server ends, CloudError where no cloud answers.
    """
    if core.is_draining:
        raise shutting_down()
    core.places.take(owner, 1)
    task = asyncio.current_task()
    assert task is not None
    core.tasks.add(task)
    try:
        facts = await core.target_facts(next(text.model for text in kept.values()))
        choices = [await _verify(core, owner, index, text, facts, no_store) for index, text in sorted(kept.items())]
    except asyncio.CancelledError:
        if core.is_draining:
            raise shutting_down() from None
        raise
    finally:
        core.tasks.discard(task)
        core.places.add(owner, -1)
    return VerifiedAnswer(id=answer, model=facts.name, choices=choices)


async def _verify(
    core: LocalCore, owner: bytes, index: int, text: KeptText, facts: ModelFacts, no_store: bool
) -> VerifiedChoice:
    kept, request = text.rest(facts.target)
    new: tuple[int, ...] = ()
    reason = "length"
    if request is not None:
        with core.drafts.lend(owner, request.prompt) as loan:
            endpoints = core.upstream.endpoints(no_store=no_store or text.no_store, model=facts.adapter)
            agent = core.stream_agent(endpoints, loan)
            result = await agent.generate(request, None, core.upstream.origin(facts))
            loan.has_failed = result.draft_error is not None
            loan.text = [*request.prompt, *result.tokens]
            new, reason = result.tokens, result.finish_reason
    assembler = kept.style.assembler(core.tokenizer, kept.request.prompt)
    whole = assembler.push([*kept.verified, *new]) + assembler.finish()
    new = new[: assembler.num_tokens - len(kept.verified)]  # a session may not know the stop strings
    num_confirmed, num_replaced = compared(kept, new)
    return VerifiedChoice(
        index=index,
        text=whole,
        finish_reason="stop" if reason == "stop" or assembler.is_stopped else "length",
        is_same=num_replaced == 0 and num_confirmed == len(new),
        confirmed_tokens=num_confirmed,
        replaced_tokens=num_replaced,
    )
