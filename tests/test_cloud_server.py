"""The server as a whole: what it exposes, how it ends, and its command line."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import psutil
import pytest
from fastapi.routing import APIRoute
from hypothesis import given
from hypothesis import strategies as st
from tests.metrics_table import grown_by, samples
from tests.raw_client import post
from tests.serving import (
    BODY,
    PROMPT,
    FakeServer,
    StepGate,
    open_session,
    run_session,
    serve_fake,
    target_tokens,
)

from outrider.cloud.api.completions import completion_routes
from outrider.cloud.api.downloads import download_routes
from outrider.cloud.api.health import health_routes
from outrider.cloud.api.sessions import session_routes
from outrider.cloud.api.state import ServerSettings
from outrider.cloud.api.stream import encode_commit
from outrider.cloud.api.verify import verify_routes
from outrider.cloud.seam import CommitEvent
from outrider.cloud.server import serve as serve_module
from outrider.cloud.server.options import ServeOptions
from outrider.cloud.server.signals import ends_at_once, ends_on_sigterm
from outrider.models.errors import SamplingError
from outrider.models.http.security import KeyRing
from outrider.models.picks.sampling import SamplingParams
from outrider.models.process.interrupts import QuietInterrupt
from outrider.models.wire.protocol import Commit, parse_event
from outrider.models.wire.tree_draft import TREE_MEDIA_TYPE

ALIASES = {
    **dict.fromkeys(("/health", "/healthz", "/livez"), "/health/live"),
    "/readyz": "/health/ready",
}


@given(
    base=st.integers(0, 10**6),
    tokens=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9),
    proposed=st.integers(0, 8),
)
def test_commits_on_the_wire_are_the_protocols(base: int, tokens: list[int], proposed: int) -> None:
    """What is written by hand is what the protocol's model reads, and as short as it can be."""
    data = encode_commit(CommitEvent(base, tuple(tokens), min(proposed, 1), proposed))
    raw = json.loads(data[6:])
    assert data == b"data: " + json.dumps(raw, separators=(",", ":")).encode() + b"\n\n"
    assert set(raw) == ({"base", "tokens", "accepted", "proposed"} if proposed else {"base", "tokens"})
    assert parse_event(data[6:]) == Commit(base=base, tokens=tokens, accepted=min(proposed, 1), proposed=proposed)


@pytest.mark.parametrize("data", ["{}", "[]", '{"type":"other"}', "{", '{"base":1}'])
def test_what_is_no_event_is_refused(data: str) -> None:
    """A reader does not guess."""
    with pytest.raises(ValueError):
        parse_event(data)


def test_a_token_costs_less_than_sixty_bytes_down(client: httpx.Client) -> None:
    """The worst case of a session, a commit for every token, with numbers of four digits."""
    with_lookup = encode_commit(CommitEvent(3, (1, 2, 3), 2, 4, 1)).decode().strip()
    assert parse_event(with_lookup[6:]) == Commit(base=3, tokens=[1, 2, 3], accepted=2, proposed=4, looked_up=1)
    assert len(encode_commit(CommitEvent(9999, (151_935,), 0, 0))) < 60
    assert len(client.post("/v1/sessions", json=BODY).content) / 24 < 60


def test_small_answers_have_small_headers(server: FakeServer) -> None:
    """A drafts answer is a status line; nothing tells the server's name or the date. Small writes leave at once."""
    address = "127.0.0.1", int(server.url.rsplit(":", 1)[1])
    with socket.create_connection(address) as connection, connection.makefile("rb") as stream:
        connection.sendall(post("/v1/sessions", json.dumps(BODY | {"max_tokens": 4000}).encode()))
        *answers, line = iter(stream.readline, b"\r\n")
        names = {line.lower().split(b":")[0] for line in answers}
        while not line.startswith(b"data: "):
            line = stream.readline()
        with socket.create_connection(address) as second:
            drafts = f"/v1/sessions/{json.loads(line[6:])['session']}/drafts"
            second.sendall(post(drafts, b'{"base":0,"paths":[[1,2,3]]}'))
            first_line = second.makefile("rb").readline()
            sockets = [each.transport.get_extra_info("socket") for each in server.server.server_state.connections]
            assert sockets and all(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for each in sockets)
    assert first_line == b"HTTP/1.1 204 No Content\r\n" and not names & {b"server", b"date"}
    server.wait_until(server.is_empty)


