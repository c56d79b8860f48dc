"""Builds the application of the local endpoint.

A request passes these layers, from the outside in: CORS where it is configured, traces, `ServedRequests`, the gate,
without keys the caller's user, then the router. `ServedRequests` and the gate are the cloud's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.edge.serve.metrics import route_of
from outrider.edge.serve.neighbours import OwnUser
from outrider.edge.serve.page_routes import GENERATE, watching_routes
from outrider.edge.serve.routes import PATHS_ARE, local_routes
from outrider.edge.serve.state import LocalCore
from outrider.models.client import tracing
from outrider.models.http.errors import install_error_handlers
from outrider.models.http.security import Gate, GatePaths
from outrider.models.http.served_requests import ServedRequests

_SPAN: Final = "outrider.span"
"""Key of the ASGI scope that holds the request's span, where traces are on."""


class TracedRequests:
    """ASGI layer that records a span per request; it goes on with the trace that the client's `traceparent` names."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or not tracing.is_on():
            return await self._app(scope, receive, send)
        name = tracing.HEADER.encode()
        incoming = next((value for key, value in scope["headers"] if key == name), b"").decode("latin-1")
        with tracing.span("request", incoming) as scope[_SPAN]:
            await self._app(scope, receive, send)


def note_request(scope: Scope, status: int | None, took_s: float) -> None:
    """Completes the span of a request that is over."""
    if (span := scope.get(_SPAN)) is not None:
        span.set(http__request__method=scope["method"], http__route=route_of(scope), http__response__status_code=status)


HEADERS: Final = {
    # No script and no style but the page's own files; text never becomes markup (trusted types).
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-cache",
}

_SITE: Final = Path(__file__).with_name("site")
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


def page_routes() -> list[Route]:
    """A route for each file, `/` for index.html."""
    return [_route(file) for file in sorted(_SITE.iterdir()) if file.suffix in _TYPES]


def page_paths(routes: Sequence[Route]) -> tuple[str, ...]:
    """Where the files are."""
    return tuple(route.path for route in routes)


def _route(file: Path) -> Route:
    body, headers = file.read_bytes(), {**HEADERS, "content-type": _TYPES[file.suffix]}

    async def serve(_: Request) -> Response:
        return Response(body, headers=headers)

    return Route("/" if file.name == "index.html" else f"/page/{file.name}", serve, methods=["GET"])


PROBE_PATHS: Final = frozenset({"/health/live", "/health/ready"})
"""Answered without a key, under any host name."""
COSTLY_PATHS: Final = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/outrider/verify", GENERATE})
"""Counted against a client's rate."""


def create_local_app(core: LocalCore) -> Starlette:
    """The application: the API and the page."""
    settings, page = core.settings, page_routes()
    paths = GatePaths(frozenset(page_paths(page)), PROBE_PATHS, COSTLY_PATHS)
    layers = [
        Middleware(TracedRequests),
        Middleware(ServedRequests, tally=core.metrics, route_of=route_of, on_over=note_request),
        Middleware(Gate, settings=settings, paths=paths),
    ]
    if not len(settings.keys) and not settings.any_user:
        layers.append(Middleware(OwnUser, open_paths=paths.open | paths.probes))
    if settings.allowed_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # OpenAI's client sends X-Stainless-* of its own
            expose_headers=["Retry-After"],
        )
        layers.insert(0, cors)  # outside, so that a page can read errors too
    app = Starlette(routes=[*local_routes(core), *watching_routes(core), *page], middleware=layers)
    install_error_handlers(app, PATHS_ARE)
    return app
