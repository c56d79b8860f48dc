"""Reports liveness, readiness, metrics, and what is served."""

from __future__ import annotations

from email.utils import formatdate

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from outrider.cloud.api.state import Core
from outrider.models.wire.protocol import ModelFacts, ReadyAnswer


class LiveAnswer(BaseModel):
    """GET /health/live. status: "live" while the process answers; "failed" while it ends, its engine being dead."""

    status: str = "live"


def ready_response(answer: ReadyAnswer) -> Response:
    """The answer of /health/ready."""
    status = 200 if answer.status == "ready" else 503
    # The server sends no Date elsewhere, for the bytes; here a device compares clocks by it.
    date = {"date": formatdate(usegmt=True)}
    return Response(answer.model_dump_json(), status, date, media_type="application/json")


def health_routes(core: Core) -> APIRouter:
    """The routes that only look."""
    router = APIRouter(tags=["server"])

    # Load balancers and uptime checks send HEAD too.
    @router.head("/livez", include_in_schema=False)
    @router.head("/healthz", include_in_schema=False)
    @router.head("/health", include_in_schema=False)
    @router.head("/health/live", include_in_schema=False)
    @router.get("/livez", include_in_schema=False)
    @router.get("/healthz", include_in_schema=False)
    @router.get("/health", include_in_schema=False)
    @router.get("/health/live", response_model=LiveAnswer, responses={503: {"model": LiveAnswer}})
    async def live(response: Response) -> LiveAnswer:
        """200 as long as the process answers and its engine has not failed for good."""
        if core.is_dead:
            response.status_code = 503
            return LiveAnswer(status="failed")
        return LiveAnswer()

    @router.head("/readyz", include_in_schema=False)
    @router.head("/health/ready", include_in_schema=False)
    @router.get("/readyz", include_in_schema=False)
    @router.get("/health/ready", response_model=ReadyAnswer, responses={503: {"model": ReadyAnswer}})
    async def ready() -> Response:
        """200 when new work is welcome, 503 while draining or when the engine cannot work; with the load."""
        return ready_response(core.ready())

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics(request: Request) -> Response:
        """Prometheus' text format."""
        body, content_type = await core.metrics.exposition(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    @router.get("/v1/model", response_model=ModelFacts)
    async def model() -> ModelFacts:
        """The facts of the served model."""
        limits, tokenizer, manifest = core.engine.limits, core.model.tokenizer, core.model.manifest
        facts = ModelFacts(
            name=core.model.name,
            tokenizer=tokenizer.fingerprint,
            vocab_size=limits.vocab_size,
            max_positions=limits.max_positions,
            eos_token_ids=sorted(core.model.eos_ids),
            has_chat_template=tokenizer.has_chat_template,
            target=core.model.target,
            mid=core.model.mid,
            tool_calls=core.model.dialect.tools,
            has_reasoning=core.model.dialect.has_reasoning,
            adapters=dict(core.model.adapters),
        )
        if (target := core.model.facts) is not None:
            kept = {"name", "protocol", "max_positions", "has_chat_template", "mid", "adapters"}
            return target.model_copy(update=facts.model_dump(include=kept))
        if manifest is None:
            return facts
        return facts.model_copy(
            update={
                "bundle": manifest.digest,
                "architecture": manifest.architecture.name,
                "parameters": manifest.architecture.parameters,
                "precision": manifest.precision,
                "runtime": manifest.runtime,
                "is_widened": manifest.widened is not None,
            }
        )

    return router
