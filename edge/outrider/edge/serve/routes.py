"""Answers the OpenAI-compatible routes of the local endpoint, and its probes.

The messages are those of the cloud's own endpoint. A conversation becomes token ids on the server, by the target's chat
template: no template that a server sends runs here.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Final

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from outrider.edge.link.fleet import CloudState
from outrider.edge.results import GenerationRequest, ends_of
from outrider.edge.retrieval.grounding import Grounding
from outrider.edge.serve.drafted_texts import LocalTexts, verify_answer
from outrider.edge.serve.grounded_calls import (
    LocalChatRequest,
    LocalCompletionRequest,
    add_passages,
    ground_messages,
    ground_prompts,
    sources_of,
)
from outrider.edge.serve.metrics import ROUTE
from outrider.edge.serve.state import Found, LocalCore
from outrider.edge.serve.unverified import VerifyAnswerRequest
from outrider.models.errors import OutriderError, RequestError
from outrider.models.http import openai, openai_answers
from outrider.models.http.answers import answer, model_not_found
from outrider.models.http.bodies import is_no_store, owner_of, read_body, sampling_of
from outrider.models.http.call_plan import (
    Dialect,
    asks_for_grammar,
    chat_style,
    echoes,
    engine_logprobs,
    grammar_of_call,
    look_of,
    text_style,
)
from outrider.models.http.chat_reader import ChatStyle
from outrider.models.http.encoding import (
    check_prediction,
    check_prompts,
    encode_prediction,
    encode_prompts,
    no_chat_template,
    processors_of,
    truncated,
)
from outrider.models.http.errors import FieldError
from outrider.models.http.security import PagePolicy
from outrider.models.http.shapes import ChatShape, CompletionShape, Shape
from outrider.models.http.sse import until_gone
from outrider.models.wire.fields import require_ids
from outrider.models.wire.protocol import ModelFacts

PATHS_ARE: Final = (
    "this is `outrider serve`, not a verifier: it has /v1/chat/completions, /v1/completions, /v1/models, "
    "/v1/outrider/verify, /health/live, /health/ready and a page at /; for /metrics start it with --metrics"
)
"""What an answer 404 says."""


Encoded = tuple[list[list[int]], list[Grounding] | None]
"""Prompts as token ids, and what each is grounded in; None where a call has no documents."""


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
    clouds: list[CloudState] = []


class LabelledRoute(Route):
    """A route that notes its pattern for metrics and traces."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """As Starlette's."""
        match, found = super().matches(scope)
        return match, {**found, ROUTE: self.path} if match is not Match.NONE else found


