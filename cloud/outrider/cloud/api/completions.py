"""Answers the OpenAI-compatible routes, without drafts: completions, chat, models. Renders conversations."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from outrider.cloud.api.admission import Asked
from outrider.cloud.api.audit import AUDIT
from outrider.cloud.api.completion_texts import Generation
from outrider.cloud.api.state import Core
from outrider.cloud.api.traces import trace_of
from outrider.cloud.seam import Asker, GenerateRequest, PickOptions
from outrider.models.http import openai, openai_answers
from outrider.models.http.answers import answer, require_model
from outrider.models.http.bodies import is_no_store, owner_of, read_body, sampling_of
from outrider.models.http.call_grammar import grammar_of_call
from outrider.models.http.call_plan import chat_style, engine_logprobs, look_of, text_style
from outrider.models.http.encoding import (
    Workers,
    check_prediction,
    check_prompts,
    encode_chat,
    encode_prediction,
    encode_prompts,
    no_chat_template,
    processors_of,
)
from outrider.models.http.shapes import ChatShape, CompletionShape, Shape
from outrider.models.wire.protocol import RenderAnswer


def completion_routes(core: Core) -> APIRouter:
    """The OpenAI-compatible routes, and /v1/render."""
    router = APIRouter(tags=["openai"])

    workers = Workers()
    tokenizer, max_prompt = core.model.tokenizer, core.engine.limits.max_positions - 1

    @router.post("/v1/completions", response_model=openai_answers.Completion)
    async def complete(request: Request) -> Response:
        """Continues each prompt; choice i belongs to prompt i // n. `stream` sends server-sent events."""
        arrived_s = time.monotonic()
        owner = owner_of(request)
        body = await core.bodies.parse(owner, openai.CompletionRequest, await read_body(request.receive))
        check_prompts(tokenizer, max_prompt, body)
        encode = partial(workers.run, owner, encode_prompts, tokenizer, max_prompt, body)
        max_tokens = body.max_tokens or openai.DEFAULT_MAX_TOKENS
        num_prompts = len(body.prompts())
        return await _answer(core, request, body, num_prompts, encode, workers, max_tokens, CompletionShape, arrived_s)

    @router.post("/v1/chat/completions", response_model=openai_answers.ChatCompletion)
    async def chat(request: Request) -> Response:
        """Answers a conversation, through the model's chat template. `stream` sends server-sent events."""
        arrived_s = time.monotonic()
        owner = owner_of(request)
        body = await core.bodies.parse(owner, openai.ChatRequest, await read_body(request.receive))
        if not tokenizer.has_chat_template:
            raise no_chat_template(core.model.name)

        async def encode() -> list[list[int]]:
            return [await workers.run(owner, encode_chat, tokenizer, max_prompt, body)]

        max_tokens = body.max_completion_tokens or body.max_tokens or core.engine.limits.max_positions
        return await _answer(core, request, body, 1, encode, workers, max_tokens, ChatShape, arrived_s)

    @router.post("/v1/render", response_model=RenderAnswer)
    async def render(request: Request) -> Response:
        """The token ids of a conversation, through the model's chat template: a session's prompt."""
        owner = owner_of(request)
        body = await core.bodies.parse(owner, openai.RenderRequest, await read_body(request.receive))
        core.require_tokenizer(body.tokenizer)
        if not tokenizer.has_chat_template:
            raise no_chat_template(core.model.name)
        tokens = await workers.run(owner, encode_chat, tokenizer, max_prompt, body)
        rendered = RenderAnswer(tokens=tokens, model=core.model.name, target=core.model.target)
        return Response(rendered.model_dump_json(), media_type="application/json")

    @router.get("/v1/models", response_model=openai_answers.ModelList)
    async def list_models() -> openai_answers.ModelList:
        """The one model that is served."""
        return openai_answers.ModelList(data=[card()])

    # A name may hold slashes.
    @router.get("/v1/models/{model:path}", response_model=openai_answers.ModelCard)
    async def retrieve_model(model: str) -> openai_answers.ModelCard:
        """The served model, by its name; 404 for any other."""
        require_model(core.model.name, model)
        return card()

    def card() -> openai_answers.ModelCard:
        return openai_answers.ModelCard(
            id=core.model.name, created=core.model.created_s, max_model_len=core.engine.limits.max_positions
        )

    return router


async def _answer(
    core: Core,
    request: Request,
    body: openai.GenerationRequest,
    num_prompts: int,
    encode: Callable[[], Awaitable[list[list[int]]]],
    workers: Workers,
    max_tokens: int,
    shape_type: type[Shape],
    arrived_s: float,
) -> Response:
    if body.model:
        require_model(core.model.name, body.model)
    body.require_few(num_prompts)
    check_prediction(core.model.tokenizer, body)
    params = sampling_of(body.sampling)
    owner, tokenizer = owner_of(request), core.model.tokenizer
    style = chat_style(body, core.model.dialect, core.model.name)
    # Slots first: they also bound how many texts wait to be tokenized.
    generation = Generation(core, owner, num_prompts * body.num_each)
    try:
        prompts = await encode()
        grammar = await core.grammars.compiled(grammar_of_call(body, style, tokenizer, prompts), owner)
        stop_ids = core.stop_set(body.stop_token_ids, bool(body.ignore_eos), grammar)
        processors = await processors_of(workers, owner, tokenizer, body)
        prediction = await workers.run(owner, encode_prediction, tokenizer, body) if body.prediction else ()
        pick = PickOptions(params, processors, grammar, engine_logprobs(body))
        requests = [
            GenerateRequest(tuple(prompt), pick, max_tokens, stop_ids, asker=Asker(owner)) for prompt in prompts
        ]
        is_allowed = not is_no_store(request)
        recalled = await asyncio.gather(*(core.recall(each, is_allowed=is_allowed) for each in requests))
        recalled = [each.predicted(prediction) for each in recalled]
        if (trace := trace_of(request.scope)) is not None:
            trace.asked(params, max_tokens)
        asked = Asked(arrived_s, body.priority, body.deadline_ms, request.scope.get(AUDIT))
        cut = text_style(body, style, tokenizer, stop_ids)
        num_each = body.num_each
        await generation.submit(recalled, cut, asked, request.scope, num_each=num_each, prediction=prediction)
    except BaseException:
        generation.close()
        raise
    look = look_of(body, style, tokenizer, prompts)
    shape = shape_type(core.model.name, params.seed, core.model.target, look)
    return await answer(generation, num_prompts, shape, body, request, core.held_logprobs, core.settings.keep_alive_s)
