"""Tests the local endpoint: the target's text through any client, several drafted texts at a time, and who may call."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send
from tests.fake_runtime import FakeBatchRuntime, FakeSequenceRuntime
from tests.local_endpoint import LocalEndpoint, fake_draft, local_core, serve_local
from tests.serving import FakeServer, StepGate, fake_tokenizer, save_fake_tokenizer, serve_fake, target_tokens
from tests.test_bundle import make_manifest

from outrider.cloud.api.state import ServerSettings
from outrider.cloud.engine import EngineConfig, Policy
from outrider.edge.cli import main as cli
from outrider.edge.serve import routes
from outrider.edge.serve import upstream as upstream_module
from outrider.edge.serve.neighbours import OwnUser
from outrider.edge.serve.server import LocalServer
from outrider.edge.serve.state import LocalSettings
from outrider.edge.serve.upstream import FACTS_S, Upstream
from outrider.models.bundle.bundle_writer import BundleWriter
from outrider.models.client.checks import check_rendered
from outrider.models.client.client import VerifierClient
from outrider.models.client.errors import ProtocolBroken
from outrider.models.client.messages import ByteCounts
from outrider.models.errors import ModelFault, RequestError, TokenizerMismatch
from outrider.models.http import openai_answers
from outrider.models.http.security import KeyRing, PagePolicy
from outrider.models.ingress.sockets import READY_PREFIX, open_socket
from outrider.models.picks.sampling import SamplingParams
from outrider.models.wire.protocol import ModelFacts, RenderAnswer
from outrider.models.wire.tree_draft import TreeDraft

PROMPT = "def verify(tokens, drafts):"
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 5}
PARAMS = SamplingParams(0.8, top_p=0.95, seed=5)
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "zip("}]
KEY = "a-key-of-the-device"
SURE = EngineConfig(policy=Policy.VERIFY, looks_up=False)
"""Verifies what a device sends and nothing else, whatever the times of this machine are."""
DRAFTS = LocalSettings(depth="8")


@pytest.fixture(scope="module")
def cloud() -> Iterator[FakeServer]:
    with serve_fake(config=SURE) as running:
        yield running


@pytest.fixture(scope="module")
def local(cloud: FakeServer) -> Iterator[LocalEndpoint]:
    with serve_local(cloud.url, DRAFTS) as running:
        yield running


@pytest.fixture(scope="module")
def client(local: LocalEndpoint) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=local.url, timeout=30.0) as opened:
        yield opened


def chunks_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The data of a stream's events; checks that it ends with [DONE]."""
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def expected(prompt: str = PROMPT, count: int = 48, params: SamplingParams = PARAMS) -> str:
    return fake_tokenizer().decode(target_tokens(fake_tokenizer().encode(prompt), count, params))


def body(max_tokens: int = 48, **fields: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True, **SAMPLED, **fields}


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    return error


