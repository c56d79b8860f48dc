"""Gives FastAPI's own errors the JSON shape of all errors."""

from __future__ import annotations

from typing import Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from outrider.models.errors import RequestError
from outrider.models.http.errors import MAX_PARAM_CHARS, error_response, from_validation, method_not_allowed

_HTTP_CODES: Final = {404: "not_found", 413: "body_too_large"}


def install_handlers(app: FastAPI) -> None:
    """Gives every error of the routes, and of the router itself, the one JSON shape."""

    async def on_request_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return error_response(error)

    async def on_validation(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(from_validation(error.errors()))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            return error_response(method_not_allowed(request.method), error.headers)
        code, message = _HTTP_CODES.get(error.status_code, "invalid_request"), str(error.detail)
        if error.status_code == 404:
            message = f"there is no {request.url.path[:MAX_PARAM_CHARS]}; /openapi.json lists all paths"
        return error_response(RequestError(code, message, status=error.status_code), error.headers)

    app.add_exception_handler(RequestError, on_request_error)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
