"""Answers the OpenAI-compatible routes, without drafts: completions, chat, models. Renders conversations."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Scope

from outrider.cloud.api.admission import Asked
from outrider.cloud.api.audit import AUDIT
from outrider.cloud.api.recent_texts import Recalled
from outrider.cloud.api.state import MAX_WAITING_RENDERS, Core
from outrider.cloud.api.traces import SequenceWatch, trace_of
from outrider.cloud.api.verify import shutting_down
from outrider.cloud.seam import CommitEvent, EndEvent, Event, GenerateRequest, PickOptions
from outrider.models.http import openai, openai_answers
from outrider.models.http.answer_text import TextStyle
from outrider.models.http.answers import CallTexts, Choice, answer, choice_params, model_not_found
from outrider.models.http.bodies import is_no_store, owner_of, read_body, sampling_of
from outrider.models.http.call_plan import (
    asks_for_grammar,
    chat_style,
    echoes,
    engine_logprobs,
    grammar_of_call,
    look_of,
    text_style,
)
from outrider.models.http.encoding import (
    check_call,
    check_prediction,
    encode_call,
    encode_chat,
    encode_prediction,
    no_chat_template,
    processors_of,
)
from outrider.models.http.errors import internal_error
from outrider.models.http.shapes import ChatShape, CompletionShape, Delta
from outrider.models.text.predicted import PredictionFollower
from outrider.models.wire.protocol import RenderAnswer
from outrider.models.wire.steady import PADDED_HEADER, padded


def completion_routes(core: Core) -> APIRouter:
    """The OpenAI-compatible routes, and /v1/render."""
    router = APIRouter(tags=["openai"])

    @router.post("/v1/completions", response_model=openai_answers.Completion)
    async def complete(request: Request) -> Response:
        """Continues each prompt; choice i belongs to prompt i // n. `stream` sends server-sent events."""
        return await _answer(core, request, openai.CompletionRequest)

    @router.post("/v1/chat/completions", response_model=openai_answers.ChatCompletion)
    async def chat(request: Request) -> Response:
        """Answers a conversation, through the model's chat template. `stream` sends server-sent events."""
        return await _answer(core, request, openai.ChatRequest)

    @router.post("/v1/render", response_model=RenderAnswer)
    async def render(request: Request) -> Response:
        """The token ids of a conversation, through the model's chat template: a session's prompt."""
        owner = owner_of(request)
        body = await core.bodies.parse(owner, openai.RenderRequest, await read_body(request.receive))
        core.require_tokenizer(body.tokenizer)
        model = core.model.named(body.model)
        if not core.model.tokenizer.has_chat_template:
            raise no_chat_template(core.model.name)
        await core.renders.wait(owner, max_waiting=MAX_WAITING_RENDERS)
        try:
            tokens = await core.workers.run(owner, encode_chat, core.model.tokenizer, core.max_prompt, body)
        finally:
            core.renders.release(owner)
        rendered = RenderAnswer(tokens=tokens, model=model.name, target=model.target)
        content = rendered.model_dump_json().encode()
        if PADDED_HEADER in request.headers:
            content = padded(content)
        return Response(content, media_type="application/json")

    @router.get("/v1/models", response_model=openai_answers.ModelList, response_model_exclude_none=True)
    async def list_models() -> openai_answers.ModelList:
        """The model that is served, then its adapters."""
        return openai_answers.ModelList(data=[card(name) for name in (core.model.name, *core.model.adapters)])

    # A name may hold slashes.
    @router.get("/v1/models/{model:path}", response_model=openai_answers.ModelCard, response_model_exclude_none=True)
    async def retrieve_model(model: str) -> openai_answers.ModelCard:
        """The served model or an adapter, by its name; 404 for any other."""
        if not model:  # which names the served model elsewhere
            raise model_not_found(core.model.name)
        return card(model)

    def card(name: str) -> openai_answers.ModelCard:
        model = core.model.named(name)
        return openai_answers.ModelCard(
            id=model.name,
            created=core.model.created_s,
            parent=None if model.adapter is None else core.model.name,
            max_model_len=core.engine.limits.max_positions,
        )

    return router


async def _answer(core: Core, request: Request, kind: type[openai.GenerationRequest]) -> Response:
    """Answers a call whose body is of this kind: checks it, takes its places, encodes and submits its texts."""
    arrived_s = time.monotonic()
    owner, tokenizer = owner_of(request), core.model.tokenizer
    core.slots.require(owner)  # parsing a flood's bodies only to refuse them would keep Python from the engine's thread
    body = await core.bodies.parse(owner, kind, await read_body(request.receive))
    check_call(tokenizer, core.max_prompt, body, core.model.name)
    model = core.model.named(body.model)
    body.require_few(body.num_prompts)
    check_prediction(tokenizer, body)
    params = sampling_of(body.sampling)
    style = chat_style(body, core.model.dialect, model.name)
    # Slots first: they also bound how many texts wait to be tokenized.
    generation = Generation(core, owner, body.num_prompts * body.num_each)
    try:
        prompts = await core.workers.run(owner, encode_call, tokenizer, core.max_prompt, body)
        asker = model.asker(owner)
        spec = None
        if asks_for_grammar(body):
            call = (body, style, tokenizer, prompts)
            spec = await core.grammars.spec(core.workers, owner, asker.salt, grammar_of_call, *call)
        grammar = await core.grammars.compiled(spec, owner, asker.salt)
        stop_ids = core.stop_set(body.stop_token_ids, bool(body.ignore_eos), grammar, "stop_token_ids")
        processors = await processors_of(core.workers, owner, tokenizer, body)
        prediction = await core.workers.run(owner, encode_prediction, tokenizer, body) if body.prediction else ()
        pick = PickOptions(params, processors, grammar, engine_logprobs(body))
        max_tokens = body.most_tokens(core.engine.limits.max_positions)
        requests = [
            GenerateRequest(tuple(prompt), pick, max_tokens, stop_ids, asker=asker, adapter=model.adapter)
            for prompt in prompts
        ]
        is_allowed = not is_no_store(request)
        recalled = await asyncio.gather(*(core.recall(each, is_allowed=is_allowed) for each in requests))
        recalled = [each.predicted(prediction) for each in recalled]
        if (trace := trace_of(request.scope)) is not None:
            trace.asked(params, max_tokens, model.name)
        asked = Asked(arrived_s, body.priority, body.deadline_ms, request.scope.get(AUDIT))
        echoed: list[str] = []
        if isinstance(body, openai.CompletionRequest) and body.echo:
            echoed = await core.workers.run(owner, echoes, body, tokenizer, prompts)
        look = look_of(body, style, tokenizer, prompts, echoed)
        await generation.submit(
            recalled,
            text_style(body, style, tokenizer, stop_ids),
            asked,
            request.scope,
            num_each=body.num_each,
            prediction=prediction,
        )
    except BaseException:
        generation.close()
        raise
    make = ChatShape if isinstance(body, openai.ChatRequest) else CompletionShape
    shape = make(model.name, params.seed, model.target, look)
    return await answer(generation, len(prompts), shape, body, request, core.held_answers, core.settings.keep_alive_s)