def drafted(
    cloud: FakeServer, local: LocalEndpoint, gate: StepGate, bodies: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Completions at the same time; the target stands still until the device has sent drafts of each."""
    engine, arrived = cloud.core.engine, set[int]()
    take = engine.draft_tree

    def counted(sequence_id: int, message: TreeDraft) -> None:
        take(sequence_id, message)
        arrived.add(sequence_id)

    engine.draft_tree = counted  # type: ignore[method-assign]
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = [pool.submit(httpx.post, f"{local.url}/v1/completions", json=each, timeout=60.0) for each in bodies]
        local.wait_until(lambda: len(arrived) == len(bodies))
        gate.open()
        for answer in answers:
            assert answer.result().status_code == 200, answer.result().text
        return [answer.result().json() for answer in answers]


def num_accepted(completions: Sequence[dict[str, Any]]) -> int:
    return sum(each["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] for each in completions)


def test_a_completion_is_the_targets_text(client: httpx.Client) -> None:
    """The same text as the target alone writes, its reason and its usage."""
    answer = client.post("/v1/completions", json=body())
    assert answer.status_code == 200, answer.text
    openai_answers.Completion.model_validate_json(answer.content)
    completion = answer.json()
    assert completion["choices"][0]["text"] == expected() and completion["choices"][0]["finish_reason"] == "length"
    assert completion["model"] == "fake" and completion["seed"] == 5
    num_prompt = len(fake_tokenizer().encode(PROMPT))
    assert (completion["usage"]["prompt_tokens"], completion["usage"]["completion_tokens"]) == (num_prompt, 48)


def test_a_stream_gives_the_same_text(client: httpx.Client) -> None:
    """For each of two prompts the pieces add up to the whole; usage comes last, on request."""
    prompts = [PROMPT, "zip("]
    fields = body(prompt=prompts, stream=True, stream_options={"include_usage": True})
    *pieces, last = chunks_of(client.post("/v1/completions", json=fields))
    for index, prompt in enumerate(prompts):
        own = [choice for chunk in pieces for choice in chunk["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in own) == expected(prompt)
        assert own[-1]["finish_reason"] == "length"
    assert last["usage"]["completion_tokens"] == 96


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_chat_is_what_the_cloud_alone_answers(cloud: FakeServer, client: httpx.Client, is_stream: bool) -> None:
    """The target's template makes the prompt, on the server."""
    fields = {"messages": MESSAGES, "max_tokens": 40, "ignore_eos": True, **SAMPLED}
    alone = httpx.post(f"{cloud.url}/v1/chat/completions", json=fields).json()["choices"][0]["message"]["content"]
    answer = client.post("/v1/chat/completions", json=fields | {"stream": is_stream})
    assert answer.status_code == 200, answer.text
    if is_stream:
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks_of(answer))
    else:
        openai_answers.ChatCompletion.model_validate_json(answer.content)
        text = answer.json()["choices"][0]["message"]["content"]
    assert text == alone and alone


