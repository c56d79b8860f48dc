"""Tests what an operator sees of the verifier: metrics, traces, logs, request ids. None has a word of a text."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from functools import partial
from importlib.metadata import version
from typing import cast
from unittest.mock import Mock

import httpx
import pytest
from tests.engine_harness import SAMPLED, VOCAB, Harness, plain
from tests.fake_runtime import FakeBatchRuntime
from tests.metrics_table import grown_by, samples
from tests.serving import BODY, PROMPT, FakeServer, fake_tokenizer, open_session, run_session, serve_fake, target_tokens

from outrider.cloud.api.metrics import Metrics
from outrider.cloud.distributions import MAX_POSITIONS, Distributions, num_tested
from outrider.cloud.engine import EngineConfig, EngineThread
from outrider.cloud.pending.selected_drafts import NOTHING, SelectedDrafts
from outrider.cloud.seam import EngineStats, Totals
from outrider.models.http.logs import FORMATTERS, LogFormat
from outrider.models.http.request_context import session_tag
from outrider.models.process.tally import MAX_CODES, RequestTally

SHORT = (5, 17, 9, 3)
SECRET = "zanzibar"
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACED = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}


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
    rest = [0] * (MAX_POSITIONS - 3)
    assert (found.accepted_by_position, found.tested_by_position) == ([1, 1, 0, *rest], [1, 1, 1, *rest])
    assert found.ends == dict.fromkeys(found.ends, 0) | {"once": 1}
    assert totals.prompt_tokens == totals.prefix_queried_tokens == len(SHORT)
    counted = found.batch_size, found.step_tokens, found.step_s, found.queue_s
    assert [each.count for each in counted] == [1] * 4 and totals.steps == 1
    assert found.step_tokens.total == totals.step_tokens and found.step_s.total == pytest.approx(totals.model_s)


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
    assert totals.draft_nodes == 5 and totals.accepted >= 4 and found.lag_s.count == 1 <= found.wait_s.count
    assert found.wait_s.total == pytest.approx(collector.ended.usage.waited_s)


def test_what_a_pass_tested() -> None:
    """A guess that a pass commits as its last token, because it ends there, was not rejected."""
    line, tree = SelectedDrafts.line([1, 2, 3]), SelectedDrafts([1, 3, 2, 4], [-1, 0, -1, 0])
    assert [list(tree.after(accepted)) for accepted in ([], [0], [0, 3])] == [[1, 2], [3, 4], []]
    for accepted, committed, after, expected in (
        (1, [1, 9], line.after([0]), 2),
        (1, [1, 2], line.after([0]), 1),
        (3, [1, 2, 3, 9], line.after([0, 1, 2]), 3),
        (1, [1, 4], tree.after([0]), 1),
        (1, [1, 5], tree.after([0]), 2),
        (0, [7], NOTHING.after([]), 0),
    ):
        assert num_tested(accepted, committed, after) == expected


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
    """By vLLM's names: acceptance, waits, queue, batches. Others: test_cloud_server, which runs on vLLM too."""

    def wait_for_counts() -> None:
        """Until nothing runs, and the engine's thread, which counts a step at its end, is past the last one."""
        server.wait_until(server.is_empty)
        is_past = threading.Event()
        cast(EngineThread, server.core.engine)._put(is_past.set)
        assert is_past.wait(60)

    wait_for_counts()
    before = samples(server.url)
    tokens = target_tokens(PROMPT, 24)
    with httpx.Client(base_url=server.url) as client, open_session(client, BODY | {"patience_ms": 0}) as session:
        client.post(session.drafts, json={"base": 0, "paths": [tokens[:4]]})
        session.rest()
    wait_for_counts()
    after = samples(server.url)
    more = partial(grown_by, before, after)
    assert more("prompt_tokens_total") == len(PROMPT)
    assert more("request_time_per_output_token_seconds_count") == more("request_queue_time_seconds_count") == 1
    assert more("engine_batch_size_count") == more("iteration_tokens_count") == more("engine_steps_total")
    accepted, drafted = more("spec_decode_num_accepted_tokens_total"), more("spec_decode_num_draft_tokens_total")
    assert accepted + more("spec_decode_num_wasted_tokens_total") == drafted
    places = map(str, range(64))
    assert accepted == sum(more("spec_decode_num_accepted_tokens_per_pos_total", position=each) for each in places)
    assert after["outrider_kv_cache_usage_perc{}"] == after["outrider_num_requests_running{}"] == 0.0
    info = {"model_name": "fake", "version": version("outrider"), "target": server.core.model.target}
    assert grown_by({}, after, "server_info", **info) == 1.0


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
    once = {"not_found": 1, "token_out_of_range": 1, "unknown_session": 1, "invalid_parameter": 1}
    assert once.items() <= codes.items()
    text = httpx.get(f"{server.url}/metrics").text
    assert SECRET not in text and "BREW" not in text
    tally = RequestTally()
    for index in range(3 * MAX_CODES):
        tally.failed(f"code{index}")
        tally.answered("/", f"M{index}", 200, 0.0)
    assert len(tally.errors) == MAX_CODES + 1 and len(tally.requests) == 1


