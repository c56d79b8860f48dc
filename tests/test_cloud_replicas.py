"""The front before replicas: what reaches a replica, what a lost one costs, who may call. Ray itself: tests/ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.agents import nowhere
from tests.fronts import FakeReplica, RunningFront, changed, replicas, report_of, serve_front, served
from tests.local_endpoint import note_requests
from tests.raw_server import raw_server, writes
from tests.serving import (
    BODY,
    PROMPT,
    StepGate,
    bearer,
    code_of,
    open_session,
    run_session,
    target_tokens,
)
from tests.waiting import TIMEOUT_S

from outrider.cloud.api.state import ServerSettings
from outrider.cloud.replicas.trust import Caller, forwarded
from outrider.edge.drafting.depth import FixedDepth
from outrider.edge.drafting.estimates import Estimates
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.stop_and_wait import StopAndWaitAgent
from outrider.edge.modes.stream import StreamAgent
from outrider.edge.results import GenerationRequest, GenerationResult
from outrider.models.client.client import VerifierClient
from outrider.models.client.errors import TargetMismatch
from outrider.models.errors import RequestError
from outrider.models.http.security import KeyRing
from outrider.models.wire.tree_draft import ROOT, TREE_MEDIA_TYPE, TreeDraft

LONG: dict[str, Any] = BODY | {"max_tokens": 3000}
KEYS = ("key-of-the-first-owner-0001", "key-of-the-second-owner-0002")


@pytest.fixture
def client(front: RunningFront) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=front.url, timeout=TIMEOUT_S) as opened:
        yield opened


def request_for(count: int) -> GenerationRequest:
    """A text of so many tokens."""
    return GenerationRequest(tuple(PROMPT), max_tokens=count, ignore_eos=True)


def test_texts_through_replicas_are_those_of_one_server(client: httpx.Client) -> None:
    """Sessions, completions and verifications, wherever they run."""
    assert run_session(client, BODY).tokens == target_tokens(PROMPT, 24)
    item = {"prefix": PROMPT, "draft": target_tokens(PROMPT, 3)}
    (result,) = client.post("/v1/verify", json={"items": [item]}).json()["results"]
    done = client.post("/v1/completions", json={"model": "fake", "prompt": PROMPT, "max_tokens": 5})
    assert (result["tokens"], result["accepted"]) == (target_tokens(PROMPT, 4), 3)
    assert done.json()["usage"]["completion_tokens"] <= 5 and done.status_code == 200
    shown = client.get("/v1/models").json()["data"][0]["id"], client.get("/openapi.json").json()["info"]["title"]
    assert shown == ("fake", "Outrider verifier")


def test_sessions_are_spread() -> None:
    """Four sessions that are open at a time, two on each replica."""
    with served(count=2, gate=StepGate()) as (client, _, _), ExitStack() as stack:
        sessions = [stack.enter_context(open_session(client, BODY)) for _ in range(4)]
    assert sorted(each.opened.session[:6] for each in sessions) == ["000001", "000001", "000002", "000002"]


@pytest.mark.parametrize("is_tree", [True, False])
def test_drafts_reach_the_replica_that_their_session_names(is_tree: bool) -> None:
    """As bytes of a tree and as JSON; the text takes fewer passes then, and stays the same."""
    expected, gate = target_tokens(PROMPT, 12), StepGate()
    body = BODY | {"max_tokens": 12, "patience_ms": 0}
    with served(count=2, gate=gate) as (client, _, _), open_session(client, body) as session:
        sent: dict[str, Any] = {"json": {"base": 0, "paths": [expected[:8]]}}
        if is_tree:
            tree = TreeDraft(0, 0, expected[:8], [ROOT, *range(7)], [15] * 8).encode()
            sent = {"content": tree, "headers": {"content-type": TREE_MEDIA_TYPE}}
        answer = client.post(session.drafts, **sent)
        gate.open()
        text = session.rest()
    assert (answer.status_code, answer.content, text.tokens) == (204, b"", expected)
    assert sum(commit.accepted - commit.looked_up for commit in text.commits) > 0


def test_a_draft_for_a_session_that_is_nowhere_is_answered(client: httpx.Client) -> None:
    """With 404, by the front or by the replica: a device goes on without it."""
    for session in ("none", "000001gone", "ffffffgone", "000002"):
        answer = client.post(f"/v1/sessions/{session}/drafts", json={"base": 0, "paths": [[1]]})
        assert code_of(answer) == (404, "unknown_session")
    assert client.delete("/v1/sessions/ffffffgone").status_code == 404
    headers = {"prefer": "return=minimal", "content-type": "text/plain", "x-request-id": "mine-1"}
    refused = client.post("/v1/sessions/000001x/drafts", content=b"{}", headers=headers)
    assert refused.status_code == 415 and refused.headers.get_list("x-request-id") == ["mine-1"]
    assert client.get("/v1/sessions/000001x/drafts").status_code == 405


def test_a_session_ends_by_delete_and_by_disconnect() -> None:
    """Its replica frees what it held, though it talks to the front only. Another key's DELETE does not find it."""
    gate, (mine, theirs) = StepGate(), map(bearer, KEYS)
    with served(KeyRing(KEYS), gate=gate) as (client, (replica,), front):
        with open_session(client, LONG, mine) as session:
            assert [client.delete(session.path, headers=each).status_code for each in (theirs, mine)] == [404, 204]
            gate.allow(3)
            assert session.rest().end.reason == "cancelled"
        with open_session(client, LONG, mine):
            pass
        gate.open()
        replica.server.wait_until(replica.server.is_empty)
        front.wait_until(lambda: all(member.load == 0 for member in front.front.members))


