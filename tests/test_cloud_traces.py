"""Tests the spans of requests: figures, and no word of a text; what is recorded is bounded."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import httpx
import pytest
from tests.serving import BODY, PROMPT, open_session, run_session, serve_fake, target_tokens

from outrider.cloud.api.state import ServerSettings
from outrider.cloud.api.traces import MAX_EVENTS, SpanBudget, TraceLimits, Traces, traces_from_environment
from outrider.cloud.engine import EngineConfig
from outrider.edge.drafting.drafter import NgramDrafter
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.assemble import make_agent
from outrider.edge.results import GenerationRequest, Mode
from outrider.models.client import tracing
from outrider.models.client.client import VerifierClient
from outrider.models.http.security import KeyRing
from outrider.models.process import tracing as models_tracing
from outrider.models.process.extras import is_installed
from outrider.models.process.tracing import parse_traceparent

SECRET = "zanzibar"
KEY, OTHER = "alice-has-a-long-key", "bob-has-another-long-key"
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACED = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
needs_sdk = pytest.mark.skipif(
    not is_installed("opentelemetry.sdk.trace"), reason='needs the SDK: pip install "outrider[telemetry]"'
)


class Recorded:
    """A provider of the SDK's that keeps its spans, and the server's view of it."""

    def __init__(self, limits: TraceLimits | None = None) -> None:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self._kept = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._kept))
        self.settings = ServerSettings(traces=Traces(self.provider, limits))

    @property
    def spans(self) -> tuple[Any, ...]:
        """Those that have ended."""
        return tuple(self._kept.get_finished_spans())


@needs_sdk
async def test_a_trace_goes_from_the_device_to_the_verifier() -> None:
    """The verifier's span is a child of the device's call, in one trace."""
    device, cloud = Recorded(), Recorded()
    with serve_fake(cloud.settings) as server, ExitStack() as stack:
        tracing.use(device.provider)
        stack.callback(tracing.use, None)
        async with VerifierClient(server.url) as client:
            agent = make_agent(Mode.STREAM, Endpoints([client]), NgramDrafter())
            await agent.generate(GenerationRequest(tuple(PROMPT), max_tokens=12, ignore_eos=True))
        server.wait_until(lambda: len(cloud.spans) == 1)
    call = next(span for span in device.spans if span.name == "POST /v1/sessions")
    (span,) = cloud.spans
    assert (span.context.trace_id, span.parent.span_id) == (call.context.trace_id, call.context.span_id)
    assert (span.kind.name, span.name) == ("SERVER", "text_completion fake")


@needs_sdk
def test_a_span_has_the_figures_of_a_request_and_no_word_of_it() -> None:
    """GenAI's and HTTP's attributes for every route that starts work; errors by their code."""
    cloud = Recorded()
    completion = {
        "prompt": f"{SECRET} def verify(",
        "max_tokens": 5,
        "ignore_eos": True,
        "seed": 77,
        "temperature": 0.5,
    }
    with serve_fake(cloud.settings) as server, httpx.Client(base_url=server.url, headers=TRACED) as client:
        told = run_session(client, BODY)
        answers = [
            client.post("/v1/completions", json=completion),
            client.post("/v1/verify", json={"items": [{"prefix": PROMPT, "draft": [1, 2]}]}),
            client.post("/v1/completions", json=completion | {"use_beam_search": True}),
            client.get(f"/v1/models/{SECRET}"),
            client.get("/metrics"),
        ]
        assert [answer.status_code for answer in answers] == [200, 200, 400, 404, 200]
        server.wait_until(lambda: len(cloud.spans) == 4)
    session, text, verify, refused = cloud.spans
    assert dict(session.attributes) | {"outrider.request_id": "", "gen_ai.response.time_to_first_chunk": 0} == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "outrider",
        "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake",
        "gen_ai.request.max_tokens": 24,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.usage.input_tokens": len(PROMPT),
        "gen_ai.usage.output_tokens": 24,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.response.time_to_first_chunk": 0,
        "outrider.target_passes": told.end.usage.target_passes,
        "outrider.accepted_tokens": told.end.usage.accepted_prediction_tokens,
        "outrider.rejected_tokens": told.end.usage.rejected_prediction_tokens,
        "outrider.waited_s": 0.0,
        "outrider.steps": len(told.commits),
        "outrider.request_id": "",
        "http.request.method": "POST",
        "http.route": "/v1/sessions",
        "http.response.status_code": 200,
    }
    assert [event.attributes["outrider.base"] for event in session.events] == [each.base for each in told.commits]
    expected: tuple[tuple[Any, dict[str, Any]], ...] = (
        (text, {"gen_ai.request.temperature": 0.5, "gen_ai.usage.output_tokens": 5}),
        (verify, {"gen_ai.response.finish_reasons": ("once",)}),
        (refused, {"error.type": "unsupported_parameter", "http.response.status_code": 400}),
    )
    assert all(some.items() <= dict(span.attributes).items() for span, some in expected)
    assert verify.name == "verify fake" and refused.status.is_unset
    assert {f"{span.context.trace_id:032x}" for span in cloud.spans} == {TRACE_ID}
    written = " ".join(span.to_json() for span in cloud.spans)
    assert SECRET not in written and "verify(" not in written and " 77" not in written


@needs_sdk
def test_a_long_text_has_a_bounded_span() -> None:
    """Steps beyond the bound are counted, not recorded; a client that leaves ends its span."""
    cloud = Recorded()
    with serve_fake(cloud.settings, config=EngineConfig(looks_up=False)) as server:
        with httpx.Client(base_url=server.url, headers=TRACED) as client:
            told = run_session(client, BODY | {"max_tokens": MAX_EVENTS + 40})
            with open_session(client, BODY | {"max_tokens": 400}):
                pass
        server.wait_until(lambda: len(cloud.spans) == 2)
        server.wait_until(server.is_empty)
    assert len(told.commits) > MAX_EVENTS == len(cloud.spans[0].events)
    assert cloud.spans[0].attributes["outrider.steps"] == len(told.commits)


@needs_sdk
def test_no_client_makes_the_server_record_everything() -> None:
    """Sampled requests count within a rate; those not sampled, and those without a key, are not recorded."""
    cloud = Recorded(TraceLimits(owner_per_s=1e-9, owner_burst=3, per_s=1e-9, burst=4))
    settings = replace(cloud.settings, keys=KeyRing([KEY, OTHER]))
    once = BODY | {"max_tokens": 1}
    with serve_fake(settings) as server, httpx.Client(base_url=server.url) as client:

        def ask(key: str, flags: str) -> int:
            headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-{flags}", "authorization": f"Bearer {key}"}
            return client.post("/v1/sessions", json=once, headers=headers).status_code

        for key, flags, count, status, num_spans in (
            ("a-key-that-nobody-has", "01", 1, 401, 0),
            (KEY, "00", 3, 200, 0),
            (KEY, "01", 10, 200, 3),
            (OTHER, "01", 3, 200, 4),
        ):
            assert {ask(key, flags) for _ in range(count)} == {status} and len(cloud.spans) == num_spans
        text = client.get("/metrics", headers={"authorization": f"Bearer {KEY}"}).text
    assert 'outrider_trace_spans_total{outcome="recorded"} 4.0' in text
    assert 'outrider_trace_spans_total{outcome="over_rate"} 9.0' in text


def test_the_budget_of_spans_fills_up_again_and_forgets_owners() -> None:
    """Of an owner 20 at once and 5 a second, in all 100 and 20; its memory is bounded."""
    now = [0.0]
    budget = SpanBudget(TraceLimits(), lambda: now[0])

    def recorded(*owners: bytes) -> int:
        return sum(budget.spend(owner) for owner in owners for _ in range(30))

    assert [recorded(b"a"), recorded(b"b", b"c", b"d", b"e", b"f")] == [20, 80]
    now[0] = 1.0
    assert [recorded(b"a"), recorded(b"b", b"c", b"d", b"e", b"f")] == [5, 15]
    for index in range(5000):
        budget.spend(str(index).encode())
    assert len(budget._owners) <= 1024


HOSTILE = [
    b"",
    b"00",
    b"00-" + b"0" * 32 + b"-b7ad6b7169203331-01",
    b"00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
    b"00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
    b"ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
    b"00-" + b"zanzibar" * 4 + b"-b7ad6b7169203331-01",
    b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0g",
    b"1" * 6000,
    b"\xff" * 55,
]


def test_a_hostile_traceparent_is_no_context() -> None:
    """Whatever its size or its bytes."""
    assert parse_traceparent(TRACED["traceparent"].encode()) is not None
    assert not [header for header in HOSTILE if parse_traceparent(header) is not None]


@needs_sdk
def test_hostile_trace_headers_change_nothing() -> None:
    """A wrong or doubled context begins a trace of its own; state and baggage are not looked at."""
    cloud = Recorded()
    beside = [("tracestate", "a=" + SECRET * 300), ("baggage", "b=" + SECRET * 300)]
    headers: list[Any] = [[*beside, (b"traceparent", header)] for header in HOSTILE]
    headers.append([("traceparent", TRACED["traceparent"])] * 2)
    with serve_fake(cloud.settings) as server, httpx.Client(base_url=server.url) as client:
        for sent in headers:
            assert client.post("/v1/sessions", json=BODY | {"max_tokens": 1}, headers=sent).status_code == 200
        server.wait_until(lambda: len(cloud.spans) == len(headers))
    assert all(span.parent is None and not span.context.trace_state for span in cloud.spans)
    assert SECRET not in " ".join(span.to_json() for span in cloud.spans)


def test_nothing_is_traced_unless_the_variables_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off by default, and nothing is loaded."""
    for name in ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    with traces_from_environment(pytest.fail) as traces:
        assert traces is None


@needs_sdk
def test_a_collector_that_never_answers_slows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are answered while the exporter's thread waits, and the end waits for a bounded time."""
    monkeypatch.setattr(models_tracing, "MAX_END_S", 0.1)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    notes: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.getsockname()[1]}")
        with traces_from_environment(notes.append) as traces:
            assert traces is not None
            with serve_fake(ServerSettings(traces=traces)) as server, httpx.Client(base_url=server.url) as client:
                run_session(client, BODY)
                connection, _ = collector.accept()  # the exporter has called, and waits from now on
                for _ in range(10):
                    assert run_session(client, BODY).tokens == target_tokens(PROMPT, 24)
            connection.settimeout(30.0)
            assert connection.recv(4) == b"POST"
        connection.close()
    assert notes == []
