"""Answers a completion call from texts in the making: whole, or as server-sent events.

Knows no engine: the cloud's texts come from its engine, the device's from the cloud.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from outrider.models.errors import RequestError
from outrider.models.http import openai, sse
from outrider.models.http.call_texts import CallTexts, best_choices
from outrider.models.http.errors import FieldError, error_answer
from outrider.models.http.logprobs import PackedLogprobs
from outrider.models.http.shapes import Delta, Shape, json_bytes
from outrider.models.process.by_owner import Shares

DONE: Final = b"data: [DONE]\n\n"
"""The last event of OpenAI's streams."""
MAX_LOGPROB_BYTES: Final = 64 << 20
"""Held of an owner's answers that are not streamed: 180 MB of JSON at least."""
MAX_ALL_LOGPROB_BYTES: Final = 8 * MAX_LOGPROB_BYTES
_TURN_S: Final = 0.002
"""Work on one answer after which other requests have their turn."""
_WITHOUT: Final = b'"logprobs":null'
"""Stands in an answer where its logprobs go. No text can contain it: its quotes would be escaped."""


class HeldLogprobs(Shares[bytes]):
    """The bytes that answers hold of logprobs until they are sent."""

    def __init__(self) -> None:
        super().__init__(MAX_LOGPROB_BYTES, MAX_ALL_LOGPROB_BYTES)


@dataclass(slots=True)
class _Holding:
    """What one answer holds of logprobs."""

    held: HeldLogprobs
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
    held: HeldLogprobs,
    keep_alive_s: float,
) -> Response:
    """The response; closes `texts` at its end, however it ends. The request's body must have been read."""
    if body.stream:
        chunks = _stream(texts, shape, body)
        return sse.EventStream(chunks, texts.reader, texts.close, keep_alive_s=keep_alive_s)
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
                found[delta.index].add(delta)
                if logprobs:
                    place = delta.index // body.num_each * body.num_kept  # its prompt's first choice
                    holding.add(logprobs[delta.index].add(shape.logprobs(place, delta.pieces) or {}))
                if time.monotonic() > turn_ends_s:
                    await asyncio.sleep(0)
                    turn_ends_s = time.monotonic() + _TURN_S
    if texts.is_abandoned:
        holding.release()
        return Response(status_code=499)  # the client has left
    if body.num_each > body.num_kept:
        means = [texts.mean_logprob(index) for index in range(len(found))]
        kept = best_choices(means, body.num_each, body.num_kept)
        found = [found[index] for index in kept]
        logprobs = [logprobs[index] for index in kept] if logprobs else []
    content = json_bytes(shape.whole(found, texts.completion_usage()))
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
            yield b"".join(shape.piece(delta, usage) for delta in deltas) or sse.KEEP_ALIVE
        if body.includes_usage:
            yield shape.last(texts.completion_usage())
        yield DONE
    except RequestError as error:
        yield sse.encode(error_answer(error)) + DONE


def require_model(served: str, asked: str) -> None:
    """Raises RequestError 404 `model_not_found` for another model than the served one."""
    if asked != served:
        raise FieldError(
            "model_not_found",
            f"this server serves {served} only; GET /v1/models lists it",
            param="model",
            status=404,
        )
