"""Runs the texts of a completion call, and answers it from them: whole, or as server-sent events.

Knows no engine: the cloud's texts come from its engine, the device's from the cloud.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from outrider.models.errors import RequestError
from outrider.models.http import openai, sse
from outrider.models.http.answer_text import TextAssembler
from outrider.models.http.errors import FieldError, error_answer
from outrider.models.http.shapes import Delta, PackedLogprobs, Shape, Usage, json_bytes
from outrider.models.http.sse import Inbox
from outrider.models.picks.sampling import SamplingParams
from outrider.models.process.by_owner import Shares
from outrider.models.processors.chooser import TokenLogprobs
from outrider.models.text.predicted import PredictionFollower

Event = TypeVar("Event")


@dataclass(slots=True)
class Drafted:
    """A text's drafted tokens. proposed: those that the target ran. by_accepted: its passes that ran some, by how many
    of them it accepted. longest: most of a pass.
    """

    proposed: int = 0
    longest: int = 0
    by_accepted: Counter[int] = field(default_factory=Counter)

    @property
    def accepted(self) -> int:
        """Those that the text has."""
        return sum(count * passes for count, passes in self.by_accepted.items())

    def count(self, proposed: int, accepted: int) -> None:
        """Counts a pass."""
        if proposed:
            self.proposed += proposed
            self.longest = max(self.longest, proposed)
            self.by_accepted[accepted] += 1

    def metrics(self) -> dict[str, Any]:
        """`openai_answers.SpeculativeDecoding`."""
        passes, accepted = self.by_accepted.total(), self.accepted
        return {
            "mean_acceptance_length": 1.0 + accepted / max(1, passes),
            "draft_acceptance_rate": accepted / max(1, self.proposed),
            "acceptance_histogram": [self.by_accepted[count] for count in range(self.longest + 1)],
            "num_spec_steps": passes,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": self.proposed,
            "num_spec_tokens": self.longest,
        }


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
    num_cached: int = 0
    num_unverified: int = 0
    drafted: Drafted = field(default_factory=Drafted)

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

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """New text as it comes, one list per wake-up; an empty list after a poke.

        Ends when all texts have ended or the client has left. Raises RequestError if one fails.
        """
        while not all(choice.is_over for choice in self.choices):
            arrived = await self.reader.take()
            if not arrived and self.reader.is_closed:
                return
            deltas: list[Delta] = []
            try:
                for index, event in arrived:
                    deltas += self._take(index, event)
                    others = range(index + 1, index + self.num_each) if index % self.num_each == 0 else ()
                    for other in others:
                        if not self.choices[other].has_begun:
                            self._begin(other)
                            await asyncio.sleep(0)
            except RequestError:
                if deltas:  # what came before it is the client's
                    yield deltas
                raise
            if deltas or not arrived:
                yield deltas

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
            accepted = sum(choice.drafted.accepted for choice in self.choices)
            rejected = sum(choice.drafted.proposed for choice in self.choices) - accepted
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

    def metrics(self) -> dict[str, Any]:
        """`openai_answers.RequestMetrics`; empty for several texts, as vLLM has it."""
        return {"speculative_decoding": self.choices[0].drafted.metrics()} if len(self.choices) == 1 else {}


DONE: Final = b"data: [DONE]\n\n"
"""The last event of OpenAI's streams."""
MAX_LOGPROB_BYTES: Final = 64 << 20
"""Held of an owner's answers that are not streamed: 180 MB of JSON at least."""
MAX_ALL_LOGPROB_BYTES: Final = 8 * MAX_LOGPROB_BYTES
_TURN_S: Final = 0.002
"""Work on one answer after which other requests have their turn."""
_WITHOUT: Final = b'"logprobs":null'
"""Stands in an answer where its logprobs go. No text can contain it: its quotes would be escaped."""


class HeldAnswers(Shares[bytes]):
    """The bytes that answers hold until they are sent: of logprobs, and of streams beyond `sse.MOST_WAITING`."""

    def __init__(self) -> None:
        super().__init__(MAX_LOGPROB_BYTES, MAX_ALL_LOGPROB_BYTES)


@dataclass(slots=True)
class _Holding:
    """What one answer holds of logprobs."""

    held: HeldAnswers
    owner: bytes
    num_bytes: int = 0

    def add(self, num_bytes: int) -> None:
        """Counts what the answer grew by, or shrank. Raises RequestError, and counts nothing: 400 `answer_too_large` if
        it is over an owner's bound alone, 503 `too_many_bytes` if it is so with others.
        """
        if self.num_bytes + num_bytes > MAX_LOGPROB_BYTES:
            raise FieldError(
                "answer_too_large",
                f"the logprobs of this answer take over {MAX_LOGPROB_BYTES >> 20} MiB; ask for fewer, or stream it",
                param="logprobs",
            )
        if not self.held.add(self.owner, num_bytes):
            raise RequestError(
                "too_many_bytes",
                "the logprobs of answers in the making, of this client or in all, take as many bytes as the server "
                "holds; stream them, or retry later",
                status=503,
            )
        self.num_bytes += num_bytes

    def release(self) -> None:
        """The answer was sent, or has failed."""
        self.held.add(self.owner, -self.num_bytes)
        self.num_bytes = 0


