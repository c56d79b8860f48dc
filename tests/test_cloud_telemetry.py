"""Tests what an operator sees of the verifier: metrics, traces, logs, request ids. None has a word of a text."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.engine_harness import SAMPLED, VOCAB, Harness, plain
from tests.fake_runtime import FakeBatchRuntime
from tests.serving import FakeServer, fake_tokenizer, read_events, run_session, serve_fake, target_tokens

from outrider.cloud.api.metrics import Metrics
from outrider.cloud.api.state import ServerSettings
from outrider.cloud.api.traces import MAX_EVENTS, SpanBudget, TraceLimits, Traces, traces_from_environment
from outrider.cloud.distributions import MAX_POSITIONS, Distributions, num_tested
from outrider.cloud.engine import EngineConfig
from outrider.cloud.pending.selected_drafts import NOTHING, SelectedDrafts
from outrider.cloud.seam import EngineStats, Totals
from outrider.edge.drafting.drafter import NgramDrafter
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.assemble import make_agent
from outrider.edge.results import GenerationRequest, Mode
from outrider.models.client import tracing
from outrider.models.client.client import VerifierClient
from outrider.models.http.logs import FORMATTERS, LogFormat
from outrider.models.http.request_context import session_tag
from outrider.models.http.security import KeyRing
from outrider.models.process import tracing as models_tracing
from outrider.models.process.extras import is_installed
from outrider.models.process.tally import MAX_CODES, RequestTally
from outrider.models.process.tracing import parse_traceparent

PROMPT = [5, 17, 99, 3]
SHORT = (5, 17, 9, 3)
SECRET = "zanzibar"
KEY, OTHER = "alice-has-a-long-key", "bob-has-another-long-key"
BODY: dict[str, object] = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True}
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACED = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
needs_sdk = pytest.mark.skipif(
    not is_installed("opentelemetry.sdk.trace"), reason='needs the SDK: pip install "outrider[telemetry]"'
)


def samples(url: str) -> dict[str, float]:
    """A scrape: values by sample name and labels."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    return {s.name + json.dumps(s.labels, sort_keys=True): s.value for family in families for s in family.samples}


def value(found: dict[str, float], name: str, **labels: str) -> float:
    """A sample's value; 0 where it is not there."""
    return found.get(f"outrider_{name}" + json.dumps(labels, sort_keys=True), 0.0)


# -- metrics -----------------------------------------------------------------------------------------------------------


def read(metrics: Metrics) -> str:
    """Prometheus' text format."""
    return asyncio.run(metrics.exposition(""))[0].decode()


def test_a_drafted_text_is_counted_by_position() -> None:
    """Accepted and tested positions, drafts, wasted tokens, batch and steps, all by hand."""
    harness = Harness()
    truth = plain(SHORT, SAMPLED, 8)
    wrong = [*truth[:2], (truth[2] + 1) % VOCAB, truth[3]]
    collector = harness.finished(SHORT, 8, draft=wrong, once=True)
    totals, found = harness.engine.stats().totals, harness.engine.stats().distributions
    assert collector.tokens == truth[:3]
    assert (totals.drafts, totals.proposed, totals.accepted, totals.tested, totals.wasted) == (1, 4, 2, 3, 2)
    assert found.accepted_by_position[:4] == [1, 1, 0, 0] and found.tested_by_position[:4] == [1, 1, 1, 0]
    assert len(found.accepted_by_position) == MAX_POSITIONS
    assert found.ends == dict.fromkeys(found.ends, 0) | {"once": 1}
    assert totals.prompt_tokens == totals.prefix_queried_tokens == len(SHORT)
    assert found.batch_size.count == found.step_tokens.count == found.step_s.count == totals.steps == 1
    assert found.step_tokens.total == totals.step_tokens and found.step_s.total == pytest.approx(totals.model_s)
    assert found.queue_s.count == 1


