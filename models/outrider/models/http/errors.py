"""Turns errors into answers: one JSON shape, a stable code, the status that a client library expects.

Internal faults are logged by type and place. They are never sent, and never logged with a request's text or tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from outrider.models.errors import RequestError
from outrider.models.faults import log_fault
from outrider.models.http.request_context import current_request
from outrider.models.wire.protocol import ErrorAnswer, ErrorBody

_CODES: Final = {404: "not_found", 413: "body_too_large"}
_OTHERS: Final = {"/v1/responses": "/v1/chat/completions"}
"""Endpoints of OpenAI's that are refused by name, each with the one to use."""
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
ERROR_CODE: Final = "outrider.error"
"""Key of the ASGI scope that holds the code of the error that was answered."""
MAX_PARAM_CHARS: Final = 100
"""Longest piece of a request that an error quotes: a field's name, a path."""


class FieldError(RequestError):
    """A RequestError about one field, named by `param`."""

    def __init__(self, code: str, message: str, *, param: str, status: int = 400) -> None:
        super().__init__(code, message, status=status, param=param)


class Throttled(RequestError):
    """A RequestError 429 for a client over its rate. retry_after_s: when its next call would be accepted."""

    def __init__(self, code: str, message: str, *, retry_after_s: int) -> None:
        super().__init__(code, message, status=429, retry_after_s=retry_after_s)


def error_body(error: RequestError) -> ErrorBody:
    """The wire form of an error."""
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    message = str(error)
    if error.status == 500 and error.code != "internal_error":
        # A runtime's message may hold paths and addresses: the engine has logged it.
        message = "the model failed on this request; the server's log has the details"
    return ErrorBody(code=error.code, message=message, type=kind, param=error.param)


def internal_error() -> RequestError:
    """The error that a client gets for a fault of ours: no details."""
    return RequestError("internal_error", "the server failed on this request; its log has the details", status=500)


def method_not_allowed(method: str) -> RequestError:
    """Raised for a route that has other methods; the answer's Allow header lists them."""
    return RequestError("method_not_allowed", f"{method} is not allowed here; see the Allow header", status=405)


def as_answer(error: Exception) -> RequestError:
    """What the client gets for an exception: a RequestError as it is, any other logged and without its details."""
    if isinstance(error, RequestError):
        return error
    log_fault(error)
    return internal_error()


def from_validation(faults: Sequence[Any], *, prefix: str = "") -> RequestError:
    """The first of a message's faults (mappings, as pydantic writes them), with the field's name.

    The input itself is never quoted.
    """
    first = faults[0]
    where = [str(part) for part in first["loc"]]
    if where and where[0] == "body":
        where = where[1:]
    param = ".".join(([prefix] if prefix else []) + where)[:MAX_PARAM_CHARS] or "body"
    message = "expected an object" if first["type"] == "model_type" else first["msg"]
    return FieldError("invalid_parameter", f"{param}: {message}", param=param)


def error_bytes(error: RequestError) -> bytes:
    """An error's body."""
    answer = error_answer(error)
    return answer.model_dump_json(exclude={"request_id"} if answer.request_id is None else None).encode()


def error_answer(error: RequestError) -> ErrorAnswer:
    """The wire form of an error with the id of the request that is served."""
    request = current_request()
    return ErrorAnswer(error=error_body(error), request_id=request.request_id if request else None)


def error_response(scope: Scope, error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    """The response for an error of the request with this scope; 429 and 503 carry Retry-After.

    Notes the error's code in the scope, for those who count and write it.
    """
    scope[ERROR_CODE] = error.code
    sent = dict(headers or {})
    if error.status in (429, 503):
        sent.setdefault("retry-after", str(error.retry_after_s or 1))
    if error.status == 413:
        sent.setdefault("connection", "close")  # otherwise the rest of the body would have to be read
    if error.status == 401:
        sent.setdefault("www-authenticate", "Bearer")
    return Response(error_bytes(error), error.status, sent, "application/json")


def install_error_handlers(app: Starlette, where_paths_are: str) -> None:
    """Gives errors of the routes, and of the router itself, the one JSON shape.

    where_paths_are: what an answer 404 says, such as "/openapi.json lists all paths".
    """

    async def on_request_error(request: Request, error: Exception) -> Response:
        # Here: on its way through the framework's layers an error would become a part of circles.
        assert isinstance(error, RequestError)
        return error_response(request.scope, error)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path, status = request.url.path, error.status_code
        if status == 405:
            refusal = method_not_allowed(request.method)
        elif status == 404 and (use := _OTHERS.get(path)):
            refusal = RequestError("unsupported_endpoint", f"{path} is not supported; use {use}", status=404)
        else:
            message = f"there is no {path[:MAX_PARAM_CHARS]}; {where_paths_are}" if status == 404 else error.detail
            refusal = RequestError(_CODES.get(status, "invalid_request"), message, status=status)
        return error_response(request.scope, refusal, error.headers)

    app.add_exception_handler(RequestError, on_request_error)
    app.add_exception_handler(HTTPException, on_http)
