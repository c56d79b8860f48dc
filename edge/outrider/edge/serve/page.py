"""Serves the page at `/`: a few files, with headers that forbid it what is not its own, and others to frame it.

The files are read once, at the start. They hold no secret, so they need no key.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

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
