"""Gives FastAPI's own errors the JSON shape of all errors."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import Response

from outrider.models.http.errors import error_response, from_validation
from outrider.models.http.handlers import install_error_handlers


def install_handlers(app: FastAPI) -> None:
    """Gives every error of the routes, and of the router itself, the one JSON shape."""

    async def on_validation(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(from_validation(error.errors()))

    install_error_handlers(app, "/openapi.json lists all paths")
    app.add_exception_handler(RequestValidationError, on_validation)
