"""Generates the texts of one completion call, drafted on the device, and turns their commits into text."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Self

from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.assemble import eased, make_agent
from outrider.edge.modes.offline import OfflineWriter, whole_result
from outrider.edge.modes.stream import StreamAgent
from outrider.edge.results import GenerationRequest, GenerationResult, Mode, OnTokens, TokenBatch
from outrider.edge.serve.drafts import Loan
from outrider.edge.serve.faults import as_request_error, shutting_down
from outrider.edge.serve.state import LocalCore
from outrider.edge.serve.unverified import KeptText
from outrider.models.errors import CloudError, OutriderError, RequestError
from outrider.models.faults import log_fault
from outrider.models.http.answers import predicted_or_drafted, usage_of
from outrider.models.http.choices import choice_params
from outrider.models.http.encoding import check_tokens
from outrider.models.http.inbox import Inbox
from outrider.models.http.openai_answers import CompletionUsage
from outrider.models.http.shapes import Delta
from outrider.models.http.text import TextAssembler, TextStyle
from outrider.models.runtimes.ngram import QuotedText
from outrider.models.text.predicted import PredictionFollower
from outrider.models.wire.protocol import ModelFacts

_log = logging.getLogger("outrider.serve")


_USAGE_S: Final = 0.5
"""For the end of a session that the server cuts at a stop string, too: it says what of the prompt was cached."""


@dataclass(slots=True)
class _Choice:
    """A text. task: while it runs. is_cut: its stop string came, and the end of its session has not."""

    request: GenerationRequest
    assembler: TextAssembler
    prediction: PredictionFollower | None
    task: asyncio.Task[None] | None = None
    has_begun: bool = False
    is_over: bool = False
    is_cut: bool = False
    num_accepted: int = 0
    num_proposed: int = 0
    num_cached: int = 0
    num_unverified: int = 0


_Event = TokenBatch | GenerationResult | RequestError


@dataclass(slots=True)
class LocalTexts:
    """The texts of one call, one per choice. Call `close` at the end, however it ends."""

    core: LocalCore
    owner: bytes
    reader: Inbox[tuple[int, _Event]] = field(default_factory=Inbox)
    answer_id: str = ""
    _choices: list[_Choice] = field(default_factory=list)
    _num_places: int = 0
    _quoted: Sequence[Sequence[QuotedText]] = ()
    _style: TextStyle = field(default_factory=TextStyle)
    _num_each: int = 1
    _facts: ModelFacts | None = None
    _is_up: bool = True

    @classmethod
    def reserve(cls, core: LocalCore, owner: bytes, num_choices: int) -> Self:
        """A call with places for its texts, none of them begun. Raises RequestError 429 or 503."""
        if core.is_draining:
            raise shutting_down()
        texts = cls(core, owner)
        core.places.take(owner, num_choices)
        texts._num_places = num_choices
        return texts

    def begin(
        self,
        requests: Sequence[GenerationRequest],
        style: TextStyle,
        facts: ModelFacts,
        quoted: Sequence[Sequence[QuotedText]] = (),
        *,
        is_up: bool = True,
        num_each: int = 1,
    ) -> None:
        """Begins a text for each request. style: how they are cut and shown. facts: their target's.

        quoted: for each request, documents that its text may quote. is_up: False has the draft write alone. num_each:
        texts of each prompt, which has a seed each; all but the first wait for its first token, so that the target runs
        the prompt once. Raises RequestError, and begins none, for a prompt that does not fit the target.
        """
        for request in requests:  # first: what a draft keeps of a prompt grows with it
            check_tokens(facts.max_positions, request.prompt)
        self._quoted = [each for each in quoted for _ in range(num_each)]
        self._style, self._num_each, self._facts, self._is_up = style, num_each, facts, is_up
        for request in requests:
            for index in range(num_each):
                each = replace(request, params=choice_params(request.params, index)) if index else request
                assembler = style.assembler(self.core.tokenizer, request.prompt)
                follower = PredictionFollower(request.prediction) if request.prediction else None
                self._choices.append(_Choice(each, assembler, follower))

        for index in range(0, len(self._choices), num_each):
            self._begin(index)

    def _begin(self, index: int) -> None:
        choice = self._choices[index]
        assert self._facts is not None
        choice.has_begun = True
        work = self._generate(index, choice.request, self._facts, is_up=self._is_up)
        choice.task = asyncio.get_running_loop().create_task(work)
        self._num_places -= 1  # the task's own from here
        self.core.tasks.add(choice.task)
        choice.task.add_done_callback(partial(self._on_done, index))

    def _begin_others(self, first: int) -> None:
        """Begins the other texts of a prompt, whose first has its first token."""
        if first % self._num_each == 0:
            for index in range(first + 1, first + self._num_each):
                if not self._choices[index].has_begun:
                    self._begin(index)

    def _on_done(self, index: int, task: asyncio.Task[None]) -> None:
        # Here and not in the task: one that is cancelled before it runs gives nothing back.
        self.core.tasks.discard(task)
        self._choices[index].task = None  # a cancelled one has the traceback of where it was, and that has this
        self.core.places.release(self.owner)
        if task.cancelled() and self.core.is_draining:
            self.reader.put((index, shutting_down()))

    async def _generate(self, index: int, request: GenerationRequest, facts: ModelFacts, *, is_up: bool) -> None:
        core, settings = self.core, self.core.settings
        tokens: list[int] = []

        metrics, timer, ended = core.metrics, core.metrics.text_timer(), False

        def on_tokens(batch: TokenBatch) -> None:
            tokens.extend(batch.tokens)
            timer.committed(len(batch.tokens))
            metrics.committed(batch)
            self.reader.put((index, batch))

        with self._lend(request) as loan:
            agent = make_agent(
                Mode.STREAM,
                self._endpoints(),
                loan.drafter,
                settings.depth,
                settings.options if core.power.reason is None else eased(settings.options),
                core.drafts.scheduler,
                loan.estimates,
                self._quoted[index] if self._quoted else (),
            )
            assert isinstance(agent, StreamAgent)
            self._watch(agent)
            try:
                # The draft alone has no logprobs of the target.
                if core.offline is not None and loan.can_write and request.num_logprobs is None:
                    result = await self._generate_offline_ok(index, agent, request, on_tokens, facts, is_up=is_up)
                else:
                    result = await agent.generate(request, on_tokens, core.upstream.origin(facts))
                    core.upstream.confirm(facts)
                loan.has_failed = result.draft_error is not None
                ended = True
                timer.ended()
                metrics.ended(result)
                self.reader.put((index, result))
            except Exception as error:
                ended = True
                metrics.texts["failed"] += 1
                if not isinstance(error, OutriderError):
                    log_fault(error)
                if isinstance(error, CloudError):
                    core.upstream.forget_facts()
                self.reader.put((index, as_request_error(error, shows_details=settings.shows_details)))
            finally:
                loan.text = [*request.prompt, *tokens]
                if not ended:  # a stop string, or the client has left
                    metrics.texts["cancelled"] += 1

    # What a text of the page does otherwise.

    def _lend(self, request: GenerationRequest) -> AbstractContextManager[Loan]:
        return self.core.drafts.lend(self.owner, request.prompt)

    def _endpoints(self) -> Endpoints:
        return self.core.upstream.endpoints()

    def _watch(self, agent: StreamAgent) -> None:
        pass

    async def _generate_offline_ok(
        self,
        index: int,
        agent: StreamAgent,
        request: GenerationRequest,
        on_tokens: OnTokens,
        facts: ModelFacts,
        *,
        is_up: bool,
    ) -> GenerationResult:
        core = self.core
        assert core.offline is not None and agent.drafter is not None
        writer = OfflineWriter(
            agent, agent.drafter, frozenset(facts.eos_token_ids), max_positions=core.offline.max_positions
        )
        origin = core.upstream.origin(facts) if is_up else None
        text = await writer.generate(request, on_tokens, origin, is_up=is_up)
        if text.local:
            _log.warning("a text of %d tokens has %d unverified ones", len(text.tokens), len(text.local))
            began = origin.began if origin is not None and text.verified else None
            kept = KeptText(request, tuple(text.verified), tuple(text.local), began, self._style)
            core.unverified.keep(self.answer_id, self.owner, index, kept)
        elif is_up:
            core.upstream.confirm(facts)
        return whole_result(text)

    @property
    def is_abandoned(self) -> bool:
        """Whether the client has left."""
        return self.reader.is_closed

    def close(self) -> None:
        """Ends what still runs: its session in the cloud, and its draft; may be called twice."""
        for choice in self._choices:
            if choice.task is not None:
                choice.task.cancel()
        for _ in range(self._num_places):
            self.core.places.release(self.owner)
        self._num_places = 0

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """New text as it comes, one list per wake-up; an empty list after a poke.

        Ends when all texts have ended or the client has left. Raises RequestError if one fails.
        """
        while not all(choice.is_over for choice in self._choices):
            arrived = await self.reader.take()
            if not arrived and self.reader.is_closed:
                return
            deltas: list[Delta] = []
            for index, event in arrived:
                deltas += self._take(index, event)
                self._begin_others(index)
            if deltas or not arrived:
                yield deltas

    def _take(self, index: int, event: _Event) -> list[Delta]:
        choice = self._choices[index]
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
            choice.num_accepted += event.num_accepted
            choice.num_proposed += event.num_proposed
            before = choice.assembler.num_tokens
            text = choice.assembler.push(event.tokens, event.logprobs)
            if choice.prediction is not None:
                choice.prediction.push(event.tokens[: choice.assembler.num_tokens - before])
            pieces = tuple(choice.assembler.take_pieces())
            num_new = len(event.tokens) if event.is_unverified else 0
            choice.num_unverified += num_new
            if choice.assembler.is_stopped:
                if choice.request.stop:  # the server ends the text, too
                    choice.is_cut = True
                    asyncio.get_running_loop().call_later(_USAGE_S, self._finish, choice)
                else:
                    self._finish(choice)
                return [Delta(index, text, "stop", num_new, pieces)]
            return [Delta(index, text, None, num_new, pieces)] if text or num_new or pieces else []
        choice.is_over = True
        choice.num_cached = event.cached_prompt_tokens
        text = choice.assembler.finish()
        is_stop = event.finish_reason == "stop" or choice.assembler.is_stopped
        return [Delta(index, text, "stop" if is_stop else "length", pieces=tuple(choice.assembler.take_pieces()))]

    def _finish(self, choice: _Choice) -> None:
        """Ends a text that is whole, whatever its session does."""
        if not choice.is_over:
            choice.is_over = True
            if choice.task is not None:
                choice.task.cancel()
            self.reader.poke()

    def mean_logprob(self, index: int) -> float:
        """Of the tokens of a text that asked for logprobs."""
        return self._choices[index].assembler.mean_logprob

    def completion_usage(self) -> CompletionUsage:
        """Tokens of all choices so far; a prompt counts once, whatever the number of its texts."""
        leaders = self._choices[:: self._num_each]
        return usage_of(
            sum(len(choice.request.prompt) for choice in leaders),
            sum(choice.assembler.num_tokens for choice in self._choices),
            *predicted_or_drafted(self._choices),
            sum(choice.num_cached for choice in leaders),
        )
