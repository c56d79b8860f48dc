"""Traces the device's texts and calls where the standard OTEL_ variables ask for it; see `models.process.tracing`.

The context goes upstream as the header `traceparent` when a session opens or a conversation is rendered, and not with
drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from outrider.models.process.tracing import (
    HEADER,
    Span,
    end_provider,
    is_asked_for,
    make_provider,
    make_tracer,
    parse_traceparent,
)

__all__ = ["HEADER", "Span", "call", "is_asked_for", "is_on", "span", "start_tracing", "use"]

_tracer: Any = None


def is_on() -> bool:
    """Whether spans are recorded."""
    return _tracer is not None


def start_tracing(note: Callable[[str], None], environment: Mapping[str, str] | None = None) -> Callable[[], None]:
    """Begins to trace if the variables ask for it; returns what ends it, and sends what is left.

    note, and what is raised: as for `make_provider`.
    """
    provider = make_provider(note, "outrider", environment)
    if provider is None:
        return lambda: None
    use(provider)

    def end() -> None:
        use(None)
        end_provider(provider)

    return end


def use(provider: Any) -> None:
    """Traces with an OpenTelemetry TracerProvider from now on; None: not at all."""
    global _tracer
    _tracer = make_tracer(provider) if provider is not None else None


@contextmanager
def span(name: str, incoming: str | None = None) -> Iterator[Span]:
    """Records what is done inside, as a part of the current span, or of the one that `incoming`, a traceparent, names.

    incoming: given for a request that this process serves.
    """
    if _tracer is None:
        yield Span()
        return
    from opentelemetry.trace import SpanKind, use_span

    kind, context = SpanKind.INTERNAL, None
    if incoming is not None:
        kind, parent = SpanKind.SERVER, parse_traceparent(incoming.encode("latin-1"))
        context = parent.as_context() if parent is not None else None
    recorded = _tracer.start_span(name, context, kind=kind)
    with use_span(recorded, record_exception=False, set_status_on_exception=False), _ended(recorded) as traced:
        yield traced


@contextmanager
def call(name: str, url: str) -> Iterator[Span]:
    """Records a call of the server at `url`. Not the current span meanwhile, so a generator may yield inside."""
    if _tracer is None:
        yield Span()
        return
    from opentelemetry.trace import SpanKind

    parts = urlsplit(url)
    with _ended(_tracer.start_span(name, kind=SpanKind.CLIENT)) as traced:
        traced.set(server__address=parts.hostname, server__port=parts.port)
        yield traced


@contextmanager
def _ended(recorded: Any) -> Iterator[Span]:
    """Notes how it goes, and ends the span."""
    traced = Span(recorded)
    try:
        yield traced
    except Exception as error:
        traced.fail(type(error).__name__)
        raise
    except BaseException:  # cancelled, or a generator that is closed
        traced.set(outrider__cancelled=True)
        raise
    finally:
        recorded.end()