async def test_a_lost_replica_costs_no_text() -> None:
    """Twelve texts on two replicas, one of which is cut off in mid-text: the same texts, some by another session."""
    gate, count = StepGate(), 60
    with replicas(2, gate=gate) as group, serve_front(group) as front:
        started = [asyncio.Event() for _ in range(12)]

        async def one(event: asyncio.Event) -> GenerationResult:
            async with VerifierClient(front.url) as client:
                return await StreamAgent(Endpoints([client])).generate(request_for(count), lambda tokens: event.set())

        texts = [asyncio.create_task(one(event)) for event in started]
        gate.allow(200)
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in started)), TIMEOUT_S)
        lost = max(group, key=lambda each: len(each.server.core.sessions))
        front.publish([each.report for each in group if each is not lost])
        gate.open()
        results = await asyncio.wait_for(asyncio.gather(*texts), TIMEOUT_S)
    assert {result.tokens for result in results} == {tuple(target_tokens(PROMPT, count))}
    assert sum(result.num_sessions > 1 for result in results) >= 1


def test_a_request_whose_replica_cannot_be_reached_goes_to_another(group: list[FakeReplica]) -> None:
    """Before an answer has begun the client notices nothing."""
    gone = report_of("00dead", nowhere(), target=group[0].report.ready.target)
    absent = FakeReplica(group[0].server, gone)
    with serve_front([absent, group[0]]) as front, httpx.Client(base_url=front.url) as client:
        for _ in range(4):
            assert run_session(client, BODY).tokens == target_tokens(PROMPT, 24)
        front.publish([gone])
        front.wait_until(lambda: len(front.front.members) == 1)
        answer = client.post("/v1/sessions", json=BODY)
    assert (*code_of(answer), answer.headers["retry-after"]) == (503, "no_replica", "1")


def test_a_request_is_not_given_to_one_replica_after_the_other_that_dies_of_it(group: list[FakeReplica]) -> None:
    """Two may be lost with it before it is refused."""
    with ExitStack() as stack:
        urls = [stack.enter_context(raw_server(writes(b""))).url for _ in range(4)]
        dying = [FakeReplica(group[0].server, report_of(f"{index:06x}", url)) for index, url in enumerate(urls)]
        front = stack.enter_context(serve_front(dying))
        answer = httpx.post(f"{front.url}/v1/verify", json={"items": [{"prefix": PROMPT}]}, timeout=TIMEOUT_S)
        num_suspects = sum(member.is_suspect for member in front.front.members)
        assert (answer.json()["error"]["code"], num_suspects) == ("no_replica", 2)


