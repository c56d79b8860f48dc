"""Answers POST /v1/verify: batched, stateless verification.

Items are validated, submitted and answered one by one, so that a bad one fails alone. In the engine they share steps
with each other and with everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.responses import Response

from outrider.cloud.api.bridge import Delivery, Mailbox
from outrider.cloud.api.state import Core
from outrider.cloud.seam import CommitEvent, GenerateRequest
from outrider.models.errors import RequestError
from outrider.models.http.errors import error_body, from_validation, internal_error
from outrider.models.http.requests import owner_of, parse, sampling_of
from outrider.models.http.sse import closed_on_disconnect
from outrider.models.protocol import MAX_VERIFY_ITEMS, VerifyAnswer, VerifyItem, VerifyResult

_FINISHED: Final[dict[str, Literal["stop", "length", "context"]]] = {
    "stop": "stop",
    "length": "length",
    "context": "context",
}


class _Envelope(BaseModel):
    """`protocol.VerifyRequest`, its items not validated yet."""

    model_config = ConfigDict(extra="forbid")

    items: list[Any] = Field(min_length=1, max_length=MAX_VERIFY_ITEMS)
    tokenizer: str | None = None


def verify_routes(core: Core) -> APIRouter:
    """The route that verifies."""
    router = APIRouter(tags=["verify"])

    @router.post("/v1/verify", response_model=VerifyAnswer)
    async def verify(request: Request) -> Response:
        """Runs one verification pass for each item.

        Results come in the items' order; an item that fails has `error`. When all items fail with one HTTP status, the
        whole answer has that status (a lone `prefix_not_held`: 409) and `error` beside `results`.
        """
        envelope = parse(_Envelope, await request.body())
        core.require_tokenizer(envelope.tokenizer)
        batch = _Batch(core, envelope.items, owner_of(request))
        try:
            async with closed_on_disconnect(batch.mailbox, request.receive):
                await batch.finish()
        finally:
            batch.cancel()
        return batch.answer()

    return router


class _Batch:
    """The items of one call: submitted ones, and results so far."""

    def __init__(self, core: Core, items: Sequence[Any], owner: bytes) -> None:
        self.mailbox: Mailbox = core.bridge.mailbox()
        self._core = core
        self._owner = owner
        self._errors: dict[int, RequestError] = {}
        self._results = [VerifyResult()] * len(items)
        self._running: dict[int, int] = {}  # item -> the engine's sequence
        for index, item in enumerate(items):
            try:
                self._running[index] = core.engine.submit(self._request(item), self.mailbox.sink(index))
            except ValidationError as error:
                self._fail(index, from_validation(error, prefix=f"items.{index}"))
            except RequestError as error:
                self._fail(index, error)

    async def finish(self) -> None:
        """Waits until every item has its result, or the client has left."""
        while self._running and not self.mailbox.is_closed:
            for delivery in await self.mailbox.take():
                self._note(delivery)

    def cancel(self) -> None:
        """Ends what still runs."""
        for sequence_id in self._running.values():
            self._core.engine.cancel(sequence_id)

    def answer(self) -> Response:
        """The call's answer."""
        model = self._core.model
        body = VerifyAnswer(results=self._results, model=model.name, target=model.target)
        statuses = {error.status for error in self._errors.values()}
        status = 200
        if len(self._errors) == len(self._results) and len(statuses) == 1:
            status = statuses.pop()
            body = body.model_copy(update={"error": self._results[0].error})
        return Response(body.model_dump_json(exclude_none=True), status, media_type="application/json")

    def _request(self, raw: Any) -> GenerateRequest:
        item = VerifyItem.model_validate(raw)
        params = item.rule.apply(sampling_of(item.sampling))
        return GenerateRequest(
            prompt=tuple(item.prefix),
            params=params,
            # Unset, one pass is the only bound; no pass commits as many tokens as the model has positions.
            max_tokens=item.max_tokens or self._core.engine.limits.max_positions,
            stop_ids=self._core.stop_set(item.stop_ids, item.ignore_eos),
            patience_ms=0.0,
            draft=tuple(item.draft),
            once=True,
            prefix_hash=item.prefix_hash,
            owner=self._owner,
        )

    def _note(self, delivery: Delivery) -> None:
        index, event = delivery
        so_far = self._results[index]
        if isinstance(event, CommitEvent):
            update: dict[str, Any] = {
                "accepted": so_far.accepted + event.accepted,
                "tokens": [*so_far.tokens, *event.tokens],
            }
        else:
            del self._running[index]
            if event.reason == "shutdown":
                return self._fail(index, shutting_down())
            if event.reason == "error":
                return self._fail(index, event.error or internal_error())
            update = {"finish_reason": _FINISHED.get(event.reason), "prefix_hash": event.prefix_hash}
        self._results[index] = so_far.model_copy(update=update)

    def _fail(self, index: int, error: RequestError) -> None:
        self._errors[index] = error
        self._results[index] = VerifyResult(error=error_body(error))


def shutting_down() -> RequestError:
    """Raised to a caller whose sequences were ended by shutdown."""
    return RequestError(
        "shutting_down", "the server shut down before the request was complete; use another server", status=503
    )