def test_drafts_of_a_device_its_lag_and_waits_for_it_are_counted() -> None:
    """The histogram of waits has the seconds of usage; nodes that become pending are counted once."""
    harness = Harness(config=EngineConfig(looks_up=False))
    truth = plain(SHORT, SAMPLED, 12)
    number, collector = harness.submit(SHORT, 12, lag_ms=5.0)
    harness.step()
    harness.engine.draft(number, 1, [truth[1:5]])
    harness.engine.draft(number, 1, [truth[1:6]])
    harness.run()
    totals, found = harness.engine.stats().totals, harness.engine.stats().distributions
    assert totals.draft_nodes == 5 and totals.accepted >= 4
    assert found.lag_s.count == 1 and found.wait_s.count >= 1
    assert collector.end is not None and found.wait_s.total == pytest.approx(collector.end.usage.waited_s)


def test_what_a_pass_tested() -> None:
    """A guess that a pass commits as its last token, because it ends there, was not rejected."""
    line = SelectedDrafts.line([1, 2, 3])
    tree = SelectedDrafts([1, 3, 2, 4], [-1, 0, -1, 0])
    assert num_tested(1, [1, 9], line.after([0])) == 2
    assert num_tested(1, [1, 2], line.after([0])) == 1
    assert num_tested(3, [1, 2, 3, 9], line.after([0, 1, 2])) == 3
    assert (list(tree.after([])), list(tree.after([0])), list(tree.after([0, 3]))) == ([1, 2], [3, 4], [])
    assert num_tested(1, [1, 4], tree.after([0])) == 1 and num_tested(1, [1, 5], tree.after([0])) == 2
    assert num_tested(0, [7], NOTHING.after([])) == 0


def test_distributions_cross_a_process_as_numbers() -> None:
    """As vLLM's engine process sends them: another process shows the same."""
    here, there = Distributions(), Distributions()
    here.stepped(3, 40, 0.02)
    here.verified(2, 3)
    here.verified(100, 100)
    for tally in (here.wait_s, here.lag_s, here.queue_s):
        tally.observe(0.03)
    there.load(json.loads(json.dumps(here.numbers())))
    assert there.numbers() == here.numbers()
    assert there.tested_by_position == here.tested_by_position == [2, 2, 2, *[1] * (MAX_POSITIONS - 3)]


