"""Builds the verifier's HTTP application.

A request passes two layers of plain ASGI: `ServedRequests` (its id, counts, the net under errors), then the `Gate`
(pace, body size, host, origin, key and scope, media type, rate), which begins its trace; then FastAPI's router. The
drafts endpoint stands in front of them, with a gate of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from outrider.cloud.api.audit import AUDIT, AuditEntry
from outrider.cloud.api.completions import completion_routes
from outrider.cloud.api.downloads import download_routes
from outrider.cloud.api.draft_posts import DraftsEndpoint, drafts_endpoint, is_draft_path
from outrider.cloud.api.health import health_routes
from outrider.cloud.api.metrics import route_of
from outrider.cloud.api.openapi import install_openapi
from outrider.cloud.api.sessions import session_routes
from outrider.cloud.api.state import Core, DraftFiles, ServedModel, ServerSettings, SharedFile
from outrider.cloud.api.stream import SERVER_SEND
from outrider.cloud.api.traces import TracedRequests
from outrider.cloud.api.verify import verify_routes
from outrider.cloud.recent.store import RecentStore
from outrider.cloud.seam import ServingEngine
from outrider.models.http.errors import install_error_handlers
from outrider.models.http.security import Gate, GatePaths
from outrider.models.http.served_requests import ServedRequests, names_of_routes
from outrider.models.version import outrider_version

PROBE_PATHS: Final = frozenset({"/health/live", "/health/ready", "/health", "/healthz", "/livez", "/readyz"})
"""Answered without a key, under any host name: load balancers probe by address."""
OPEN_PATHS: Final = frozenset({"/openapi.json", "/docs"})
"""Answered without a key."""
OPERATIONS: Final = {
    "/v1/sessions": "text_completion",
    "/v1/verify": "verify",
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/render": "render",
}
"""What is traced, by OpenTelemetry's names of operations where it has one."""
COSTLY_PATHS: Final = frozenset(OPERATIONS)
"""Counted against a key's rate, and written to the audit log. Drafts are neither: sessions and owners have budgets of
them."""
PATHS: Final = GatePaths(OPEN_PATHS, PROBE_PATHS, COSTLY_PATHS)
_DOWNLOADS: Final = ("/v1/drafts/", "/v1/tokenizer/")


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
    tokenizer_files: Mapping[str, SharedFile] | None = None,
) -> FastAPI:
    """The application over a started engine. The caller stops the engine, and closes `recent` after it.

    `app.state.core` is the app's Core. drafts: what devices may download. recent: texts that requests may repeat.
    tokenizer_files: of the target's tokenizer, by name, for devices to download; None shares none.
    """
    settings = settings or ServerSettings()
    core = Core(engine, model, settings, drafts, recent, tokenizer_files)
    app = VerifierApp(
        title="Outrider verifier",
        version=outrider_version(),
        summary="Speculative decoding across a network: verifies drafts, streams the target's tokens.",
        redoc_url=None,
        redirect_slashes=False,  # a replica would name its own address
    )
    app.state.core = core
    patterns = [*OPEN_PATHS]
    for routes in (session_routes, verify_routes, completion_routes, download_routes, health_routes):
        router = routes(core)
        app.include_router(router)
        patterns += [getattr(route, "path", "") for route in router.routes]
    install_error_handlers(app, "/openapi.json lists all paths")
    install_openapi(app, needs_key=bool(len(settings.keys)), open_paths=PROBE_PATHS | OPEN_PATHS)

    app.drafts = drafts_endpoint(core, PATHS)
    traced = TracedRequests(settings.traces, core.metrics, model.name, OPERATIONS)

    name_of_route = names_of_routes(patterns, route_of)

    def begin(scope: Scope) -> None:
        if settings.audit is not None:
            scope[AUDIT] = AuditEntry()
        traced.begin(scope)

    def over(scope: Scope, status: int | None, took_s: float) -> None:
        traced.end(scope, status)
        path: str = scope["path"]
        if settings.audit is not None and path not in PROBE_PATHS:
            is_work = path in COSTLY_PATHS or path.startswith(_DOWNLOADS)
            settings.audit.over(scope, name_of_route(scope), status, took_s, is_work=is_work)

    # Added from the inside out. A replica's requests were spaced by its front.
    app.add_middleware(Gate, settings=settings, paths=PATHS, is_paced=not settings.session_prefix, on_admitted=begin)
    app.add_middleware(ServedRequests, tally=core.metrics, route_of=name_of_route, on_over=over)
    # FastAPI builds the routes when the first request looks for its own: that takes time then, and changes the warning
    # filters of the whole process.
    for route in app.routes:
        route.matches({"type": "http", "method": "GET", "path": "/", "root_path": "", "headers": []})
    return app
