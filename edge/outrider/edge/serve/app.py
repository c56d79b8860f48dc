"""Builds the application of the local endpoint.

A request passes these layers, from the outside in: CORS where it is configured, counts, traces, the error boundary, the
pace of each client, the body limit, the gate (host, origin, key, media type and rate), without keys the caller's user,
then the router. All but counts, traces and the last two are the cloud's own.
"""

from __future__ import annotations

from typing import Final

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from outrider.edge.serve.metrics import route_of
from outrider.edge.serve.neighbours import OwnUser
from outrider.edge.serve.page import page_paths, page_routes
from outrider.edge.serve.page_routes import GENERATE, watching_routes
from outrider.edge.serve.routes import PATHS_ARE, local_routes
from outrider.edge.serve.state import LocalCore
from outrider.edge.serve.traces import TracedRequests
from outrider.models.http.counted_requests import CountedRequests
from outrider.models.http.errors import ErrorBoundary
from outrider.models.http.handlers import install_error_handlers
from outrider.models.http.limits import BodyLimit, RateLimiter
from outrider.models.http.security import Gate, Paced, PagePolicy

PROBE_PATHS: Final = ("/health/live", "/health/ready")
"""Answered without a key, under any host name."""
COSTLY_PATHS: Final = ("/v1/completions", "/v1/chat/completions", "/v1/outrider/verify", GENERATE)
"""Counted against a client's rate."""


def create_local_app(core: LocalCore) -> Starlette:
    """The application: the API and the page."""
    settings, page = core.settings, page_routes()
    layers = [
        Middleware(CountedRequests, tally=core.metrics, route_of=route_of),
        Middleware(TracedRequests),
        Middleware(ErrorBoundary),
        Middleware(Paced, keys=settings.keys, probe_paths=PROBE_PATHS),
        Middleware(BodyLimit, max_bytes=settings.max_body_bytes),
        Middleware(
            Gate,
            keys=settings.keys,
            limiter=RateLimiter(settings.rate_per_s),
            pages=settings.pages or PagePolicy(is_keyless=not len(settings.keys)),
            open_paths=page_paths(page),
            probe_paths=PROBE_PATHS,
            costly_paths=COSTLY_PATHS,
        ),
    ]
    if not len(settings.keys) and not settings.any_user:
        layers.append(Middleware(OwnUser, open_paths={*page_paths(page), *PROBE_PATHS}))
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