def local_routes(core: LocalCore) -> list[Route]:
    """All routes."""

    async def complete(request: Request) -> Response:
        owner, arrived_s = owner_of(request), time.monotonic()
        body = await core.bodies.parse(owner, LocalCompletionRequest, await read_body(request.receive))
        facts = await core.facts_or_draft(body.model)
        prompts = body.prompts()
        check_prompts(core.tokenizer, facts.max_positions - 1, body)
        sources = sources_of(core, body.documents)
        if body.documents and any(isinstance(prompt, list) for prompt in prompts):
            raise FieldError(
                "invalid_parameter", "prompt: with documents, expected texts and no token ids", param="prompt"
            )
        for name in ("suffix", "truncate_prompt_tokens"):
            if body.documents and getattr(body, name):
                raise FieldError(
                    "invalid_parameter", f"{name}: with documents, expected none; leave it out", param=name
                )

        async def encode(facts: ModelFacts) -> Encoded:
            texts = [each for each in prompts if isinstance(each, str)]
            # Of a prompt that is cut, passages would be the first to go.
            if sources is None or body.suffix or body.truncate_prompt_tokens or not texts:
                limit = facts.max_positions - 1
                ids = await core.workers.run(owner, encode_prompts, core.tokenizer, limit, body)
                return ids, None if sources is None else [Grounding() for _ in ids]
            max_tokens, is_special = body.most_tokens(facts.max_positions), body.add_special_tokens is not False
            return await core.workers.run(owner, ground_prompts, sources, texts, facts, max_tokens, is_special)

        return await _answer(core, request, arrived_s, body, facts, len(prompts), encode)

    async def chat(request: Request) -> Response:
        owner, arrived_s = owner_of(request), time.monotonic()
        body = await core.bodies.parse(owner, LocalChatRequest, await read_body(request.receive))
        facts = await core.facts_or_draft(body.model)
        if not facts.has_chat_template:
            raise no_chat_template(facts.name)

        sources = sources_of(core, body.documents)

        async def encode(facts: ModelFacts) -> Encoded:
            asked, groundings = body, None
            if sources is not None:
                max_tokens = body.most_tokens(facts.max_positions)
                kept, found = await core.workers.run(owner, ground_messages, sources, body.messages, facts, max_tokens)
                asked, groundings = body.model_copy(update={"messages": kept}), [found]
            tokens = await core.rendered(owner, asked, facts)
            if facts is core.draft_facts:
                return [tokens], groundings
            if body.add_special_tokens and core.tokenizer.begins_with_bos:
                tokens = [*core.tokenizer.encode("")[:1], *tokens]
            return [truncated(tokens, facts.max_positions - 1, body)], groundings

        return await _answer(core, request, arrived_s, body, facts, 1, encode)

    async def verify(request: Request) -> Response:
        owner = owner_of(request)
        body = await core.bodies.parse(owner, VerifyAnswerRequest, await read_body(request.receive))
        with core.unverified.checking(body.id, owner) as kept:
            try:
                verified = await _while_connected(
                    request, verify_answer(core, owner, body.id, kept, is_no_store(request))
                )
            except OutriderError as error:
                raise core.request_error(error) from None
        return _json(verified)

    async def list_models(_: Request) -> Response:
        served = await core.served_or_draft()
        own = served.named(core.settings.model or "") or served
        names = dict.fromkeys((own.name, served.name, *served.adapters))
        return _json(openai_answers.ModelList(data=[_card(served, name) for name in names]))

    async def retrieve_model(request: Request) -> Response:
        name = request.path_params["model"]
        served = await core.served_or_draft(name)
        named = served if served is core.draft_facts else served.named(name)
        if named is None or not name:
            raise model_not_found(served.name)
        return _json(_card(served, named.name))

    async def live(_: Request) -> Response:
        return Response(b'{"status":"live"}', media_type="application/json")

    async def ready(request: Request) -> Response:
        readiness = LocalReadiness(
            status="draining" if core.is_draining else "ready",
            running=core.places.total,
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
        readiness.clouds = core.upstream.fleet.states()
        if readiness.status == "no_verifier":  # a lone one is not left out, so nothing else says that it is down
            readiness.clouds = [state.model_copy(update={"state": "down"}) for state in readiness.clouds]
        status = 200 if readiness.status == "ready" else 503
        # Probes come under any name; so may a page, by a name of its own that resolves to this machine.
        shown = None if _is_known_host(core, request) else {"status"}
        return _json(readiness, status, shown)

    async def metrics(request: Request) -> Response:
        gauges = {
            "texts_running": ("Texts in work.", core.places.total),
            "draft_sequences": ("Texts that the draft model can draft for at a time.", core.drafts.max_sequences),
            "draft_sequences_lent": ("Texts that the draft model drafts for.", core.drafts.num_lent),
        }
        content, media_type = core.metrics.exposition(request.headers.get("accept", ""), gauges)
        return Response(content, headers={"content-type": media_type})

    return [
        *([LabelledRoute("/metrics", metrics)] if core.settings.shows_metrics else []),
        LabelledRoute("/v1/completions", complete, methods=["POST"]),
        LabelledRoute("/v1/chat/completions", chat, methods=["POST"]),
        LabelledRoute("/v1/outrider/verify", verify, methods=["POST"]),
        LabelledRoute("/v1/models", list_models),
        LabelledRoute("/v1/models/{model:path}", retrieve_model),  # a name may hold slashes
        LabelledRoute("/health/live", live),
        LabelledRoute("/health/ready", ready),
    ]


async def _answer(
    core: LocalCore,
    request: Request,
    arrived_s: float,
    body: openai.GenerationRequest,
    facts: ModelFacts,
    num_prompts: int,
    encode: Callable[[ModelFacts], Awaitable[Encoded]],
) -> Response:
    body.require_few(num_prompts)
    check_prediction(core.tokenizer, body)
    params = sampling_of(body.sampling)
    _style(body, facts)  # raises before anything is rendered
    owner = owner_of(request)
    # Places first: they also bound how many texts wait to be tokenized.
    texts = LocalTexts(core, owner, num_prompts * body.num_each)
    with texts.closing_on_error():
        (prompts, groundings), facts = await _while_connected(request, core.or_draft(facts, encode))
        style, own_stops = _style(body, facts), frozenset(facts.eos_token_ids)
        if not all(prompts):
            raise RequestError("empty_prompt", "the prompt has no tokens; send at least one")
        grammar = None
        if asks_for_grammar(body):
            call = (body, style, core.tokenizer, prompts)
            grammar = await core.grammars.spec(core.workers, owner, b"", grammar_of_call, *call)
        stop_ids = None if body.stop_token_ids is None else frozenset(body.stop_token_ids)
        ignores_eos = bool(body.ignore_eos) and grammar is None
        ends = ends_of(stop_ids, own_stops, ignores_eos)
        cut = text_style(body, style, core.tokenizer, ends)
        draft_grammar = await core.grammars.compiled(grammar, owner)
        rules = await processors_of(core.workers, owner, core.tokenizer, body)
        for ids, name in (*((prompt, "prompt") for prompt in prompts), (stop_ids or (), "stop_token_ids")):
            require_ids(ids, name, facts.vocab_size)
        rules.require_ids(facts.vocab_size)
        prediction = await core.workers.run(owner, encode_prediction, core.tokenizer, body) if body.prediction else ()
        requests = [
            GenerationRequest(
                tuple(prompt),
                params,
                body.most_tokens(facts.max_positions),
                stop_ids,
                ignores_eos,
                tokenizer=core.fingerprint,
                processors=rules,
                end_ids=own_stops,
                grammar=grammar,
                draft_grammar=draft_grammar,
                stop=tuple(body.stop_strings) if cut.is_plain else (),
                num_logprobs=engine_logprobs(body),
                prediction=prediction,
                priority=body.priority,
                due_s=math.inf if body.deadline_ms is None else arrived_s + body.deadline_ms / 1e3,
                salt=core.cache_salt(owner),
            )
            for prompt in prompts
        ]
        make = ChatShape if isinstance(body, LocalChatRequest) else CompletionShape
        echoed: list[str] = []
        if isinstance(body, openai.CompletionRequest) and body.echo:
            echoed = await core.workers.run(owner, echoes, body, core.tokenizer, prompts)
        look = look_of(body, style, core.tokenizer, prompts, echoed)
        shape: Shape = make(facts.name, params.seed, facts.target, look)
        texts.answer_id, texts.model, texts.arrived_s = shape.id, body.model, arrived_s
        texts.no_store = is_no_store(request)
        if groundings is not None:
            add_passages(shape, [each for each in groundings for _ in range(body.num_kept)])
        quoted = [each.quoted for each in groundings or ()]
        texts.begin(requests, cut, facts, quoted, num_each=body.num_each)
    core.metrics.counts["prompt_tokens"] += sum(len(request.prompt) for request in requests)
    core.metrics.counts["passage_tokens"] += sum(each.num_tokens for each in groundings or ())
    return await answer(texts, num_prompts, shape, body, request, core.held_answers, core.settings.keep_alive_s)


def _style(body: openai.GenerationRequest, facts: ModelFacts) -> ChatStyle:
    return chat_style(body, Dialect(facts.tool_calls, facts.has_reasoning), facts.name)


async def _while_connected(request: Request, work: Awaitable[Found]) -> Found:
    """What `work` returns; ends it, and raises ClientDisconnect, where the client leaves. The body must have been read.

    Indexing documents takes seconds, a check as long as a text: neither goes on for a client that has left.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.create_task(until_gone(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


def _is_known_host(core: LocalCore, request: Request) -> bool:
    pages = core.settings.pages or PagePolicy(is_keyless=not len(core.settings.keys))
    try:
        pages.require_host(next((value for name, value in request.scope["headers"] if name == b"host"), None))
    except RequestError:
        return False
    return True


def _card(served: ModelFacts, name: str) -> openai_answers.ModelCard:
    parent = served.name if name in served.adapters else None
    return openai_answers.ModelCard(id=name, created=0, parent=parent, max_model_len=served.max_positions)


def _json(message: BaseModel, status: int = 200, shown: set[str] | None = None) -> Response:
    """The answer. shown: the message's only fields that go out; None: all."""
    content = message.model_dump_json(include=shown, exclude_none=True)
    return Response(content, status, media_type="application/json")
