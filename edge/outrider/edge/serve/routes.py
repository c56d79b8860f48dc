"""Answers the OpenAI-compatible routes of the local endpoint, and its probes.

The messages are those of the cloud's own endpoint. A conversation becomes token ids on the server, by the target's chat
template: no template that a server sends runs here.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from outrider.edge.results import GenerationRequest
from outrider.edge.serve.faults import NO_VERIFIER, as_request_error
from outrider.edge.serve.generation import LocalTexts
from outrider.edge.serve.state import LocalCore
from outrider.edge.serve.unverified import VerifyAnswerRequest
from outrider.edge.serve.verify import verify_answer
from outrider.models.errors import CloudError, OutriderError, RequestError
from outrider.models.http import openai
from outrider.models.http.answers import answer, require_model
from outrider.models.http.encoding import check_length, encode_chat, encode_prompts, no_chat_template
from outrider.models.http.requests import owner_of, read_body, sampling_of
from outrider.models.http.shapes import ChatShape, CompletionShape, Shape
from outrider.models.protocol import ModelFacts

_PATHS = (
    "this server has /v1/chat/completions, /v1/completions, /v1/models, /v1/outrider/verify, /health/live and "
    "/health/ready"
)


class CloudReadiness(BaseModel):
    """One cloud, as far as it is known."""

    state: str
    model: str | None = None
    target: str | None = None
    round_trip_ms: float | None = None
    queue_depth: int | None = None
    free_block_share: float | None = None


class LocalReadiness(BaseModel):
    """GET /health/ready of the local endpoint. drafting: texts that have a sequence of the draft model.

    failed_drafts: models that are not tried now. eased_by: why texts are drafted with half the work. clouds: in the
    order of preference, without their addresses.
    """

    status: str
    model: str | None = None
    running: int = 0
    drafting: int = 0
    draft_sequences: int = 0
    draft: str = ""
    failed_drafts: list[str] = []
    eased_by: str | None = None
    clouds: list[CloudReadiness] = []


def local_routes(core: LocalCore) -> list[Route]:
    """All routes."""

    async def complete(request: Request) -> Response:
        owner = owner_of(request)
        body = await core.bodies.parse(owner, openai.CompletionRequest, await read_body(request.receive))
        facts, is_up = await _facts_or_draft(core, body)
        prompts = body.prompts()
        for prompt in prompts:
            if isinstance(prompt, str):
                check_length(core.tokenizer, facts.max_positions - 1, prompt)

        async def encode() -> list[list[int]]:
            return await core.workers.run(owner, encode_prompts, core.tokenizer, prompts)

        max_tokens = body.max_tokens or openai.DEFAULT_MAX_TOKENS
        return await _answer(core, request, body, facts, len(prompts), encode, max_tokens, CompletionShape, is_up)

    async def chat(request: Request) -> Response:
        owner = owner_of(request)
        body = await core.bodies.parse(owner, openai.ChatRequest, await read_body(request.receive))
        facts, is_up = await _facts_or_draft(core, body)
        if not facts.has_chat_template:
            raise no_chat_template(facts.name)

        async def encode() -> list[list[int]]:
            if not is_up:  # the draft bundle's own template: no server is there to use the target's
                return [await core.workers.run(owner, encode_chat, core.tokenizer, facts.max_positions - 1, body)]
            conversation = {
                "messages": [message.model_dump(exclude_unset=True) for message in body.messages],
                "chat_template_kwargs": body.chat_template_kwargs,
                "tokenizer": core.fingerprint,
            }
            return [(await core.upstream.render(json.dumps(conversation).encode(), facts)).tokens]

        max_tokens = body.max_completion_tokens or body.max_tokens or facts.max_positions
        return await _answer(core, request, body, facts, 1, encode, max_tokens, ChatShape, is_up)

    async def verify(request: Request) -> Response:
        owner = owner_of(request)
        body = await core.bodies.parse(owner, VerifyAnswerRequest, await read_body(request.receive))
        kept = core.unverified.find(body.id, owner)
        try:
            verified = await verify_answer(core, owner, body.id, kept)
        except OutriderError as error:
            raise as_request_error(error, shows_details=core.settings.shows_details) from None
        core.unverified.forget(body.id)
        return _json(verified)

    async def list_models(_: Request) -> Response:
        return _json(openai.ModelList(data=[_card(await _facts(core))]))

    async def retrieve_model(request: Request) -> Response:
        facts = await _facts(core)
        require_model(facts.name, request.path_params["model"])
        return _json(_card(facts))

    async def live(_: Request) -> Response:
        return Response(b'{"status":"live"}', media_type="application/json")

    async def ready(_: Request) -> Response:
        readiness = LocalReadiness(
            status="draining" if core.is_draining else "ready",
            running=core.places.num_taken,
            drafting=core.drafts.num_lent,
            draft_sequences=core.drafts.max_sequences,
            draft=core.placement,
            failed_drafts=core.drafts.failed,
            eased_by=core.power.reason,
        )
        try:
            upstream = await core.upstream.ready()
            readiness.model = upstream.model
        except OutriderError:
            readiness.status = "no_verifier"
        if core.upstream.has_choice:
            known = CloudReadiness.model_fields
            states = [asdict(state) for state in core.upstream.fleet.states()]
            readiness.clouds = [CloudReadiness(**{name: state[name] for name in known}) for state in states]
        return _json(readiness, 200 if readiness.status == "ready" else 503)

    return [
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/outrider/verify", verify, methods=["POST"]),
        Route("/v1/models", list_models),
        Route("/v1/models/{model:path}", retrieve_model),  # a name may hold slashes
        Route("/health/live", live),
        Route("/health/ready", ready),
    ]


async def _facts(core: LocalCore, body: openai.GenerationRequest | None = None) -> ModelFacts:
    """The target's facts. Raises RequestError, also where the body asks for another model."""
    try:
        facts = await core.upstream.facts()
        if body is not None and body.model and body.model != facts.name:
            facts = await core.upstream.facts(is_fresh=True)
    except OutriderError as error:
        raise as_request_error(error, shows_details=core.settings.shows_details) from None
    if body is not None and body.model:
        require_model(facts.name, body.model)
    return facts


