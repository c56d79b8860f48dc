"""Runs the sequences of one completion call and turns their commits into text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from starlette.types import Scope

from outrider.cloud.api.admission import Asked
from outrider.cloud.api.bridge import Mailbox
from outrider.cloud.api.recall import Recalled
from outrider.cloud.api.state import Core
from outrider.cloud.api.verify import shutting_down
from outrider.cloud.api.watch import SequenceWatch, watch
from outrider.cloud.seam import CommitEvent, EndEvent
from outrider.models.http.answers import predicted_or_drafted, usage_of
from outrider.models.http.choices import choice_params
from outrider.models.http.errors import internal_error
from outrider.models.http.openai_answers import CompletionUsage
from outrider.models.http.shapes import Delta
from outrider.models.http.text import TextAssembler, TextStyle
from outrider.models.text.predicted import PredictionFollower


@dataclass(slots=True)
class _Choice:
    """A text. sequence_id, watch: None until its sequence is submitted."""

    recalled: Recalled
    assembler: TextAssembler
    prediction: PredictionFollower | None
    sequence_id: int | None = None
    watch: SequenceWatch | None = None
    is_over: bool = False
    has_ended_text: bool = False
    num_accepted: int = 0
    num_proposed: int = 0
    num_cached: int = 0


@dataclass(slots=True)
class Generation:
    """The sequences of one call, one per choice. Call `close` at the end, however it ends."""

    core: Core
    owner: bytes
    mailbox: Mailbox
    _choices: list[_Choice] = field(default_factory=list)
    _num_each: int = 1
    _asked: Asked | None = None
    _scope: Scope = field(default_factory=dict)
    _num_slots: int = 0

    @classmethod
    def reserve(cls, core: Core, owner: bytes, num_choices: int) -> Generation:
        """A call with slots for its sequences, none of them submitted. Raises RequestError 429."""
        generation = cls(core, owner, core.bridge.mailbox())
        core.slots.take(owner, num_choices)
        generation._num_slots = num_choices
        return generation

    async def submit(
        self,
        recalled: Sequence[Recalled],
        style: TextStyle,
        asked: Asked,
        scope: Scope,
        *,
        num_each: int = 1,
        prediction: Sequence[int] = (),
    ) -> None:
        """Submits a sequence for each request. scope: the call's. Raises RequestError; call `close` then too.

        num_each: texts of each prompt, which has a seed each. All but the first wait for its first token: the prompt
        is then in the cache, and is run once.
        """
        self._num_each, self._asked, self._scope = num_each, asked, scope
        tokenizer = self.core.model.tokenizer
        for leader in recalled:
            prompt, params = leader.request.prompt, leader.request.params
            for index in range(num_each):
                each = leader if index == 0 else leader.for_choice(choice_params(params, index))
                follower = PredictionFollower(prediction) if prediction else None
                self._choices.append(_Choice(each, style.assembler(tokenizer, prompt), follower))
        for index in range(0, len(self._choices), num_each):
            self._submit(index)
            await asyncio.sleep(0)  # 64 long prompts at once would delay every stream

    def _submit(self, index: int) -> None:
        choice, asked = self._choices[index], self._asked
        assert asked is not None
        sink = choice.recalled.sink(self.mailbox.sink(index))
        choice.sequence_id = self.core.admission.submit(choice.recalled.request, sink, asked)
        choice.watch = watch(self.core.metrics, self._scope, asked.arrived_s, index)

    async def _submit_others(self, index: int) -> None:
        """Submits the other texts of a prompt, once its first one has begun."""
        if self._num_each == 1 or index % self._num_each:
            return
        for other in range(index + 1, index + self._num_each):
            if self._choices[other].sequence_id is None:
                self._submit(other)
                await asyncio.sleep(0)

    def close(self) -> None:
        """Ends what still runs and frees its slots; may be called twice."""
        for choice in self._choices:
            if choice.sequence_id is not None and not choice.is_over:
                self.core.engine.cancel(choice.sequence_id)
        if self._num_slots:
            self.core.slots.release(self.owner, self._num_slots)
            self._num_slots = 0

    @property
    def reader(self) -> Mailbox:
        """What `deltas` waits on."""
        return self.mailbox

    @property
    def is_abandoned(self) -> bool:
        """Whether the client has left."""
        return self.mailbox.is_closed

    def mean_logprob(self, index: int) -> float:
        """Of the tokens of a text that asked for logprobs."""
        return self._choices[index].assembler.mean_logprob

    def completion_usage(self) -> CompletionUsage:
        """Tokens of all choices so far; a prompt counts once, whatever the number of its texts."""
        leaders = self._choices[:: self._num_each]
        return usage_of(
            sum(len(choice.recalled.request.prompt) for choice in leaders),
            sum(choice.assembler.num_tokens for choice in self._choices),
            *predicted_or_drafted(self._choices),
            sum(choice.num_cached for choice in leaders),
        )

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """New text as it comes, one list per wake-up; an empty list after a poke of the mailbox.

        Ends when all choices have ended or the client has left. Raises RequestError if a sequence fails.
        """
        while not all(choice.is_over for choice in self._choices):
            arrived = await self.mailbox.take()
            if not arrived and self.mailbox.is_closed:
                return
            deltas: list[Delta] = []
            for index, event in arrived:
                if isinstance(event, CommitEvent):
                    deltas += self._commit(index, event)
                elif isinstance(event, EndEvent):
                    deltas += self._end(index, event)
                await self._submit_others(index)
            if deltas or not arrived:
                yield deltas

    def _commit(self, index: int, event: CommitEvent) -> list[Delta]:
        choice = self._choices[index]
        assert choice.watch is not None and choice.sequence_id is not None
        choice.watch.committed(event)
        choice.num_accepted += event.accepted
        choice.num_proposed += event.proposed
        if choice.has_ended_text:
            return []  # committed between the stop string and the cancellation
        before = choice.assembler.num_tokens
        text = choice.assembler.push(event.tokens, event.logprobs)
        if choice.prediction is not None:
            choice.prediction.push(event.tokens[: choice.assembler.num_tokens - before])
        pieces = tuple(choice.assembler.take_pieces())
        if choice.assembler.is_stopped:
            self.core.engine.cancel(choice.sequence_id)
            choice.has_ended_text = True
            return [Delta(index, text, "stop", pieces=pieces)]
        return [Delta(index, text, pieces=pieces)] if text or pieces else []

    def _end(self, index: int, event: EndEvent) -> list[Delta]:
        choice = self._choices[index]
        assert choice.watch is not None
        choice.is_over = True
        choice.watch.ended(event)
        if event.reason == "shutdown":
            raise shutting_down()
        if event.reason == "error":
            raise event.error or internal_error()
        choice.num_cached = event.usage.cached_prompt_tokens
        if choice.has_ended_text:
            return []
        text = choice.assembler.finish()
        is_stop = event.reason == "stop" or choice.assembler.is_stopped
        return [Delta(index, text, "stop" if is_stop else "length", pieces=tuple(choice.assembler.take_pieces()))]
