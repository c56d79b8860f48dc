"""Runs the sequences of one completion call and turns their commits into text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from starlette.types import Scope

from outrider.cloud.api.admission import Asked
from outrider.cloud.api.bridge import Mailbox
from outrider.cloud.api.recall import Recalled
from outrider.cloud.api.state import Core
from outrider.cloud.api.verify import shutting_down
from outrider.cloud.api.watch import SequenceWatch, watch
from outrider.cloud.seam import CommitEvent, EndEvent, SequenceUsage
from outrider.models.http.answers import usage_of
from outrider.models.http.errors import internal_error
from outrider.models.http.openai_answers import CompletionUsage
from outrider.models.http.shapes import Delta
from outrider.models.http.text import TextAssembler


@dataclass(slots=True)
class _Choice:
    sequence_id: int
    assembler: TextAssembler
    watch: SequenceWatch
    is_over: bool = False
    has_ended_text: bool = False


@dataclass(slots=True)
class Generation:
    """The sequences of one call, one per choice. Call `close` at the end, however it ends."""

    core: Core
    owner: bytes
    mailbox: Mailbox
    usage: SequenceUsage = field(default_factory=SequenceUsage)  # of all choices
    _choices: list[_Choice] = field(default_factory=list)
    _num_slots: int = 0

    @classmethod
    def reserve(cls, core: Core, owner: bytes, num_choices: int) -> Generation:
        """A call with slots for its sequences, none of them submitted. Raises RequestError 429."""
        generation = cls(core, owner, core.bridge.mailbox())
        core.slots.take(owner, num_choices)
        generation._num_slots = num_choices
        return generation

    async def submit(
        self, recalled: Sequence[Recalled], stop_strings: Sequence[str], asked: Asked, scope: Scope
    ) -> None:
        """Submits a sequence for each request. scope: the call's. Raises RequestError; call `close` then too."""
        for index, each in enumerate(recalled):
            request = each.request
            detokenizer = self.core.model.tokenizer.detokenizer(context=request.prompt)
            assembler = TextAssembler(detokenizer, stop_strings, request.stop_ids)
            sequence_id = self.core.admission.submit(request, each.sink(self.mailbox.sink(index)), asked)
            timer = watch(self.core.metrics, scope, asked.arrived_s, index)
            self._choices.append(_Choice(sequence_id, assembler, timer))
            await asyncio.sleep(0)  # 64 long prompts at once would delay every stream

    def close(self) -> None:
        """Ends what still runs and frees its slots; may be called twice."""
        for choice in self._choices:
            if not choice.is_over:
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

    def completion_usage(self) -> CompletionUsage:
        """Tokens of all choices."""
        usage = self.usage
        return usage_of(
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.accepted_tokens,
            usage.rejected_tokens,
            usage.cached_prompt_tokens,
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
                else:
                    deltas += self._end(index, event)
            if deltas or not arrived:
                yield deltas

    def _commit(self, index: int, event: CommitEvent) -> list[Delta]:
        choice = self._choices[index]
        choice.watch.committed(event)
        if choice.has_ended_text:
            return []  # committed between the stop string and the cancellation
        text = choice.assembler.push(event.tokens)
        if choice.assembler.is_stopped:
            self.core.engine.cancel(choice.sequence_id)
            choice.has_ended_text = True
            return [Delta(index, text, "stop")]
        return [Delta(index, text)] if text else []

    def _end(self, index: int, event: EndEvent) -> list[Delta]:
        choice = self._choices[index]
        choice.is_over = True
        choice.watch.ended(event)
        if event.reason == "shutdown":
            raise shutting_down()
        if event.reason == "error":
            raise event.error or internal_error()
        self.usage.add(replace(event.usage, completion_tokens=choice.assembler.num_tokens))  # those in the text
        if choice.has_ended_text:
            return []
        text = choice.assembler.finish()
        is_stop = event.reason == "stop" or choice.assembler.is_stopped
        return [Delta(index, text, "stop" if is_stop else "length")]
