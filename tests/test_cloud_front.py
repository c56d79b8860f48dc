"""The front of replicas: hostile clients, full replicas, early signals. What it passes on: test_cloud_replicas."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import aiohttp
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.fronts import FakeReplica, RunningFront, replicas, report_of, serve_front
from tests.raw_client import Raw
from tests.serving import (
    PROMPT,
    code_of,
    fake_tokenizer,
    run_session,
    target_tokens,
)
from tests.waiting import TIMEOUT_S

from outrider.cloud.api.state import DraftLimits, ServerSettings
from outrider.cloud.replicas import cluster
from outrider.cloud.replicas.forward import Forwarder, _refusal
from outrider.cloud.replicas.front import Front, FrontServer, labelled, merged
from outrider.cloud.replicas.members import Member, Members, Report
from outrider.cloud.replicas.registry import open_registry
from outrider.models.errors import RequestError
from outrider.models.ingress.connections import ConnectionLimits
from outrider.models.ingress.sockets import open_socket

BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24, "ignore_eos": True}


@contextmanager
def ended(work: Callable[[], None], name: str) -> Iterator[None]:
    """Does this beside the body, at whose end it has to end."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield
    thread.join(TIMEOUT_S)
    assert not thread.is_alive(), f"{name} did not end"


@contextmanager
def answering(answers: Sequence[bytes], may_close: threading.Event | None = None) -> Iterator[FakeReplica]:
    """A replica of a plain socket: gives these answers, one per connection, and closes each, or when it may."""

    def serve() -> None:
        for answer in answers:
            accepted, _ = listener.accept()
            with accepted:
                accepted.recv(1 << 16)
                accepted.sendall(answer)
                if may_close is not None:
                    may_close.wait(TIMEOUT_S)

    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        replicas(1) as (real,),
        ended(serve, "the replica, which is to be asked as often as it has answers,"),
    ):
        yield FakeReplica(real.server, report_of("00fa4e", f"http://127.0.0.1:{listener.getsockname()[1]}"))


