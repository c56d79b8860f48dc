"""Gives errors of the routes, and of the router itself, the one JSON shape."""

from __future__ import annotations

from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from outrider.models.errors import RequestError
from outrider.models.http.errors import MAX_PARAM_CHARS, error_response, method_not_allowed

_CODES: Final = {404: "not_found", 413: "body_too_large"}
_OTHERS: Final = {"/v1/responses": "/v1/chat/completions"}
"""Endpoints of OpenAI's that are refused by name, each with the one to use."""


def install_error_handlers(app: Starlette, where_paths_are: str) -> None:
    """where_paths_are: what an answer 404 says, such as "/openapi.json lists all paths"."""

    async def on_request_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return error_response(error)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            return error_response(method_not_allowed(request.method), error.headers)
        code, message = _CODES.get(error.status_code, "invalid_request"), str(error.detail)
        if error.status_code == 404:
            path = request.url.path
            if (use := _OTHERS.get(path)) is not None:
                refusal = RequestError("unsupported_endpoint", f"{path} is not supported; use {use}", status=404)
                return error_response(refusal, error.headers)
            message = f"there is no {path[:MAX_PARAM_CHARS]}; {where_paths_are}"
        return error_response(RequestError(code, message, status=error.status_code), error.headers)

    app.add_exception_handler(RequestError, on_request_error)
    app.add_exception_handler(HTTPException, on_http)
