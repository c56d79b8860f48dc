"""Sends OpenTelemetry traces where the standard OTEL_ variables ask for them; otherwise nothing is loaded or sent.

A trace has times, counts and outcomes: no prompt, no text, no token, no key. Contexts travel as the header
`traceparent` (W3C Trace Context). `tracestate` and baggage are neither read nor sent: a client could put anything into
them.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from outrider.models.errors import ConfigError
from outrider.models.process.extras import is_installed
from outrider.models.version import outrider_version

Value = str | int | float | bool
HEADER: Final = "traceparent"
MAX_END_S: Final = 3.0
"""How long the end waits for a collector that takes no spans."""
_SDK: Final = "opentelemetry.sdk.trace"
_OTLP: Final = "opentelemetry.exporter.otlp.proto.http"
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_CONTEXT: Final = re.compile(rb"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


class Span:
    """A span that is being recorded; headers: what carries its context to a server."""

    def __init__(self, span: Any = None) -> None:
        self._span = span

    @property
    def headers(self) -> list[tuple[str, str]]:
        """The context for a request upstream; empty where nothing is traced."""
        if self._span is None or not (context := self._span.get_span_context()).is_valid:
            return []
        return [(HEADER, f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}")]

    def set(self, **attributes: Value | None) -> None:
        """Sets attributes, "__" standing for "."; those that are None are left out."""
        if self._span is not None:
            for name, value in attributes.items():
                if value is not None:
                    self._span.set_attribute(name.replace("__", "."), value)

    def fail(self, error_type: str) -> None:
        """Marks the span as failed. Only the kind of an error: its words may quote a request."""
        if self._span is not None:
            from opentelemetry.trace import Status, StatusCode

            self.set(error__type=error_type)
            self._span.set_status(Status(StatusCode.ERROR))


@dataclass(frozen=True, slots=True)
class RemoteContext:
    """The caller's span, as its `traceparent` names it."""

    trace_id: int
    span_id: int
    is_sampled: bool

    def as_context(self) -> Any:
        """The same for OpenTelemetry: what a span below it starts with."""
        from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

        flags = TraceFlags(TraceFlags.SAMPLED if self.is_sampled else TraceFlags.DEFAULT)
        return set_span_in_context(NonRecordingSpan(SpanContext(self.trace_id, self.span_id, True, flags)))


def parse_traceparent(value: bytes) -> RemoteContext | None:
    """The context of a `traceparent` of version 00; None for anything else, whatever its size."""
    found = _CONTEXT.fullmatch(value)
    if found is None:
        return None
    trace_id, span_id, flags = (int(part, 16) for part in found.groups())
    return RemoteContext(trace_id, span_id, bool(flags & 1)) if trace_id and span_id else None


def _variables(environment: Mapping[str, str] | None) -> Mapping[str, str]:
    """The environment's, without spaces around them; empty where there is none."""
    found = os.environ if environment is None else environment
    return defaultdict(str, {name: value.strip() for name, value in found.items() if name.startswith("OTEL_")})


def is_asked_for(environment: Mapping[str, str] | None = None) -> bool:
    """Whether the OTEL_ variables ask for traces: they name an exporter or an endpoint."""
    found = _variables(environment)
    if found["OTEL_SDK_DISABLED"].lower() == "true":
        return False
    if exporter := found["OTEL_TRACES_EXPORTER"].lower():
        return exporter != "none"
    return any(found[name] for name in _ENDPOINTS)


def make_provider(
    note: Callable[[str], None], service: str, environment: Mapping[str, str] | None = None
) -> Any | None:
    """A TracerProvider that exports from a thread of its own; None where the variables do not ask for traces.

    note: gets a sentence where packages are missing: a variable for all programs of a machine stops none of them.
    service: the service's name unless OTEL_SERVICE_NAME has one. A collector that is down costs spans, no time: at most
    2,048 wait. Raises ConfigError for an exporter or a protocol that is not offered.
    """
    found = _variables(environment)
    if not is_asked_for(environment):
        return None
    kind = found["OTEL_TRACES_EXPORTER"].lower() or "otlp"
    if kind not in ("otlp", "console"):
        raise ConfigError(f"OTEL_TRACES_EXPORTER is {kind[:40]!r}; expected otlp, console or none")
    protocol = next((found[name] for name in _PROTOCOLS if found[name]), "http/protobuf")
    if kind == "otlp" and protocol != "http/protobuf":
        raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol[:40]!r}; expected http/protobuf")
    if missing := [name for name in (_SDK, *([_OTLP] if kind == "otlp" else [])) if not is_installed(name)]:
        note(f'OTEL_ variables ask for traces, which need {missing[0]}; run: pip install "outrider[telemetry]"')
        return None
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

    logging.getLogger("opentelemetry.sdk").setLevel(logging.ERROR)  # it warns for each span that a full queue drops
    names = {} if found["OTEL_SERVICE_NAME"] else {SERVICE_NAME: service}
    provider = TracerProvider(resource=Resource.create(names), shutdown_on_exit=False)
    if kind == "otlp":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    else:
        import sys

        provider.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter(out=sys.stderr)))
    return provider


def make_tracer(provider: Any) -> Any:
    """Outrider's tracer of a provider."""
    return provider.get_tracer("outrider", outrider_version())


def end_provider(provider: Any) -> None:
    """Sends what is left, for at most MAX_END_S."""
    # On a thread: a collector that accepts and never answers holds the SDK's own end for half a minute.
    thread = threading.Thread(target=provider.shutdown, name="outrider-traces", daemon=True)
    thread.start()
    thread.join(MAX_END_S)
