"""Answers the OpenAI-compatible routes, without drafts: completions, chat completions, models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from outrider.cloud.api.generation import Generation
from outrider.cloud.api.state import Core
from outrider.cloud.seam import GenerateRequest, SequenceUsage
from outrider.models.errors import RequestError, TokenizerError
from outrider.models.http import openai, sse
from outrider.models.http.errors import FieldError, error_body
from outrider.models.http.requests import owner_of, parse, sampling_of
from outrider.models.http.shapes import ChatShape, CompletionShape, Shape
from outrider.models.http.sse import closed_on_disconnect
from outrider.models.protocol import ErrorAnswer

_DONE = b"data: [DONE]\n\n"


def completion_routes(core: Core) -> APIRouter:
    """The OpenAI-compatible routes."""
    router = APIRouter(tags=["openai"])

    @router.post("/v1/completions", response_model=openai.Completion)
    async def complete(request: Request) -> Response:
        """Continues each prompt; `n` is 1, so choice i belongs to prompt i. `stream` sends server-sent events."""
        arrived_s = time.monotonic()
        body = parse(openai.CompletionRequest, await request.body())
        prompts = await asyncio.to_thread(_encode_prompts, core, body.prompts())
        max_tokens = body.max_tokens or openai.DEFAULT_MAX_TOKENS
        return await _answer(core, request, body, prompts, max_tokens, CompletionShape, arrived_s)

    @router.post("/v1/chat/completions", response_model=openai.ChatCompletion)
    async def chat(request: Request) -> Response:
        """Answers a conversation, through the model's chat template. `stream` sends server-sent events."""
        arrived_s = time.monotonic()
        body = parse(openai.ChatRequest, await request.body())
        prompt = await asyncio.to_thread(_encode_chat, core, body)
        max_tokens = body.max_completion_tokens or body.max_tokens or core.engine.limits.max_positions
        return await _answer(core, request, body, [prompt], max_tokens, ChatShape, arrived_s)

    @router.get("/v1/models", response_model=openai.ModelList)
    async def list_models() -> openai.ModelList:
        """The one model that is served."""
        card = openai.ModelCard(
            id=core.model.name, created=core.model.created_s, max_model_len=core.engine.limits.max_positions
        )
        return openai.ModelList(data=[card])

    return router


def _encode_prompts(core: Core, prompts: list[str | list[int]]) -> list[list[int]]:
    tokenizer = core.model.tokenizer
    return [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]


def _encode_chat(core: Core, body: openai.ChatRequest) -> list[int]:
    tokenizer = core.model.tokenizer
    if not tokenizer.has_chat_template:
        raise RequestError(
            "no_chat_template",
            f"{core.model.name} has no chat template, so it is not a chat model. Use /v1/completions",
        )
    try:
        text = tokenizer.apply_chat_template(
            [message.for_template() for message in body.messages], variables=body.chat_template_kwargs
        )
    except TokenizerError as error:
        raise FieldError("chat_template_refused", str(error), param="messages") from None
    return tokenizer.encode(text, add_special_tokens=False)


async def _answer(
    core: Core,
    request: Request,
    body: openai.GenerationRequest,
    prompts: list[list[int]],
    max_tokens: int,
    shape_type: type[Shape],
    arrived_s: float,
) -> Response:
    body.refuse_unsupported()
    if body.model not in (None, "", core.model.name):
        raise FieldError(
            "model_not_found",
            f"this server serves {core.model.name} only; GET /v1/models lists it",
            param="model",
            status=404,
        )
    params = sampling_of(body.sampling)
    stop_ids = core.stop_set(body.stop_token_ids, body.ignore_eos)
    owner = owner_of(request)
    requests = [GenerateRequest(tuple(prompt), params, max_tokens, stop_ids, owner=owner) for prompt in prompts]
    generation = Generation.start(core, owner, requests, body.stop_strings, arrived_s)
    shape = shape_type(core.model.name, params.seed)
    if body.stream:
        chunks = _stream(generation, shape, includes_usage=body.includes_usage)
        return sse.EventStream(chunks, generation.mailbox, generation.close, keep_alive_s=core.settings.keep_alive_s)
    texts = [""] * len(prompts)
    reasons: list[Any] = [None] * len(prompts)
    try:
        async with closed_on_disconnect(generation.mailbox, request.receive):
            async for deltas in generation.deltas():
                for delta in deltas:
                    texts[delta.index] += delta.text
                    reasons[delta.index] = delta.finish_reason or reasons[delta.index]
    finally:
        generation.close()
    if generation.mailbox.is_closed:
        return Response(status_code=499)  # the client has left
    answer = shape.whole(texts, reasons, completion_usage(generation.usage))
    return Response(answer.model_dump_json(), media_type="application/json")


async def _stream(generation: Generation, shape: Shape, *, includes_usage: bool) -> AsyncGenerator[bytes, None]:
    try:
        if first := shape.first():
            yield first
        async for deltas in generation.deltas():
            yield b"".join(map(shape.piece, deltas)) or sse.KEEP_ALIVE
        if includes_usage:
            yield shape.last(completion_usage(generation.usage))
        yield _DONE
    except RequestError as error:
        yield sse.encode(ErrorAnswer(error=error_body(error))) + _DONE


def completion_usage(usage: SequenceUsage) -> openai.CompletionUsage:
    """The wire form of a call's usage."""
    return openai.CompletionUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        completion_tokens_details=openai.CompletionTokensDetails(
            accepted_prediction_tokens=usage.accepted_tokens, rejected_prediction_tokens=usage.rejected_tokens
        ),
        prompt_tokens_details=openai.PromptTokensDetails(cached_tokens=usage.cached_prompt_tokens),
    )
