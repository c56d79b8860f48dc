"""Answers the OpenAI-compatible routes, without drafts: completions, chat completions, models."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from outrider.cloud.api.encoding import Workers, check_length, encode_chat, encode_prompts
from outrider.cloud.api.generation import Generation
from outrider.cloud.api.state import Core
from outrider.cloud.seam import GenerateRequest, SequenceUsage
from outrider.models.errors import RequestError
from outrider.models.http import openai, sse
from outrider.models.http.errors import FieldError, error_body
from outrider.models.http.requests import owner_of, read_body, sampling_of
from outrider.models.http.shapes import ChatShape, CompletionShape, Shape
from outrider.models.http.sse import closed_on_disconnect
from outrider.models.protocol import ErrorAnswer

_DONE = b"data: [DONE]\n\n"


def completion_routes(core: Core) -> APIRouter:
    """The OpenAI-compatible routes."""
    router = APIRouter(tags=["openai"])

    workers = Workers()

    @router.post("/v1/completions", response_model=openai.Completion)
    async def complete(request: Request) -> Response:
        """Continues each prompt; `n` is 1, so choice i belongs to prompt i. `stream` sends server-sent events."""
        arrived_s = time.monotonic()
        owner = owner_of(request)
        body = await core.bodies.parse(owner, openai.CompletionRequest, await read_body(request.receive))
        prompts = body.prompts()
        for prompt in prompts:
            if isinstance(prompt, str):
                check_length(core, prompt)
        encode = partial(workers.run, owner, encode_prompts, core, prompts)
        max_tokens = body.max_tokens or openai.DEFAULT_MAX_TOKENS
        return await _answer(core, request, body, len(prompts), encode, max_tokens, CompletionShape, arrived_s)

    @router.post("/v1/chat/completions", response_model=openai.ChatCompletion)
    async def chat(request: Request) -> Response:
        """Answers a conversation, through the model's chat template. `stream` sends server-sent events."""
        arrived_s = time.monotonic()
        owner = owner_of(request)
        body = await core.bodies.parse(owner, openai.ChatRequest, await read_body(request.receive))
        if not core.model.tokenizer.has_chat_template:
            raise RequestError(
                "no_chat_template",
                f"{core.model.name} has no chat template, so it is not a chat model. Use /v1/completions",
            )

        async def encode() -> list[list[int]]:
            return [await workers.run(owner, encode_chat, core, body)]

        max_tokens = body.max_completion_tokens or body.max_tokens or core.engine.limits.max_positions
        return await _answer(core, request, body, 1, encode, max_tokens, ChatShape, arrived_s)

    @router.get("/v1/models", response_model=openai.ModelList)
    async def list_models() -> openai.ModelList:
        """The one model that is served."""
        return openai.ModelList(data=[card()])

    # A name may hold slashes.
    @router.get("/v1/models/{model:path}", response_model=openai.ModelCard)
    async def retrieve_model(model: str) -> openai.ModelCard:
        """The served model, by its name; 404 for any other."""
        _require_model(core, model)
        return card()

    def card() -> openai.ModelCard:
        return openai.ModelCard(
            id=core.model.name, created=core.model.created_s, max_model_len=core.engine.limits.max_positions
        )

    return router


def _require_model(core: Core, name: str) -> None:
    if name != core.model.name:
        raise FieldError(
            "model_not_found",
            f"this server serves {core.model.name} only; GET /v1/models lists it",
            param="model",
            status=404,
        )


async def _answer(
    core: Core,
    request: Request,
    body: openai.GenerationRequest,
    num_prompts: int,
    encode: Callable[[], Awaitable[list[list[int]]]],
    max_tokens: int,
    shape_type: type[Shape],
    arrived_s: float,
) -> Response:
    if body.model:
        _require_model(core, body.model)
    params = sampling_of(body.sampling)
    stop_ids = core.stop_set(body.stop_token_ids, bool(body.ignore_eos))
    owner = owner_of(request)
    # Slots first: they also bound how many texts wait to be tokenized.
    generation = Generation.reserve(core, owner, num_prompts)
    try:
        requests = [
            GenerateRequest(tuple(prompt), params, max_tokens, stop_ids, owner=owner) for prompt in await encode()
        ]
        await generation.submit(requests, body.stop_strings, arrived_s)
    except BaseException:
        generation.close()
        raise
    shape = shape_type(core.model.name, params.seed)
    if body.stream:
        chunks = _stream(generation, shape, includes_usage=body.includes_usage)
        return sse.EventStream(chunks, generation.mailbox, generation.close, keep_alive_s=core.settings.keep_alive_s)
    texts = [""] * num_prompts
    reasons: list[Any] = [None] * num_prompts
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
