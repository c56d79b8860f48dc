"""Answers the requests of the page: what runs here, and texts with everything that the page shows of them.

The prompt is treated as that of the other routes: bounded, never logged.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from outrider.edge.chat.messages import render_fitting
from outrider.edge.results import GenerationRequest
from outrider.edge.retrieval.grounding import Grounding
from outrider.edge.serve.grounded_calls import ground_messages, ground_prompts, sources_of
from outrider.edge.serve.page_events import DroppedEvent, PageInfo, PageRequest, PassagesEvent
from outrider.edge.serve.state import LocalCore
from outrider.edge.serve.watched_text import WatchedText
from outrider.models.http import sse
from outrider.models.http.answer_text import TextStyle
from outrider.models.http.bodies import owner_of, read_body, sampling_of
from outrider.models.http.encoding import check_length, no_chat_template
from outrider.models.http.openai import ChatMessage, RenderRequest
from outrider.models.wire.protocol import ModelFacts

GENERATE: str = "/v1/outrider/generate"
INFO: str = "/v1/outrider/info"


def watching_routes(core: LocalCore) -> list[Route]:
    """What the page asks."""

    async def info(_: Request) -> Response:
        facts, is_up = await core.facts_or_draft()
        message = PageInfo(
            model=facts.name,
            is_up=is_up,
            has_chat_template=facts.has_chat_template,
            max_positions=facts.max_positions,
            draft=core.placement,
        )
        return Response(message.model_dump_json(), media_type="application/json", headers={"cache-control": "no-store"})

    async def generate(request: Request) -> Response:
        owner = owner_of(request)
        body = await core.bodies.parse(owner, PageRequest, await read_body(request.receive))
        params = sampling_of(body.params)
        facts, is_up = await core.facts_or_draft()
        text = WatchedText(core, owner, 1)
        with text.closing_on_error():
            text.is_drafted, text.delay_s = body.is_drafted, body.round_trip_ms / 1e3
            text.answer_id = f"page-{secrets.token_urlsafe(12)}"
            prompt, text.dropped, grounding = await _prompt_ids(core, owner, body, facts, is_up=is_up)
            if grounding.passages:
                text.passages = PassagesEvent.model_validate({"passages": grounding.as_json()})
            stop_ids = frozenset(facts.eos_token_ids)
            wanted = GenerationRequest(tuple(prompt), params, body.max_tokens, tokenizer=core.fingerprint)
            text.begin([wanted], TextStyle(stop_ids=stop_ids), facts, [grounding.quoted], is_up=is_up)
        return sse.EventStream(text.events(), text.reader, text.close, keep_alive_s=core.settings.keep_alive_s)

    return [Route(INFO, info, methods=["GET"]), Route(GENERATE, generate, methods=["POST"])]


@dataclass(frozen=True, slots=True)
class _Sent:
    """A message of the page. content: its text, whatever its shape."""

    message: ChatMessage
    role: str
    content: str


async def _prompt_ids(
    core: LocalCore, owner: bytes, body: PageRequest, facts: ModelFacts, *, is_up: bool
) -> tuple[list[int], DroppedEvent | None, Grounding]:
    """The prompt's ids, with passages of the server's documents.

    A conversation loses its oldest turns where the context is full; it keeps system messages.
    """
    limit, sources = facts.max_positions, sources_of(core, None)
    if body.prompt is not None:
        check_length(core.tokenizer, limit - 1, body.prompt)
        if sources is None:
            return await core.workers.run(owner, core.tokenizer.encode, body.prompt), None, Grounding()
        ids, found = await core.workers.run(owner, ground_prompts, sources, [body.prompt], facts, body.max_tokens)
        return ids[0], None, found[0]
    if not facts.has_chat_template:
        raise no_chat_template(facts.name)
    assert body.messages is not None
    messages, grounding = body.messages, Grounding()
    if sources is not None:
        plain, grounding = await core.workers.run(owner, ground_messages, sources, messages, facts, body.max_tokens)
        messages = [ChatMessage.model_validate(each) for each in plain]
    asked = [_Sent(message, message.role, message.for_template()["content"]) for message in messages]

    async def render(kept: list[_Sent]) -> list[int]:
        conversation = RenderRequest(messages=[each.message for each in kept])
        return await core.rendered(owner, conversation, facts, is_up=is_up)

    kept, tokens, num_turns = await render_fitting(asked, render, limit, body.max_tokens)
    dropped = None
    if num_turns:
        num_messages = len(messages) - len(kept)
        dropped = DroppedEvent(num_turns=num_turns, num_messages=num_messages, max_positions=limit)
    return tokens, dropped, grounding
