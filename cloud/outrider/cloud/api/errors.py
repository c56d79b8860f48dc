"""Every error's way to the client: one JSON shape, a stable code, the status that a client library expects.

What went wrong inside is logged by type and place, never sent, and never with the text or the tokens of a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.cloud.engine.faults import log_fault
from outrider.models.errors import RequestError
from outrider.models.protocol import ErrorAnswer, ErrorBody

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}
_MAX_PARAM_CHARS = 100


class FieldError(RequestError):
    """A RequestError about one field, named by `param`."""

    def __init__(self, code: str, message: str, *, param: str, status: int = 400) -> None:
        super().__init__(code, message, status=status)
        self.param = param


class Throttled(RequestError):
    """A RequestError 429 for one who calls too often, with the seconds after which a call would be let in."""

    def __init__(self, code: str, message: str, *, retry_after_s: int) -> None:
        super().__init__(code, message, status=429)
        self.retry_after_s = retry_after_s


def error_body(error: RequestError) -> ErrorBody:
    """The wire form of an error."""
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    param = error.param if isinstance(error, FieldError) else None
    message = str(error)
    if error.status == 500 and error.code != "internal_error":
        # A runtime's own words may hold paths and addresses: the engine has logged them.
        message = "the model failed on this request; the server's log has the details"
    return ErrorBody(code=error.code, message=message, type=kind, param=param)


def internal_error() -> RequestError:
    """What a client learns of a fault of ours: nothing but that."""
    return RequestError("internal_error", "the server failed on this request; its log has the details", status=500)


def from_validation(found: ValidationError | RequestValidationError, *, prefix: str = "") -> RequestError:
    """The first thing that is wrong with a message, with the field named; the input itself is never quoted."""
    errors: Sequence[Any] = found.errors()
    first = errors[0]
    if first["type"] == "json_invalid":
        return RequestError("malformed_json", f"the body is not JSON: {_reason(first)}")
    where = [str(part) for part in first["loc"]]
    if where and where[0] == "body":
        where = where[1:]
    param = ".".join(([prefix] if prefix else []) + where)[:_MAX_PARAM_CHARS] or "body"
    return FieldError("invalid_parameter", f"{param}: {_reason(first)}", param=param)


def _reason(first: Any) -> str:
    context = first.get("ctx") or {}
    if first["type"] == "json_invalid":
        return str(context.get("error", "invalid"))
    return str(first["msg"])


def error_response(error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    """The response that carries an error; 429 and 503 tell when to come again."""
    body = ErrorAnswer(error=error_body(error)).model_dump_json().encode()
    sent = dict(headers or {})
    if error.status in (429, 503):
        sent.setdefault("retry-after", str(error.retry_after_s if isinstance(error, Throttled) else 1))
    if error.status == 413:
        sent.setdefault("connection", "close")  # or the rest of the body would have to be read
    if error.status == 401:
        sent.setdefault("www-authenticate", "Bearer")
    return Response(body, error.status, sent, "application/json")


def install_handlers(app: FastAPI) -> None:
    """Makes every refusal of the routes, and of the router itself, take the one shape."""

    async def on_request_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return error_response(error)

    async def on_validation(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(from_validation(error))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = _HTTP_CODES.get(error.status_code, "invalid_request")
        message = {
            404: f"there is no {request.url.path[:_MAX_PARAM_CHARS]}; /openapi.json lists what there is",
            405: f"{request.method} is not allowed here; see the Allow header",
        }.get(error.status_code, str(error.detail))
        return error_response(RequestError(code, message, status=error.status_code), error.headers)

    app.add_exception_handler(RequestError, on_request_error)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)


class ErrorBoundary:
    """ASGI layer around all that may fail: whatever escapes becomes a bare 500, or ends a response that has begun."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started = False

        async def note_start(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, note_start)
        except asyncio.CancelledError:
            pass  # the server is closing and has waited long enough; uvicorn would log a trace of it
        except ClientDisconnect:
            pass  # gone while its body was read: nobody is left to answer
        except Exception as error:
            if isinstance(error, RequestError):
                answer = error
            else:
                log_fault(error)
                answer = internal_error()
            # With a response begun, returning is enough: the server closes the connection, so the client sees a cut.
            if not started:
                await error_response(answer)(scope, receive, send)
