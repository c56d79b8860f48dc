"""Traces the requests that start work: a span per request below the device's, with an event per step.

`SequenceWatch` notes what one sequence does, also where nothing is traced: times for /metrics, an error for the log.

Attributes have OpenTelemetry's names (HTTP and GenAI). A span holds times, counts and outcomes: no text, no token, no
seed, no key. Nobody can make the server record everything: a caller's `sampled` flag counts only within a rate per
owner and in all; without the flag nothing is recorded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from starlette.types import Scope

from outrider.cloud.api.metrics import Metrics, route_of
from outrider.cloud.seam import CommitEvent, EndEvent, SequenceUsage
from outrider.models.errors import RequestError
from outrider.models.http.errors import ERROR_CODE
from outrider.models.http.limits import Buckets
from outrider.models.http.request_context import RequestContext, current_request
from outrider.models.http.security import ANYBODY, OWNER
from outrider.models.picks.sampling import SamplingParams
from outrider.models.process.tally import RequestTally
from outrider.models.process.tracing import (
    HEADER,
    RemoteContext,
    end_provider,
    make_provider,
    make_tracer,
    parse_traceparent,
)

TRACE: Final = "outrider.trace"
"""Key of the ASGI scope that holds the request's trace, where it is recorded."""
MAX_EVENTS: Final = 128
"""Steps of a span that are recorded one by one."""
_MAX_OWNERS: Final = 1024
_HEADER: Final = HEADER.encode()

_log = logging.getLogger("outrider.cloud")


@dataclass(frozen=True, slots=True)
class TraceLimits:
    """Spans per second that are recorded, of an owner and in all; `*_burst`: how many at once."""

    owner_per_s: float = 5.0
    owner_burst: float = 20.0
    per_s: float = 20.0
    burst: float = 100.0