def test_a_session_shows_in_every_metric(server: FakeServer) -> None:
    """By vLLM's names: times, tokens, acceptance, waits and the device's lag, queue, ends."""
    before = samples(server.url)
    tokens = target_tokens(PROMPT, 12)
    with httpx.Client(base_url=server.url) as client:
        with client.stream("POST", "/v1/sessions", json=BODY | {"patience_ms": 0}) as response:
            events = read_events(response)
            opened = next(events)
            path = f"/v1/sessions/{opened.session}/drafts"  # type: ignore[union-attr]
            client.post(path, json={"base": 0, "paths": [tokens[:4]]})
            for _ in events:
                pass
        server.wait_until(server.is_empty)
        after = samples(server.url)

    def more(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    assert more("generation_tokens_total") == 12 and more("prompt_tokens_total") == len(PROMPT)
    assert more("request_success_total", finished_reason="length") == 1
    assert more("time_to_first_token_seconds_count") == more("e2e_request_latency_seconds_count") == 1
    assert more("request_time_per_output_token_seconds_count") == more("request_queue_time_seconds_count") == 1
    assert more("inter_token_latency_seconds_count") == more("target_passes_total") - 1
    assert more("engine_batch_size_count") == more("iteration_tokens_count") == more("engine_steps_total")
    drafted = more("spec_decode_num_draft_tokens_total")
    assert more("spec_decode_num_accepted_tokens_total") + more("spec_decode_num_wasted_tokens_total") == drafted
    by_position = sum(more("spec_decode_num_accepted_tokens_per_pos_total", position=str(i)) for i in range(64))
    assert by_position == more("spec_decode_num_accepted_tokens_total")
    assert value(after, "kv_cache_usage_perc") == 0.0 and value(after, "num_requests_running") == 0.0
    info = {"model_name": "fake", "version": version("outrider"), "target": server.core.model.target}
    assert value(after, "server_info", **info) == 1.0


def test_errors_are_counted_by_our_codes_only(server: FakeServer) -> None:
    """Of answers, of items, and never by anything that a client sent; more codes than fit count as one."""
    before = samples(server.url)
    httpx.get(f"{server.url}/{SECRET}")
    httpx.post(f"{server.url}/v1/verify", json={"items": [{"prefix": PROMPT, "draft": [5000]}, {"prefix": 5}]})
    httpx.post(f"{server.url}/v1/sessions/none/drafts", json={"base": 0, "paths": [[1]]})
    httpx.request("BREW", f"{server.url}/v1/sessions")
    after = samples(server.url)
    grown = {name: after[name] - before.get(name, 0) for name in after if "request_errors_total" in name}
    codes = {json.loads(name.removeprefix("outrider_request_errors_total"))["code"]: n for name, n in grown.items()}
    assert codes["not_found"] == codes["token_out_of_range"] == codes["unknown_session"] == 1
    assert codes["invalid_parameter"] == 1
    text = httpx.get(f"{server.url}/metrics").text
    assert SECRET not in text and "BREW" not in text
    tally = RequestTally()
    for index in range(3 * MAX_CODES):
        tally.failed(f"code{index}")
        tally.answered("/", f"M{index}", 200, 0.0)
    assert len(tally.errors) == MAX_CODES + 1 and len(tally.requests) == 1


def test_others_add_their_metrics() -> None:
    """A counter with a label whose values are known, and a gauge that may have no value."""
    gauges: list[float | None] = [None]
    stats = EngineStats(Totals(), 0, 0, 0, 0, 1, 1, 0.0, None, None)
    metrics = Metrics(lambda: stats, lambda: 0, max_age_s=0.0)
    counts = metrics.add_counter("store_lookups", "Lookups.", "outcome", ("hit", "miss"))
    metrics.add_counts("reloads", "Files.", ("file", "result"), lambda: {("keys", "read"): 3})
    metrics.add_gauge("store_up", "Whether it answers.", lambda: gauges[0])
    counts["hit"] += 2
    text = read(metrics)
    assert 'outrider_store_lookups_total{outcome="hit"} 2.0' in text and 'outcome="miss"} 0.0' in text
    assert 'outrider_reloads_total{file="keys",result="read"} 3.0' in text
    assert "outrider_store_up" not in text
    gauges[0] = 1.0
    assert "outrider_store_up 1.0" in read(metrics)
    with pytest.raises(KeyError):
        counts["made by a client"] += 1


# -- traces ------------------------------------------------------------------------------------------------------------


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
def test_a_trace_goes_from_the_device_to_the_verifier() -> None:
    """The verifier's span is a child of the device's call, in one trace."""
    device, cloud = Recorded(), Recorded()

    async def scenario(url: str) -> None:
        async with VerifierClient(url) as client:
            agent = make_agent(Mode.STREAM, Endpoints([client]), NgramDrafter())
            await agent.generate(GenerationRequest(tuple(PROMPT), max_tokens=12, ignore_eos=True))

    tracing.use(device.provider)
    try:
        with serve_fake(cloud.settings) as server:
            asyncio.run(scenario(server.url))
            server.wait_until(lambda: len(cloud.spans) == 1)
    finally:
        tracing.use(None)
    call = next(span for span in device.spans if span.name == "POST /v1/sessions")
    (span,) = cloud.spans
    assert span.context.trace_id == call.context.trace_id and span.parent.span_id == call.context.span_id
    assert span.kind.name == "SERVER" and span.name == "text_completion fake"


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
        assert client.post("/v1/completions", json=completion).status_code == 200
        client.post("/v1/verify", json={"items": [{"prefix": PROMPT, "draft": [1, 2]}]})
        assert client.post("/v1/completions", json=completion | {"use_beam_search": True}).status_code == 400
        assert client.get(f"/v1/models/{SECRET}").status_code == 404 and client.get("/metrics").status_code == 200
        server.wait_until(lambda: len(cloud.spans) == 4)
    session, text, verify, refused = cloud.spans
    assert dict(session.attributes) | {"outrider.request_id": "", "gen_ai.response.time_to_first_chunk": 0} == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "outrider",
        "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake",
        "gen_ai.request.max_tokens": 12,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.usage.input_tokens": len(PROMPT),
        "gen_ai.usage.output_tokens": 12,
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
    assert text.attributes["gen_ai.request.temperature"] == 0.5 and text.attributes["gen_ai.usage.output_tokens"] == 5
    assert verify.name == "verify fake" and verify.attributes["gen_ai.response.finish_reasons"] == ("once",)
    assert refused.attributes["error.type"] == "unsupported_parameter"
    assert refused.attributes["http.response.status_code"] == 400 and refused.status.is_unset
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
            with client.stream("POST", "/v1/sessions", json=BODY | {"max_tokens": 400}) as response:
                next(read_events(response))
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

        def ask(key: str, flags: str = "01") -> int:
            headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-{flags}", "authorization": f"Bearer {key}"}
            return client.post("/v1/sessions", json=once, headers=headers).status_code

        assert ask("a-key-that-nobody-has") == 401
        assert [ask(KEY, "00") for _ in range(3)] == [200] * 3
        assert cloud.spans == ()
        assert [ask(KEY) for _ in range(10)] == [200] * 10
        assert len(cloud.spans) == 3
        assert [ask(OTHER) for _ in range(3)] == [200] * 3
        assert len(cloud.spans) == 4
        headers = {"authorization": f"Bearer {KEY}"}
        text = client.get("/metrics", headers=headers).text
    assert 'outrider_trace_spans_total{outcome="recorded"} 4.0' in text
    assert 'outrider_trace_spans_total{outcome="over_rate"} 9.0' in text


def test_the_budget_of_spans_fills_up_again_and_forgets_owners() -> None:
    """Per owner and in all; its memory is bounded."""
    now = [0.0]
    budget = SpanBudget(TraceLimits(owner_per_s=1.0, owner_burst=2.0, per_s=10.0, burst=3.0), lambda: now[0])
    assert [budget.spend(b"a") for _ in range(3)] == [True, True, False]
    assert [budget.spend(b"b") for _ in range(2)] == [True, False]  # in all
    now[0] = 1.0
    assert [budget.spend(b"a") for _ in range(2)] == [True, False]
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


@pytest.mark.parametrize("header", HOSTILE)
def test_a_hostile_traceparent_is_no_context(header: bytes) -> None:
    """Whatever its size or its bytes."""
    assert parse_traceparent(header) is None
    assert parse_traceparent(TRACED["traceparent"].encode()) is not None


@needs_sdk
def test_hostile_trace_headers_change_nothing() -> None:
    """A wrong or doubled context begins a trace of its own; state and baggage are not looked at."""
    cloud = Recorded()
    beside = [("tracestate", "a=" + SECRET * 300), ("baggage", "b=" + SECRET * 300)]
    with serve_fake(cloud.settings) as server, httpx.Client(base_url=server.url) as client:
        for header in HOSTILE:
            sent = [*beside, (b"traceparent", header)]
            assert client.post("/v1/sessions", json=BODY | {"max_tokens": 1}, headers=sent).status_code == 200  # type: ignore[arg-type]
        twice = [("traceparent", TRACED["traceparent"])] * 2
        assert client.post("/v1/sessions", json=BODY | {"max_tokens": 1}, headers=twice).status_code == 200
        server.wait_until(lambda: len(cloud.spans) == len(HOSTILE) + 1)
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
                    assert run_session(client, BODY).tokens == target_tokens(PROMPT, 12)
            connection.settimeout(30.0)
            assert connection.recv(4) == b"POST"
        connection.close()
    assert notes == []


# -- requests and logs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "is_taken"),
    [
        ("req-1_a.B", True),
        ("a" * 64, True),
        ("a" * 65, False),
        ("", False),
        ("two words", False),
        ('{"level":"error"}', False),
        ("é", False),
    ],
)
def test_a_clean_request_id_is_taken_over(server: FakeServer, sent: str, is_taken: bool) -> None:
    """Any other gets a new one; it stands in the header and in the error."""
    answer = httpx.get(f"{server.url}/nowhere", headers=[(b"x-request-id", sent.encode())])
    found = answer.headers["x-request-id"]
    assert found == answer.json()["request_id"]
    assert (found == sent) is is_taken and (is_taken or len(found) == 16)