Texts = CallTexts[Any, Any]


async def answer(
    texts: Texts,
    num_prompts: int,
    shape: Shape,
    body: openai.GenerationRequest,
    request: Request,
    held: HeldAnswers,
    keep_alive_s: float,
) -> Response:
    """The response; closes `texts` at its end, however it ends. The request's body must have been read."""
    if body.stream:
        chunks = _stream(texts, shape, body)
        hold = partial(held.add, texts.owner)
        return sse.EventStream(chunks, texts.reader, texts.close, keep_alive_s=keep_alive_s, hold=hold)
    holding = _Holding(held, texts.owner)
    try:
        return await _whole(texts, num_prompts, shape, body, request, holding)
    except BaseException:
        holding.release()
        raise
    finally:
        texts.close()


async def _whole(
    texts: Texts,
    num_prompts: int,
    shape: Shape,
    body: openai.GenerationRequest,
    request: Request,
    holding: _Holding,
) -> Response:
    found = [Delta(index) for index in range(num_prompts * body.num_each)]
    none = shape.logprobs(0, ())
    logprobs = [PackedLogprobs(none) for _ in found] if none is not None else []
    turn_ends_s = time.monotonic() + _TURN_S
    async with sse.closed_on_disconnect(texts.reader, request.receive):
        async for deltas in texts.deltas():
            for delta in deltas:
                shape.take(found[delta.index], delta)
                if logprobs:
                    place = delta.index // body.num_each * body.num_kept  # its prompt's first choice
                    holding.add(logprobs[delta.index].add(shape.logprobs(place, delta.pieces) or {}))
                if time.monotonic() > turn_ends_s:
                    await asyncio.sleep(0)
                    turn_ends_s = time.monotonic() + _TURN_S
    if texts.reader.is_closed:
        holding.release()
        return Response(status_code=499)  # the client has left
    if body.num_each > body.num_kept:
        means = [choice.assembler.mean_logprob for choice in texts.choices]
        kept = best_choices(means, body.num_each, body.num_kept)
        found = [found[index] for index in kept]
        logprobs = [logprobs[index] for index in kept] if logprobs else []
    content = json_bytes(shape.whole(found, texts.completion_usage(), texts.metrics()))
    if not logprobs:
        return Response(content, media_type="application/json")
    return _AnswerWithLogprobs(content, logprobs, holding.release)


class _AnswerWithLogprobs(StreamingResponse):
    """on_sent: called once, when the answer is sent or its client has left."""

    def __init__(self, content: bytes, logprobs: Sequence[PackedLogprobs], on_sent: Callable[[], None]) -> None:
        super().__init__(_with_logprobs(content, logprobs), media_type="application/json")
        self._on_sent = on_sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_sent()


async def _with_logprobs(content: bytes, logprobs: Sequence[PackedLogprobs]) -> AsyncGenerator[bytes, None]:
    """The answer in pieces, a turn of the event loop each."""
    first, *others = content.split(_WITHOUT)
    yield first
    for packed, following in zip(logprobs, others, strict=True):
        yield b'"logprobs":'
        for piece in packed.pieces():
            yield piece
            if len(piece) > 1:
                await asyncio.sleep(0)
        yield following


async def _stream(texts: Texts, shape: Shape, body: openai.GenerationRequest) -> AsyncGenerator[bytes, None]:
    try:
        if first := shape.first():
            yield first
        async for deltas in texts.deltas():
            usage = texts.completion_usage() if body.repeats_usage else None
            pieces: list[bytes] = []
            turn_ends_s = time.monotonic() + _TURN_S
            for delta in deltas:
                if pieces and time.monotonic() > turn_ends_s:
                    yield b"".join(pieces) or sse.KEEP_ALIVE
                    pieces.clear()
                    await asyncio.sleep(0)
                    turn_ends_s = time.monotonic() + _TURN_S
                pieces.append(shape.piece(delta, usage))
            yield b"".join(pieces) or sse.KEEP_ALIVE
        if body.includes_usage:
            yield shape.last(texts.completion_usage(), texts.metrics())
        yield DONE
    except RequestError as error:
        yield sse.encode(error_answer(error)) + DONE


def model_not_found(served: str) -> FieldError:
    """The error 404 for a name that is neither the served model's nor an adapter's."""
    return FieldError(
        "model_not_found",
        f"this server serves {served}, and no model of this name; GET /v1/models lists all",
        param="model",
        status=404,
    )
