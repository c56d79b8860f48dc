"""Words what a connection is refused with before a route runs, and writes it as a whole HTTP answer."""

from __future__ import annotations

from http import HTTPStatus

from outrider.models.errors import RequestError
from outrider.models.http.errors import error_bytes
from outrider.models.ingress.connections import ConnectionLimits


def answer_of(refusal: RequestError) -> bytes:
    """A whole HTTP answer."""
    body = error_bytes(refusal)
    phrase = HTTPStatus(refusal.status).phrase
    retry = "retry-after: 1\r\n" if refusal.status == 503 else ""
    head = (
        f"HTTP/1.1 {refusal.status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        f"{retry}connection: close\r\n\r\n"
    )
    return head.encode() + body


def too_many_connections() -> bytes:
    """The answer to a connection that is not admitted."""
    return answer_of(
        RequestError(
            "too_many_connections",
            "the server has as many connections as it takes, in all or from this address; retry later",
            status=503,
        )
    )


def malformed() -> RequestError:
    """The error 400 of bytes that are no request."""
    return RequestError("malformed_http", "this is not an HTTP/1.1 request; compare the URL's scheme and port")


def unknown_coding() -> RequestError:
    """The error 501 of a body in another coding."""
    return RequestError(
        "unsupported_transfer_encoding",
        "the request's Transfer-Encoding is not chunked alone; send the body as it is",
        status=501,
    )


def too_slow(what: str) -> RequestError:
    """The error 408 of a part that did not arrive in time."""
    return RequestError("request_timeout", f"the {what} did not arrive in time; send the request again", status=408)


def headers_too_large(limits: ConnectionLimits) -> RequestError:
    """The error 431 of headers beyond the bounds."""
    return RequestError(
        "headers_too_large",
        f"the request line and headers are larger than {limits.max_header_bytes} bytes or more than "
        f"{limits.max_headers} lines; send fewer",
        status=431,
    )