def test_others_add_their_metrics() -> None:
    """A counter with a label whose values are known, and a gauge that may have no value."""
    gauge, stats = Mock(return_value=None), EngineStats(Totals(), 0, 0, 0, 0, 1, 1, 0.0, None, None)
    metrics = Metrics(lambda: stats, lambda: 0, max_age_s=0.0)
    counts = metrics.add_counter("store_lookups", "Lookups.", "outcome", ("hit", "miss"))
    metrics.add_counts("reloads", "Files.", ("file", "result"), lambda: {("keys", "read"): 3})
    metrics.add_gauge("store_up", "Whether it answers.", gauge)
    counts["hit"] += 2
    text, gauge.return_value = read(metrics), 1.0
    assert 'outrider_store_lookups_total{outcome="hit"} 2.0' in text and 'outcome="miss"} 0.0' in text
    assert 'outrider_reloads_total{file="keys",result="read"} 3.0' in text
    assert "outrider_store_up" not in text and "outrider_store_up 1.0" in read(metrics)
    with pytest.raises(KeyError):
        counts["made by a client"] += 1


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
    assert found == answer.json()["request_id"] and (found == sent) is is_taken and (is_taken or len(found) == 16)


@pytest.mark.parametrize("format_", LogFormat)
def test_a_failed_sequence_is_logged_with_its_request(
    format_: LogFormat, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Request, trace, a hash of the session and the code; no prompt, no token, no session id."""
    runtime = FakeBatchRuntime(vocab_size=fake_tokenizer().size, fail_on_token=PROMPT[-1])
    headers = TRACED | {"x-request-id": "the-request"}
    monkeypatch.setattr(caplog.handler, "formatter", FORMATTERS[format_])
    with serve_fake(runtime=runtime) as server, httpx.Client(base_url=server.url, headers=headers) as client:
        told = run_session(client, BODY)
        client.post("/v1/verify", json={"items": [{"prefix": PROMPT}]})
    session, lines = told.open.session, caplog.text.splitlines()
    assert told.end.reason == "error" and session not in caplog.text and str(PROMPT) not in caplog.text
    own, item = (line for line in lines if "a sequence failed: model_fault" in line)
    if format_ is LogFormat.TEXT:
        assert own.endswith(
            f"[request_id=the-request trace_id={TRACE_ID} session={session_tag(session)} code=model_fault]"
        )
        return
    found = json.loads(own)
    assert found["time"].endswith("Z")
    assert found == {
        "time": found["time"],
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


def test_a_line_outside_of_requests_has_no_ids(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing of a record but what is listed."""
    monkeypatch.setattr(caplog.handler, "formatter", FORMATTERS[LogFormat.JSON])
    logging.getLogger("outrider.cloud").warning("hello", extra={"prompt": SECRET})
    assert set(json.loads(caplog.text)) == {"time", "level", "event", "logger", "message"}
