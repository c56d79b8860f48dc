"""Notes the commits and the end of a sequence: times for /metrics, steps for the trace, an error for the log.

A commit is noted once per sequence and step, so what is off costs one comparison.
"""

from __future__ import annotations

import logging

from starlette.types import Scope

from outrider.cloud.api.traces import trace_of
from outrider.cloud.seam import CommitEvent, EndEvent
from outrider.models.errors import RequestError
from outrider.models.http.request_context import RequestContext, current_request
from outrider.models.process.tally import RequestTally

_log = logging.getLogger("outrider.cloud")


class SequenceWatch:
    """One sequence of the request with this scope. index: which of the request's. On the event loop."""

    __slots__ = ("_ids", "_index", "_tally", "_timer", "_trace")

    def __init__(self, tally: RequestTally, scope: Scope, arrived_s: float, index: int = 0) -> None:
        self._tally = tally
        self._timer = tally.commit_timer(arrived_s)
        self._trace = trace_of(scope)
        self._index = index
        self._ids = current_request()  # events arrive outside of the request's task

    def committed(self, event: CommitEvent) -> None:
        """Notes a commit."""
        self._timer.committed(len(event.tokens))
        if self._trace is not None:
            self._trace.committed(event, self._index)

    def ended(self, event: EndEvent) -> None:
        """Notes the end."""
        self._timer.ended()
        if self._trace is not None:
            self._trace.ended(event)
        if event.reason == "error":
            self._tally.failed(event.error.code if event.error is not None else "internal_error")
            log_failure(event.error, self._ids)


def log_failure(error: RequestError | None, ids: RequestContext | None) -> None:
    """Logs a sequence that failed by a fault of ours: the engine has logged why, without knowing the request."""
    if error is not None and error.status != 500:
        return
    code = error.code if error is not None else "internal_error"
    _log.error(
        "a sequence failed: %s",
        code,
        extra={
            "event": "sequence_failed",
            "code": code,
            "request_id": getattr(ids, "request_id", None),
            "trace_id": getattr(ids, "trace_id", None),
            "session": getattr(ids, "session", None),
        },
    )