def test_every_answer_has_its_own_request_id(server: FakeServer) -> None:
    """Streams too. Accepted drafts have none: they are answered without a header."""
    with httpx.Client(base_url=server.url) as client:
        ids = [client.get("/health/live").headers["x-request-id"] for _ in range(3)]
        with client.stream("POST", "/v1/sessions", json=BODY) as response:
            ids.append(response.headers["x-request-id"])
            response.read()
        refused = client.post("/v1/sessions/none/drafts", json={"base": 0, "paths": [[1]]})
        ids.append(refused.headers["x-request-id"])
        assert refused.json()["request_id"] == ids[-1]
    assert len(set(ids)) == 5


class Lines(logging.Handler):
    """Log lines as they would be written."""

    def __init__(self, format_: LogFormat) -> None:
        super().__init__()
        self.setFormatter(FORMATTERS[format_])
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the line."""
        self.lines.append(self.format(record))


@contextmanager
def lines_of(format_: LogFormat) -> Iterator[list[str]]:
    """What Outrider logs meanwhile."""
    handler = Lines(format_)
    logging.getLogger("outrider").addHandler(handler)
    try:
        yield handler.lines
    finally:
        logging.getLogger("outrider").removeHandler(handler)


@pytest.mark.parametrize("format_", LogFormat)
def test_a_failed_sequence_is_logged_with_its_request(format_: LogFormat) -> None:
    """Request, trace, a hash of the session and the code; no prompt, no token, no session id."""
    runtime = FakeBatchRuntime(vocab_size=fake_tokenizer().size, fail_on_token=PROMPT[-1])
    headers = TRACED | {"x-request-id": "the-request"}
    with (
        lines_of(format_) as lines,
        serve_fake(runtime=runtime) as server,
        httpx.Client(base_url=server.url, headers=headers) as client,
    ):
        told = run_session(client, BODY)
        assert told.end.reason == "error"
        client.post("/v1/verify", json={"items": [{"prefix": PROMPT}]})
    session = told.open.session
    assert not any(session in line or str(PROMPT) in line for line in lines)
    own, item = (line for line in lines if "a sequence failed: model_fault" in line)
    if format_ is LogFormat.TEXT:
        assert own.endswith(
            f"[request_id=the-request trace_id={TRACE_ID} session={session_tag(session)} code=model_fault]"
        )
        return
    found = json.loads(own)
    assert found.pop("time").endswith("Z")
    assert found == {
        "level": "error",
        "event": "sequence_failed",
        "logger": "outrider.cloud",
        "message": "a sequence failed: model_fault",
        "request_id": "the-request",
        "trace_id": TRACE_ID,
        "session": session_tag(session),
        "code": "model_fault",
    }
    assert json.loads(item)["request_id"] == "the-request" and "session" not in json.loads(item)
    assert {json.loads(line)["event"] for line in lines} >= {"sequence_failed", "fault"}


def test_a_line_outside_of_requests_has_no_ids() -> None:
    """And nothing of a record but what is listed."""
    with lines_of(LogFormat.JSON) as lines:
        logging.getLogger("outrider.cloud").warning("hello", extra={"prompt": SECRET})
    assert set(json.loads(lines[0])) == {"time", "level", "event", "logger", "message"}
