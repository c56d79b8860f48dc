"""Words what a connection is refused with before a route runs, and writes it as a whole HTTP answer."""

from __future__ import annotations

from functools import lru_cache
from http import HTTPStatus

from outrider.models.errors import RequestError
from outrider.models.http.bodies import too_many_bytes
from outrider.models.http.errors import error_bytes
from outrider.models.ingress.connections import ConnectionLimits

TOO_MANY = "too many connections"


# Answers, never raised: one that was would keep the traceback of its last use.
@lru_cache(maxsize=8)
def refusals(limits: ConnectionLimits) -> dict[str, RequestError]:
    """By cause, as the log names it; a connection that is closed for another gets no answer."""
    late = "did not arrive in time; send the request again"
    large = (
        f"the request line and headers are larger than {limits.max_header_bytes} bytes or more than "
        f"{limits.max_headers} lines; send fewer"
    )
    coding = "the request's Transfer-Encoding is not chunked alone; send the body as it is"
    plain = "this is not an HTTP/1.1 request; compare the URL's scheme and port"
    full = "the server has as many connections as it takes, in all or from this address; retry later"
    return {
        TOO_MANY: RequestError("too_many_connections", full, status=503),
        "malformed requests": RequestError("malformed_http", plain),
        "transfer codings": RequestError("unsupported_transfer_encoding", coding, status=501),
        "large headers": RequestError("headers_too_large", large, status=431),
        "slow headers": RequestError("request_timeout", f"the request line and headers {late}", status=408),
        "slow bodies": RequestError("request_timeout", f"the body {late}", status=408),
        "large bodies at once": too_many_bytes("unfinished"),
    }


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
