"""Runs the texts of one completion call: what is the same in the cloud and on the device."""

from __future__ import annotations

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar

from outrider.models.http.answer_text import TextAssembler
from outrider.models.http.inbox import Inbox
from outrider.models.http.shapes import Delta, Usage
from outrider.models.picks.sampling import SamplingParams
from outrider.models.processors.chooser import TokenLogprobs
from outrider.models.text.predicted import PredictionFollower

Event = TypeVar("Event")


@dataclass(slots=True)
class Choice:
    """A text. num_prompt: tokens before it. has_begun: its work runs, or ran. has_stopped: a stop string came, and what
    is committed after it is not shown. is_over: nothing more comes.
    """

    assembler: TextAssembler
    prediction: PredictionFollower | None
    num_prompt: int
    has_begun: bool = False
    has_stopped: bool = False
    is_over: bool = False
    num_accepted: int = 0
    num_proposed: int = 0
    num_cached: int = 0
    num_unverified: int = 0

    def push(
        self, index: int, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] = (), num_unverified: int = 0
    ) -> list[Delta]:
        """What a commit adds to the text `index`; nothing where no character is complete."""
        before = self.assembler.num_tokens
        text = self.assembler.push(tokens, logprobs)
        if self.prediction is not None:
            self.prediction.push(tokens[: self.assembler.num_tokens - before])
        self.num_unverified += num_unverified
        pieces = tuple(self.assembler.take_pieces())
        self.has_stopped = self.assembler.is_stopped
        if not (self.has_stopped or text or num_unverified or pieces):
            return []
        return [Delta(index, text, "stop" if self.has_stopped else None, num_unverified, pieces)]

    def finish(self, index: int, *, is_stop: bool) -> list[Delta]:
        """What was held back, where no stop string had ended the text."""
        text = self.assembler.finish()
        reason = "stop" if is_stop or self.assembler.is_stopped else "length"
        return [Delta(index, text, reason, pieces=tuple(self.assembler.take_pieces()))]


_SEED_BITS: Final = 53
"""Survives clients whose numbers are floats."""


def choice_seed(seed: int, index: int) -> int:
    """Choice 0 has the request's seed; choice i the first 53 bits of SHA-256 of "SEED/i" in ASCII."""
    if index == 0:
        return seed
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - _SEED_BITS)


def choice_params(params: SamplingParams, index: int) -> SamplingParams:
    """The sampling parameters of choice `index` of a prompt."""
    return replace(params, seed=choice_seed(params.seed, index))


def best_choices(means: Sequence[float], num_each: int, num_kept: int) -> list[int]:
    """Of every `num_each` texts of a prompt the `num_kept` with the highest mean logprob per token, best first."""
    kept: list[int] = []
    for begin in range(0, len(means), num_each):
        ranked = sorted(range(begin, begin + num_each), key=lambda index: (-means[index], index))
        kept += ranked[:num_kept]
    return kept


AnyChoice = TypeVar("AnyChoice", bound=Choice)


class CallTexts(ABC, Generic[AnyChoice, Event]):
    """The texts of one call, one per choice. Call `close` at the end, however it ends. Lives on one event loop.

    num_each: texts of each prompt, which has a seed each. All but the first wait for its first token: the prompt is
    then in the cache, and is run once.
    """

    def __init__(self, owner: bytes, reader: Inbox[tuple[int, Event]]) -> None:
        """reader: gets what happens, with the choice's index."""
        self.owner = owner
        self.reader = reader
        self.choices: list[AnyChoice] = []
        self.num_each = 1

    @abstractmethod
    def _begin(self, index: int) -> None:
        """Begins a text. Raises RequestError."""

    @abstractmethod
    def _take(self, index: int, event: Event) -> list[Delta]:
        """What an event adds. Raises RequestError if the text has failed."""

    @abstractmethod
    def close(self) -> None:
        """Ends what still runs and frees what it took; may be called twice."""

    @property
    def is_abandoned(self) -> bool:
        """Whether the client has left."""
        return self.reader.is_closed

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """New text as it comes, one list per wake-up; an empty list after a poke.

        Ends when all texts have ended or the client has left. Raises RequestError if one fails.
        """
        while not all(choice.is_over for choice in self.choices):
            arrived = await self.reader.take()
            if not arrived and self.is_abandoned:
                return
            deltas: list[Delta] = []
            for index, event in arrived:
                deltas += self._take(index, event)
                others = range(index + 1, index + self.num_each) if index % self.num_each == 0 else ()
                for other in others:
                    if not self.choices[other].has_begun:
                        self._begin(other)
                        await asyncio.sleep(0)
            if deltas or not arrived:
                yield deltas

    def mean_logprob(self, index: int) -> float:
        """Of the tokens of a text that asked for logprobs."""
        return self.choices[index].assembler.mean_logprob

    def completion_usage(self) -> Usage:
        """Tokens so far, exact once `deltas` has ended; a prompt counts once, whatever the number of its texts.

        Accepted and rejected tokens are those of the predictions if there are some, else of what was drafted.
        """
        leaders = self.choices[:: self.num_each]
        prompt_tokens = sum(choice.num_prompt for choice in leaders)
        completion_tokens = sum(choice.assembler.num_tokens for choice in self.choices)
        followers = [choice.prediction for choice in self.choices if choice.prediction is not None]
        if followers:
            accepted = sum(each.num_accepted for each in followers)
            rejected = sum(each.num_rejected for each in followers)
        else:
            accepted = sum(choice.num_accepted for choice in self.choices)
            rejected = sum(choice.num_proposed for choice in self.choices) - accepted
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": rejected,
            },
            "prompt_tokens_details": {"cached_tokens": sum(choice.num_cached for choice in leaders)},
        }