def test_a_stop_string_ends_the_text_and_its_session(
    cloud: FakeServer, local: LocalEndpoint, client: httpx.Client
) -> None:
    """The stop string is not part of the text; the session in the cloud ends with it."""
    full = expected()
    stop = full[9:12]
    answer = client.post("/v1/completions", json=body(max_tokens=3000, stop=stop)).json()
    assert answer["choices"][0]["text"] == full[: full.index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"
    cloud.wait_until(cloud.is_empty)
    local.wait_until(local.is_at_rest)
    # What of the prompt was cached is known only at the session's end, which a stop string brings there, too.
    long = body(prompt="a prompt of some blocks " * 8, max_tokens=3000)
    whole = client.post("/v1/completions", json=long | {"max_tokens": 24}).json()
    again = client.post("/v1/completions", json=long | {"stop": whole["choices"][0]["text"][9:12]}).json()
    assert again["choices"][0]["finish_reason"] == "stop"
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= again["usage"]["prompt_tokens"] // 2


def test_four_texts_at_a_time_are_drafted_and_the_targets_own() -> None:
    """Each has a sequence of the draft; calls of the model serve several of them."""
    gate = StepGate()
    prompts = [f"{index} + {PROMPT}" for index in range(4)]
    with (
        serve_fake(config=SURE, gate=gate) as cloud,
        serve_local(cloud.url, DRAFTS, runtime=fake_draft(agreement=1.0)) as local,
    ):
        completions = drafted(cloud, local, gate, [body(24, prompt=prompt) for prompt in prompts])
        assert [each["choices"][0]["text"] for each in completions] == [expected(each, 24) for each in prompts]
        assert num_accepted(completions) > 0
        assert local.core.drafts.scheduler.num_shared > 0
        cloud.wait_until(cloud.is_empty)
        local.wait_until(local.is_at_rest)


def test_where_the_draft_holds_one_sequence_the_others_stream_without_it() -> None:
    """One text drafts with the model; the other gets its text all the same."""
    gate = StepGate()
    single = FakeSequenceRuntime(vocab_size=fake_tokenizer().size, agreement=0.8)

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
        answers = [
            pool.submit(httpx.post, f"{local.url}/v1/completions", json=body(prompt=prompt), timeout=30.0)
            for prompt in prompts
        ]
        local.wait_until(lambda: len(cloud.core.sessions) == 2)
        assert local.core.drafts.max_sequences == local.core.drafts.num_lent == 1
        gate.open()
        texts = [answer.result(30.0).json()["choices"][0]["text"] for answer in answers]
        assert texts == [expected(prompt) for prompt in prompts]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_frees_everything(is_stream: bool) -> None:
    """The cloud's session ends, the draft's sequence is back, the place is free."""
    gate = StepGate()
    with serve_fake(config=SURE, gate=gate) as cloud, serve_local(cloud.url) as local:
        gate.allow(3)
        content = json.dumps(body(max_tokens=3000, stream=is_stream)).encode()
        address = httpx.URL(local.url)
        with socket.create_connection((address.host, address.port or 0)) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
            connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + content)
            cloud.wait_until(lambda: len(cloud.core.sessions) == 1)
            if is_stream:
                assert connection.recv(12) == b"HTTP/1.1 200"
        gate.open()
        local.wait_until(local.is_at_rest)
        cloud.wait_until(cloud.is_empty)
        local.core.drafts.scheduler.join()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
    ],
)
def test_what_the_verifier_does_not_offer_is_refused_by_name(
    client: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    """With OpenAI's shape of errors."""
    for path, whole in (("/v1/completions", body()), ("/v1/chat/completions", {"messages": MESSAGES})):
        answer = client.post(path, json=whole | fields)
        assert answer.status_code == 400
        error = error_of(answer)
        assert (error["code"], error["param"], error["type"]) == (
            "unsupported_parameter",
            param,
            "invalid_request_error",
        )


def test_models_and_paths(client: httpx.Client) -> None:
    """The target is the one model; other names and other paths are 404, other methods 405."""
    (card,) = client.get("/v1/models").json()["data"]
    assert card["id"] == "fake" and card == client.get("/v1/models/fake").json()
    openai_answers.ModelCard.model_validate(card)
    assert client.get("/v1/models/other").status_code == 404
    assert error_of(client.post("/v1/completions", json=body(model="other")))["code"] == "model_not_found"
    assert error_of(client.get("/v1/nothing"))["code"] == "not_found"
    assert error_of(client.get("/v1/completions"))["code"] == "method_not_allowed"


def test_probes(client: httpx.Client) -> None:
    """Readiness says what drafts, and whether a verifier answers."""
    assert client.get("/health/live").json() == {"status": "live"}
    ready = client.get("/health/ready")
    assert ready.status_code == 200 and client.head("/health/ready").status_code == 200
    # A page may come under a name of its own that resolves to this machine; probes do, too.
    assert client.get("/health/ready", headers={"Host": "evil.example"}).json() == {"status": "ready"}
    assert ready.json()["model"] == "fake" and ready.json()["draft_sequences"] == 4
    (cloud,) = ready.json()["clouds"]
    assert (cloud["state"], cloud["model"]) == ("up", "fake") and cloud["round_trip_ms"] >= 0.0
    with serve_local("http://127.0.0.1:9") as alone:
        answer = httpx.get(f"{alone.url}/health/ready")
        assert answer.status_code == 503 and answer.json()["status"] == "no_verifier"
        assert [each["state"] for each in answer.json()["clouds"]] == ["down"]


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Host": "rebound.example.com"}, "host_not_allowed"),
        ({"Origin": "https://page.example.com"}, "origin_not_allowed"),
        ({"Sec-Fetch-Site": "cross-site"}, "origin_not_allowed"),
    ],
)
def test_a_page_of_another_site_cannot_call(client: httpx.Client, headers: dict[str, str], code: str) -> None:
    """Neither by a name that resolves to this machine, nor from its own origin; no CORS header helps it."""
    answer = client.post("/v1/completions", json=body(), headers=headers)
    assert answer.status_code == 403 and error_of(answer)["code"] == code
    assert "access-control-allow-origin" not in answer.headers
    plain = client.post("/v1/completions", content=json.dumps(body()), headers={"Content-Type": "text/plain"})
    assert plain.status_code == 415


