"""Names requests, and knows which request, trace and session the running code works for.

The id goes out as `X-Request-Id`, in errors and in log lines. A client's own is taken over if it is short and has only
letters, digits and `._-`: it stands in log lines.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from starlette.types import Scope

HEADER: Final = b"x-request-id"
MAX_CHARS: Final = 64
_CLEAN: Final = re.compile(rb"[A-Za-z0-9._-]{1,%d}" % MAX_CHARS)
_ID_BYTES: Final = 8


@dataclass(slots=True)
class RequestContext:
    """What log lines name. session: a hash of the session's id, which is a secret. trace_id: 32 hexadecimal digits."""

    request_id: str
    trace_id: str | None = None
    session: str | None = None


_current: ContextVar[RequestContext | None] = ContextVar("outrider_request", default=None)


def current_request() -> RequestContext | None:
    """The request that the running code works for; None outside of one."""
    return _current.get()


def enter_request(scope: Scope) -> RequestContext:
    """Makes a new request the current one of this task, with the id that its client sent, if it is clean."""
    own = next((value for name, value in scope["headers"] if name == HEADER), b"")
    found = RequestContext(own.decode("ascii") if _CLEAN.fullmatch(own) else secrets.token_hex(_ID_BYTES))
    _current.set(found)
    return found


def leave_request() -> None:
    """The current request is over."""
    _current.set(None)


def session_tag(session_id: str) -> str:
    """What stands for a session in log lines: whoever reads them must not be able to post drafts to it."""
    return hashlib.sha256(session_id.encode()).hexdigest()[:12]