@dataclass(slots=True, kw_only=True)
class _Sequence(Choice):
    """A text. sequence_id: None until its sequence is submitted."""

    recalled: Recalled
    watch: SequenceWatch
    sequence_id: int | None = None


class Generation(CallTexts[_Sequence, Event]):
    """The sequences of one call, one per choice."""

    def __init__(self, core: Core, owner: bytes, num_choices: int) -> None:
        """With slots for its sequences, none of them submitted. Raises RequestError 429."""
        self.mailbox = core.bridge.mailbox()
        super().__init__(owner, self.mailbox)
        self.core = core
        core.slots.take(owner, num_choices)
        self._num_slots, self._num_charged = num_choices, 0

    async def submit(
        self,
        recalled: Sequence[Recalled],
        style: TextStyle,
        asked: Asked,
        scope: Scope,
        *,
        num_each: int = 1,
        prediction: Sequence[int] = (),
    ) -> None:
        """Submits a sequence for each request. scope: the call's. Raises RequestError; call `close` then too."""
        self.num_each, self._asked = num_each, asked
        tokenizer = self.core.model.tokenizer
        for leader in recalled:
            prompt, params = leader.request.prompt, leader.request.pick.params
            for index in range(num_each):
                each = leader if index == 0 else leader.for_choice(choice_params(params, index))
                follower = PredictionFollower(prediction) if prediction else None
                assembler = style.assembler(tokenizer, prompt)
                watch = SequenceWatch(self.core.metrics, scope, asked.arrived_s, len(self.choices))
                self.choices.append(_Sequence(assembler, follower, len(prompt), recalled=each, watch=watch))
        num_prompts = sum(len(leader.request.prompt) for leader in recalled)
        self.core.admission.charge(self.owner, num_prompts)  # at once: another call may come between two submissions
        self._num_charged = num_prompts
        for index in range(0, len(self.choices), num_each):
            self._begin(index)
            await asyncio.sleep(0)  # 64 long prompts at once would delay every stream

    def _begin(self, index: int) -> None:
        choice = self.choices[index]
        sink = choice.recalled.sink(self.mailbox.sink(index))
        admission, request = self.core.admission, choice.recalled.request
        choice.sequence_id = admission.submit(request, sink, self._asked, is_charged=True)
        if index % self.num_each:
            admission.charge(self.owner, len(request.prompt), may_owe=True)
        else:
            self._num_charged -= len(request.prompt)
        choice.has_begun = True

    def close(self) -> None:
        """Ends what still runs and frees its slots; may be called twice."""
        for choice in self.choices:
            if choice.sequence_id is not None and not choice.is_over:
                self.core.engine.cancel(choice.sequence_id)
        if self._num_charged:  # of prompts that were not begun
            self.core.admission.charge(self.owner, -self._num_charged, may_owe=True)
            self._num_charged = 0
        if self._num_slots:
            self.core.slots.release(self.owner, self._num_slots)
            self._num_slots = 0

    def _take(self, index: int, event: Event) -> list[Delta]:
        if isinstance(event, CommitEvent):
            return self._commit(index, event)
        return self._end(index, event) if isinstance(event, EndEvent) else []

    def _commit(self, index: int, event: CommitEvent) -> list[Delta]:
        choice = self.choices[index]
        assert choice.sequence_id is not None
        choice.watch.committed(event)
        choice.drafted.count(event.proposed, event.accepted)
        if choice.has_stopped:
            return []  # committed between the stop string and the cancellation
        deltas = choice.push(index, event.tokens, event.logprobs)
        if choice.has_stopped:
            self.core.engine.cancel(choice.sequence_id, "stop")
        return deltas

    def _end(self, index: int, event: EndEvent) -> list[Delta]:
        choice = self.choices[index]
        choice.is_over = True
        choice.watch.ended(event)
        choice.num_cached = event.usage.cached_prompt_tokens
        if choice.has_stopped:
            return []  # the text was whole before, whatever ended its sequence
        if event.reason == "shutdown":
            raise shutting_down()
        if event.reason == "error":
            raise event.error or internal_error()
        return choice.finish(index, is_stop=event.reason == "stop")