class SpanBudget:
    """Token buckets of spans. Owners beyond the latest 1,024 are forgotten: the bucket for all bounds them."""

    def __init__(self, limits: TraceLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._all, self._owners = Buckets(clock), Buckets(clock, _MAX_OWNERS)

    def spend(self, owner: bytes) -> bool:
        """Takes a span from both buckets; False, and takes none, if one is empty."""
        limits = self._limits
        if self._all.spend(None, 1.0, limits.per_s, limits.burst, 1.0) < 1.0:
            return False
        if self._owners.spend(owner, 1.0, limits.owner_per_s, limits.owner_burst, 1.0) < 1.0:
            self._all.spend(None, -1.0, limits.per_s, limits.burst)
            return False
        return True


class Traces:
    """What records a server's spans: OpenTelemetry's provider, within a budget."""

    def __init__(self, provider: Any, limits: TraceLimits | None = None) -> None:
        self._tracer = make_tracer(provider)
        self.budget = SpanBudget(limits or TraceLimits())

    def begin(self, name: str, parent: RemoteContext | None) -> RequestTrace | None:
        """A request's span, which has begun; None where the sampler of the variables wants none."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        context = parent.as_context() if parent is not None else Context()
        span = self._tracer.start_span(name, context, kind=SpanKind.SERVER)
        return RequestTrace(span) if span.is_recording() else None


class RequestTrace:
    """The span of a request and what was learned for it. On the event loop."""

    def __init__(self, span: Any) -> None:
        self._span = span
        self._usage = SequenceUsage()
        self._reasons: list[str] = []
        self._num_events = self._num_steps = 0
        self._started_s = time.monotonic()
        self._first_s: float | None = None

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""
        return f"{self._span.get_span_context().trace_id:032x}"

    def asked(self, params: SamplingParams, max_tokens: int, model: str) -> None:
        """Notes what was asked for; without the seed, which is as good as the text to who has the prompt."""
        self.set(
            {
                "gen_ai.request.model": model,
                "gen_ai.response.model": model,
                "gen_ai.request.max_tokens": max_tokens,
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                "gen_ai.request.top_k": params.top_k,
            }
        )

    def committed(self, event: CommitEvent, index: int) -> None:
        """Adds an event for a step of the sequence `index`; MAX_EVENTS at most."""
        self._num_steps += 1
        if self._first_s is None:
            self._first_s = time.monotonic()
        if self._num_events < MAX_EVENTS:
            self._num_events += 1
            self._span.add_event(
                "step",
                {
                    "outrider.sequence": index,
                    "outrider.base": event.base,
                    "outrider.tokens": len(event.tokens),
                    "outrider.proposed": event.proposed,
                    "outrider.accepted": event.accepted,
                },
            )

    def ended(self, event: EndEvent) -> None:
        """Adds what a sequence of the request took."""
        self._usage.add(event.usage)
        self._reasons.append(event.reason)
        if event.error is not None:
            self.set({"error.type": event.error.code})  # not its words, which may quote the request

    def set(self, attributes: Mapping[str, Any]) -> None:
        """Sets attributes."""
        self._span.set_attributes(attributes)

    def end(self, status: int | None) -> None:
        """Ends the span. status: the answer's; None where the client left before it."""
        from opentelemetry.trace import Status, StatusCode

        usage = self._usage
        if self._reasons:
            self.set(
                {
                    "gen_ai.usage.input_tokens": usage.prompt_tokens,
                    "gen_ai.usage.output_tokens": usage.completion_tokens,
                    "gen_ai.usage.cache_read.input_tokens": usage.cached_prompt_tokens,
                    "gen_ai.response.finish_reasons": self._reasons[:MAX_EVENTS],
                    "outrider.target_passes": usage.target_passes,
                    "outrider.accepted_tokens": usage.accepted_tokens,
                    "outrider.rejected_tokens": usage.rejected_tokens,
                    "outrider.waited_s": usage.waited_s,
                }
            )
        if self._num_steps:
            assert self._first_s is not None
            self.set(
                {
                    "outrider.steps": self._num_steps,
                    "gen_ai.response.time_to_first_chunk": self._first_s - self._started_s,
                }
            )
        if status is None or (self._num_steps and not self._reasons):
            self.set({"outrider.cancelled": True})
        if status is not None:
            self.set({"http.response.status_code": status})
            if status >= 500 or "error" in self._reasons:
                self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()


def trace_of(scope: Scope) -> RequestTrace | None:
    """The request's trace; None where none is recorded."""
    found: RequestTrace | None = scope.get(TRACE)
    return found


class SequenceWatch:
    """One sequence of the request with this scope. index: which of the request's. On the event loop.

    A commit is noted once per sequence and step, so what is off costs one comparison.
    """

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


class TracedRequests:
    """Begins the span of a request that the gate has let in, and ends it with the request.

    operations: GenAI's name of what each path does.
    """

    def __init__(self, traces: Traces | None, metrics: Metrics, model: str, operations: Mapping[str, str]) -> None:
        self._traces = traces
        self._model = model
        self._operations = operations
        self._counts = metrics.add_counter(
            "trace_spans",
            "Requests whose spans were recorded, and those left out because of the rate.",
            "outcome",
            ("recorded", "over_rate"),
        )

    def begin(self, scope: Scope) -> None:
        """Puts the request's trace into its scope, where one is recorded."""
        parent = _parent(scope)
        request = current_request()
        if parent is not None and request is not None:
            request.trace_id = f"{parent.trace_id:032x}"
        operation = self._operations.get(scope["path"])
        if self._traces is None or operation is None or scope["method"] != "POST":
            return
        if parent is not None and not parent.is_sampled:
            return
        if not self._traces.budget.spend(scope.get(OWNER, ANYBODY)):
            self._counts["over_rate"] += 1
            return
        trace = self._traces.begin(f"{operation} {self._model}", parent)
        if trace is None:
            return
        self._counts["recorded"] += 1
        scope[TRACE] = trace
        trace.set(
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "outrider",
                "gen_ai.request.model": self._model,
                "gen_ai.response.model": self._model,
            }
        )
        if request is not None:
            request.trace_id = trace.trace_id
            trace.set({"outrider.request_id": request.request_id})

    def end(self, scope: Scope, status: int | None) -> None:
        """Ends the span. status: the answer's; None where the client left before it."""
        trace = trace_of(scope)
        if trace is not None:
            trace.set({"http.request.method": scope["method"], "http.route": route_of(scope)})
            if (code := scope.get(ERROR_CODE)) is not None:
                trace.set({"error.type": code})
            trace.end(status)


def _parent(scope: Scope) -> RemoteContext | None:
    """The caller's context; None where the header is missing, wrong, or there twice."""
    found = [value for name, value in scope["headers"] if name == _HEADER]
    return parse_traceparent(found[0]) if len(found) == 1 else None


@contextmanager
def traces_from_environment(note: Callable[[str], None]) -> Iterator[Traces | None]:
    """What records spans where the OTEL_ variables ask for it; sends what is left at the end. Raises ConfigError."""
    provider = make_provider(note, "outrider-cloud")
    if provider is None:
        yield None
        return
    try:
        yield Traces(provider)
    finally:
        end_provider(provider)
