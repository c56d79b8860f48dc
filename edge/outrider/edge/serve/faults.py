"""Turns what a generation raises into the errors that clients of the local endpoint get."""

from __future__ import annotations

import logging
from typing import Final

from outrider.models.errors import CloudError, OutriderError, RequestError, TokenizerMismatch
from outrider.models.http.errors import internal_error
from outrider.models.visible import visible

_log = logging.getLogger("outrider.serve")

NO_VERIFIER: Final = "no_verifier"
_OWN_KEY: Final = frozenset({401, 403})
"""What a verifier answers because of the device's own key or address: the client cannot put it right."""


def as_request_error(error: Exception, *, shows_details: bool) -> RequestError:
    """What the client gets. shows_details: whether it may learn the verifiers' addresses; the log has them always."""
    if isinstance(error, RequestError) and error.status not in _OWN_KEY:
        return error
    if not isinstance(error, OutriderError):
        return internal_error()
    if isinstance(error, TokenizerMismatch):
        code, status, words = "tokenizer_mismatch", 502, "the draft was made for another target"
    elif isinstance(error, RequestError):
        code, status, words = "verifier_refused", 502, "the verifier refuses this device"
    elif isinstance(error, CloudError):
        code, status, words = NO_VERIFIER, 503, "no verifier can answer now"
    else:
        code, status, words = "device_failed", 500, "the device failed on this request"
    _log.warning("%s: %s", code, visible(str(error)))
    return RequestError(
        code, str(error) if shows_details else f"{words}; the log of this server says why", status=status
    )


def shutting_down() -> RequestError:
    """The error 503 while the server ends."""
    return RequestError("shutting_down", "the server is shutting down; retry in a moment", status=503)
