"""Runs the sequences of one completion call and turns their commits into text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.types import Scope

from outrider.cloud.api.admission import Asked
from outrider.cloud.api.recent_texts import Recalled
from outrider.cloud.api.sequence_watch import SequenceWatch, watch
from outrider.cloud.api.state import Core
from outrider.cloud.api.verify import shutting_down
from outrider.cloud.seam import CommitEvent, EndEvent, Event
from outrider.models.http.answer_text import TextStyle
from outrider.models.http.call_texts import CallTexts, Choice
from outrider.models.http.choices import choice_params
from outrider.models.http.errors import internal_error
from outrider.models.http.shapes import Delta
from outrider.models.text.predicted import PredictionFollower


@dataclass(slots=True, kw_only=True)
class _Sequence(Choice):
    """A text. sequence_id, watch: None until its sequence is submitted."""

    recalled: Recalled
    sequence_id: int | None = None
    watch: SequenceWatch | None = None


class Generation(CallTexts[_Sequence, Event]):
    """The sequences of one call, one per choice."""

    def __init__(self, core: Core, owner: bytes, num_choices: int) -> None:
        """With slots for its sequences, none of them submitted. Raises RequestError 429."""
        self.mailbox = core.bridge.mailbox()
        super().__init__(owner, self.mailbox)
        self.core = core
        core.slots.take(owner, num_choices)
        self._num_slots = num_choices
        self._asked: Asked | None = None
        self._scope: Scope = {}

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
        """Submits a sequence for each request. scope: the call's. Raises RequestError; call `close` then too."""
        self.num_each, self._asked, self._scope = num_each, asked, scope
        tokenizer = self.core.model.tokenizer
        for leader in recalled:
            prompt, params = leader.request.prompt, leader.request.pick.params
            for index in range(num_each):
                each = leader if index == 0 else leader.for_choice(choice_params(params, index))
                follower = PredictionFollower(prediction) if prediction else None
                assembler = style.assembler(tokenizer, prompt)
                self.choices.append(_Sequence(assembler, follower, len(prompt), recalled=each))
        for index in range(0, len(self.choices), num_each):
            self._begin(index)
            await asyncio.sleep(0)  # 64 long prompts at once would delay every stream

    def _begin(self, index: int) -> None:
        choice, asked = self.choices[index], self._asked
        assert asked is not None
        sink = choice.recalled.sink(self.mailbox.sink(index))
        choice.sequence_id = self.core.admission.submit(choice.recalled.request, sink, asked)
        choice.watch = watch(self.core.metrics, self._scope, asked.arrived_s, index)
        choice.has_begun = True

    def close(self) -> None:
        """Ends what still runs and frees its slots; may be called twice."""
        for choice in self.choices:
            if choice.sequence_id is not None and not choice.is_over:
                self.core.engine.cancel(choice.sequence_id)
        if self._num_slots:
            self.core.slots.release(self.owner, self._num_slots)
            self._num_slots = 0

    def _take(self, index: int, event: Event) -> list[Delta]:
        if isinstance(event, CommitEvent):
            return self._commit(index, event)
        return self._end(index, event) if isinstance(event, EndEvent) else []

    def _commit(self, index: int, event: CommitEvent) -> list[Delta]:
        choice = self.choices[index]
        assert choice.watch is not None and choice.sequence_id is not None
        choice.watch.committed(event)
        choice.num_accepted += event.accepted
        choice.num_proposed += event.proposed
        if choice.has_stopped:
            return []  # committed between the stop string and the cancellation
        deltas = choice.push(index, event.tokens, event.logprobs)
        if choice.has_stopped:
            self.core.engine.cancel(choice.sequence_id)
        return deltas

    def _end(self, index: int, event: EndEvent) -> list[Delta]:
        choice = self.choices[index]
        assert choice.watch is not None
        choice.is_over = True
        choice.watch.ended(event)
        if event.reason == "shutdown":
            raise shutting_down()
        if event.reason == "error":
            raise event.error or internal_error()
        choice.num_cached = event.usage.cached_prompt_tokens
        return [] if choice.has_stopped else choice.finish(index, is_stop=event.reason == "stop")
