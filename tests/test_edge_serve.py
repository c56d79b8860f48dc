"""Tests the local endpoint: the target's text through any client, several drafted texts at a time."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tests.agents import SURE, Clock, free_port, proxy_to
from tests.commands import KEY, OTHER_KEY
from tests.fake_runtime import FakeBatchRuntime, FakeSequenceRuntime
from tests.faulty_proxy import FaultyProxy
from tests.local_endpoint import (
    DRAFTS,
    MESSAGES,
    PROMPT,
    LocalEndpoint,
    body,
    chunks_of,
    documents_of,
    expected,
    fake_draft,
    note_requests,
    on_drafts,
    posted,
    serve_local,
)
from tests.raw_server import NOT_FOUND, RawServer, raw_server
from tests.serving import FakeServer, StepGate, bearer, fake_tokenizer, serve_fake

from outrider.edge.serve.state import LocalSettings, OfflineSettings
from outrider.edge.serve.upstream import FACTS_S, Upstream
from outrider.models.client.client import VerifierClient
from outrider.models.client.messages import ByteCounts
from outrider.models.http.security import KeyRing
from outrider.models.wire.protocol import ModelFacts

FACTS = ModelFacts(
    name="fake",
    tokenizer=fake_tokenizer().fingerprint,
    vocab_size=fake_tokenizer().size,
    max_positions=4096,
    eos_token_ids=[0],
    has_chat_template=True,
    target="0" * 16,
)
"""Of the target that the module's server has."""
CHAT, ASKED = "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4}


