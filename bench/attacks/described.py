"""Describes all routes of the verifier and of `outrider serve` as OpenAPI does, also those that no document shows.

Routes come from the applications themselves, so that a new one is in it by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

import httpx
from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from tests.local_endpoint import local_core
from tools.api_page import application

from outrider.edge.serve.server import create_local_app
from outrider.edge.serve.state import LocalSettings
from outrider.models.errors import RequestError

_REF: Final = "#/components/schemas/{model}"


def described(app: FastAPI) -> dict[str, Any]:
    """The document of an application, and the routes that it leaves out."""
    document = dict(app.openapi())
    document["paths"] = {path: dict(operations) for path, operations in document["paths"].items()}
    _add_routes(document["paths"], app.routes)
    return document


def verifier_document() -> dict[str, Any]:
    """Of `outrider-cloud serve`."""
    return described(application())


def local_document() -> dict[str, Any]:
    """The routes of `outrider serve`, which has no document: each with the message that it parses."""
    # Any user: a request without a socket is nobody's.
    core = local_core("http://127.0.0.1:9", LocalSettings(any_user=True, shows_metrics=True))
    parser = _Parser()
    core.bodies = parser  # type: ignore[assignment]  # that is all that routes ask of it here
    app = create_local_app(core)
    paths: dict[str, dict[str, Any]] = {}
    _add_routes(paths, app.routes)
    posts = [path for path, operations in paths.items() if "post" in operations]
    messages = dict(zip(posts, asyncio.run(parser.messages_of(app, posts)), strict=True))
    _, definitions = models_json_schema([(each, "validation") for each in messages.values()], ref_template=_REF)
    for path, message in messages.items():
        schema = {"$ref": _REF.format(model=message.__name__)}
        paths[path]["post"] = {"requestBody": {"content": {"application/json": {"schema": schema}}}}
    return {"paths": paths, "components": {"schemas": definitions["$defs"]}}


def _add_routes(paths: dict[str, dict[str, Any]], routes: Iterable[Any]) -> None:
    for route in routes:
        if (included := getattr(route, "original_router", None)) is not None:
            _add_routes(paths, included.routes)
            continue
        path = route.path.replace(":path}", "}")
        for method in route.methods:
            paths.setdefault(path, {}).setdefault(method.lower(), {})


class _Parser:
    """Stands for `Bodies`: notes the message that a route wants."""

    def __init__(self) -> None:
        self._seen: list[type[BaseModel]] = []

    async def parse(self, owner: bytes, message: type[BaseModel], body: bytes) -> BaseModel:
        self._seen.append(message)
        raise RequestError("invalid_parameter", "the route has parsed its body, and ends here")

    async def messages_of(self, app: Any, posts: list[str]) -> list[type[BaseModel]]:
        """The message of each route."""
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            for number, path in enumerate(posts):
                await client.post(path, json={})
                if len(self._seen) != number + 1:
                    raise LookupError(f"POST {path} does not parse its body by `core.bodies`; describe it here")
        return self._seen
