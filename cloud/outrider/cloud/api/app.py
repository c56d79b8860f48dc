"""Builds the verifier's HTTP application.

A request passes these layers, from the outside in: the request's id, the audit log where there is one, the HTTP
metrics, the error boundary, the pace of each client, the body limit, the gate (host, origin, key and scope, media type
and rate), the trace, then FastAPI's router. All layers are plain ASGI. The drafts endpoint stands in front of them,
with a gate of its own.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.cloud.api.audit import AuditedRequests
from outrider.cloud.api.completions import completion_routes
from outrider.cloud.api.download_slots import DraftFiles
from outrider.cloud.api.downloads import download_routes
from outrider.cloud.api.draft_budget import DraftBudget
from outrider.cloud.api.draft_posts import MEDIA_TYPES, DraftsEndpoint, is_draft_path
from outrider.cloud.api.health import health_routes
from outrider.cloud.api.metrics import route_of
from outrider.cloud.api.openapi import install_openapi
from outrider.cloud.api.sessions import session_routes
from outrider.cloud.api.state import Core, ServedModel, ServerSettings
from outrider.cloud.api.stream import SERVER_SEND
from outrider.cloud.api.traces import TracedRequests
from outrider.cloud.api.verify import verify_routes
from outrider.cloud.recent.store import RecentStore
from outrider.cloud.seam import ServingEngine
from outrider.models.http.counted_requests import CountedRequests
from outrider.models.http.errors import ErrorBoundary, error_response, from_validation
from outrider.models.http.handlers import install_error_handlers
from outrider.models.http.limits import BodyLimit, RateLimiter, Slots
from outrider.models.http.request_context import RequestIds
from outrider.models.http.security import METRICS_PATH, Gate, Paced, PagePolicy
from outrider.models.version import outrider_version


def install_handlers(app: FastAPI) -> None:
    """Gives every error of the routes, and of the router itself, the one JSON shape."""

    async def on_validation(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(from_validation(error.errors()))

    install_error_handlers(app, "/openapi.json lists all paths")
    app.add_exception_handler(RequestValidationError, on_validation)


PROBE_PATHS: Final = ("/health/live", "/health/ready", "/health", "/healthz", "/livez", "/readyz")
"""Answered without a key, under any host name: load balancers probe by address."""
OPEN_PATHS: Final = ("/openapi.json", "/docs")
"""Answered without a key."""
COSTLY_PATHS: Final = ("/v1/sessions", "/v1/verify", "/v1/completions", "/v1/chat/completions", "/v1/render")
"""Counted against a key's rate, and written to the audit log. Drafts are neither: sessions and owners have budgets of
them."""
_DOWNLOADS: Final = "/v1/drafts/"


def _endpoint_of(scope: Scope) -> str:
    """The route's pattern, also of a request that the gate refused before the router saw it."""
    path: str = scope["path"]
    return path if path in COSTLY_PATHS or path == METRICS_PATH else route_of(scope)


def _is_work(scope: Scope) -> bool:
    """Whether the audit log has a line for the request though it was not refused."""
    path = scope["path"]
    return path in COSTLY_PATHS or path.startswith(_DOWNLOADS)


OPERATIONS: Final = {
    "/v1/sessions": "text_completion",
    "/v1/verify": "verify",
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/render": "render",
}
"""What is traced, by OpenTelemetry's names of operations where it has one."""


class VerifierApp(FastAPI):
    """FastAPI with the drafts endpoint in front. Set `drafts` before the first request."""

    drafts: DraftsEndpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if is_draft_path(scope):
            return await self.drafts(scope, receive, send)
        scope[SERVER_SEND] = send
        await super().__call__(scope, receive, send)


def create_app(
    engine: ServingEngine,
    model: ServedModel,
    settings: ServerSettings | None = None,
    drafts: tuple[DraftFiles, ...] = (),
    recent: RecentStore | None = None,
) -> FastAPI:
    """The application over a started engine. The caller stops the engine, and closes `recent` after it.

    `app.state.core` is the app's Core. drafts: what devices may download. recent: texts that requests may repeat.
    """
    settings = settings or ServerSettings()
    core = Core(engine, model, settings, Slots(settings.max_sessions, settings.keys.sessions_of), drafts, recent)
    app = VerifierApp(
        title="Outrider verifier",
        version=outrider_version(),
        summary="Speculative decoding across a network: verifies drafts, streams the target's tokens.",
        redoc_url=None,
        redirect_slashes=False,  # a replica would name its own address
    )
    app.state.core = core
    for routes in (session_routes, verify_routes, completion_routes, download_routes, health_routes):
        app.include_router(routes(core))
    install_handlers(app)
    install_openapi(app, needs_key=bool(len(settings.keys)), open_paths=(*PROBE_PATHS, *OPEN_PATHS))

    gate = partial(
        Gate,
        keys=settings.keys,
        limiter=RateLimiter(settings.rate_per_s),
        pages=settings.pages or PagePolicy(is_keyless=not len(settings.keys)),
        open_paths=OPEN_PATHS,
        probe_paths=PROBE_PATHS,
        costly_paths=COSTLY_PATHS,
    )
    app.drafts = DraftsEndpoint(core, partial(gate, media_types=MEDIA_TYPES), DraftBudget(settings.draft_limits))
    # Added from the inside out.
    app.add_middleware(
        TracedRequests, traces=settings.traces, metrics=core.metrics, model=model.name, operations=OPERATIONS
    )
    app.add_middleware(gate)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    if not settings.session_prefix:  # a replica's requests were spaced by its front
        app.add_middleware(Paced, keys=settings.keys, probe_paths=PROBE_PATHS)
    app.add_middleware(ErrorBoundary)
    app.add_middleware(CountedRequests, tally=core.metrics, route_of=route_of)
    if settings.audit is not None:
        app.add_middleware(
            AuditedRequests, log=settings.audit, route_of=_endpoint_of, is_work=_is_work, quiet_paths=PROBE_PATHS
        )
    app.add_middleware(RequestIds)
    # FastAPI builds the routes when the first request looks for its own: that takes time then, and changes the warning
    # filters of the whole process.
    for route in app.routes:
        route.matches({"type": "http", "method": "GET", "path": "/", "root_path": "", "headers": []})
    return app