def test_metrics_tell_what_happened(client: httpx.Client, server: FakeServer) -> None:
    """Tokens, requests and times are counted, and no path that a client made up is a label."""
    before = samples(server.url)
    told = run_session(client, BODY)
    server.wait_until(server.is_empty)
    after = samples(server.url)
    grown = partial(grown_by, before, after)
    num_passes = len(told.commits)
    assert grown("generation_tokens_total") == 24 and grown("target_passes_total") == num_passes
    assert grown("request_success_total", finished_reason="length") == 1
    assert grown("time_to_first_token_seconds_count") == grown("e2e_request_latency_seconds_count") == 1
    assert grown("inter_token_latency_seconds_count") == num_passes - 1
    assert grown("http_requests_total", route="/v1/sessions", method="POST", status="200") == 1
    gauges = "kv_cache_free_blocks", "draft_patience_seconds", "decode_step_seconds", "kv_cache_usage_perc"
    assert {f"outrider_{name}{{}}" for name in gauges} <= after.keys()
    client.get("/no/such/path")
    shown = client.get("/metrics")
    modern = client.get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert shown.headers["content-type"].startswith("text/plain") and modern.text.endswith("# EOF\n")
    assert 'route="unmatched"' in shown.text and "/no/such/path" not in shown.text
    assert "_created" not in shown.text + modern.text  # each would be a series


def test_readiness_tells_the_load(client: httpx.Client, server: FakeServer) -> None:
    """What agents choose an endpoint by."""
    server.wait_until(server.is_empty)
    ready, facts = client.get("/health/ready").json(), client.get("/v1/model").json()
    idle = {"status": "ready", "model": "fake", "running": 0, "queue_depth": 0, "free_block_share": 1.0}
    assert idle.items() <= ready.items()
    assert {"tokenizer": server.core.model.tokenizer.fingerprint, "vocab_size": 300}.items() <= facts.items()


