"""Tests metrics and traces of the device: off unless asked for, and without a word of anybody's text."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from tests.commands import KEY
from tests.local_endpoint import LocalEndpoint, leaving_ids_to, note_requests, serve_local
from tests.serving import FakeServer, bearer

from outrider.edge.drafting.drafter import NgramDrafter
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.assemble import make_agent
from outrider.edge.results import GenerationRequest, Mode
from outrider.edge.serve.state import LocalSettings
from outrider.models.client import tracing
from outrider.models.client.client import VerifierClient
from outrider.models.errors import ConfigError
from outrider.models.http.security import KeyRing
from outrider.models.process import tracing as models_tracing
from outrider.models.process.extras import is_installed
from outrider.models.wire.protocol import ModelFacts

SECRET = "zanzibar"
"""A word of prompts that no metric and no trace may have."""
ASKED: dict[str, Any] = {"prompt": f"{SECRET} def verify(", "max_tokens": 12, "ignore_eos": True, "seed": 5}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 4, "seed": 5}
UNKNOWN_ID = 987654
NEVER = (SECRET, KEY, "verify(")


@pytest.fixture(scope="module")
def local(cloud: FakeServer) -> Iterator[LocalEndpoint]:
    with serve_local(cloud.url, LocalSettings(depth="8", shows_metrics=True)) as running:
        yield running


def test_metrics_are_off_unless_asked_for_and_behind_the_gate(cloud: FakeServer) -> None:
    """No route without --metrics; a key where one is needed; no page of another site."""
    with serve_local(cloud.url) as local:
        assert httpx.get(f"{local.url}/metrics").status_code == 404
    with serve_local(cloud.url, LocalSettings(keys=KeyRing([KEY]), shows_metrics=True)) as local:
        page = {"Origin": "https://evil.example"}
        for headers, status in (({}, 401), (page | bearer(KEY), 403), (bearer(KEY), 200)):
            assert httpx.get(f"{local.url}/metrics", headers=headers).status_code == status


def samples(local: LocalEndpoint) -> dict[str, float]:
    """All samples of a scrape, by name and labels as they are written."""
    lines = httpx.get(f"{local.url}/metrics").text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def test_metrics_count_texts_by_the_clouds_names(cloud: FakeServer, local: LocalEndpoint) -> None:
    """Times and requests have the names that the cloud gives them; no label comes from a client."""
    before = samples(local)
    for _ in range(2):
        local.post(ASKED)
    assert httpx.get(f"{local.url}/v1/models/{SECRET}").status_code == 404
    assert httpx.request("PURGE", f"{local.url}/{SECRET}").status_code in (400, 404, 405)
    found = samples(local)

    more = {
        "outrider_device_committed_total": 24,
        'outrider_device_texts_total{reason="length"}': 2,
        'outrider_http_requests_total{method="POST",route="/v1/completions",status="200"}': 2,
        'outrider_http_requests_total{method="GET",route="/v1/models/{model:path}",status="404"}': 1,
        "outrider_time_to_first_token_seconds_count": 2,
    }
    assert {name: found[name] - before.get(name, 0.0) for name in more} == more
    assert found["outrider_device_draft_sequences"] == 4
    assert found["outrider_device_accepted_total"] <= found["outrider_device_proposed_total"]
    assert httpx.get(f"{cloud.url}/nowhere").status_code == 404
    theirs = {line.split("{")[0].split()[0] for line in httpx.get(f"{cloud.url}/metrics").text.splitlines()}
    ours = {name.split("{")[0] for name in found if "_device_" not in name and not name.startswith("process_")}
    some = {"outrider_http_request_duration_seconds_bucket", "outrider_inter_token_latency_seconds_sum"}
    assert some <= ours <= theirs


def test_times_count_from_a_requests_arrival(local: LocalEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the cloud's: with what is asked of the verifier before the text begins."""
    facts, metrics = local.core.upstream.facts, local.core.metrics

    async def slow(**how: bool) -> ModelFacts:
        await asyncio.sleep(0.2)
        return await facts(**how)

    monkeypatch.setattr(local.core.upstream, "facts", slow)
    page = {"prompt": SECRET, "max_tokens": 1, "seed": 5}
    for path, asked in (("/v1/completions", ASKED), ("/v1/chat/completions", CHAT), ("/v1/outrider/generate", page)):
        ttft_s, e2e_s = metrics.ttft_s.total, metrics.e2e_s.total
        assert httpx.post(local.url + path, json=asked).status_code == 200
        assert min(metrics.ttft_s.total - ttft_s, metrics.e2e_s.total - e2e_s) >= 0.2


