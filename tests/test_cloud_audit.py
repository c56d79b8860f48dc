"""Tests the audit log: who used what and how it ended; no prompt, no text, no key; bounded, and never in the way."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.serving import (
    FakeServer,
    StepGate,
    fake_tokenizer,
    key_line,
    open_session,
    run_session,
    serve_fake,
    target_tokens,
)
from tests.waiting import wait_until

from outrider.cloud.api.audit import MAX_REFUSED_LINES, MAX_WAITING, AuditLog
from outrider.cloud.api.state import ServerSettings
from outrider.models.errors import ConfigError
from outrider.models.http.keys import ApiKey, KeyRing

KEY = "a-key-of-the-audited-team"
SECRET = "my secret prompt"
HEADERS = {"authorization": f"Bearer {KEY}"}


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a log."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@contextmanager
def audited(path: Path, clock: Callable[[], float] = time.monotonic, **given: Any) -> Iterator[FakeServer]:
    """A server with one named key that writes to a log. given: as `serve_fake` takes them."""
    keys = KeyRing([ApiKey.parse(key_line(KEY, "name=team-a"))])
    with closing(AuditLog(path, clock=clock)) as log, serve_fake(ServerSettings(keys, audit=log), **given) as server:
        yield server


def test_a_line_says_who_used_what_and_how_it_ended(tmp_path: Path) -> None:
    """One per request that starts work, written when it is over; its id is in the answer."""
    path, body = tmp_path / "audit.jsonl", {"prompt": [5, 6, 7], "max_tokens": 4000, "ignore_eos": True}
    with (
        audited(path, gate=StepGate()) as server,
        httpx.Client(base_url=server.url, headers=HEADERS) as client,
    ):
        with open_session(client, body) as left:
            server.gate.allow(2)
            left.commit()
        server.gate.open()
        server.wait_until(server.is_empty)
        run_session(client, body | {"max_tokens": 5})
        body = {"prompt": SECRET, "max_tokens": 4, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body, headers={"x-request-id": "from-the-client.1"})
        assert answer.headers["x-request-id"] == "from-the-client.1"
        items = [{"prefix": [1, 2], "draft": [3]}, {"prefix": [4]}]
        verify = client.post("/v1/verify", json={"items": items}, headers={"x-request-id": "two\twords"})
        assert client.get("/health/ready").status_code == client.get("/v1/models").status_code == 200
    first, second, third, fourth = lines_of(path)
    assert first["end"] in ("left", "cancelled") and first["status"] == 200 and first["generated_tokens"] >= 1
    assert second | {"time": 0, "duration_ms": 0, "request_id": ""} == {
        **{"time": 0, "endpoint": "/v1/sessions", "method": "POST", "key": "team-a", "network": "127.0.0.1"},
        **{"request_id": "", "status": 200, "end": "length", "prompt_tokens": 3, "generated_tokens": 5},
        **{"accepted_tokens": 0, "duration_ms": 0},
    }
    num_prompt = answer.json()["usage"]["prompt_tokens"]
    assert (third["request_id"], third["prompt_tokens"]) == ("from-the-client.1", num_prompt)
    assert (fourth["end"], fourth["prompt_tokens"]) == ("once", 3)
    assert fourth["request_id"] == verify.headers["x-request-id"] != "two\twords"
    for secret in (SECRET, KEY, ApiKey.plain(KEY).digest.hex()):
        assert secret not in path.read_text()
    assert os.name != "posix" or stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("cascaded", [False, True])
def test_a_text_that_its_stop_string_ends_is_not_cancelled(tmp_path: Path, cascaded: bool) -> None:
    """Neither in the log nor in metrics; nothing is kept of what lies behind its end."""
    path, ids = tmp_path / "audit.jsonl", fake_tokenizer().encode(SECRET)
    stop = fake_tokenizer().decode(target_tokens(ids, 20))[9:12]
    body = {"temperature": 0, "max_tokens": 3000, "ignore_eos": True, "stop": [stop]}
    with (
        serve_fake(name="large") as target,
        audited(path, upstream=target.url if cascaded else None) as server,
        httpx.Client(base_url=server.url, headers=HEADERS) as client,
    ):
        assert run_session(client, body | {"prompt": ids, "keep_prefix": True}).end.cut is not None
        answer = client.post("/v1/completions", json=body | {"prompt": SECRET})
        assert answer.json()["choices"][0]["finish_reason"] == "stop"
        server.wait_until(lambda: server.core.engine.stats().distributions.ends["stop"] == 2)
        assert server.core.engine.stats().parked == 0
    assert [line["end"] for line in lines_of(path)] == ["stop", "stop"]


def test_downloads_are_written_and_lists_are_not(tmp_path: Path) -> None:
    """A file of the tokenizer, as one of a draft."""
    path = tmp_path / "audit.jsonl"
    with audited(path) as server, httpx.Client(base_url=server.url, headers=HEADERS) as client:
        for place in ("/v1/drafts", "/v1/tokenizer", "/v1/tokenizer/tokenizer.json"):
            assert client.get(place).status_code == 200
    (line,) = lines_of(path)
    assert (line["endpoint"], line["status"], line["key"]) == ("/v1/tokenizer/{path:path}", 200, "team-a")


def test_refused_requests_are_written_until_there_are_many(tmp_path: Path) -> None:
    """20 in ten seconds get a line with the error's code; the others are one count per route, status and code."""
    path, now = tmp_path / "audit.jsonl", 0.0
    unknown = {"prompt": [10**6], "max_tokens": 2}  # which the engine refuses
    with audited(path, lambda: now) as server, httpx.Client(base_url=server.url) as client:
        for _ in range(MAX_REFUSED_LINES + 30):
            assert client.post("/v1/completions", json={"prompt": SECRET}).status_code == 401
        for method, place, body, headers, status in (
            ("POST", "/v1/completions", {}, HEADERS, 400),
            ("POST", "/v1/sessions/x/drafts", {}, {}, 401),
            ("GET", "/metrics", None, HEADERS, 403),
            ("GET", "/v1/model", None, {}, 401),
            ("POST", "/v1/sessions", unknown, HEADERS, 400),
        ):
            assert client.request(method, place, json=body, headers=headers).status_code == status
        now = 9.9
        assert client.post("/v1/completions", json={}).status_code == 401
        now = 10.1
        wait_until(lambda: len(lines_of(path)) == MAX_REFUSED_LINES + 6)
        assert client.post("/v1/completions", json={}).status_code == 401
    *lines, last = lines_of(path)
    single, many = [*lines[:MAX_REFUSED_LINES], last], lines[MAX_REFUSED_LINES:]
    assert {(line["status"], line["end"], line["key"]) for line in single} == {(401, "unauthorized", None)}
    assert len(many) == 6
    assert {(line["endpoint"], line["status"], line["end"]): line["refused_requests"] for line in many} == {
        ("/v1/completions", 401, "unauthorized"): 31,
        ("/v1/completions", 400, "invalid_parameter"): 1,
        ("/v1/sessions/{session_id}/drafts", 401, "unauthorized"): 1,
        ("/metrics", 403, "scope_missing"): 1,
        ("/v1/model", 401, "unauthorized"): 1,
        ("/v1/sessions", 400, "token_out_of_range"): 1,
    }