def test_the_openapi_document_is_complete(client: httpx.Client, server: FakeServer) -> None:
    """Every route is in it, every body and answer has a schema, and every reference leads somewhere."""
    document = client.get("/openapi.json").json()
    assert {
        "/v1/sessions",
        "/v1/sessions/{session_id}",
        "/v1/sessions/{session_id}/drafts",
        "/v1/verify",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/v1/models/{model}",
        "/v1/model",
        "/v1/drafts",
        "/v1/drafts/{name}/{path}",
        "/v1/tokenizer",
        "/v1/tokenizer/{path}",
        "/v1/render",
        "/health/live",
        "/health/ready",
        "/metrics",
    } == set(document["paths"])
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["description"], path
            assert "422" not in operation["responses"] and "default" in operation["responses"]
            if method == "post":
                assert operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
            good = next(answer for status, answer in operation["responses"].items() if status[0] == "2")
            assert good.get("content") or "204" in operation["responses"], path
    drafts = document["paths"]["/v1/sessions/{session_id}/drafts"]["post"]
    assert drafts["requestBody"]["content"][TREE_MEDIA_TYPE]["schema"]["format"] == "binary"
    assert TREE_MEDIA_TYPE in drafts["description"]
    references = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    messages = {"SessionRequest", "SessionOpen", "Commit", "SessionEnd", "DraftRequest", "VerifyItem"}
    assert messages | {"CompletionRequest", "ErrorAnswer"} <= references <= set(document["components"]["schemas"])
    routed = {
        (method.lower(), route.path_format)
        for group in (completion_routes, download_routes, health_routes, session_routes, verify_routes)
        for route in group(server.core).routes
        if isinstance(route, APIRoute) and route.path not in ALIASES
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert routed <= {(method, path) for path, operations in document["paths"].items() for method in operations}


def test_the_document_knows_which_temperatures_are_refused(client: httpx.Client) -> None:
    """Those between greedy and the smallest one, in every request that has a temperature, but for OpenAI's."""
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    properties = [schema.get("properties", {}) for schema in schemas.values()]
    found, least = [each["temperature"] for each in properties if "not" in each.get("temperature", {})], 0.0001
    assert len(found) >= 2 and sum("temperature" in each for each in properties) == len(found) + 2
    refused = {"type": "number", "exclusiveMinimum": 0.0, "exclusiveMaximum": least}
    assert all(each["not"] == refused for each in found)
    assert SamplingParams(temperature=least).temperature == least
    with pytest.raises(SamplingError):
        SamplingParams(temperature=least / 2)


def test_health_needs_no_key_under_its_usual_names_and_the_document_says_what_needs_one(client: httpx.Client) -> None:
    """An alias gives the same answer, and is not once more in the document, which names the scheme where keys are."""
    assert "security" not in client.get("/openapi.json").json()
    settings = ServerSettings(keys=KeyRing(["sixteen-characters"]))
    with serve_fake(settings) as server, httpx.Client(base_url=server.url) as stranger:
        document = stranger.get("/openapi.json").json()
        for alias, path in ALIASES.items():
            assert stranger.get(alias).json() == stranger.get(path).json() and stranger.get(alias).status_code == 200
            assert path in document["paths"] and alias not in document["paths"]
            heads = [stranger.head(name) for name in (alias, path)]
            assert [(head.status_code, head.content) for head in heads] == [(200, b"")] * 2
        assert stranger.get("/v1/model").status_code == 401
    ((needed, _),) = document["security"][0].items()
    assert document["components"]["securitySchemes"][needed]["scheme"] == "bearer"


def test_draining_lets_running_sessions_finish() -> None:
    """While draining, new work is refused, drafts are taken, streams go to their end, and then the server closes."""
    with serve_fake(gate=StepGate(), drain_s=30.0) as server, httpx.Client(base_url=server.url) as client:
        with open_session(client, BODY) as session:
            server.server.handle_exit(signal.SIGTERM, None)
            server.wait_until(lambda: server.core.is_draining)  # a session that was taken would wait for the gate
            refused, ready = client.post("/v1/sessions", json=BODY), client.get("/health/ready")
            assert (refused.status_code, ready.status_code, ready.json()["status"]) == (503, 503, "draining")
            assert client.post(session.drafts, json={"base": 0, "paths": [target_tokens(PROMPT, 4)]}).status_code == 204
            server.gate.open()
            text = session.rest()
        assert (text.end.reason, text.tokens) == ("length", target_tokens(PROMPT, 24))
        server.wait_until(lambda: server.server.should_exit)
        with pytest.raises(httpx.TransportError):
            while True:
                httpx.get(server.url + "/health/live")


def test_a_second_signal_ends_what_runs() -> None:
    """Who asks twice does not want to wait for the sequences, and who asks three times for nothing at all."""
    with (
        serve_fake(gate=StepGate(), drain_s=600.0) as server,
        httpx.Client(base_url=server.url) as client,
        open_session(client, BODY | {"max_tokens": 4000}) as session,
    ):
        server.server.handle_exit(signal.SIGINT, None)
        server.wait_until(lambda: server.core.is_draining)  # a session that was taken would wait for the gate
        assert client.post("/v1/sessions", json=BODY).status_code == 503 and not server.server.should_exit
        server.server.handle_exit(signal.SIGINT, None)
        server.gate.open()
        assert session.rest().end.reason == "shutdown"
        server.wait_until(lambda: server.server.should_exit)
        assert not server.server.force_exit
        server.server.handle_exit(signal.SIGINT, None)
        assert server.server.force_exit


# -- SIGTERM while it loads: the process ends at once, with 143, also as process 1 of a container ----------------------
posix_only = pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal")
TIMEOUT_S = 60.0
PROCESS_1 = ["unshare", "--pid", "--fork", "--kill-child"]
LOADS = """
import ctypes
from types import SimpleNamespace
from outrider.cloud.server import embedded, serve
from outrider.cloud.server.options import ServeOptions
from outrider.cloud.server.signals import ends_at_once, ends_on_sigterm

def load(*_):
    mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    print("loads", flush=True)
    lock(mutex)  # for ever, in native code, and again after each signal

target = object.__new__(embedded.BundleTarget)
target.path, target.source_name, target.model = None, "slow", None
target._bundle = SimpleNamespace(manifest=SimpleNamespace(runtime="openvino"), model_file=None)
target._loading = None
target._options = ServeOptions("slow")
embedded.open_batch_runtime, serve.open_target = load, lambda options: target
serve.serve(ServeOptions("slow", port=0, share_tokenizer=False))
"""


@posix_only
@pytest.mark.parametrize("prefix", [[], PROCESS_1], ids=["a process", "process 1"])
def test_a_server_ends_while_native_code_loads_its_model(prefix: list[str]) -> None:
    """Python's own handlers would wait for that code, and process 1 has no default."""
    if prefix and (not shutil.which(prefix[0]) or subprocess.run([*prefix, "true"], capture_output=True).returncode):
        pytest.skip("no right to make a process 1")
    with subprocess.Popen([*prefix, sys.executable, "-c", LOADS], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "loads\n"
            outside = psutil.Process(process.pid)
            (outside.children()[0] if prefix else outside).send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT_S) == 128 + signal.SIGTERM
        finally:
            process.kill()


@posix_only
def test_what_was_begun_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that loads in Python, such as vLLM with processes of its own, is left by SystemExit."""
    left = Mock()

    @contextmanager
    def load() -> Iterator[Any]:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            yield
        finally:
            left()

    target = SimpleNamespace(load=load, model=None, path=tmp_path, source_name="slow")
    monkeypatch.setattr(serve_module, "open_target", lambda options: target)
    monkeypatch.setattr(serve_module, "configure_logging", lambda _: None)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match=f"^{128 + signal.SIGTERM}$"):
        serve_module.serve(ServeOptions("slow", port=0, share_tokenizer=False))
    assert left.called and signal.getsignal(signal.SIGTERM) is before


def test_in_another_thread_signals_are_left_alone() -> None:
    """A program that serves in a thread of its own keeps its handlers."""

    def handlers() -> list[Any]:
        with ends_on_sigterm(), ends_at_once(), QuietInterrupt():
            return [signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)]

    before = [signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)]
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(handlers).result() == before
