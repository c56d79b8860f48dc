"""Traces the requests of the local endpoint: route, method, status."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.edge.serve.metrics import route_of
from outrider.models.client import tracing


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
        with tracing.span("request", incoming) as span:

            async def note_status(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set(http__response__status_code=message["status"])
                await send(message)

            try:
                await self._app(scope, receive, note_status)
            finally:
                span.set(http__request__method=scope["method"], http__route=route_of(scope))
