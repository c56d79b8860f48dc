"""Answers the requests of the page: what runs here, and texts with everything that the page shows of them.

The prompt is treated as that of the other routes: bounded, never logged.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from outrider.edge.chat.messages import render_fitting
from outrider.edge.drafting.ahead import DraftAhead
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.link.sender import Posts
from outrider.edge.modes.stream import StreamAgent
from outrider.edge.results import GenerationRequest, GenerationResult, Source, TokenBatch
from outrider.edge.retrieval.grounding import Grounding
from outrider.edge.serve.drafted_texts import LocalTexts
from outrider.edge.serve.grounded_calls import ground_messages, ground_prompts, sources_of
from outrider.edge.serve.lent_drafts import Loan
from outrider.edge.serve.page_events import (
    CommitEvent,
    DroppedEvent,
    EndEvent,
    ErrorEvent,
    PageInfo,
    PageRequest,
    PassagesEvent,
    ShownGuess,
    ShownToken,
    Span,
    StateEvent,
    finite,
    origin_of,
)
from outrider.edge.serve.state import LocalCore
from outrider.models.client.messages import DraftMessage
from outrider.models.errors import RequestError
from outrider.models.http import sse
from outrider.models.http.answer_text import TextStyle
from outrider.models.http.bodies import owner_of, read_body, sampling_of
from outrider.models.http.encoding import check_length, no_chat_template
from outrider.models.http.errors import error_body
from outrider.models.http.openai import ChatMessage, RenderRequest
from outrider.models.wire.protocol import ModelFacts

GENERATE: str = "/v1/outrider/generate"
INFO: str = "/v1/outrider/info"


def watching_routes(core: LocalCore) -> list[Route]:
    """What the page asks."""

    async def info(_: Request) -> Response:
        facts = await core.facts_or_draft()
        message = PageInfo(
            model=facts.name,
            is_up=facts is not core.draft_facts,
            has_chat_template=facts.has_chat_template,
            max_positions=facts.max_positions,
            draft=core.placement,
        )
        return Response(message.model_dump_json(), media_type="application/json", headers={"cache-control": "no-store"})

    async def generate(request: Request) -> Response:
        owner, arrived_s = owner_of(request), time.monotonic()
        body = await core.bodies.parse(owner, PageRequest, await read_body(request.receive))
        params = sampling_of(body.params)
        facts = await core.facts_or_draft()
        text = WatchedText(core, owner, 1)
        with text.closing_on_error():
            text.is_drafted, text.delay_s = body.is_drafted, body.round_trip_ms / 1e3
            text.answer_id, text.arrived_s = f"page-{secrets.token_urlsafe(12)}", arrived_s
            found, facts = await core.or_draft(facts, partial(_prompt_ids, core, owner, body))
            prompt, text.dropped, grounding = found
            if grounding.passages:
                text.passages = PassagesEvent.model_validate({"passages": grounding.as_json()})
            stop_ids = frozenset(facts.eos_token_ids)
            wanted = GenerationRequest(tuple(prompt), params, body.max_tokens, tokenizer=core.fingerprint)
            text.begin([wanted], TextStyle(stop_ids=stop_ids), facts, [grounding.quoted])
        hold, every_s = partial(core.held_answers.add, owner), core.settings.keep_alive_s
        return sse.EventStream(text.events(), text.reader, text.close, keep_alive_s=every_s, hold=hold)

    return [Route(INFO, info, methods=["GET"]), Route(GENERATE, generate, methods=["POST"])]


@dataclass(frozen=True, slots=True)
class _Sent:
    """A message of the page. content: its text, whatever its shape."""

    message: ChatMessage
    role: str
    content: str


async def _prompt_ids(
    core: LocalCore, owner: bytes, body: PageRequest, facts: ModelFacts
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
        messages, grounding = await core.workers.run(owner, ground_messages, sources, messages, facts, body.max_tokens)
    asked = [_Sent(message, message.role, message.for_template()["content"]) for message in messages]

    async def render(kept: list[_Sent]) -> list[int]:
        conversation = RenderRequest(messages=[each.message for each in kept])
        return await core.rendered(owner, conversation, facts)

    kept, tokens, num_turns = await render_fitting(asked, render, limit, body.max_tokens)
    dropped = None
    if num_turns:
        num_messages = len(messages) - len(kept)
        dropped = DroppedEvent(num_turns=num_turns, num_messages=num_messages, max_positions=limit)
    return tokens, dropped, grounding


MAX_GUESSES: Final = 32
"""Of the tree, shown at a time."""
MAX_SPANS: Final = 256
"""Of each kind, kept until they are taken."""


class _WatchedPosts:
    """The same destination, watched. on_posted: called with when a message went and arrived, and its bytes."""

    def __init__(self, posts: Posts, on_posted: Callable[[float, float, int], None]) -> None:
        self._posts = posts
        self._on_posted = on_posted

    async def post_drafts(self, session: str, message: DraftMessage) -> float | None:
        began_s = time.perf_counter()
        held_ms = await self._posts.post_drafts(session, message)
        self._on_posted(began_s, time.perf_counter(), len(message.body))
        return held_ms


STATE_S: Final = 0.1
"""Between two states, at least; the tree changes with each commit."""
TICK_S: Final = 0.2
"""Between two states, where nothing is committed."""


class WatchedText(LocalTexts):
    """One text. is_drafted: false lets the cloud write alone. delay_s: added to each round trip of this text.

    dropped: what was left out of its conversation. passages: of the server's documents, in its prompt.
    """

    def __init__(self, core: LocalCore, owner: bytes, num_choices: int) -> None:
        super().__init__(core, owner, num_choices)
        self.is_drafted = True
        self.delay_s = 0.0
        self.dropped: DroppedEvent | None = None
        self.passages: PassagesEvent | None = None
        self._estimates = Estimates()
        self._ahead: DraftAhead | None = None
        self._began_s = time.perf_counter()
        self._passed_ms = 0.0  # the end of the last pass
        self._is_alone = False  # no cloud answers: the draft writes
        self._drafts = deque[Span](maxlen=MAX_SPANS)  # added to in another thread
        self._posts = deque[Span](maxlen=MAX_SPANS)
        self._passes = deque[Span](maxlen=MAX_SPANS)
        self._ticks: asyncio.Task[None] | None = None

    def _lend(self, request: GenerationRequest) -> AbstractContextManager[Loan]:
        return self._lend_own(request) if self.is_drafted else nullcontext(Loan(None, self._estimates))

    @contextmanager
    def _lend_own(self, request: GenerationRequest) -> Iterator[Loan]:
        with self.core.drafts.lend(self.owner, request.prompt) as loan:
            if self.delay_s:  # other texts must not learn these times
                loan.estimates = loan.estimates.for_other_link()
            self._estimates = loan.estimates
            yield loan

    def _endpoints(self) -> Endpoints:
        # The page shows what is drafted here and compares modes: no cloud may draft from the text of another try.
        return self.core.upstream.endpoints(self.delay_s, no_store=True, model=self.adapter)

    def _watch(self, agent: StreamAgent) -> None:
        if not self.is_drafted:
            agent.estimates = self._estimates
        wrap, on_posted = agent.wrap_posts, partial(self._span, self._posts)
        agent.wrap_posts = lambda client: _WatchedPosts(wrap(client), on_posted)
        agent.on_begin, agent.on_call = self._begins, partial(self._span, self._drafts)

    def _begins(self, ahead: DraftAhead) -> None:
        self._ahead = ahead

    def _span(self, spans: deque[Span], began_s: float, ended_s: float, count: int) -> None:
        spans.append((self._ms(began_s), self._ms(ended_s), count))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The event stream. Ends with the text, or when the client has left."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        self._ticks = loop.create_task(self._tick())
        try:
            if self.dropped is not None:
                yield sse.encode(self.dropped)
            if self.passages is not None:
                yield sse.encode(self.passages)
            while not self.choices[0].is_over:
                arrived = await self.reader.take()
                if not arrived and self.reader.is_closed:
                    return
                parts: list[bytes] = []
                for _, event in arrived:
                    if isinstance(event, RequestError):
                        yield b"".join([*parts, sse.encode(ErrorEvent(error=error_body(event)))])
                        return
                    parts.append(sse.encode(self._commit(event) if isinstance(event, TokenBatch) else self._end(event)))
                if loop.time() >= due_s or self.choices[0].is_over:
                    due_s = loop.time() + STATE_S
                    parts.insert(-1 if self.choices[0].is_over else len(parts), sse.encode(self._state()))
                if parts:
                    yield b"".join(parts)
        finally:
            self._end_ticks()

    def close(self) -> None:
        """As `LocalTexts.close`."""
        self._end_ticks()
        self._ahead = None  # it calls this text
        LocalTexts.close(self)

    def _end_ticks(self) -> None:
        if self._ticks is not None:
            self._ticks.cancel()
            self._ticks = None  # a cancelled one has the traceback of where it was, and that has this

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.reader.poke()

    def _pass(self, batch: TokenBatch) -> None:
        """Notes a pass. When it ran is not reported: that is estimated from step, round trip and arrival."""
        ended_ms = self._ms() - self._estimates.round_trip_ms / 2
        took_ms = self._estimates.step_ms + self._estimates.extra_ms * batch.num_proposed
        began_ms = max(self._passed_ms, ended_ms - took_ms)
        self._passed_ms = max(began_ms, ended_ms)
        self._passes.append((round(began_ms, 1), round(self._passed_ms, 1), len(batch.tokens)))

    def _commit(self, batch: TokenBatch) -> CommitEvent:
        self._is_alone = batch.is_unverified
        if not batch.is_unverified:
            self._pass(batch)
        push = self.choices[0].assembler.push
        ranks = [*batch.ranks, *[None] * (len(batch.tokens) - len(batch.ranks))]
        tokens = [
            ShownToken(
                id=token,
                text=push([token]),
                origin="unverified" if batch.is_unverified else origin_of(index, batch.num_accepted, rank),
                rank=rank,
            )
            for index, (token, rank) in enumerate(zip(batch.tokens, ranks, strict=True))
        ]
        return CommitEvent(
            at_ms=self._ms(),
            tokens=tokens,
            accepted=batch.num_accepted,
        )

    def _state(self) -> StateEvent:
        ahead, estimates, decode = self._ahead, self._estimates, self.core.tokenizer.decode
        is_measured = estimates.round_trip_ms > 0.0 and not self._is_alone  # else the step is assumed, or of before
        tree = [
            ShownGuess(
                id=node.token,
                text=decode([node.token], skip_special_tokens=False),
                parent=parent,
                reach=round(node.reach, 3),
                rank=node.rank,
                is_sent=node.number is not None,
            )
            for node, parent in (ahead.look(MAX_GUESSES) if ahead is not None else ())
        ]
        return StateEvent(
            at_ms=self._ms(),
            tree=tree,
            drafts=_taken(self._drafts),
            posts=_taken(self._posts),
            passes=_taken(self._passes),
            round_trip_ms=(finite(estimates.round_trip_ms) or None) if is_measured else None,
            step_ms=finite(estimates.step_ms) if is_measured else None,
            draft_ms=finite(estimates.draft_ms) if self.is_drafted else None,
        )

    def _end(self, result: GenerationResult) -> EndEvent:
        choice = self.choices[0]
        choice.is_over = True
        num_unverified = result.sources.count(Source.UNVERIFIED)
        shows_details = self.core.settings.shows_details
        return EndEvent(
            at_ms=self._ms(),
            text=choice.assembler.finish(),
            finish_reason=result.finish_reason,
            num_tokens=len(result.tokens),
            num_prompt=len(choice.request.prompt),
            passes=result.num_passes,
            ttft_ms=finite(result.ttft_ms),
            tokens_per_s=finite(result.tokens_per_s),
            draft_error=result.draft_error if shows_details else None,
            id=self.answer_id if num_unverified else None,
            num_unverified=num_unverified,
            eased_by=self.core.power.reason if self.is_drafted else None,
            failed_drafts=self.core.drafts.failed if shows_details else [],
        )

    def _ms(self, at_s: float | None = None) -> float:
        """Since the text's begin. at_s: None means now."""
        return round(((time.perf_counter() if at_s is None else at_s) - self._began_s) * 1e3, 1)


def _taken(spans: deque[Span]) -> list[Span]:
    """Empties it; its thread may add meanwhile."""
    return [spans.popleft() for _ in range(len(spans))]
