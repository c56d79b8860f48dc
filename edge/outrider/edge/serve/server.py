"""Builds the local endpoint's application, and runs it with an orderly end.

The first signal lets texts in work finish for a bounded time, the second ends them, and their streams say so.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Final

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.edge.serve.metrics import route_of
from outrider.edge.serve.neighbours import OwnUser
from outrider.edge.serve.page_routes import GENERATE, watching_routes
from outrider.edge.serve.routes import PATHS_ARE, local_routes
from outrider.edge.serve.state import LocalCore
from outrider.edge.serve.upstream import look_at
from outrider.models.client import tracing
from outrider.models.errors import OutriderError
from outrider.models.http.errors import install_error_handlers
from outrider.models.http.security import Gate, GatePaths, plain_origin
from outrider.models.http.served_requests import ServedRequests, names_of_routes
from outrider.models.ingress.bounded_server import BoundedServer
from outrider.models.ingress.connections import ConnectionLimits
from outrider.models.ingress.sockets import TlsFiles
from outrider.models.visible import visible

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


def _route(file: Path) -> Route:
    answer = Response(file.read_bytes(), headers={**HEADERS, "content-type": _TYPES[file.suffix]})
    return Route("/" if file.name == "index.html" else f"/page/{file.name}", answer, methods=["GET"])


PROBE_PATHS: Final = frozenset({"/health/live", "/health/ready"})
"""Answered without a key, under any host name."""
COSTLY_PATHS: Final = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/outrider/verify", GENERATE})
"""Counted against a client's rate."""


def create_local_app(core: LocalCore) -> Starlette:
    """The application: the API and the page."""
    settings, page = core.settings, page_routes()
    routes = [*local_routes(core), *watching_routes(core), *page]
    name_of_route = names_of_routes((route.path for route in routes), route_of)
    paths = GatePaths(frozenset(route.path for route in page), PROBE_PATHS, COSTLY_PATHS)
    layers = [
        Middleware(TracedRequests),
        Middleware(ServedRequests, tally=core.metrics, route_of=name_of_route, on_over=note_request),
        Middleware(Gate, settings=settings, paths=paths),
    ]
    if not len(settings.keys) and not settings.any_user:
        layers.append(Middleware(OwnUser, open_paths=paths.open | paths.probes))
    if settings.allowed_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(map(plain_origin, settings.allowed_origins)),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # OpenAI's client sends X-Stainless-* of its own
            expose_headers=["Retry-After"],
        )
        layers.insert(0, cors)  # outside, so that a page can read errors too
    app = Starlette(routes=routes, middleware=layers)
    app.router.redirect_slashes = False  # to an address of the client's own making, by its Host
    install_error_handlers(app, PATHS_ARE)
    return app


_log = logging.getLogger("outrider.serve")

LOOK_S: Final = 2.0
"""How long the start waits for a verifier."""


class LocalServer(BoundedServer):
    """Serves `core`, and closes it at the end. drain_s: how long texts may take to finish."""

    def __init__(
        self,
        core: LocalCore,
        *,
        drain_s: float,
        tls: TlsFiles | None = None,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._core = core
        self._drain_s = drain_s
        self._num_signals = 0
        self._look: asyncio.Task[None] | None = None
        self._ends_at: float | None = None
        limits = ConnectionLimits(max_body_bytes=core.settings.max_body_bytes)
        super().__init__(create_local_app(core), limits, tls=tls, on_ready=on_ready)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Opens for business, after a look at the verifier. Raises TokenizerMismatch where it is not the draft's.

        A verifier that does not answer soon is looked at while texts are served.
        """
        look = self._look = asyncio.create_task(look_at(self._core.upstream, self._core.settings.model))
        try:
            await asyncio.wait([look], timeout=LOOK_S)
            if look.done():
                look.result()
            else:
                _log.warning("no verifier has answered in %g s; it is still looked for", LOOK_S)
                look.add_done_callback(_note_end)
        except BaseException:
            look.cancel()
            await self._core.aclose()
            raise
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins the draining, the second ends what runs."""
        self._num_signals += 1
        if self._num_signals == 1 and self._core.places.total:
            _log.info("waiting up to %g s for texts in work; a second signal ends them", self._drain_s)
        self.begin_drain(self._drain_s if self._num_signals == 1 else 0.0)

    def begin_drain(self, drain_s: float) -> None:
        """Refuses new work, and closes when texts have finished or been ended after `drain_s`. From any thread."""
        self._core.is_draining = True
        self._ends_at = time.monotonic() + drain_s

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn every 0.1 s; true ends the server."""
        if self._ends_at is not None and (not self._core.places.total or time.monotonic() >= self._ends_at):
            for task in self._core.tasks:
                task.cancel()  # their streams end with an error
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes connections, texts and the draft."""
        if self._look is not None:
            self._look.cancel()
        await super().shutdown(sockets)
        await self._core.aclose()


def _note_end(look: asyncio.Task[None]) -> None:
    """Logs what a look has found that ended after the start: requests get the same error."""
    if look.cancelled() or (error := look.exception()) is None:
        return
    if not isinstance(error, OutriderError):
        look.get_loop().call_exception_handler({"message": "the look at the verifiers failed", "exception": error})
        return
    _log.error("%s", visible(str(error)))
