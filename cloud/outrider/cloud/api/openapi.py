"""Completes the OpenAPI document: bodies parsed by hand, streams, the route below the framework, and the error codes of
each endpoint. docs/protocol.md says when each code is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any, Final

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from outrider.cloud.api.draft_posts import DRAFTS_PATH, MAX_TREE_BYTES
from outrider.models.http import openai, openai_answers
from outrider.models.wire import protocol, verify
from outrider.models.wire.tree_draft import TREE_MEDIA_TYPE

_REF: Final = "#/components/schemas/{model}"
_BODIES: Final[dict[str, type[BaseModel]]] = {
    "/v1/sessions": protocol.SessionRequest,
    DRAFTS_PATH: protocol.DraftRequest,
    "/v1/verify": verify.VerifyRequest,
    "/v1/completions": openai.CompletionRequest,
    "/v1/chat/completions": openai.ChatRequest,
    "/v1/render": openai.RenderRequest,
}
# Path -> the messages that its stream may carry.
_STREAMS: Final[dict[str, tuple[type[BaseModel], ...]]] = {
    "/v1/sessions": (protocol.SessionOpen, protocol.Commit, protocol.SessionEnd),
    "/v1/completions": (openai_answers.Completion, protocol.ErrorAnswer),
    "/v1/chat/completions": (openai_answers.ChatChunk, protocol.ErrorAnswer),
}
_TREE_WORDS: Final = f"""
    A body of the type {TREE_MEDIA_TYPE} is a tree instead, at most {MAX_TREE_BYTES} bytes: each guess once, with the
    chance that it follows; later messages go on below it.
    """
_WITH_DONE: Final = ("/v1/completions", "/v1/chat/completions")


Codes = dict[int, tuple[str, ...]]
"""Stable codes by HTTP status."""

_GROUPS: Final[dict[str, Codes]] = {
    "any": {
        400: ("malformed_http", "invalid_request"),
        404: ("not_found", "unsupported_endpoint"),
        405: ("method_not_allowed",),
        408: ("request_timeout",),
        413: ("body_too_large",),
        414: ("url_too_long",),
        431: ("headers_too_large",),
        500: ("internal_error",),
        501: ("unsupported_transfer_encoding",),
        503: ("too_many_connections", "too_many_bytes", "no_replica"),
    },
    "gate": {401: ("unauthorized",), 403: ("scope_missing", "host_not_allowed", "origin_not_allowed")},
    "json": {400: ("malformed_json", "invalid_parameter"), 415: ("unsupported_media_type",)},
    "rate": {429: ("rate_limited",)},
    "engine": {
        400: ("context_length_exceeded", "empty_prompt", "token_out_of_range", "steady_required"),
        429: ("too_many_sessions", "tokens_exhausted"),
        503: ("overloaded", "engine_failed", "shutting_down"),
        504: ("deadline_exceeded",),
    },
    "fault": {500: ("model_fault",)},
    "tokenizer": {409: ("tokenizer_mismatch",)},
    "prefix": {409: ("prefix_not_held",)},
    "session": {404: ("unknown_session",)},
    "openai": {400: ("unsupported_parameter", "answer_too_large"), 404: ("model_not_found",)},
    "template": {400: ("no_chat_template", "chat_template_refused")},
    "rules": {400: ("unsupported_rule",), 403: ("tolerance_not_allowed",)},
    "grammar": {
        400: ("invalid_grammar", "grammar_too_complex", "grammar_excluded"),
        429: ("too_many_grammars",),
    },
    "prompt": {400: ("context_length_exceeded", "empty_prompt"), 429: ("too_many_sessions",)},
    "model": {404: ("model_not_found",)},
    "pace": {400: ("unsupported_parameter",)},
    "cascade": {502: ("upstream_refused",), 503: ("upstream_lost",)},
    "evidence": {400: ("wrong_evidence",)},
    "drafts": {
        400: ("draft_ahead", "token_out_of_range", "steady_required"),
        409: ("second_long_request",),
        429: ("rate_limited",),
        503: ("draft_not_taken",),
    },
    "draft": {404: ("unknown_draft",), 410: ("draft_changed",)},
    "shared": {404: ("tokenizer_not_shared",)},
    "shared_file": {404: ("unknown_file",), 410: ("tokenizer_changed",)},
    "download": {
        416: ("range_not_satisfiable",),
        429: ("too_many_downloads",),
        503: ("too_many_downloads", "shutting_down"),
    },
}
"""Codes that belong together, by what may answer them."""

_OWN: Final = {
    ("post", "/v1/sessions"): "json rate engine rules grammar pace cascade tokenizer prefix model",
    ("post", "/v1/sessions/{session_id}/drafts"): "json session drafts evidence",
    ("delete", "/v1/sessions/{session_id}"): "session",
    ("post", "/v1/verify"): "json rate engine rules grammar cascade evidence fault tokenizer prefix model",
    ("post", "/v1/completions"): "json rate engine grammar cascade fault openai",
    ("post", "/v1/chat/completions"): "json rate engine grammar cascade fault openai template",
    ("post", "/v1/render"): "json rate tokenizer template prompt model",
    ("get", "/v1/models/{model}"): "model",
    ("get", "/v1/drafts/{name}/{path}"): "draft download",
    ("get", "/v1/tokenizer"): "shared",
    ("get", "/v1/tokenizer/{path}"): "shared shared_file download",
}
"""The groups of each endpoint, without those that every endpoint may answer."""


def own_codes(method: str, path: str) -> Codes:
    """The codes of an endpoint, without those that every endpoint may answer."""
    return _merged(_OWN.get((method, path), ""))


def shared_codes(*, needs_key: bool) -> Codes:
    """The codes that any endpoint may answer. needs_key: not a health probe or the OpenAPI document."""
    return _merged("any gate" if needs_key else "any")


def _merged(groups: str) -> Codes:
    parts = [_GROUPS[name] for name in groups.split()]
    statuses = sorted({status for part in parts for status in part})
    # Each code once, in the order of the parts.
    return {
        status: tuple(dict.fromkeys(code for part in parts for code in part.get(status, ()))) for status in statuses
    }


def install_openapi(app: FastAPI, *, needs_key: bool, open_paths: Collection[str]) -> None:
    """Makes `app.openapi()` return the whole document, and its route send it as it was first rendered: anybody may ask,
    and it takes 80 ms, later 3 ms. needs_key: calls must carry an API key, except to open_paths.
    """
    generate = app.openapi
    rendered: asyncio.Task[bytes] | None = None

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _complete(generate(), needs_key, open_paths)
        return app.openapi_schema

    async def answer(request: Request) -> Response:
        nonlocal rendered
        if rendered is None or (rendered.done() and rendered.exception()):
            rendered = asyncio.create_task(asyncio.to_thread(lambda: bytes(JSONResponse(document()).body)))
        return Response(await asyncio.shield(rendered), media_type="application/json")

    app.openapi = document  # type: ignore[method-assign]  # the way that FastAPI documents
    routes = app.router.routes
    index = next(i for i, route in enumerate(routes) if isinstance(route, Route) and route.path == app.openapi_url)
    routes[index] = Route(app.openapi_url or "", answer, include_in_schema=False)


def _complete(document: dict[str, Any], needs_key: bool, open_paths: Collection[str]) -> dict[str, Any]:
    answers = {model for models in _STREAMS.values() for model in models} | {protocol.ErrorAnswer}
    inputs = [(model, "validation") for model in _BODIES.values()]
    outputs = [(model, "serialization") for model in sorted(answers, key=lambda model: model.__name__)]
    _, definitions = models_json_schema([*inputs, *outputs], ref_template=_REF)  # type: ignore[list-item]
    components = document.setdefault("components", {})
    components["schemas"] = {**components.get("schemas", {}), **definitions["$defs"]}
    document["paths"][DRAFTS_PATH] = {"post": _drafts_operation()}
    for path, model in _BODIES.items():
        schema = {"$ref": _REF.format(model=model.__name__)}
        document["paths"][path]["post"]["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    tree = {"type": "string", "format": "binary", "maxLength": MAX_TREE_BYTES}
    tree["description"] = "a tree of drafts; docs/protocol.md has its bytes"
    document["paths"][DRAFTS_PATH]["post"]["requestBody"]["content"][TREE_MEDIA_TYPE] = {"schema": tree}
    for path, models in _STREAMS.items():
        refs = [{"$ref": _REF.format(model=model.__name__)} for model in models]
        content = document["paths"][path]["post"]["responses"]["200"].setdefault("content", {})
        content["text/event-stream"] = {"schema": _event_schema(refs, ends_with_done=path in _WITH_DONE)}
    for path, operations in document["paths"].items():
        shared = shared_codes(needs_key=path not in open_paths)
        for method, operation in operations.items():
            responses = operation["responses"]
            responses.pop("422", None)  # invalid requests are 400 here
            for status, codes in own_codes(method, path).items():
                responses.setdefault(str(status), _error(_listed(codes)))
            others = "; ".join(f"{status} {_listed(codes)}" for status, codes in shared.items())
            responses["default"] = _error(f"Any other error: {others}")
    if needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
        for path in document["paths"].keys() & set(open_paths):
            for operation in document["paths"][path].values():
                operation["security"] = []
    return document


def _error(words: str) -> dict[str, Any]:
    schema = {"$ref": _REF.format(model=protocol.ErrorAnswer.__name__)}
    return {"description": words, "content": {"application/json": {"schema": schema}}}


def _listed(codes: tuple[str, ...]) -> str:
    return ", ".join(f"`{code}`" for code in codes)


def _event_schema(refs: list[dict[str, Any]], *, ends_with_done: bool) -> dict[str, Any]:
    """One event, as OpenAPI 3.2 describes streams: `data` is text that holds JSON. OpenAI's end with a plain word."""
    data: dict[str, Any] = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"oneOf": refs},
    }
    if ends_with_done:
        data = {"anyOf": [{"const": "[DONE]"}, data]}
    return {"type": "object", "properties": {"data": data}, "description": "one event"}


def _drafts_operation() -> dict[str, Any]:
    name = {"name": "session_id", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "tags": ["sessions"],
        "summary": "Send Drafts",
        "description": f"{protocol.DraftRequest.__doc__}\n{_TREE_WORDS}",
        "operationId": "send_drafts",
        "parameters": [name],
        "responses": {"204": {"description": "Taken"}},
    }
