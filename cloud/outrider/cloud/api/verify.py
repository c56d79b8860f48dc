"""Answers POST /v1/verify: batched, stateless verification.

Items are validated, submitted and answered one by one, so that a bad one fails alone. In the engine they share steps
with each other and with everything else. Items beyond their owner's share of slots wait and are not refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, Literal

from fastapi import APIRouter, Request
from pydantic import Field, ValidationError
from starlette.responses import Response

from outrider.cloud.api.admission import Asked
from outrider.cloud.api.audit import AUDIT
from outrider.cloud.api.bridge import Delivery, Mailbox
from outrider.cloud.api.state import Core, ServerSettings
from outrider.cloud.api.traces import RequestTrace, log_failure, trace_of
from outrider.cloud.seam import Asker, CommitEvent, DraftHints, EndEvent, GenerateRequest, PickOptions
from outrider.models.errors import RequestError
from outrider.models.grammar.compiler import CompiledGrammar
from outrider.models.grammar.spec import GrammarSpec
from outrider.models.http.bodies import faults_of, owner_of, read_body, sampling_of
from outrider.models.http.encoding import check_tokens
from outrider.models.http.errors import FieldError, error_body, from_validation, internal_error
from outrider.models.http.request_context import current_request
from outrider.models.http.sse import closed_on_disconnect
from outrider.models.picks.acceptance import DEFAULT_DELTA, Rule, RuleTerms
from outrider.models.picks.rejection import Evidence, SparseDistribution
from outrider.models.processors.options import processors_of
from outrider.models.wire.protocol import MAX_VERIFY_ITEMS
from outrider.models.wire.verify import VerifyAnswer, VerifyItem, VerifyRequest, VerifyResult


def terms_of(item: VerifyItem, settings: ServerSettings) -> RuleTerms:
    """The rule of a verify item. Raises RequestError `tolerance_not_allowed`, `invalid_parameter`."""
    if item.rule is Rule.TOLERANCE:
        if not settings.allow_tolerance:
            raise RequestError(
                "tolerance_not_allowed",
                "the rule tolerance is lossy, and this server does not allow it; use coupled or rejection",
                status=403,
            )
    elif item.delta is not None:
        raise FieldError(
            "invalid_parameter", f"delta is given, and the rule is {item.rule.value}; leave it out", param="delta"
        )
    return RuleTerms(item.rule, DEFAULT_DELTA if item.delta is None else item.delta)


def evidence_of(qs: Sequence[Sequence[int]] | None, log_qs: Sequence[float] | None) -> tuple[Evidence, ...]:
    """What came with drafted tokens in JSON. The engine checks that it is what the rule needs."""
    if qs is not None and log_qs is not None:
        raise FieldError(
            "invalid_parameter", "draft_q and draft_log_q are both given; expected one of them", param="draft_log_q"
        )
    if log_qs is not None:
        return tuple(log_qs)
    for q in qs or ():
        if len(q) % 2:
            raise FieldError(
                "invalid_parameter",
                f"a distribution of draft_q has {len(q)} numbers; expected ids, each followed by its weight",
                param="draft_q",
            )
    return tuple(SparseDistribution(tuple(q[::2]), tuple(q[1::2])) for q in qs or ())


MAX_WAITING_CALLS: Final = 256
"""Calls of one owner that may wait for their first slot; each holds its body."""

_FINISHED: Final[dict[str, Literal["stop", "length", "context"]]] = {
    "stop": "stop",
    "length": "length",
    "context": "context",
}


class VerifyEnvelope(VerifyRequest):
    """A request whose items are not validated yet."""

    items: list[Any] = Field(min_length=1, max_length=MAX_VERIFY_ITEMS)


def verify_routes(core: Core) -> APIRouter:
    """The route that verifies."""
    router = APIRouter(tags=["verify"])

    @router.post("/v1/verify", response_model=VerifyAnswer)
    async def verify(request: Request) -> Response:
        """Runs one verification pass for each item.

        Results come in the items' order; an item that fails has `error`. When all items fail with one HTTP status, the
        whole answer has that status (a lone `prefix_not_held`: 409) and `error` beside `results`.
        """
        asked = Asked(time.monotonic(), entry=request.scope.get(AUDIT))
        owner = owner_of(request)
        body = await read_body(request.receive)
        batch = _Batch(core, owner, asked, trace_of(request.scope))
        with core.bodies.hold(owner, body):  # to the call's end: its items wait
            try:
                async with closed_on_disconnect(batch.mailbox, request.receive):
                    await batch.run(body)
            finally:
                batch.cancel()
        if batch.mailbox.is_closed:
            return Response(status_code=499)  # the client has left
        return batch.answer()

    return router


class _Batch:
    """The items of one call: submitted ones, and results so far.

    Every item takes a slot of its owner's. Items for which none is free wait; the calls of an owner take turns, one
    item each. The body is parsed when the first slot is free, so that calls that wait hold little.
    """

    def __init__(self, core: Core, owner: bytes, asked: Asked, trace: RequestTrace | None) -> None:
        self.mailbox: Mailbox = core.bridge.mailbox()
        self._core = core
        self._owner = owner
        self._asked = asked
        self._model = core.model.named(None)
        self._asker = Asker(owner)
        self._trace = trace
        self._failed: dict[int, tuple[int, int]] = {}  # item -> its HTTP status, and when to try again, in seconds
        self._results: list[VerifyResult] = []
        self._running: dict[int, int] = {}  # item -> the engine's sequence; each has a slot

    async def run(self, body: bytes) -> None:
        """Runs the items of a call until each has its result, or the client has left. Raises RequestError."""
        feeder = asyncio.get_running_loop().create_task(self._submit(body))
        feeder.add_done_callback(lambda _: self.mailbox.poke())
        try:
            while not (feeder.done() and not self._running) and not self.mailbox.is_closed:
                for delivery in await self.mailbox.take():
                    self._note(delivery)
                if feeder.done():
                    feeder.result()
        finally:
            feeder.cancel()
            await asyncio.wait([feeder])

    async def _submit(self, body: bytes) -> None:
        slots, owner = self._core.slots, self._owner
        await slots.wait(owner, max_waiting=MAX_WAITING_CALLS)
        num_held = 1  # a slot that has no sequence yet
        try:
            envelope = await self._core.bodies.parse(owner, VerifyEnvelope, body, is_held=True)
            self._core.require_tokenizer(envelope.tokenizer)
            self._model = self._core.model.named(envelope.model)
            self._asker = self._model.asker(owner, envelope.cache_salt)
            self._asked = replace(self._asked, priority=envelope.priority, deadline_ms=envelope.deadline_ms)
            self._results = [VerifyResult()] * len(envelope.items)
            items = envelope.items
            for index in range(len(items)):
                if not num_held:
                    await slots.wait(owner)
                    num_held = 1
                item, items[index] = items[index], None  # a call that waits keeps only what it has yet to submit
                if await self._start(index, item):
                    num_held = 0
                await asyncio.sleep(0)  # 256 items at once would delay every stream
        finally:
            if num_held:
                slots.release(owner)

    async def _start(self, index: int, raw: Any) -> bool:
        """Submits an item; returns whether it runs."""
        try:
            request = await self._core.admission.sought(await self._request(raw))
            self._running[index] = self._core.admission.submit(request, self.mailbox.sink(index), self._asked)
            rule = request.pick.terms.rule.value if request.pick.terms.rule.needs_evidence else None
            self._results[index] = VerifyResult(rule=rule, lossy=request.pick.terms.is_lossy or None)
            return True
        except ValidationError as error:
            self._fail(index, from_validation(faults_of(error), prefix=f"items.{index}"))
        except RequestError as error:
            self._fail(index, error)
        return False

    def cancel(self) -> None:
        """Ends what still runs and frees its slots."""
        for sequence_id in self._running.values():
            self._core.engine.cancel(sequence_id)
            self._core.slots.release(self._owner)
        self._running.clear()

    def answer(self) -> Response:
        """The call's answer."""
        model = self._model
        times = self._core.step_times()._asdict()
        body = VerifyAnswer(results=self._results, model=model.name, target=model.target, **times)
        statuses = {status for status, _ in self._failed.values()}
        status = 200
        if len(self._failed) == len(self._results) and len(statuses) == 1:
            status = statuses.pop()
            body = body.model_copy(update={"error": self._results[0].error})
        headers = {}
        if status in (429, 503):
            headers["retry-after"] = str(max(retry_s for _, retry_s in self._failed.values()))
        return Response(body.model_dump_json(exclude_none=True), status, headers, media_type="application/json")

    async def _grammar(self, item: VerifyItem) -> CompiledGrammar | None:
        if item.grammar is None:
            return None
        core, owner, salt = self._core, self._owner, self._asker.salt
        spec = await core.grammars.spec(core.workers, owner, salt, GrammarSpec.of_wire, item.grammar)
        return await core.grammars.compiled(spec, owner, salt)

    async def _request(self, raw: Any) -> GenerateRequest:
        if isinstance(raw, dict) and isinstance(prefix := raw.get("prefix"), list):
            check_tokens(self._core.engine.limits.max_positions, prefix)  # before it is copied
        item = VerifyItem.model_validate(raw)
        params = item.rule.apply(sampling_of(item.sampling))
        grammar = await self._grammar(item)
        terms = terms_of(item, self._core.settings)
        return GenerateRequest(
            prompt=tuple(item.prefix),
            pick=PickOptions(params, sampling_of(lambda: processors_of(item)), grammar, terms=terms),
            # Unset, one pass is the only bound; no pass commits as many tokens as the model has positions.
            max_tokens=item.max_tokens or self._core.engine.limits.max_positions,
            stop_ids=self._core.stop_set(item.stop_ids, item.ignore_eos, grammar),
            hints=DraftHints(tuple(item.draft), evidence_of(item.draft_q, item.draft_log_q), patience_ms=0.0),
            asker=self._asker,
            adapter=self._model.adapter,
            prefix_hash=item.prefix_hash,
            num_generated=item.generated,
            once=True,
        )

    def _note(self, delivery: Delivery) -> None:
        index, event = delivery
        so_far = self._results[index]
        if isinstance(event, CommitEvent):
            if self._trace is not None:
                self._trace.committed(event, index)
            update: dict[str, Any] = {
                "accepted": so_far.accepted + event.accepted,
                "tokens": [*so_far.tokens, *event.tokens],
                "tested": event.tested,
            }
        elif isinstance(event, EndEvent):
            del self._running[index]
            if self._trace is not None:
                self._trace.ended(event)
            self._core.slots.release(self._owner)
            if event.reason == "shutdown":
                return self._fail(index, shutting_down())
            if event.reason == "error":
                log_failure(event.error, current_request())
                return self._fail(index, event.error or internal_error())
            update = {"finish_reason": _FINISHED.get(event.reason), "prefix_hash": event.prefix_hash}
        else:
            return  # no call asks for provisional tokens
        self._results[index] = so_far.model_copy(update=update)

    def _fail(self, index: int, error: RequestError) -> None:
        # Not the error: its traceback would hold this batch, and so all that the item had, until the collector runs.
        self._failed[index] = (error.status, error.retry_after_s or 1)
        self._core.metrics.failed(error.code)
        self._results[index] = VerifyResult(error=error_body(error))


def shutting_down() -> RequestError:
    """Raised to a caller whose sequences were ended by shutdown."""
    return RequestError(
        "shutting_down", "the server shut down before the request was complete; use another server", status=503
    )