def test_a_rotated_log_is_opened_again(tmp_path: Path) -> None:
    """What is renamed keeps its lines, the next go to a new file."""
    path, now = tmp_path / "audit.jsonl", 0.0
    path.touch()
    path.chmod(0o644)
    with closing(AuditLog(path, clock=lambda: now)) as log:
        log.write({"n": 1})
        wait_until(lambda: len(lines_of(path)) == 1)
        path.rename(tmp_path / "audit.1")
        now = 2.0
        log.write({"n": 2})
    assert [[line["n"] for line in lines_of(tmp_path / name)] for name in ("audit.1", "audit.jsonl")] == [[1], [2]]
    assert os.name != "posix" or {stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir()} == {0o600}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
def test_a_full_disk_loses_lines_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Requests are answered; one warning, and a metric that counts."""
    with (
        closing(AuditLog(Path("/dev/full"))) as log,
        serve_fake(ServerSettings(KeyRing([KEY]), audit=log)) as server,
        httpx.Client(base_url=server.url, headers=HEADERS) as client,
    ):
        for _ in range(3):
            assert client.post("/v1/completions", json={"prompt": [1], "max_tokens": 1}).status_code == 200
        server.wait_until(lambda: log.num_lost == 3)
        assert "outrider_audit_lines_lost_total 3.0" in client.get("/metrics").text
    assert sum("lines are lost" in record.message for record in caplog.records) == 1


def test_a_log_that_cannot_be_written_is_a_mistake_at_the_start(tmp_path: Path) -> None:
    """And lines that wait for a slow disk are bounded."""
    with pytest.raises(ConfigError, match="name another file"):
        AuditLog(tmp_path / "nowhere" / "audit.jsonl")
    log = AuditLog(tmp_path / "audit.jsonl")
    log.close()
    for number in range(MAX_WAITING + 5):  # nobody writes them any more
        log.write({"n": number})
    assert log.num_lost == 5


@pytest.mark.parametrize("is_audited", [True, False])
def test_an_answer_has_one_request_id(tmp_path: Path, is_audited: bool) -> None:
    """Also a refused one; it is the one of the log."""
    path, work = tmp_path / "audit.jsonl", {"prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True}
    with closing(AuditLog(path)) as log:
        settings = ServerSettings(KeyRing([KEY]), audit=log if is_audited else None)
        with serve_fake(settings) as server, httpx.Client(base_url=server.url) as client:
            answers = [
                client.post("/v1/completions", json=work, headers=HEADERS),
                client.post("/v1/sessions", json=work, headers=HEADERS),
                client.post("/v1/sessions", json=work),
                client.post("/v1/verify", json={}, headers=HEADERS),
                client.get("/nowhere", headers=HEADERS),
                client.get("/health/live"),
            ]
    assert [each.status_code for each in answers] == [200, 200, 401, 400, 404, 200]
    ids = [each.headers.get_list("x-request-id") for each in answers]
    assert {len(each) for each in ids} == {1} and len({each[0] for each in ids}) == len(ids)
    assert {line["request_id"] for line in lines_of(path)} == ({each[0] for each in ids[:-1]} if is_audited else set())