def test_cors_is_for_configured_origins_only(cloud: FakeServer) -> None:
    """A page of an allowed origin may ask and read answers, errors too."""
    origin = "https://chat.example.com"
    pages = PagePolicy(is_keyless=True, allowed_origins=[origin])
    with serve_local(cloud.url, LocalSettings(pages=pages, allowed_origins=(origin,))) as local:
        # Also what OpenAI's client adds in a page.
        named = "authorization,content-type,x-stainless-lang,x-stainless-retry-count"
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": named}
        preflight = httpx.options(f"{local.url}/v1/completions", headers={"Origin": origin, **asked})
        assert preflight.status_code == 200 and preflight.headers["access-control-allow-origin"] == origin
        other = httpx.options(f"{local.url}/v1/completions", headers={"Origin": "https://other.example.com", **asked})
        assert other.status_code == 400 and "access-control-allow-origin" not in other.headers
        refused = httpx.post(f"{local.url}/v1/completions", json={}, headers={"Origin": origin})
        assert refused.status_code == 400 and refused.headers["access-control-allow-origin"] == origin


def test_keys_and_bounds(cloud: FakeServer) -> None:
    """A key where one is configured; the device's own goes to the verifier only. Texts and bodies are bounded."""
    gate = StepGate()
    settings = LocalSettings(KeyRing([KEY, KEY + "-2"]), max_body_bytes=2000, max_requests=2, max_own=1)
    with (
        serve_fake(ServerSettings(KeyRing([KEY * 2])), gate=gate) as guarded,
        serve_local(guarded.url, settings, api_key=KEY * 2) as local,
        httpx.Client(base_url=local.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=30.0) as client,
    ):
        assert httpx.get(f"{local.url}/v1/models").status_code == 401
        assert httpx.get(f"{local.url}/v1/models", headers={"Authorization": f"Bearer {KEY * 2}"}).status_code == 401
        assert httpx.get(f"{local.url}/health/ready").status_code == 200
        assert client.post("/v1/completions", json=body(stop="x" * 3000)).status_code == 413
        assert error_of(client.post("/v1/completions", json=body(prompt=["a", "b"])))["code"] == "invalid_parameter"
        with client.stream("POST", "/v1/completions", json=body(stream=True, max_tokens=3000)):
            refused = client.post("/v1/completions", json=body())
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
            other = {"Authorization": f"Bearer {KEY}-2"}
            with client.stream("POST", "/v1/completions", json=body(stream=True, max_tokens=3000), headers=other):
                local.core.places.max_each = 5
                full = client.post("/v1/completions", json=body())
                assert full.status_code == 503 and error_of(full)["code"] == "overloaded"
        gate.open()
        local.wait_until(local.is_at_rest)


