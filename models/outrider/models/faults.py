"""Logs unexpected faults without anything of a request."""

from __future__ import annotations

import logging
import traceback

from outrider.models.errors import OutriderError

_log = logging.getLogger("outrider")


def log_fault(error: BaseException) -> None:
    """Logs type and place; the message only of our own errors, since others may quote a prompt."""
    said = f": {error}" if isinstance(error, OutriderError) else ""
    trace = "".join(traceback.format_tb(error.__traceback__))
    _log.error("%s%s\n%s", type(error).__name__, said, trace, extra={"event": "fault"})
