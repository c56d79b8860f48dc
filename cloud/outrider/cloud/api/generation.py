"""Text from the engine: the sequences of one completion call, detokenized as they come, cut at stop strings.

What a call returns does not depend on how commits were chunked: tokens are looked at one by one, and those after the
one that completes a stop string do not count.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from outrider.cloud.api.bridge import Mailbox
from outrider.cloud.api.errors import internal_error
from outrider.cloud.api.metrics import CommitTimer
from outrider.cloud.api.state import Core
from outrider.cloud.api.verify import shutting_down
from outrider.cloud.engine.types import CommitEvent, EndEvent, GenerateRequest, SequenceUsage
from outrider.models.detokenizer import StreamingDetokenizer


class TextAssembler:
    """Tokens in, text out; text that may yet turn out to begin a stop string is held back."""

    def __init__(
        self, detokenizer: StreamingDetokenizer, stop_strings: Sequence[str], stop_ids: frozenset[int]
    ) -> None:
        self._detokenizer = detokenizer
        self._stop_strings = stop_strings
        self._stop_ids = stop_ids
        self._held = ""
        self.num_tokens = 0
        self.is_stopped = False

    def push(self, tokens: Sequence[int]) -> str:
        """The text that `tokens` let out. After a stop string, which is not part of it, nothing comes any more."""
        shown = ""
        for token in tokens:
            if self.is_stopped:
                break
            self.num_tokens += 1
            if token not in self._stop_ids:
                shown += self._let_out(self._detokenizer.push(token))
        return shown

    def finish(self) -> str:
        """What was held back, once no more tokens come."""
        if self.is_stopped:
            return ""
        shown = self._let_out(self._detokenizer.flush())
        if not self.is_stopped:
            shown += self._held
            self._held = ""
        return shown

    def _let_out(self, piece: str) -> str:
        text = self._held + piece
        ends = [found for found in (text.find(stop) for stop in self._stop_strings) if found >= 0]
        if ends:
            self.is_stopped = True
            self._held = ""
            return text[: min(ends)]
        keep = max((_overlap(text, stop) for stop in self._stop_strings), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of choice `index`; with finish_reason the last of it."""

    index: int
    text: str
    finish_reason: str | None = None


@dataclass(slots=True)
class _Choice:
    sequence_id: int
    assembler: TextAssembler
    timer: CommitTimer
    is_over: bool = False
    is_told: bool = False


@dataclass(slots=True)
class CallUsage:
    """What all sequences of a call took together."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    accepted_tokens: int = 0
    rejected_tokens: int = 0
    cached_prompt_tokens: int = 0

    def add(self, usage: SequenceUsage, num_tokens: int) -> None:
        """Adds a sequence of which `num_tokens` made it into the text."""
        self.prompt_tokens += usage.prompt_tokens
        self.completion_tokens += num_tokens
        self.accepted_tokens += usage.accepted_tokens
        self.rejected_tokens += usage.rejected_tokens
        self.cached_prompt_tokens += usage.cached_prompt_tokens


@dataclass(slots=True)
class Generation:
    """The sequences of one call, a choice each. `close` must be called at the end, however it ends."""

    core: Core
    owner: bytes
    mailbox: Mailbox
    usage: CallUsage = field(default_factory=CallUsage)
    _choices: list[_Choice] = field(default_factory=list)
    _num_slots: int = 0

    @classmethod
    def start(
        cls,
        core: Core,
        owner: bytes,
        requests: Sequence[GenerateRequest],
        stop_strings: Sequence[str],
        arrived_s: float,
    ) -> Generation:
        """Submits a sequence for each request. Raises RequestError, with nothing left behind."""
        generation = cls(core, owner, core.bridge.mailbox())
        core.slots.take(owner, len(requests))
        generation._num_slots = len(requests)
        try:
            for index, request in enumerate(requests):
                detokenizer = core.model.tokenizer.detokenizer(context=request.prompt)
                assembler = TextAssembler(detokenizer, stop_strings, request.stop_ids)
                sequence_id = core.engine.submit(request, generation.mailbox.sink(index))
                generation._choices.append(_Choice(sequence_id, assembler, core.metrics.commit_timer(arrived_s)))
        except BaseException:
            generation.close()
            raise
        return generation

    def close(self) -> None:
        """Ends what still runs and gives the places back; may be called twice."""
        for choice in self._choices:
            if not choice.is_over:
                self.core.engine.cancel(choice.sequence_id)
        if self._num_slots:
            self.core.slots.release(self.owner, self._num_slots)
            self._num_slots = 0

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """New text as it comes, each list being what was ready at once; an empty one after a poke of the mailbox.

        Ends when all choices have, or the client has left. Raises RequestError if a sequence fails.
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
        choice.timer.committed()
        if choice.is_told:
            return []  # committed between the stop string and the cancellation
        text = choice.assembler.push(event.tokens)
        if choice.assembler.is_stopped:
            self.core.engine.cancel(choice.sequence_id)
            choice.is_told = True
            return [Delta(index, text, "stop")]
        return [Delta(index, text)] if text else []

    def _end(self, index: int, event: EndEvent) -> list[Delta]:
        choice = self._choices[index]
        choice.is_over = True
        if event.reason == "shutdown":
            raise shutting_down()
        if event.reason == "error":
            raise event.error or internal_error()
        self.usage.add(event.usage, choice.assembler.num_tokens)
        if choice.is_told:
            return []
        text = choice.assembler.finish()
        is_stop = event.reason == "stop" or choice.assembler.is_stopped
        return [Delta(index, text, "stop" if is_stop else "length")]
