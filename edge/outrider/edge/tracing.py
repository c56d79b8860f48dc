"""Traces with OpenTelemetry where the standard OTEL_ variables ask for it; otherwise nothing is loaded or sent.

A trace has times, counts and outcomes: no prompt, no text, no token, no key. The context goes upstream as the header
`traceparent` (W3C Trace Context) when a session opens or a conversation is rendered, and not with drafts. `tracestate`
and baggage go nowhere: a client could put anything into them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, Final
from urllib.parse import urlsplit

from outrider.models.errors import ConfigError
from outrider.models.extras import is_installed

Value = str | int | float | bool
HEADER: Final = "traceparent"
_SDK: Final = "opentelemetry.sdk.trace"
_OTLP: Final = "opentelemetry.exporter.otlp.proto.http"
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")

_tracer: Any = None


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


def is_on() -> bool:
    """Whether spans are recorded."""
    return _tracer is not None


def is_asked_for(environment: Mapping[str, str] | None = None) -> bool:
    """Whether the OTEL_ variables ask for traces: they name an exporter or an endpoint."""
    found = _Variables(environment)
    if found["OTEL_SDK_DISABLED"].lower() == "true":
        return False
    if exporter := found["OTEL_TRACES_EXPORTER"].lower():
        return exporter != "none"
    return any(found[name] for name in _ENDPOINTS)


def start_tracing(note: Callable[[str], None], environment: Mapping[str, str] | None = None) -> Callable[[], None]:
    """Begins to trace if the variables ask for it; returns what ends it, and sends what is left.

    note: gets a sentence where packages are missing: a variable for all programs of a machine stops none of them.
    Raises ConfigError for an exporter or a protocol that is not offered.
    """
    found = _Variables(environment)
    if not is_asked_for(environment):
        return _nothing
    kind = found["OTEL_TRACES_EXPORTER"].lower() or "otlp"
    if kind not in ("otlp", "console"):
        raise ConfigError(f"OTEL_TRACES_EXPORTER is {kind[:40]!r}; expected otlp, console or none")
    protocol = next((found[name] for name in _PROTOCOLS if found[name]), "http/protobuf")
    if kind == "otlp" and protocol != "http/protobuf":
        raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol[:40]!r}; expected http/protobuf")
    if missing := [name for name in (_SDK, *([_OTLP] if kind == "otlp" else [])) if not is_installed(name)]:
        note(f'OTEL_ variables ask for traces, which need {missing[0]}; run: pip install "outrider[telemetry]"')
        return _nothing
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

    names = {} if found["OTEL_SERVICE_NAME"] else {SERVICE_NAME: "outrider"}
    provider = TracerProvider(resource=Resource.create(names), shutdown_on_exit=False)
    if kind == "otlp":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    else:
        import sys

        provider.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter(out=sys.stderr)))
    use(provider)

    def end() -> None:
        use(None)
        provider.shutdown()

    return end


def use(provider: Any) -> None:
    """Traces with an OpenTelemetry TracerProvider from now on; None: not at all."""
    global _tracer
    _tracer = provider.get_tracer("outrider", version("outrider")) if provider is not None else None


@contextmanager
def span(name: str, incoming: str | None = None) -> Iterator[Span]:
    """Records what is done inside, as a part of the current span, or of the one that `incoming`, a traceparent, names.

    incoming: given for a request that this process serves.
    """
    if _tracer is None:
        yield Span()
        return
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    kind, context = SpanKind.INTERNAL, None
    if incoming is not None:
        kind, context = SpanKind.SERVER, TraceContextTextMapPropagator().extract({HEADER: incoming})
    with _tracer.start_as_current_span(
        name, context, kind=kind, record_exception=False, set_status_on_exception=False
    ) as recorded:
        traced = Span(recorded)
        with _outcome(traced):
            yield traced


@contextmanager
def call(name: str, url: str) -> Iterator[Span]:
    """Records a call of the server at `url`. Not the current span meanwhile, so a generator may yield inside."""
    if _tracer is None:
        yield Span()
        return
    from opentelemetry.trace import SpanKind

    recorded = _tracer.start_span(name, kind=SpanKind.CLIENT)
    traced = Span(recorded)
    parts = urlsplit(url)
    traced.set(server__address=parts.hostname, server__port=parts.port)
    try:
        with _outcome(traced):
            yield traced
    finally:
        recorded.end()


@contextmanager
def _outcome(traced: Span) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        traced.fail(type(error).__name__)
        raise
    except BaseException:  # cancelled, or a generator that is closed
        traced.set(outrider__cancelled=True)
        raise


def _nothing() -> None:
    pass


class _Variables:
    def __init__(self, environment: Mapping[str, str] | None) -> None:
        self._found = os.environ if environment is None else environment

    def __getitem__(self, name: str) -> str:
        return self._found.get(name, "").strip()