def test_a_text_that_its_stop_string_ends_is_not_cancelled(local: LocalEndpoint) -> None:
    """Nor without a time, where the device alone knows of its end: the server shows no special tokens."""
    (choice,) = local.post(ASKED)["choices"]
    before = samples(local)
    local.post(ASKED | {"max_tokens": 3000, "stop": choice["text"][9:12], "skip_special_tokens": False})
    local.wait_until(local.is_at_rest)
    found, times = samples(local), "outrider_e2e_request_latency_seconds_count"
    ended = 'outrider_device_texts_total{reason="stop"}'
    assert found[ended] - before.get(ended, 0.0) == found[times] - before[times] == 1


def test_metrics_have_no_word_of_a_text(local: LocalEndpoint) -> None:
    """Neither of prompts, paths and names, nor a key."""
    httpx.post(f"{local.url}/v1/completions", json=ASKED, headers={"Authorization": f"Bearer {KEY}"})
    httpx.post(f"{local.url}/v1/chat/completions", json=CHAT)
    httpx.get(f"{local.url}/{SECRET}?{SECRET}")
    text = httpx.get(f"{local.url}/metrics").text
    assert not any(word in text for word in NEVER)


def test_nothing_is_traced_or_loaded_unless_the_variables_ask_for_it(
    local: LocalEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verifier gets no traceparent, also where the client sends one."""
    seen = note_requests(monkeypatch)
    for name in ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    loaded = {name for name in sys.modules if name.startswith("opentelemetry")}
    tracing.start_tracing(pytest.fail)()
    local.post(ASKED, headers={"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"})
    assert seen.traceparents("/v1/sessions") == [None] and not tracing.is_on()
    assert {name for name in sys.modules if name.startswith("opentelemetry")} == loaded


@pytest.mark.parametrize(
    ("variables", "is_asked"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "x"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, False),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_the_standard_variables_decide(variables: dict[str, str], is_asked: bool) -> None:
    """An exporter or an endpoint turns traces on; `none` and the switch of the SDK turn them off."""
    assert tracing.is_asked_for(variables) is is_asked


def test_what_cannot_be_exported_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing package is a note, since the variable may be meant for others; a wrong value is an error."""
    notes: list[str] = []
    monkeypatch.setattr(models_tracing, "is_installed", lambda name: False)
    tracing.start_tracing(notes.append, {"OTEL_TRACES_EXPORTER": "otlp"})()
    assert len(notes) == 1 and "outrider[telemetry]" in notes[0]
    for wrong in (
        {"OTEL_TRACES_EXPORTER": "zipkin"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
    ):
        with pytest.raises(ConfigError, match="expected"):
            tracing.start_tracing(notes.append, wrong)


class Provider:
    """A TracerProvider that keeps what it records, with opentelemetry-api alone: the SDK is an extra."""

    def __init__(self) -> None:
        self.spans: list[Any] = []

    def get_tracer(self, *_: object) -> Any:
        """Itself."""
        return self

    def start_span(self, name: str, context: Any = None, kind: Any = None) -> Any:
        """A span below the current one, or below `context`'s."""
        from opentelemetry import trace

        parent = trace.get_current_span(context).get_span_context()
        trace_id = parent.trace_id if parent.is_valid else len(self.spans) + 0x1000
        own = trace.SpanContext(trace_id, len(self.spans) + 1, False, trace.TraceFlags(1))
        span: Any = trace.NonRecordingSpan(own)
        span.name, span.parent, span.attributes = name, parent.span_id if parent.is_valid else None, {}
        span.status, span.is_ended, span.set_attribute = None, False, span.attributes.__setitem__
        span.set_status = lambda status, description=None: setattr(span, "status", status)
        span.end = lambda end_time=None: setattr(span, "is_ended", True)
        self.spans.append(span)
        return span

    def start_as_current_span(self, name: str, context: Any = None, **options: Any) -> Any:
        """As the SDK's."""
        from opentelemetry import trace

        assert options.pop("record_exception") is False and options.pop("set_status_on_exception") is False
        return trace.use_span(self.start_span(name, context, **options), True, False, False)


@pytest.fixture
def provider() -> Iterator[Provider]:
    """Traces into it."""
    if not is_installed("opentelemetry.trace"):
        pytest.skip("needs opentelemetry-api")
    kept = Provider()
    tracing.use(kept)
    yield kept
    tracing.use(None)


def test_a_trace_goes_from_the_client_through_the_device_to_the_verifier(
    local: LocalEndpoint, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session's traceparent names the span of the call; drafts and foreign headers carry nothing of it."""
    seen = note_requests(monkeypatch)
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    sent = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01", "tracestate": f"x={SECRET}", "baggage": f"a={SECRET}"}
    local.post(ASKED, headers=sent)
    local.wait_until(lambda: all(span.is_ended for span in provider.spans))
    request, text, call = (
        next(s for s in provider.spans if s.name == n) for n in ("request", "text", "POST /v1/sessions")
    )
    contexts = [span.get_span_context() for span in (request, text, call)]
    assert {f"{context.trace_id:032x}" for context in contexts} == {trace_id} and request.parent == 0xB7AD6B7169203331
    assert (text.parent, call.parent) == (contexts[0].span_id, contexts[1].span_id)
    assert seen.traceparents("/v1/sessions") == [f"00-{trace_id}-{contexts[2].span_id:016x}-01"]
    assert request.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
    }
    assert text.attributes["outrider.tokens"] == 12 and text.attributes["outrider.finish_reason"] == "length"
    for call, headers, _ in seen.sent:
        assert "tracestate" not in headers and "baggage" not in headers
        assert call.endswith((" /v1/sessions", " /v1/model")) or "traceparent" not in headers


async def test_each_verification_carries_the_trace(
    cloud: FakeServer, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop-and-wait has a call per block; each names its own span."""
    seen = note_requests(monkeypatch)
    async with VerifierClient(cloud.url) as client:
        agent = make_agent(Mode.STOP_AND_WAIT, Endpoints([client]), NgramDrafter())
        await agent.generate(GenerationRequest((5, 6, 7), max_tokens=3, ignore_eos=True))
    calls = [span for span in provider.spans if span.name == "POST /v1/verify"]
    assert calls and [parent and parent.split("-")[2] for parent in seen.traceparents("/v1/verify")] == [
        f"{span.get_span_context().span_id:016x}" for span in calls
    ]
    (text,) = (span.attributes for span in provider.spans if span.name == "text")
    assert (text["outrider.mode"], text["outrider.tokens"]) == ("stop-and-wait", 3)


def test_traces_have_no_word_of_a_text_and_errors_only_their_kind(
    cloud: FakeServer, local: LocalEndpoint, provider: Provider
) -> None:
    """Also where the verifier's error quotes the request."""
    httpx.post(f"{local.url}/v1/completions", json=ASKED, headers={"Authorization": f"Bearer {KEY}"})
    httpx.post(f"{local.url}/v1/chat/completions", json=CHAT)
    unknown = {**ASKED, "prompt": [UNKNOWN_ID]}  # the verifier refuses it by name
    with leaving_ids_to(cloud, local):
        refused = httpx.post(f"{local.url}/v1/completions", json=unknown, timeout=60.0)
    assert refused.status_code == 400 and str(UNKNOWN_ID) in refused.text
    httpx.get(f"{local.url}/{SECRET}?{SECRET}")
    local.wait_until(lambda: all(span.is_ended for span in provider.spans))
    kinds = [span.attributes["error.type"] for span in provider.spans if "error.type" in span.attributes]
    assert "RequestError" in kinds and all(span.status.description is None for span in provider.spans if span.status)
    written = repr([(span.name, span.attributes) for span in provider.spans])
    assert not any(word in written for word in (*NEVER, str(UNKNOWN_ID))) and "POST /v1/render" in written


def test_a_call_that_is_cancelled_ends_its_span(provider: Provider) -> None:
    """As such, and not as a failure."""

    with suppress(asyncio.CancelledError), tracing.call("POST /v1/sessions", "http://user:pass@127.0.0.1:9/v1"):
        raise asyncio.CancelledError
    (span,) = provider.spans
    assert span.is_ended and span.status is None
    assert span.attributes == {"server.address": "127.0.0.1", "server.port": 9, "outrider.cancelled": True}


@pytest.mark.skipif(
    not is_installed("opentelemetry.sdk.trace"), reason='needs the SDK: pip install "outrider[telemetry]"'
)
def test_the_sdk_exports_to_the_console(capsys: pytest.CaptureFixture[str]) -> None:
    """With the SDK itself, whose resource names the service."""
    end = tracing.start_tracing(pytest.fail, {"OTEL_TRACES_EXPORTER": "console"})
    with tracing.span("text") as span, tracing.call("POST /v1/sessions", "http://127.0.0.1:9") as call:
        span.set(outrider__tokens=3)
        (name, value), *_ = call.headers
        assert name == "traceparent" and value.startswith("00-")
    end()
    written = capsys.readouterr().err
    assert '"outrider.tokens": 3' in written and '"service.name": "outrider"' in written and not tracing.is_on()