@asynccontextmanager
async def text_in_the_middle(front: RunningFront, gate: StepGate, count: int) -> AsyncIterator[asyncio.Task[Any]]:
    """A device's text through the front, of which the first token has come; the gate is opened at the end.

    Not before: the first replica could end the text.
    """
    begun = asyncio.Event()
    async with VerifierClient(front.url) as client:
        agent = StreamAgent(Endpoints([client]))
        text = asyncio.create_task(agent.generate(request_for(count), lambda tokens: begun.set()))
        gate.allow(5)
        await asyncio.wait_for(begun.wait(), TIMEOUT_S)
        yield text
        gate.open()
        await asyncio.wait([text])


async def test_a_draining_replica_hands_its_texts_to_one_of_the_same_target() -> None:
    """With two targets behind the front, as while new weights are rolled out: `shutdown`, then the same text."""
    gate, count = StepGate(), 40
    with replicas(3, seeds=(0, 0, 7), gate=gate) as group, serve_front(group[:1]) as front:
        async with text_in_the_middle(front, gate, count) as text:
            front.publish([changed(group[0].report, status="draining"), *(each.report for each in group[1:])])
            group[0].drain()
    assert text.result().tokens == tuple(target_tokens(PROMPT, count)) and text.result().num_sessions == 2


async def test_where_no_replica_has_the_target_the_device_says_so() -> None:
    """New weights everywhere: the text cannot go on, and both targets are named."""
    gate = StepGate()
    with replicas(2, seeds=(0, 7), gate=gate) as group, serve_front(group[:1]) as front:
        async with text_in_the_middle(front, gate, 40) as text:
            front.publish([group[1].report])
            with pytest.raises(TargetMismatch, match=r"began with fake \(target 0{16}\).*target 0{15}7"):
                await text


def test_work_that_a_draining_replica_refuses_goes_to_another(group: list[FakeReplica]) -> None:
    """Also before its front has heard of it."""
    with replicas(1) as leaving, serve_front([leaving[0], group[0]]) as front:
        leaving[0].server.core.engine.stop()
        with httpx.Client(base_url=front.url) as client:
            for _ in range(3):
                assert run_session(client, BODY).tokens == target_tokens(PROMPT, 24)


async def test_a_kept_prefix_is_asked_where_it_is_held(group: list[FakeReplica], front: RunningFront) -> None:
    """Stop-and-wait with hashes, while sessions of others change which replica has the least to do."""

    def num_hits() -> int:
        return sum(each.server.core.engine.stats().totals.prefix_hit_tokens for each in group)

    before = num_hits()
    async with VerifierClient(front.url) as device:
        agent = StopAndWaitAgent(Endpoints([device]), None, FixedDepth(0), Estimates())
        assert (await agent.generate(request_for(12))).tokens == tuple(target_tokens(PROMPT, 12))
    # Each call but the first goes on with what the one before it left at the replica.
    assert num_hits() - before >= 11 * len(PROMPT)
    with httpx.Client(base_url=front.url) as client:
        kept = run_session(client, BODY | {"keep_prefix": True})
        assert kept.end.prefix_hash is not None
        body = {"prompt": [9], "max_tokens": 4, "ignore_eos": True, "prefix_hash": kept.end.prefix_hash}
        assert run_session(client, body).tokens == target_tokens([*PROMPT, *kept.tokens, 9], 4)
        answer = client.post("/v1/sessions", json=body)  # a hash is taken once
        assert code_of(answer) == (409, "prefix_not_held")