async def _facts_or_draft(core: LocalCore, body: openai.GenerationRequest) -> tuple[ModelFacts, bool]:
    """The target's facts, and whether a cloud answers. Without one, with --offline-ok, the draft's."""
    try:
        return await _facts(core, body), True
    except RequestError as error:
        if error.code != NO_VERIFIER or core.offline is None:
            raise
        return core.offline_facts, False


async def _answer(
    core: LocalCore,
    request: Request,
    body: openai.GenerationRequest,
    facts: ModelFacts,
    num_prompts: int,
    encode: Callable[[], Awaitable[list[list[int]]]],
    max_tokens: int,
    shape_type: type[Shape],
    is_up: bool,
) -> Response:
    params = sampling_of(body.sampling)
    own_stops = frozenset(facts.eos_token_ids)
    stop_ids = own_stops if body.stop_token_ids is None else frozenset(body.stop_token_ids)
    # Places first: they also bound how many texts wait to be tokenized.
    texts = LocalTexts.reserve(core, owner_of(request), num_prompts)
    try:
        requests = [
            GenerationRequest(
                tuple(prompt),
                params,
                max_tokens,
                None if body.stop_token_ids is None else stop_ids,
                bool(body.ignore_eos),
                core.settings.patience_ms,
                core.fingerprint,
            )
            for prompt in await encode()
        ]
        shape = shape_type(facts.name, params.seed)
        texts.answer_id = shape.id
        stops = stop_ids - own_stops if body.ignore_eos else stop_ids
        texts.begin(requests, body.stop_strings, stops, facts, is_up=is_up)
    except OutriderError as error:
        texts.close()
        if isinstance(error, CloudError):
            core.upstream.forget_facts()
        raise as_request_error(error, shows_details=core.settings.shows_details) from None
    except BaseException:
        texts.close()
        raise
    return await answer(texts, num_prompts, shape, body, request, core.settings.keep_alive_s)


def _card(facts: ModelFacts) -> openai.ModelCard:
    return openai.ModelCard(id=facts.name, created=0, max_model_len=facts.max_positions)


def _json(message: BaseModel, status: int = 200) -> Response:
    return Response(message.model_dump_json(exclude_none=True), status, media_type="application/json")


PATHS_ARE = _PATHS
"""What an answer 404 says."""
