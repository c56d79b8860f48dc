"""Writes log lines, as text or as JSON objects, one per line. They never hold a prompt, a token or a session's id.

A line of JSON has `time`, `level`, `event`, `logger` and `message`; while a request is served also `request_id`, and
`trace_id` and `session` where there is one; and what the line was logged with in `extra`, as far as FIELDS lists it.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from enum import StrEnum
from typing import Any, Final

from outrider.models.http.request_context import current_request

FIELDS: Final = ("request_id", "trace_id", "session", "code")
"""What `extra` may add to a line. Nothing else of a record is written."""


class LogFormat(StrEnum):
    """How a log line looks."""

    TEXT = "text"
    JSON = "json"


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": getattr(record, "event", "log"),
            "logger": record.name,
            "message": record.getMessage(),
            **_found(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class _TextFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        words = " ".join(f"{name}={value}" for name, value in _found(record).items())
        return super().formatMessage(record) + (f" [{words}]" if words else "")


def _found(record: logging.LogRecord) -> dict[str, Any]:
    """The line's fields, its own before those of the request that is served."""
    request = current_request()
    found = {}
    for name in FIELDS:
        value = getattr(record, name, None)
        if value is None:
            value = getattr(request, name, None)
        if value is not None:
            found[name] = value
    return found


FORMATTERS: Final = {
    LogFormat.TEXT: _TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"),
    LogFormat.JSON: _JsonFormatter(),
}


def configure_logging(format_: LogFormat) -> None:
    """Sends everything from INFO up to standard error; uvicorn's and httpx's own from WARNING up.

    httpx would log every message of drafts, with its session's id.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FORMATTERS[format_])
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for name in ("uvicorn", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)