def test_a_front_asks_for_keys_and_hands_no_client_header_on(group: list[FakeReplica]) -> None:
    """A replica takes its own front only, and the owner that the front found."""
    with serve_front(group, ServerSettings(KeyRing(KEYS))) as front:
        with httpx.Client(base_url=front.url) as client:
            assert client.post("/v1/sessions", json=BODY).status_code == 401
            assert client.post("/v1/sessions/000001x/drafts", json={"base": 0, "paths": [[1]]}).status_code == 401
            for status, paths in (
                (401, ("/metrics", "/v1/model", "/v1/drafts", "/v1/tokenizer", "/v1/tokenizer/tokenizer.json")),
                (200, ("/health/live", "/health/ready", "/healthz", "/openapi.json")),
            ):
                assert {client.get(path).status_code for path in paths} == {status}
            forged = forwarded(group[0].report.secret, Caller(b"somebody"))
            assert client.get("/v1/model", headers={"authorization": forged}).status_code == 401
            assert run_session(client, BODY, bearer(KEYS[0])).tokens == target_tokens(PROMPT, 24)
        for headers in ({}, bearer(KEYS[0])):
            assert httpx.post(group[0].report.url + "/v1/sessions", json=BODY, headers=headers).status_code == 401


def test_a_keyless_client_is_known_by_its_address() -> None:
    """Replicas see the client's network, not the front's."""
    with served(gate=StepGate()) as (client, (replica,), _), open_session(client, BODY) as session:
        sessions = replica.server.core.sessions
        assert sessions.find(session.opened.session, b"127.0.0.1").owner == b"127.0.0.1"
        with pytest.raises(RequestError, match="no such session"):
            sessions.find(session.opened.session, b"")


def test_readiness_and_metrics_are_of_all_replicas(
    client: httpx.Client, front: RunningFront, group: list[FakeReplica]
) -> None:
    """Sums for readiness; a label for each replica in the metrics."""
    reports = [changed(each.report, running=2, queue_depth=1, step_ms=4.0) for each in group]
    front.publish(reports)
    front.wait_until(lambda: client.get("/health/ready").json()["running"] == 4)
    ready = client.get("/health/ready")
    assert ready.json()["queue_depth"] == 2 and ready.json()["status"] == "ready" and "date" in ready.headers
    assert len(ready.headers.get_list("x-request-id")) == 1
    families = {family.name: family for family in text_string_to_metric_families(client.get("/metrics").text)}
    labels = {sample.labels["replica"] for sample in families["outrider_num_requests_running"].samples}
    assert labels == {each.report.tag for each in group}
    assert families["outrider_front_replicas_ready"].samples[0].value == 2
    assert any(s.labels["route"] == "/health/ready" for s in families["outrider_front_requests"].samples)
    front.publish([changed(each, status="failed") for each in reports])
    front.wait_until(lambda: client.get("/health/ready").status_code == 503)
    assert client.get("/health/ready").json()["status"] == "failed"
    front.publish([each.report for each in group])
    front.wait_until(lambda: client.get("/health/ready").status_code == 200)


def test_a_front_drains_its_replicas_before_it_closes() -> None:
    """New work is refused, streams end with `shutdown`, then the port closes."""
    gate = StepGate()
    with (
        replicas(1, gate=gate) as group,
        serve_front(group, drain=group[0].drain) as front,
        httpx.Client(base_url=front.url, timeout=TIMEOUT_S) as client,
        open_session(client, LONG) as session,
    ):
        front.server.begin_drain()
        gate.open()
        assert session.rest().end.reason == "shutdown"


async def test_a_device_names_its_target_only_where_a_text_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A header of 33 bytes, once for each session after the first, and for verifications that send all tokens again."""
    gate, sent = StepGate(), note_requests(monkeypatch).sent

    def seen() -> list[str | None]:
        return [headers.get("outrider-target") for request, headers, _ in sent if request.startswith("POST")]

    with replicas(2, gate=gate) as group, serve_front(group[:1]) as front:
        async with text_in_the_middle(front, gate, 20) as text:
            front.publish([group[1].report])
            await asyncio.to_thread(front.wait_until, lambda: len(seen()) == 2)
        assert text.result().tokens == tuple(target_tokens(PROMPT, 20))
    assert seen() == [None, group[0].report.ready.target]