def refusal(code: str, *headers: str) -> bytes:
    """A replica's answer 503."""
    body = b'{"error":{"code":"%b","message":"not now","type":"server_error"}}' % code.encode()
    lines = ["HTTP/1.1 503 Service Unavailable", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("GET *", 404),
        ("OPTIONS *", 404),
        ("POST *", 404),
        ("GET /v1/model?a=%00&b=%zz", 200),
        ("GET //evil.example/v1/model", 404),
        ("GET /@evil.example:80/x", 404),
        ("GET /%2e%2e/%2Fx", 404),
        ("TRACE /v1/model", 405),
        ("PROPFIND /v1/model", 405),
        ("GET http://evil.example/v1/model", 200),
        ("CONNECT evil.example:80", 400),
    ],
)
def test_odd_targets_are_the_clients_faults(
    front: RunningFront, caplog: pytest.LogCaptureFixture, line: str, status: int
) -> None:
    """No 5xx, no line in the log, and no replica that counts as lost."""
    with Raw(front) as raw:
        assert raw.answer(f"{line} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode())[0] == status
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert not any(member.is_suspect for member in front.front.members)


def test_no_answer_names_a_replicas_address(front: RunningFront, group: list[FakeReplica]) -> None:
    """A path with a slash at its end is another path, not a redirect to the replica, past TLS."""
    with httpx.Client(base_url=front.url) as client:
        for method, path in (("POST", "/v1/completions/"), ("GET", "/metrics/"), ("GET", "/v1/models/")):
            answer = client.request(method, path, json=BODY if method == "POST" else None)
            assert answer.status_code == 404 and "location" not in answer.headers
    with httpx.Client(base_url=group[0].report.url) as direct:
        assert direct.post("/v1/completions/", json=BODY, headers={"authorization": "none"}).status_code == 401
    moved = b"HTTP/1.1 302 Found\r\nLocation: http://10.0.0.7:4444/x\r\nContent-Length: 0\r\n\r\n"
    with answering([moved]) as fake, serve_front([fake]) as other:
        assert "location" not in httpx.get(f"{other.url}/v1/models").headers


@pytest.mark.parametrize("target", ["", "0" * 16, "f" * 4000, "../../registry-other", "a\tb"])
def test_a_target_that_no_replica_has_changes_nothing(front: RunningFront, target: str) -> None:
    """Any client may send the header by which a device goes on with its text."""
    with httpx.Client(base_url=front.url) as client:
        assert run_session(client, BODY, {"outrider-target": target}).tokens == target_tokens(PROMPT, 24)


def test_replicas_are_asked_once_a_second(group: list[FakeReplica], monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ask for metrics at a time: a replica is asked once, and not again before a second is over."""
    asked: list[str] = []

    async def fetch(self: Forwarder, member: Member, path: str) -> bytes:
        asked.append(member.report.tag)
        await asyncio.sleep(0)
        return b""

    async def scraped(front: Front, now_s: float) -> int:
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s)
        await front._metrics()
        return len(asked)

    monkeypatch.setattr(Forwarder, "fetch", fetch)
    with serve_front(group) as front, ThreadPoolExecutor(8) as pool:
        assert [asyncio.run(scraped(front.front, now_s)) for now_s in (100.0, 100.99, 101.01, 102.0)] == [2, 2, 4, 4]
        # Requests of a busy machine may take more than a second.
        monkeypatch.setattr("outrider.cloud.replicas.front._SCRAPE_S", 600.0)
        front.front._scraped_s = float("-inf")
        texts = set(pool.map(lambda _: httpx.get(f"{front.url}/metrics").text, range(24)))
        assert sorted(asked[4:]) == ["000001", "000002"] and len(texts) == 1


def test_a_scrape_without_a_replica_has_the_others(group: list[FakeReplica]) -> None:
    """And says how many it has."""
    with serve_front([FakeReplica(group[0].server, report_of("00dead", "http://127.0.0.1:9")), group[0]]) as front:
        text = httpx.get(f"{front.url}/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["outrider_front_replicas_scraped"].samples[0].value == 1
    assert {s.labels["replica"] for s in families["outrider_num_requests_running"].samples} == {"000001"}


def test_labels_are_added_without_a_parser() -> None:
    """The same samples as a parser finds, each with its replica; comments of a family once."""
    text = (
        b'# HELP a_total What \\n it {counts} is.\n# TYPE a_total counter\na_total{k="v } \\" a 1"} 3.0\na_total 1.0\n'
        b'# HELP h Times.\n# TYPE h histogram\nh_bucket{le="+Inf"} 2.0\nh_count 2.0\nh_sum 1e-05\n'
        b"# HELP empty None.\n# TYPE empty gauge\n"
    )
    whole = merged([labelled(text, "000001"), labelled(text.replace(b"Times.", b"Seconds."), "000002")]).decode()
    assert whole.count("# HELP") == whole.count("# TYPE") == 3
    found = {f.name: [(s.name, s.labels, s.value) for s in f.samples] for f in text_string_to_metric_families(whole)}
    assert found == {
        family.name: [
            (sample.name, sample.labels | {"replica": tag}, sample.value)
            for tag in ("000001", "000002")
            for sample in family.samples
        ]
        for family in text_string_to_metric_families(text.decode())
    }
    assert labelled(b"", "000001") == []


def test_a_full_replica_is_passed_over(group: list[FakeReplica]) -> None:
    """Several fronts may have filled its connections."""
    with answering([refusal("too_many_connections")]) as full, serve_front([full]) as front:
        front.publish([full.report, group[0].report])
        front.wait_until(lambda: len(front.front.members) == 2)
        # Without a load, and by its tag, either is first: the one that is full is made so.
        other, _ = sorted(front.front.members, key=lambda member: member.report.tag)
        other.is_suspect = True
        with httpx.Client(base_url=front.url, timeout=TIMEOUT_S) as client:
            assert run_session(client, BODY).tokens == target_tokens(PROMPT, 24)


@pytest.mark.parametrize(("header", "seconds"), [("Retry-After: 7", "7"), ("Retry-After: soon", "1"), ("X: y", "1")])
def test_a_replicas_retry_after_reaches_the_client(header: str, seconds: str) -> None:
    """It has measured it."""
    with answering([refusal("overloaded", header)]) as busy, serve_front([busy]) as front:
        answer = httpx.post(f"{front.url}/v1/sessions", json=BODY, timeout=TIMEOUT_S)
    assert code_of(answer) == (503, "overloaded") and answer.headers["retry-after"] == seconds


def test_a_refusal_that_does_not_end_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replica hangs while it says 503, and counts as lost."""
    closed: list[int] = []
    close = aiohttp.ClientResponse.close
    has_begun, may_end = threading.Event(), threading.Event()

    async def refusing(answer: aiohttp.ClientResponse) -> RequestError:
        has_begun.set()
        return await _refusal(answer)

    def noted(self: aiohttp.ClientResponse) -> None:
        closed.append(self.status)
        close(self)

    monkeypatch.setattr(aiohttp.ClientResponse, "close", noted)
    monkeypatch.setattr("outrider.cloud.replicas.forward._refusal", refusing)
    with (
        answering([refusal("overloaded")[:-20]], may_end) as hung,
        serve_front([hung]) as front,
        ThreadPoolExecutor(1) as pool,
    ):
        asked = pool.submit(httpx.post, f"{front.url}/v1/sessions", json=BODY, timeout=TIMEOUT_S)
        assert has_begun.wait(TIMEOUT_S)
        front.publish([])
        assert code_of(asked.result(TIMEOUT_S)) == (503, "no_replica")
        may_end.set()
    assert closed == [503]


@contextmanager
def waiting_front(drain: Callable[[], None] = lambda: None, *, is_early: bool = False) -> Iterator[FrontServer]:
    """A front that waits for its first replica, and must have ended at the end. is_early: is told so before it runs."""
    has_begun = threading.Event()

    async def reports() -> AsyncIterator[list[Report]]:
        has_begun.set()
        await asyncio.Event().wait()
        yield []

    server = FrontServer(Front(Members(), ServerSettings()), reports, drain=drain, limits=ConnectionLimits())
    if is_early:
        server._end()
    with open_socket("127.0.0.1", 0) as sock, ended(lambda: server.run([sock]), "the front"):
        assert is_early or has_begun.wait(TIMEOUT_S)
        yield server


def test_a_signal_ends_a_front_without_replicas() -> None:
    """It waits for its first replica no longer; also where the signal comes before the loop runs."""
    with waiting_front() as server:
        server.begin_drain()
    with waiting_front(is_early=True) as early:
        pass
    early.revoke([b"owner"])  # of a key that is removed while no loop runs
    assert not server.started and not early.started


def test_a_second_signal_ends_a_front_whose_replicas_drain() -> None:
    """Also before its first replica has come."""
    may_end = threading.Event()
    with waiting_front(lambda: (may_end.wait(TIMEOUT_S), None)[1]) as server:
        server.handle_exit(15, None)
        server.handle_exit(15, None)
    may_end.set()


def test_an_owner_that_keeps_much_makes_no_other_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the limit of all, who has most loses the oldest name, as in every store by owner; nobody finds another's."""
    monkeypatch.setattr("outrider.cloud.replicas.members.MAX_HELD", 10)
    known = Members()
    known.update([report_of(f"{i:06x}", running=i) for i in range(3)])
    first, second, third = known
    known.hold(b"small", "mine", third)
    for index in range(100):
        known.hold(b"large", f"n{index}", second)
    known.hold(b"small", "mine", third)
    assert known.choose(b"small", held="mine") is third and known.choose(b"small", held="n99") is first
    assert [known.choose(b"large", held=f"n{index}") is second for index in (90, 91, 99)] == [False, True, True]
    assert len(known._held) == 10


def fake_ray(monkeypatch: pytest.MonkeyPatch, serve: dict[str, Any], **ray: Any) -> None:
    """Puts modules with these names in the place of Ray's."""
    modules = {name: ModuleType(name) for name in ("ray", "ray.serve", "ray.serve.exceptions")}
    vars(modules["ray"]).update(ray, serve=modules["ray.serve"])
    vars(modules["ray.serve"]).update(serve, exceptions=modules["ray.serve.exceptions"])
    vars(modules["ray.serve.exceptions"]).update(RayServeException=LookupError)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    ("deployed", "name"),
    [({"side_effect": LookupError}, "outrider"), ({"return_value.app_name": "other-model"}, "other-model")],
)
def test_each_application_of_a_cluster_has_its_registry(
    monkeypatch: pytest.MonkeyPatch, deployed: dict[str, Any], name: str
) -> None:
    """By the name that Serve has deployed it by: two of a cluster do not take each other's replicas."""
    remote = Mock()
    fake_ray(monkeypatch, {"get_replica_context": Mock(**deployed)}, remote=remote)
    options = remote.return_value.options
    assert open_registry("outrider") is options.return_value.remote.return_value
    assert options.call_args.kwargs.items() >= {"name": f"registry-{name}", "namespace": "outrider"}.items()


def test_logs_of_replicas_stay_where_they_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They are bounded, because clients cause lines in them; a clean end removes them."""
    fake_ray(
        monkeypatch, {"start": Mock()}, util=Mock(**{"get_node_ip_address.return_value": "127.0.0.1"}), shutdown=Mock()
    )
    monkeypatch.setattr(cluster, "_start", lambda *_: None)
    environment: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(OSError, match="fault"), cluster.local_ray(1):
        raise OSError("fault")
    (failed,) = tmp_path.iterdir()
    with cluster.local_ray(1):
        limits = {name: int(environment[f"RAY_ROTATION_{name}"]) for name in ("MAX_BYTES", "BACKUP_COUNT")}
        assert limits == {"MAX_BYTES": 8 << 20, "BACKUP_COUNT": 1} and len(list(tmp_path.iterdir())) == 2
    with pytest.raises(KeyboardInterrupt), cluster.local_ray(1):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == [failed]


def test_downloads_pass_the_front(group: list[FakeReplica]) -> None:
    """The tokenizer's list and files, with ranges and refusals, as a replica answers."""
    with serve_front(group) as front, httpx.Client(base_url=front.url) as client:
        path, content = "/v1/tokenizer/tokenizer.json", (fake_tokenizer().directory / "tokenizer.json").read_bytes()
        files = client.get("/v1/tokenizer").json()["files"]
        assert {file["path"]: file["size"] for file in files}["tokenizer.json"] == len(content)
        assert client.get(path).content == content
        part = client.get(path, headers={"Range": "bytes=5-"})
        assert (part.status_code, part.content) == (206, content[5:])
        assert client.head(path).headers["content-length"] == str(len(content))
        assert code_of(client.get("/v1/tokenizer/none")) == (404, "unknown_file")
        front.wait_until(lambda: front.front.tally.requests["/v1/tokenizer", "GET", 200] == 1)


def test_the_front_bounds_rates_bodies_and_floods(group: list[FakeReplica]) -> None:
    """Before anything reaches a replica."""
    limits = DraftLimits(session_per_s=1.0, session_burst=2.0, delay_s=0.01)
    settings = ServerSettings(max_body_bytes=4096, rate_per_s=0.5, draft_limits=limits)
    large, small, draft = (
        {"items": [{"prefix": [1] * 5000}]},
        {"items": [{"prefix": PROMPT}]},
        {"base": 0, "paths": [[1]]},
    )
    with serve_front(group, settings) as front, httpx.Client(base_url=front.url) as client:
        assert client.post("/v1/verify", json=large).status_code == 413
        assert 429 in [client.post("/v1/verify", json=small).status_code for _ in range(3)]
        sent = [client.post("/v1/sessions/000001x/drafts", json=draft) for _ in range(4)]
        assert [each.status_code for each in sent] == [404, 404, 429, 429] and front.front.num_dropped.total() == 2
        for headers in ({"host": "evil.example"}, {"origin": "http://evil.example"}):
            assert client.get("/v1/model", headers=headers).status_code == 403
