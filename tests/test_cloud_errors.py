"""Tests every error of the server: status, code and shape, and that the engine goes on serving."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from tests.serving import (
    ALICE,
    BOB,
    JSON,
    PROMPT,
    FakeServer,
    StepGate,
    bearer,
    open_session,
    run_session,
    serve_fake,
    target_tokens,
)

from outrider.cloud.api.state import ServerSettings
from outrider.cloud.engine import EngineConfig
from outrider.models.http.security import KeyRing
from outrider.models.wire.protocol import ErrorAnswer


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with serve_fake(ServerSettings(max_body_bytes=40_000)) as running:
        yield running


@pytest.fixture
def client(server: FakeServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url) as opened:
        yield opened
        # After any error the engine still serves, and it holds nothing.
        assert run_session(opened, {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}).tokens == target_tokens(
            PROMPT, 8
        )
    server.wait_until(server.is_empty)


def refused(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """Checks an error's status, code and shape; returns the error."""
    assert answer.headers["content-type"] == "application/json"
    assert (answer.status_code, ErrorAnswer.model_validate_json(answer.content).error.code) == (status, code)
    body = answer.json()
    assert set(body) == {"error", "request_id"} and set(body["error"]) == {"code", "message", "type", "param"}
    assert body["request_id"] == answer.headers["x-request-id"] != ""
    assert "Traceback" not in answer.text and ".py" not in answer.text
    return dict(body["error"])


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b'{"prompt":[5000],"max_tokens":4}', "token_out_of_range", "prompt"),
        (b'{"prompt":[1],"max_tokens":4,"stop_ids":[300]}', "token_out_of_range", "stop_ids"),
        (b'{"prompt":[%s],"max_tokens":4}' % b",".join([b"1"] * 4096), "context_length_exceeded", None),
        (b'{"prompt":[1],"max_tokens":4,"temperature":NaN}', "invalid_parameter", "temperature"),
        (b'{"prompt":[1],"max_tokens":4,"temperature":Infinity}', "invalid_parameter", "temperature"),
        (b'{"prompt":[1],"max_tokens":4,"temperature":-0.1}', "invalid_parameter", "temperature"),
        (b'{"prompt":[1],"max_tokens":4,"temperature":0.00001}', "invalid_parameter", "temperature"),
        (b'{"prompt":[1],"max_tokens":4,"top_p":0}', "invalid_parameter", "top_p"),
        (b'{"prompt":[1],"max_tokens":4,"top_p":NaN}', "invalid_parameter", "top_p"),
        (b'{"prompt":[1],"max_tokens":4,"top_k":-2}', "invalid_parameter", "top_k"),
        (b'{"prompt":[1],"max_tokens":4,"min_p":1.5}', "invalid_parameter", "min_p"),
        (b'{"prompt":[1],"max_tokens":4,"seed":-1}', "invalid_parameter", "seed"),
        (b'{"prompt":[1],"max_tokens":4,"patience_ms":-1}', "invalid_parameter", "patience_ms"),
        (b'{"prompt":[1],"max_tokens":0}', "invalid_parameter", "max_tokens"),
        (b'{"prompt":[],"max_tokens":4}', "invalid_parameter", "prompt"),
        (b'{"prompt":[1,"x"],"max_tokens":4}', "invalid_parameter", "prompt.1"),
        (b'{"prompt":[1],"max_tokens":4,"colour":1}', "invalid_parameter", "colour"),
        (b'{"max_tokens":4}', "invalid_parameter", "prompt"),
        (b'{"prompt":[1', "malformed_json", None),
        (b"\xff\xfe", "malformed_json", None),
    ],
)
def test_an_invalid_session_request_is_refused(client: httpx.Client, body: bytes, code: str, param: str) -> None:
    """The error names the invalid field."""
    error = refused(client.post("/v1/sessions", content=body, headers=JSON), 400, code)
    assert error["param"] == param and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        # An agent with another tokenizer gets an error before anything is generated.
        ("POST", "sessions", {"prompt": PROMPT, "max_tokens": 1, "tokenizer": "0" * 64}, 409, "tokenizer_mismatch"),
        ("POST", "sessions/nope/drafts", {"base": 0, "paths": [[1]]}, 404, "unknown_session"),
        ("DELETE", "sessions/nope", None, 404, "unknown_session"),
        ("GET", "none", None, 404, "not_found"),
        ("GET", "sessions", None, 405, "method_not_allowed"),
        ("PUT", "sessions/x/drafts", None, 405, "method_not_allowed"),
    ],
)
def test_what_is_not_there_is_refused_in_the_same_shape(
    client: httpx.Client, method: str, path: str, body: dict[str, Any] | None, status: int, code: str
) -> None:
    """Another tokenizer, unknown sessions, and the router's 404 and 405."""
    answer = client.request(method, f"/v1/{path}", json=body)
    assert refused(answer, status, code)["param"] == ("tokenizer" if status == 409 else None)
    assert answer.headers.get("allow") == ("POST" if status == 405 else None)