def test_a_verifier_that_fails_is_reported(cloud: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    """No verifier: 503, so that clients try again. One that refuses the device's key: 502. No prompt is logged."""
    with serve_local("http://127.0.0.1:9") as alone:
        answer = httpx.post(f"{alone.url}/v1/completions", json=body())
        assert answer.status_code == 503 and error_of(answer)["code"] == "no_verifier"
        assert answer.headers["retry-after"] == "1"
    with (
        serve_fake(ServerSettings(KeyRing([KEY]))) as guarded,
        serve_local(guarded.url, LocalSettings(shows_details=False)) as local,
    ):
        answer = httpx.post(f"{local.url}/v1/completions", json=body())
        assert answer.status_code == 502 and error_of(answer)["code"] == "verifier_refused"
        assert guarded.url not in answer.text and "verifier_refused" in caplog.text
    too_long = httpx.post(f"{cloud.url}/v1/completions", json=body(prompt="a b " * 9000))
    with serve_local(cloud.url) as local:
        refused = httpx.post(f"{local.url}/v1/completions", json=body(prompt="a b " * 9000))
        assert refused.status_code == 400 and error_of(refused)["code"] == error_of(too_long)["code"]
    assert PROMPT not in caplog.text


def test_a_target_without_a_template_takes_no_messages() -> None:
    """A clear error; completions work."""
    with serve_fake(has_chat_template=False) as cloud, serve_local(cloud.url) as local:
        answer = httpx.post(f"{local.url}/v1/chat/completions", json={"messages": MESSAGES})
        assert answer.status_code == 400 and error_of(answer)["code"] == "no_chat_template"
        assert httpx.post(f"{local.url}/v1/completions", json=body()).status_code == 200


def test_a_draft_for_another_target_is_refused_at_the_start(cloud: FakeServer) -> None:
    """Its token ids would mean other text."""
    core = local_core(cloud.url, fingerprint="0" * 64)
    with open_socket("127.0.0.1", 0) as sock, pytest.raises(TokenizerMismatch, match="made for this target"):
        asyncio.run(LocalServer(core, drain_s=0.0).startup([sock]))


def test_a_text_goes_on_where_the_first_verifier_fails(cloud: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one finishes it; the text after that begins there."""
    monkeypatch.setattr("outrider.edge.link.fleet.CLEARLY", 1e9)  # times of this machine do not choose
    gate = StepGate()
    with (
        serve_fake(config=SURE, gate=gate) as first,
        serve_local([first.url, cloud.url]) as local,
        httpx.Client(timeout=30.0) as client,
    ):
        gate.allow(3)
        with client.stream("POST", f"{local.url}/v1/completions", json=body(stream=True)) as answer:
            lines = answer.iter_lines()
            got = [next(lines)]
            first.server.begin_drain(0.0)
            gate.open()
            got += list(lines)
        events = [json.loads(line[6:]) for line in got if line.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in events) == expected()
        assert local.core.upstream.fleet.ranked()[0].url == cloud.url


def test_a_draft_that_breaks_costs_only_the_draft(cloud: FakeServer) -> None:
    """One text's draft fails; its text is whole, and the sequence drafts again for the next."""
    fails, calls = threading.Event(), list[int]()

    def step(tokens: Sequence[int]) -> None:
        calls.append(len(tokens))
        if fails.is_set():
            fails.clear()
            raise ModelFault("the draft's logits are not finite")

    runtime = FakeSequenceRuntime(vocab_size=fake_tokenizer().size, agreement=0.8, on_step=step)
    with serve_local(cloud.url, DRAFTS, runtime=runtime, draft_pause_s=0.0) as local:
        fails.set()
        for _ in range(2):
            calls.clear()
            answer = httpx.post(f"{local.url}/v1/completions", json=body(), timeout=30.0)
            assert answer.json()["choices"][0]["text"] == expected()
            local.wait_until(lambda: bool(calls) and local.is_at_rest())
            local.core.drafts.scheduler.join()
            assert not fails.is_set()


def test_the_next_turn_takes_over_the_drafts_cache(cloud: FakeServer) -> None:
    """A sequence keeps its text for its own client only, and memory is bounded by the number of sequences."""
    runs: list[int] = []
    runtime = FakeSequenceRuntime(
        vocab_size=fake_tokenizer().size, agreement=0.8, on_step=lambda tokens: runs.append(len(tokens))
    )
    settings = LocalSettings(KeyRing([KEY, KEY + "-2"]), depth="8")
    long = "x = 1\n" * 60
    with serve_local(cloud.url, settings, runtime=runtime, max_sequences=1) as local:

        def turn(prompt: str, key: str) -> int:
            runs.clear()
            headers = {"Authorization": f"Bearer {key}"}
            answer = httpx.post(f"{local.url}/v1/completions", json=body(prompt=prompt), headers=headers, timeout=30.0)
            assert answer.status_code == 200, answer.text
            local.wait_until(local.is_at_rest)
            local.core.drafts.scheduler.join()
            return max(runs)

        num_tokens = len(fake_tokenizer().encode(long))
        assert turn(long, KEY) >= num_tokens // 4
        assert turn(long + "y", KEY) < num_tokens // 4
        assert turn(long + "y", KEY + "-2") >= num_tokens // 4
    assert runtime.opened == []


def test_a_server_that_ends_says_so() -> None:
    """A text in work gets its error; new ones are refused meanwhile."""
    gate = StepGate()
    with serve_fake(config=SURE, gate=gate) as cloud, serve_local(cloud.url, drain_s=30.0) as local:
        gate.allow(2)
        with httpx.stream("POST", f"{local.url}/v1/completions", json=body(stream=True, max_tokens=3000)) as answer:
            lines = answer.iter_lines()
            next(lines)
            local.server.begin_drain(30.0)
            refused = httpx.post(f"{local.url}/v1/completions", json=body())
            assert refused.status_code == 503 and error_of(refused)["code"] == "shutting_down"
            local.server.begin_drain(0.0)
            assert any("shutting_down" in line for line in lines)


def test_another_user_of_the_machine_cannot_call_without_a_key(tmp_path: Path) -> None:
    """The system's table says whose the connection is; one that is closed, or not there, is nobody's."""
    table, reached = tmp_path / "tcp", list[str]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        reached.append(scope["path"])

    def call(host: str, rows: Sequence[str], path: str = "/v1/models", server: str = "127.0.0.1") -> None:
        table.write_text("\n".join(["  sl  local_address ...", *rows, ""]))
        scope = {"type": "http", "method": "GET", "path": path, "client": (host, 4660), "server": (server, 8077)}
        layer = OwnUser(app, ["/health/live"], [table, tmp_path / "none"])
        asyncio.run(layer(scope, None, None))  # type: ignore[arg-type]

    def row(user: int, local: str = "0100007F:1234", state: str = "01") -> str:
        return f"   0: {local} 0100007F:1F8D {state} 00000000:00000000 00:00000000 00000000 {user} 0 77"

    own = os.getuid()
    call("127.0.0.1", [row(4321, "0100007F:9999"), row(own)])
    call("127.0.0.1", [row(0)])
    call("::ffff:127.0.0.1", [row(own, "0000000000000000FFFF00000100007F:1234")])
    call("::1", [row(own, "00000000000000000000000001000000:1234")])
    call("192.0.2.7", [], server="192.0.2.8")  # not over loopback: the gate's business
    call("127.0.0.1", [], path="/health/live")
    call("192.0.2.8", [row(own, "080200C0:1234")])
    assert len(reached) == 7
    for rows in ([row(4321)], [row(4321, state="06")], [row(0, state="06")] if own else [], []):
        with pytest.raises(RequestError) as refused:
            call("127.0.0.1", rows)
        assert (refused.value.code, refused.value.status) == ("other_user", 403)
    for host, server in (("192.0.2.8", "127.0.0.1"), ("127.0.0.1", "192.0.2.8")):
        with pytest.raises(RequestError, match="another user"):  # a program may call from any address of its machine
            call(host, [row(4321, "080200C0:1234"), row(4321)], server=server)
    assert len(reached) == 7


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_system_names_the_owner_of_one_connection(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without reading the tables, which takes milliseconds. Who listens at the caller's address is not the caller."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    empty, reached = tmp_path / "tcp", list[str]()
    empty.write_text("  sl  local_address ...\n")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        reached.append(scope["path"])

    def call(client: tuple[str, int], server: tuple[str, int]) -> None:
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "client": client, "server": server}
        asyncio.run(OwnUser(app, [], [empty])(scope, None, None))  # type: ignore[arg-type]

    with ExitStack() as stack:
        try:
            listener = stack.enter_context(socket.create_server((host, 0), family=family))
        except OSError:
            pytest.skip(f"no sockets on {host}")
        server = listener.getsockname()[:2]
        caller = stack.enter_context(socket.create_connection(server))
        client = caller.getsockname()[:2]
        call(client, server)
        assert reached == ["/v1/completions"]
        for other in (listener.getsockname()[:2], (host, 1)):
            with pytest.raises(RequestError, match="another user"):
                call(other, server)
        monkeypatch.setattr("outrider.edge.serve.neighbours.owner_of", lambda *_: 4321)
        with pytest.raises(RequestError, match="another user"):
            call(client, server)
    assert reached == ["/v1/completions"]


@pytest.fixture
def fake_bundle(tmp_path: Path) -> Path:
    """A draft bundle with the fake server's tokenizer and a model that nothing can run."""
    with BundleWriter(tmp_path / "draft") as writer:
        save_fake_tokenizer(writer.directory)
        for suffix in ("xml", "bin"):
            (writer.directory / f"openvino_model.{suffix}").write_text("none")
        return writer.commit(make_manifest(writer.list_files(), fake_tokenizer().fingerprint)).path


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Exit code of `outrider ARGUMENTS` in this process."""
    monkeypatch.setattr(sys, "argv", ["outrider", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_the_command_serves_the_text_of_outrider_run(
    cloud: FakeServer, fake_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a process: it says where it listens, and SIGTERM ends it."""
    given = ["--cloud", cloud.url, "--draft", str(fake_bundle), "--runtime", "ngram"]
    command = [sys.executable, "-m", "outrider.edge.cli", "serve", *given, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            url = process.stdout.readline().removeprefix(READY_PREFIX).strip()
            answer = httpx.post(f"{url}/v1/completions", json=body(), timeout=30.0)
        finally:
            process.terminate()
        assert "draft: n-gram lookup, no model\n" in process.stdout.read()
        log = process.stderr.read()
        assert process.wait(30.0) in (0, -signal.SIGTERM) and "Traceback" not in log and PROMPT not in log
    sampled = ["--temperature", "0.8", "--param", "top_p=0.95", "--seed", "5", "--max-tokens", "48", "--ignore-eos"]
    assert run_main(monkeypatch, "run", PROMPT, *given, *sampled) == 0
    assert capsys.readouterr().out.removesuffix("\n") == answer.json()["choices"][0]["text"] == expected()


def test_threads_at_work_give_the_event_loop_its_turn_soon(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server's loop shares one process with the indexing of documents."""
    intervals: list[float] = []
    monkeypatch.setattr("sys.setswitchinterval", intervals.append)
    monkeypatch.setattr("outrider.edge.cli.serve.configure_logging", lambda format_: None)
    assert run_main(monkeypatch, "serve", "--port", "0", "--draft", "nowhere") == 2
    assert intervals == [0.001] and "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--draft", "nowhere"], "nowhere"),
        (["--host", "0.0.0.0"], "refusing to listen on 0.0.0.0 without API keys"),
        (["--width", "9"], "width is '9'"),
        (["--depth", "deep"], "expected auto, threshold or a number"),
        (["--cloud", "ftp://x"], "the cloud's address"),
        (["--tls-cert", "x.pem"], "HTTPS needs both"),
        (["--allowed-origin", "chat"], "an allowed origin is 'chat'"),
    ],
)
def test_a_mistake_shows_before_the_draft_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    """One clear line, and exit code 2."""
    monkeypatch.setattr(
        "outrider.edge.cli.draft_source.default_draft", lambda choice: pytest.fail("a draft was exported")
    )
    monkeypatch.setattr("outrider.edge.cli.serve.configure_logging", lambda format_: None)
    assert run_main(monkeypatch, "serve", "--port", "0", *options) == 2
    shown = capsys.readouterr()
    assert message in shown.err and shown.err.count("\n") == 1 and shown.out == ""