def test_a_stream_gives_the_same_text(local: LocalEndpoint) -> None:
    """For each of two prompts the pieces add up to the whole; usage comes last, on request."""
    prompts = [PROMPT, "zip("]
    fields = body(prompt=prompts, stream=True, stream_options={"include_usage": True})
    *pieces, last = chunks_of(httpx.post(f"{local.url}/v1/completions", json=fields))
    for index, prompt in enumerate(prompts):
        own = [choice for chunk in pieces for choice in chunk["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in own) == expected(prompt) and own[-1]["finish_reason"] == "length"
    assert last["usage"]["completion_tokens"] == 96


def test_a_stop_string_ends_the_text_and_its_session(cloud: FakeServer, local: LocalEndpoint) -> None:
    """The stop string is not part of the text; the session in the cloud ends with it."""
    full = expected()
    stop = full[9:12]
    (choice,) = local.post(body(max_tokens=3000, stop=stop))["choices"]
    assert (choice["text"], choice["finish_reason"]) == (full[: full.index(stop)], "stop")
    cloud.wait_until(cloud.is_empty)
    local.wait_until(local.is_at_rest)
    # What of the prompt was cached is known only at the session's end, which a stop string brings there, too.
    long = {"prompt": "a prompt of some blocks " * 8}
    again = local.post(body(3000, **long, stop=local.text(24, **long)[9:12]))
    assert again["choices"][0]["finish_reason"] == "stop"
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= again["usage"]["prompt_tokens"] // 2


def test_a_stop_string_is_counted_where_the_stream_is_cut_before_its_end(cloud: FakeServer) -> None:
    """With the last of max_tokens: no other session is opened, so no server says why the text ended."""
    address = httpx.URL(cloud.url)
    with FaultyProxy(address.host, address.port or 0) as proxy, serve_local(proxy.url) as local:
        local.post(body(1))
        proxy.cut_after(b'"reason":', 1)
        (choice,) = local.post(body(1, stop=expected(count=1)[-1]))["choices"]
        local.wait_until(local.is_at_rest)
        assert (choice["finish_reason"], proxy.num_cuts > 0) == ("stop", True)
        assert local.core.metrics.texts == {"length": 1, "stop": 1}


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"skip_special_tokens": False}])
def test_a_text_without_a_cloud_is_kept_up_to_its_stop_string(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cloud can verify it later, also by a session that does not end at the stop string, and after the deadline."""
    wire = note_requests(monkeypatch)
    full, port = expected(), free_port()
    drafts = {"runtime": fake_draft(agreement=1.0), "offline": OfflineSettings("a-fake-draft", 4096)}
    with (
        serve_fake(config=SURE) as cloud,
        serve_local(f"http://127.0.0.1:{port}", DRAFTS, **drafts) as local,  # type: ignore[arg-type]
    ):
        asked = body(3000, stop=full[9:12], deadline_ms=60e3, **fields)
        url, headers = f"{local.url}/v1/completions", {"Cache-Control": "no-store"}
        found, text = documents_of(httpx.post(url, json=asked, headers=headers, timeout=60.0))
        local.wait_until(local.is_at_rest)
        with proxy_to(cloud.url, listen_port=port):
            (checked,) = local.post({"id": found[0]["id"]}, "/v1/outrider/verify")["choices"]
    assert text == checked["text"] == full[: full.index(full[9:12])]
    assert checked["is_same"] and checked["finish_reason"] == "stop"
    assert 0 < checked["confirmed_tokens"] < 12 and not checked["replaced_tokens"]
    ((_, sent, opened),) = [each for each in wire.sent if each[0] == "POST /v1/sessions"]
    assert sent["cache-control"] == "no-store" and "deadline_ms" not in json.loads(opened)


def test_a_session_has_its_requests_priority_deadline_and_cache_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of the deadline, at which the text ends as it is; one that has not begun gets 504."""
    wire, gate = note_requests(monkeypatch), StepGate()
    with serve_fake(gate=gate) as cloud, serve_local(cloud.url) as local, ThreadPoolExecutor(1) as pool:
        fields = body(3000, priority=-7, deadline_ms=2000.0)
        text = pool.submit(local.post, fields, headers={"Cache-Control": "max-age=0, No-Store"})
        while not text.done():
            gate.allow(1)
            time.sleep(0.02)
        (choice,), count = text.result()["choices"], text.result()["usage"]["completion_tokens"]
        assert (choice["finish_reason"], choice["text"]) == ("length", expected(count=count)) and 0 < count < 3000
        assert local.refusal(504, body(deadline_ms=1e-6)) == "deadline_exceeded"
        gate.open()
        local.post(body(1))
    (_, sent, asked), (_, plain, unasked) = [each for each in wire.sent if each[0] == "POST /v1/sessions"]
    assert sent["cache-control"] == "no-store" and json.loads(asked)["priority"] == -7
    assert 0.0 < json.loads(asked)["deadline_ms"] < 2000.0
    assert "cache-control" not in plain and not json.loads(unasked).keys() & {"priority", "deadline_ms"}


def test_four_texts_at_a_time_are_drafted_and_the_targets_own() -> None:
    """Each has a sequence of the draft; calls of the model serve several of them."""
    gate, arrived = StepGate(), set[int]()
    prompts = [f"{index} + {PROMPT}" for index in range(4)]
    with (
        serve_fake(config=SURE, gate=gate) as cloud,
        serve_local(cloud.url, DRAFTS, runtime=fake_draft(agreement=1.0)) as local,
        ThreadPoolExecutor(4) as pool,
    ):
        on_drafts(cloud, arrived.add)
        answers = [pool.submit(local.post, body(24, prompt=prompt)) for prompt in prompts]
        local.wait_until(lambda: len(arrived) == 4)  # the target stands still until then
        gate.open()
        texts = [answer.result()["choices"][0]["text"] for answer in answers]
        assert texts == [expected(prompt, 24) for prompt in prompts]
        counted = [answer.result()["usage"]["completion_tokens_details"] for answer in answers]
        assert sum(each["accepted_prediction_tokens"] for each in counted) > 0
        assert local.core.drafts.scheduler.num_shared > 0
        cloud.wait_until(cloud.is_empty)
        local.wait_until(local.is_at_rest)


def test_where_the_draft_holds_one_sequence_the_others_stream_without_it() -> None:
    """One text drafts with the model; the other gets its text all the same."""
    gate, single = StepGate(), fake_draft()

    class Single:
        """What an NPU's runtime has, and nothing else."""

        limits, extend, truncate, close = single.limits, single.extend, single.truncate, single.close
        length = 0

    with (
        serve_fake(config=SURE, gate=gate) as cloud,
        serve_local(cloud.url, DRAFTS, runtime=Single()) as local,
        ThreadPoolExecutor(2) as pool,
    ):
        prompts = ["1 + x", "2 + x"]
        texts = [pool.submit(local.text, prompt=prompt) for prompt in prompts]
        local.wait_until(lambda: len(cloud.core.sessions) == 2)
        assert local.core.drafts.max_sequences == local.core.drafts.num_lent == 1
        gate.open()
        assert [text.result(30.0) for text in texts] == [expected(prompt) for prompt in prompts]


def test_a_text_goes_on_where_the_first_verifier_fails(cloud: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one finishes it; the text after that begins there."""
    monkeypatch.setattr("outrider.edge.link.fleet.CLEARLY", 1e9)  # times of this machine do not choose
    gate = StepGate()
    gate.allow(3)
    with serve_fake(config=SURE, gate=gate) as first, serve_local([first.url, cloud.url]) as local:
        url, asked = f"{local.url}/v1/completions", body(stream=True)
        with httpx.stream("POST", url, json=asked, timeout=30.0) as answer:
            lines = answer.iter_lines()
            begun = next(lines)
            first.server.begin_drain(0.0)
            gate.open()
            events = [json.loads(line[6:]) for line in (begun, *lines) if line.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in events) == expected()
        assert local.core.upstream.fleet.ranked()[0].url == cloud.url


def test_the_next_turn_takes_over_the_drafts_cache(cloud: FakeServer) -> None:
    """A sequence keeps its text for its own client only, and memory is bounded by the number of sequences."""
    runs, long, size = list[int](), "x = 1\n" * 60, fake_tokenizer().size
    runtime = FakeSequenceRuntime(vocab_size=size, agreement=0.8, on_step=lambda tokens: runs.append(len(tokens)))
    settings = LocalSettings(KeyRing([KEY, OTHER_KEY]), depth="8")
    quarter = len(fake_tokenizer().encode(long)) // 4
    with serve_local(cloud.url, settings, runtime=runtime, max_sequences=1) as local:
        for prompt, key, is_new in ((long, KEY, True), (long + "y", KEY, False), (long + "y", OTHER_KEY, True)):
            runs.clear()
            local.post(body(prompt=prompt), headers=bearer(key))
            local.wait_until(local.is_at_rest)
            local.core.drafts.scheduler.join()
            assert (max(runs) >= quarter) == is_new
    assert runtime.opened == []


async def test_bytes_are_counted_by_text(cloud: FakeServer) -> None:
    """Texts that run at the same time share connections, not figures; closing one text's client closes nothing."""
    async with VerifierClient(cloud.url) as client:
        first, second = client.for_one_text(), client.for_one_text()
        await first.model_facts()
        await first.aclose()
        assert second.wire == client.wire == ByteCounts()
        await second.ready()
        assert second.wire.body_down != first.wire.body_down > 0 < second.wire.body_down


def test_texts_keep_the_targets_facts(local: LocalEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text does not wait for them where another was served by the same target within 30 s; for 5 minutes at most."""
    clock, asked, model_facts = Clock(), list[float](), VerifierClient.model_facts
    clock.now = 1e6

    async def counted(self: VerifierClient) -> ModelFacts:
        asked.append(clock.now)
        return await model_facts(self)

    for name, value in {"clock": clock, "_facts": None, "_confirmed_at": 0.0}.items():
        monkeypatch.setattr(local.core.upstream, name, value)
    monkeypatch.setattr(VerifierClient, "model_facts", counted)
    for passed_s in [29.0] * 11 + [31.0, 0.0]:
        local.text(1)
        clock.now += passed_s
    assert asked == [1e6, 1e6 + 11 * 29.0, clock.now]


def test_a_prompt_that_no_target_takes_reaches_no_draft(cloud: FakeServer) -> None:
    """200,000 ids fit into a body; what the draft keeps of a prompt to copy from it took 150 MB."""
    with serve_local(cloud.url) as local:
        assert local.refusal(400, body(1, prompt=[5] * 200_000)) == "context_length_exceeded"
        for empty in ({"prompt": ["a", ""]}, {"prompt": "", "documents": [{"text": "a"}]}):
            assert local.refusal(400, empty) == "empty_prompt"
        assert not local.core.drafts.scheduler.num_calls
        local.wait_until(local.is_at_rest)


async def test_many_clients_ask_a_slow_verifier_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they take all connections to it. Facts that are known serve while it does not answer."""
    asked, answers, clock = list[str](), asyncio.Event(), Clock()
    ready = {"status": "ready", "model": "fake", "running": 0, "queue_depth": 0}

    async def slow(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        await answers.wait()
        return httpx.Response(200, json=FACTS.model_dump() if request.url.path == "/v1/model" else ready)

    client = VerifierClient("http://127.0.0.1:1", transport=httpx.MockTransport(slow))
    upstream = Upstream([client], FACTS.tokenizer, clock=clock)
    waiting = [asyncio.create_task(upstream.facts(is_fresh=number % 2 == 0)) for number in range(20)]
    probes = [asyncio.create_task(upstream.ready()) for _ in range(20)]
    while len(asked) < 2:
        await asyncio.sleep(0)
    waiting.pop().cancel()
    answers.set()
    assert await asyncio.gather(*waiting) == [FACTS] * 19
    assert [each.model for each in await asyncio.gather(*probes)] == ["fake"] * 20
    assert sorted(asked) == ["/health/ready", "/v1/model"]
    answers.clear()
    clock.now += FACTS_S
    monkeypatch.setattr("outrider.edge.serve.upstream.PATIENT_S", 0.0)
    assert [await upstream.facts() for _ in range(3)] == [FACTS] * 3
    await upstream.aclose()
    assert asked.count("/v1/model") <= 2


async def test_chats_that_a_verifier_never_renders_take_their_clients_places_only(
    cloud: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked no more than a client may have texts, and another client's text is written meanwhile."""
    asked = list[bytes]()

    async def never(client: VerifierClient, conversation: bytes) -> None:
        asked.append(conversation)
        await asyncio.Event().wait()

    monkeypatch.setattr(VerifierClient, "render", never)
    with serve_local(cloud.url, LocalSettings(KeyRing([KEY, OTHER_KEY]), max_own=2)) as local:
        async with httpx.AsyncClient(base_url=local.url, headers=bearer(KEY), timeout=30.0) as client:
            chats = [asyncio.create_task(client.post(CHAT, json=ASKED)) for _ in range(6)]
            for refused in itertools.islice(asyncio.as_completed(chats), 4):
                assert (await refused).status_code == 429
            other = await client.post("/v1/completions", json=body(), headers=bearer(OTHER_KEY))
            assert other.json()["choices"][0]["text"] == expected() and len(asked) == 2
            for each in chats:
                each.cancel()
        local.wait_until(local.is_at_rest)


def test_a_client_that_leaves_before_its_text_begins_frees_its_place(
    cloud: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its documents may take seconds to index; other texts do not wait for them."""
    goes_on, began = threading.Event(), threading.Event()

    def encode(tokenizer: object, max_tokens: int, body: object) -> list[list[int]]:
        began.set()
        goes_on.wait(60.0)
        return [[5]]

    monkeypatch.setattr("outrider.edge.serve.routes.encode_prompts", encode)
    with serve_local(cloud.url) as local:
        with posted(local):
            assert began.wait(30.0) and local.core.places.total == 1
        local.wait_until(local.is_at_rest)
        goes_on.set()


def test_a_text_is_written_by_the_target_that_its_answer_names(cloud: FakeServer) -> None:
    """Where another target took the place of the known one, the text is refused; the next request knows the new one."""
    other = FakeBatchRuntime(vocab_size=fake_tokenizer().size, seed=7)
    with serve_fake(runtime=other, name="other") as second, serve_local([cloud.url, second.url]) as local:
        assert local.post(ASKED, CHAT)["model"] == "fake"
        upstream = local.core.upstream
        del upstream.fleet.clients[0]  # the first one is gone, and the second answers
        for path, fields in (("/v1/completions", body()), (CHAT, ASKED)):
            error = local.post(fields, path, 503)["error"]
            assert error["code"] == "no_verifier" and "another target" in error["message"]
            assert local.post(fields, path)["model"] == "other"
            upstream._facts = (upstream.clock(), FACTS)


def test_the_server_is_ready_while_it_still_looks_for_its_verifier(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the look finds is logged when it has ended."""
    may_answer = threading.Event()

    def slow(server: RawServer, connection: Any) -> None:
        assert may_answer.wait(30.0)
        connection.sendall(NOT_FOUND)

    monkeypatch.setattr("outrider.edge.serve.server.LOOK_S", 0.0)
    with raw_server(slow) as cloud, serve_local(cloud.url) as local:
        assert httpx.get(f"{local.url}/health/live").status_code == 200
        assert "it is still looked for" in caplog.text and "requests get 503" not in caplog.text
        may_answer.set()
        local.wait_until(lambda: "no verifier yet; requests get 503, still trying" in caplog.text)


def test_a_start_without_a_verifier_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """The command has named the address that does not answer before."""
    with serve_local("http://127.0.0.1:9") as local:
        assert httpx.get(f"{local.url}/health/live").status_code == 200
    assert caplog.messages == ["no verifier yet; requests get 503, still trying"]