@pytest.mark.parametrize("path", ["/v1/sessions", "/v1/sessions/x/drafts", "/v1/verify", "/v1/completions"])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_that_is_too_large_is_413(client: httpx.Client, path: str, is_chunked: bool) -> None:
    """By its announced length; without one, as soon as it is too long."""
    body = b'{"prompt":"' + b"x" * 50_000 + b'"}'
    pieces = (body[at : at + 10_000] for at in range(0, len(body), 10_000))
    # Own connections: the server may close one after an answer, because of the rest of a body that nobody reads.
    with httpx.Client(base_url=client.base_url) as own:
        answer = own.post(path, content=pieces if is_chunked else body, headers=JSON)
    if path.endswith("drafts"):  # an unknown session is detected before the body is read
        assert answer.status_code == (404 if is_chunked else 413)
    else:
        refused(answer, 413, "body_too_large")


def test_an_internal_error_reveals_nothing(
    client: httpx.Client, server: FakeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug gives a bare 500; the log names its type and place; neither contains any of the prompt."""
    with monkeypatch.context() as patch, caplog.at_level(logging.DEBUG):
        patch.setattr(type(server.core.engine), "submit", Mock(side_effect=ValueError("the secret prompt")))
        answer = client.post("/v1/completions", json={"prompt": "the secret prompt"})
    assert refused(answer, 500, "internal_error")["type"] == "server_error"
    assert "ValueError" in caplog.text and "secret" not in caplog.text + answer.text


def test_keys_are_required_and_sessions_belong_to_them() -> None:
    """A missing or wrong key gives 401; another key's session is unknown; health needs no key."""
    body, draft = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}, {"base": 0, "paths": [[1]]}
    settings = ServerSettings(keys=KeyRing([ALICE, BOB]))
    with serve_fake(settings, gate=StepGate()) as server, httpx.Client(base_url=server.url) as client:
        for headers in ({}, bearer("wrong"), {"authorization": f"Basic {ALICE}"}):
            for path in ("/v1/sessions", "/v1/sessions/x/drafts", "/v1/verify", "/v1/chat/completions", "/nope"):
                answer = client.post(path, json=body, headers=headers)
                assert refused(answer, 401, "unauthorized")["type"] == "authentication_error"
                assert answer.headers["www-authenticate"] == "Bearer"
        statuses = [client.get(path).status_code for path in ("/metrics", "/health/ready", "/health/live")]
        assert statuses == [401, 200, 200]
        with open_session(client, body, bearer(ALICE)) as session:
            refused(client.post(session.drafts, json=draft, headers=bearer(BOB)), 404, "unknown_session")
            refused(client.delete(session.path, headers=bearer(BOB)), 404, "unknown_session")
            assert client.post(session.drafts, json=draft, headers=bearer(ALICE)).status_code == 204
            server.gate.open()
            assert session.rest().commits
        server.wait_until(server.is_empty)


def test_a_full_queue_is_503() -> None:
    """A request that the engine cannot queue is refused and may be retried."""
    config, body = EngineConfig(max_running=1, max_queue=1), {"prompt": PROMPT, "max_tokens": 8}
    with serve_fake(gate=StepGate(), config=config) as server, httpx.Client(base_url=server.url) as client:
        stats = server.core.engine.stats
        with client.stream("POST", "/v1/sessions", json=body):
            server.wait_until(lambda: stats().running == 1)
            with client.stream("POST", "/v1/sessions", json=body):
                server.gate.allow(1)  # the engine takes new requests between two steps
                server.wait_until(lambda: stats().queued == 1)
                answer = client.post("/v1/sessions", json=body)
                assert refused(answer, 503, "overloaded")["type"] == "server_error" and "retry-after" in answer.headers
                server.gate.open()
        server.wait_until(server.is_empty)


def test_the_request_rate_is_limited_per_key() -> None:
    """Requests that start work are limited; reads and other keys are not."""
    settings = ServerSettings(keys=KeyRing([ALICE, BOB]), rate_per_s=0.001)
    body = {"prompt": PROMPT, "max_tokens": 1}
    with serve_fake(settings) as server, httpx.Client(base_url=server.url) as client:
        assert client.post("/v1/completions", json=body, headers=bearer(ALICE)).status_code == 200
        answer = client.post("/v1/completions", json=body, headers=bearer(ALICE))
        assert refused(answer, 429, "rate_limited")["type"] == "rate_limit_error"
        assert 900 <= int(answer.headers["retry-after"]) <= 1000  # 0.001 requests per second
        assert client.get("/v1/models", headers=bearer(ALICE)).status_code == 200
        assert client.post("/v1/completions", json=body, headers=bearer(BOB)).status_code == 200