def test_bytes_are_counted_by_text(cloud: FakeServer) -> None:
    """Texts that run at the same time share connections, not figures; closing one text's client closes nothing."""

    async def ask() -> None:
        async with VerifierClient(cloud.url) as client:
            first, second = client.for_one_text(), client.for_one_text()
            await first.model_facts()
            await first.aclose()
            assert first.wire.body_down > 0 and second.wire == client.wire == ByteCounts()
            await second.ready()
            assert second.wire.body_down > 0 and second.wire != first.wire

    asyncio.run(ask())


@pytest.mark.parametrize("tokens", [[], [-1], [1 << 31]])
def test_a_server_cannot_render_what_no_session_takes(tokens: list[int]) -> None:
    """A conversation's ids are checked as all others that a server sends."""
    with pytest.raises(ProtocolBroken):
        check_rendered("http://x", RenderAnswer(tokens=tokens, model="fake"))


def test_texts_keep_the_targets_facts(
    cloud: FakeServer, local: LocalEndpoint, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text does not wait for them where another was served by the same target within 30 s; for 5 minutes at most."""
    upstream, now, asked = local.core.upstream, [1e6], list[float]()
    model_facts = VerifierClient.model_facts

    async def counted(self: VerifierClient) -> ModelFacts:
        asked.append(now[0])
        return await model_facts(self)

    monkeypatch.setattr(upstream, "_clock", lambda: now[0])
    monkeypatch.setattr(upstream, "_facts", None)
    monkeypatch.setattr(upstream, "_confirmed_at", 0.0)
    monkeypatch.setattr(VerifierClient, "model_facts", counted)
    for _ in range(12):
        assert client.post("/v1/completions", json=body(max_tokens=1)).status_code == 200
        now[0] += 29.0
    assert asked == [1e6, 1e6 + 11 * 29.0]
    now[0] += 2.0  # 31 s after the last text
    assert client.post("/v1/completions", json=body(max_tokens=1)).status_code == 200
    assert asked[2:] == [now[0]]


def test_a_prompt_that_no_target_takes_reaches_no_draft(cloud: FakeServer) -> None:
    """200,000 ids fit into a body; what the draft keeps of a prompt to copy from it took 150 MB."""
    with serve_local(cloud.url) as local, httpx.Client(base_url=local.url, timeout=30.0) as client:
        refused = client.post("/v1/completions", json={"prompt": [5] * 200_000, "max_tokens": 1})
        assert refused.status_code == 400 and error_of(refused)["code"] == "context_length_exceeded"
        assert not local.core.drafts.scheduler.num_calls
        local.wait_until(local.is_at_rest)


def test_many_clients_ask_a_slow_verifier_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they take all connections to it. Facts that are known serve while it does not answer."""
    asked: list[str] = []

    async def run() -> None:
        answers = asyncio.Event()

        async def slow(request: httpx.Request) -> httpx.Response:
            asked.append(request.url.path)
            await answers.wait()
            ready = {"status": "ready", "model": "fake", "running": 0, "queue_depth": 0}
            is_facts = request.url.path == "/v1/model"
            return httpx.Response(200, content=FACTS.model_dump_json() if is_facts else json.dumps(ready))

        now = [0.0]
        client = VerifierClient("http://127.0.0.1:1", transport=httpx.MockTransport(slow))
        upstream = Upstream([client], FACTS.tokenizer, clock=lambda: now[0])
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
        now[0] += FACTS_S
        monkeypatch.setattr(upstream_module, "PATIENT_S", 0.0)
        assert [await upstream.facts() for _ in range(3)] == [FACTS] * 3
        await upstream.aclose()
        assert asked.count("/v1/model") <= 2

    asyncio.run(run())


def test_a_client_that_leaves_before_its_text_begins_frees_its_place(
    cloud: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its documents may take seconds to index; other texts do not wait for them."""
    goes_on, began = threading.Event(), threading.Event()

    def encode(tokenizer: object, max_tokens: int, body: object) -> list[list[int]]:
        began.set()
        goes_on.wait()
        return [[5]]

    monkeypatch.setattr(routes, "encode_prompts", encode)
    with serve_local(cloud.url) as local:
        content, address = json.dumps(body()).encode(), httpx.URL(local.url)
        try:
            with socket.create_connection((address.host, address.port or 0)) as connection:
                head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
                connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + content)
                assert began.wait(30.0) and local.core.places.total == 1
            local.wait_until(local.is_at_rest)
        finally:
            goes_on.set()


def test_a_text_is_written_by_the_target_that_its_answer_names(cloud: FakeServer) -> None:
    """Where another target took the place of the known one, the text is refused; the next request knows the new one."""
    other = FakeBatchRuntime(vocab_size=fake_tokenizer().size, seed=7)
    with serve_fake(runtime=other, name="other") as second, serve_local([cloud.url, second.url]) as local:
        chat = {"messages": MESSAGES, "max_tokens": 4}
        with httpx.Client(base_url=local.url, timeout=30.0) as client:
            assert client.post("/v1/chat/completions", json=chat).json()["model"] == "fake"
            local.core.upstream.fleet.clients.reverse()  # the first one is gone, and the second answers
            local.core.upstream.fleet.clients.pop()
            for path, asked in (("/v1/completions", body()), ("/v1/chat/completions", chat)):
                refused = client.post(path, json=asked)
                assert refused.status_code == 503 and error_of(refused)["code"] == "no_verifier"
                assert "another target" in error_of(refused)["message"]
                answer = client.post(path, json=asked)
                assert answer.status_code == 200 and answer.json()["model"] == "other"
                local.core.upstream._facts = (local.core.upstream._clock(), FACTS)


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
