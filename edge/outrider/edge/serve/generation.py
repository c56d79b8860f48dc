"""Generates the texts of one completion call, drafted on the device, and turns their commits into text."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Self

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
from outrider.models.http.answers import usage_of
from outrider.models.http.encoding import check_tokens
from outrider.models.http.inbox import Inbox
from outrider.models.http.openai_answers import CompletionUsage
from outrider.models.http.shapes import Delta
from outrider.models.http.text import TextAssembler
from outrider.models.protocol import ModelFacts
from outrider.models.runtimes.ngram import QuotedText

_log = logging.getLogger("outrider.serve")


@dataclass(slots=True)
class _Choice:
    assembler: TextAssembler
    num_prompt: int
    task: asyncio.Task[None] | None = None
    is_over: bool = False
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
    _stops: tuple[str, ...] = ()
    _stop_ids: frozenset[int] = frozenset()

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
        stop_strings: Sequence[str],
        stop_ids: frozenset[int],
        facts: ModelFacts,
        quoted: Sequence[Sequence[QuotedText]] = (),
        *,
        is_up: bool = True,
    ) -> None:
        """Begins a text for each request. stop_ids: ids that end a text and are no part of it. facts: its target's.

        quoted: for each request, documents that its text may quote. is_up: False has the draft write alone.
        Raises RequestError, and begins none, for a prompt that does not fit the target.
        """
        for request in requests:  # first: what a draft keeps of a prompt grows with it
            check_tokens(facts.max_positions, request.prompt)
        self._quoted = quoted
        self._stops, self._stop_ids = tuple(stop_strings), stop_ids
        for index, request in enumerate(requests):
            detokenizer = self.core.tokenizer.detokenizer(context=request.prompt)
            choice = _Choice(TextAssembler(detokenizer, stop_strings, stop_ids), len(request.prompt))
            self._choices.append(choice)
            choice.task = asyncio.get_running_loop().create_task(self._generate(index, request, facts, is_up=is_up))
            self._num_places -= 1  # the task's own from here
            self.core.tasks.add(choice.task)
            choice.task.add_done_callback(partial(self._on_done, index))

    def _on_done(self, index: int, task: asyncio.Task[None]) -> None:
        # Here and not in the task: one that is cancelled before it runs gives nothing back.
        self.core.tasks.discard(task)
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
                if core.offline is not None and loan.can_write:
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
            kept = KeptText(request, tuple(text.verified), tuple(text.local), began, self._stops, self._stop_ids)
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
            if deltas or not arrived:
                yield deltas

    def _take(self, index: int, event: _Event) -> list[Delta]:
        choice = self._choices[index]
        if choice.is_over:
            return []  # committed between the stop string and the cancellation
        if isinstance(event, RequestError):
            raise event
        if isinstance(event, TokenBatch):
            choice.num_accepted += event.num_accepted
            choice.num_proposed += event.num_proposed
            text = choice.assembler.push(event.tokens)
            num_new = len(event.tokens) if event.is_unverified else 0
            choice.num_unverified += num_new
            if choice.assembler.is_stopped:
                choice.is_over = True
                assert choice.task is not None
                choice.task.cancel()
                return [Delta(index, text, "stop", num_new)]
            return [Delta(index, text, num_unverified=num_new)] if text or num_new else []
        choice.is_over = True
        choice.num_cached = event.cached_prompt_tokens
        text = choice.assembler.finish()
        is_stop = event.finish_reason == "stop" or choice.assembler.is_stopped
        return [Delta(index, text, "stop" if is_stop else "length")]

    def completion_usage(self) -> CompletionUsage:
        """Tokens of all choices."""
        return usage_of(
            sum(choice.num_prompt for choice in self._choices),
            sum(choice.assembler.num_tokens for choice in self._choices),
            sum(choice.num_accepted for choice in self._choices),
            sum(choice.num_proposed - choice.num_accepted for choice in self._choices),
            sum(choice.num_cached for choice in self._choices),
        )
