"""Answers a completion call from texts in the making: whole, or as server-sent events.

Knows no engine: the cloud's texts come from its engine, the device's from the cloud.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Final, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from outrider.models.errors import RequestError
from outrider.models.http import openai, openai_answers, sse
from outrider.models.http.errors import FieldError, error_answer
from outrider.models.http.shapes import Delta, Shape, unverified_field

DONE: Final = b"data: [DONE]\n\n"
"""The last event of OpenAI's streams."""


class Texts(Protocol):
    """The texts of one call, one per choice."""

    @property
    def reader(self) -> sse.Reader:
        """What `deltas` waits on."""
        ...

    @property
    def is_abandoned(self) -> bool:
        """Whether the client has left."""
        ...

    def deltas(self) -> AsyncIterator[list[Delta]]:
        """New text as it comes; an empty list after a poke. Ends with the last text, or when the client has left.

        Raises RequestError if a text fails.
        """
        ...

    def completion_usage(self) -> openai_answers.CompletionUsage:
        """Tokens of the call, once `deltas` has ended."""
        ...

    def close(self) -> None:
        """Ends what still runs and frees what it took; may be called twice."""
        ...


async def answer(
    texts: Texts, num_choices: int, shape: Shape, body: openai.GenerationRequest, request: Request, keep_alive_s: float
) -> Response:
    """The response; closes `texts` at its end, however it ends. The request's body must have been read."""
    if body.stream:
        chunks = _stream(texts, shape, includes_usage=body.includes_usage)
        return sse.EventStream(chunks, texts.reader, texts.close, keep_alive_s=keep_alive_s)
    found = [""] * num_choices
    reasons: list[Any] = [None] * num_choices
    unverified = [0] * num_choices
    try:
        async with sse.closed_on_disconnect(texts.reader, request.receive):
            async for deltas in texts.deltas():
                for delta in deltas:
                    found[delta.index] += delta.text
                    unverified[delta.index] += delta.num_unverified
                    reasons[delta.index] = delta.finish_reason or reasons[delta.index]
    finally:
        texts.close()
    if texts.is_abandoned:
        return Response(status_code=499)  # the client has left
    whole = shape.whole(found, reasons, texts.completion_usage())
    if not any(unverified):
        return Response(whole.model_dump_json(), media_type="application/json")
    document = whole.model_dump()
    for choice, num_unverified in zip(document["choices"], unverified, strict=True):
        choice.update(unverified_field(num_unverified))
    return JSONResponse(document)


async def _stream(texts: Texts, shape: Shape, *, includes_usage: bool) -> AsyncGenerator[bytes, None]:
    try:
        if first := shape.first():
            yield first
        async for deltas in texts.deltas():
            yield b"".join(map(shape.piece, deltas)) or sse.KEEP_ALIVE
        if includes_usage:
            yield shape.last(texts.completion_usage())
        yield DONE
    except RequestError as error:
        yield sse.encode(error_answer(error)) + DONE


def usage_of(
    prompt_tokens: int, completion_tokens: int, accepted: int, rejected: int, cached: int
) -> openai_answers.CompletionUsage:
    """The wire form of a call's usage."""
    return openai_answers.CompletionUsage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        completion_tokens_details=openai_answers.CompletionTokensDetails(
            accepted_prediction_tokens=accepted, rejected_prediction_tokens=rejected
        ),
        prompt_tokens_details=openai_answers.PromptTokensDetails(cached_tokens=cached),
    )


def require_model(served: str, asked: str) -> None:
    """Raises RequestError 404 `model_not_found` for another model than the served one."""
    if asked != served:
        raise FieldError(
            "model_not_found",
            f"this server serves {served} only; GET /v1/models lists it",
            param="model",
            status=404,
        )
