"""Tests the budgets of draft messages, and the time that a long request's have."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import httpx
import pytest
from starlette.types import Message
from tests.engine_harness import Clock, refused
from tests.serving import (
    JSON,
    FakeServer,
    StepGate,
    bearer,
    code_of,
    open_session,
    serve_fake,
    target_tokens,
)

from outrider.cloud.api.draft_line import DraftLine
from outrider.cloud.api.draft_posts import TREE_UNIT_BYTES, DraftBudget
from outrider.cloud.api.state import DraftLimits, ServerSettings
from outrider.models.http.security import KeyRing
from outrider.models.wire.draft_stream import framed

PROMPT = [5, 17, 99, 3]
ALICE, BOB = "alice-has-a-long-key", "bob-has-another-long-key"


# -- the buckets -------------------------------------------------------------------------------------------------------


def test_a_session_spends_its_burst_and_then_its_rate() -> None:
    """After the burst, messages are taken as the bucket fills; other sessions have their own."""
    clock = Clock()
    budget = DraftBudget(DraftLimits(session_per_s=10.0, session_burst=3.0), clock)
    assert [budget.spend("a", b"") for _ in range(5)] == [None, None, None, "session", "session"]
    assert budget.spend("b", b"") is None
    clock.now += 0.15
    assert [budget.spend("a", b""), budget.spend("a", b"")] == [None, "session"]
    clock.now += 1e6
    assert [budget.spend("a", b"") for _ in range(4)] == [None, None, None, "session"]


def test_a_long_message_counts_as_several() -> None:
    """5 KB take 20 messages' worth, and a tree's bytes more: a node has three and takes as long as a path's token in
    JSON. The bucket fills up from below 0.
    """
    clock = Clock()
    budget = DraftBudget(DraftLimits(session_per_s=10.0, session_burst=10.0), clock)
    assert [budget.spend("a", b"", 5_000) for _ in range(2)] == [None, "session"]
    clock.now += 1.0
    assert budget.spend("a", b"", 1) == "session"
    clock.now += 0.2
    assert [budget.spend("a", b"", 100), budget.spend("a", b"", 100)] == [None, None]
    trees = [budget.spend("b", b"", 4 * TREE_UNIT_BYTES, TREE_UNIT_BYTES) for _ in range(4)]
    assert trees == [None, None, None, "session"]


def test_sessions_of_one_owner_share_a_budget() -> None:
    """A message that the owner's bucket refuses takes nothing from the session's."""
    clock = Clock()
    budget = DraftBudget(DraftLimits(session_per_s=0.0, session_burst=2.0, owner_per_s=1.0, owner_burst=3.0), clock)
    assert [budget.spend(name, b"x") for name in "abcd"] == [None, None, None, "owner"]
    assert budget.spend("e", b"y") is None
    clock.now += 2.0
    assert [budget.spend("d", b"x") for _ in range(3)] == [None, None, "session"]


def test_the_defaults_hold_for_honest_agents() -> None:
    """A device at steps of 2 ms posts once per step; 256 devices of one owner at steps of 32 ms do too."""
    clock = Clock()
    budget = DraftBudget(DraftLimits(), clock)
    for _ in range(2000):
        clock.now += 0.002
        assert budget.spend("fast", b"x") is None
    for _ in range(100):
        clock.now += 0.032
        assert {budget.spend(f"device {index}", b"y") for index in range(256)} == {None}


# -- the endpoint ------------------------------------------------------------------------------------------------------


@contextmanager
def held_server(**limits: float) -> Iterator[tuple[FakeServer, StepGate]]:
    """A server with two keys whose engine stands until the gate is opened."""
    gate = StepGate()
    settings = ServerSettings(keys=KeyRing([ALICE, BOB]), draft_limits=DraftLimits(**limits))
    with serve_fake(settings, gate=gate) as server:
        yield server, gate


def test_a_flood_is_dropped_late_and_unread_and_the_text_stays() -> None:
    """429 after the delay, counted, whatever the body is; other owners' drafts are taken; the text is the same."""
    body = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}
    draft = {"base": 0, "paths": [target_tokens(PROMPT, 4)]}
    with (
        held_server(session_per_s=0.0, session_burst=2.0, delay_s=0.05) as (server, gate),
        httpx.Client(base_url=server.url, headers=bearer(ALICE)) as alice,
        httpx.Client(base_url=server.url, headers=bearer(BOB)) as bob,
        open_session(alice, body) as flooded,
        open_session(bob, body) as calm,
    ):
        path = flooded.drafts
        assert [alice.post(path, json=draft).status_code for _ in range(2)] == [204, 204]
        late = alice.post(path, content=b"not even JSON", headers=JSON)
        assert code_of(late) == (429, "rate_limited") and late.headers["retry-after"] == "1"
        assert late.elapsed.total_seconds() >= 0.05
        assert bob.post(calm.drafts, json=draft).status_code == 204
        metrics = alice.get("/metrics").text
        assert 'outrider_drafts_dropped_total{budget="session"} 1.0' in metrics
        route = 'method="POST",route="/v1/sessions/{session_id}/drafts",status="429"'
        assert f"outrider_http_requests_total{{{route}}} 1.0" in metrics
        gate.open()
        assert flooded.rest().tokens == target_tokens(PROMPT, 8)


def test_an_owners_sessions_add_up() -> None:
    """A second session gives its owner no second budget."""
    body = {"prompt": PROMPT, "max_tokens": 8}
    draft = {"base": 0, "paths": [[1, 2]]}
    with (
        held_server(session_burst=3.0, owner_per_s=0.0, owner_burst=3.0, delay_s=0.0) as (server, gate),
        httpx.Client(base_url=server.url, headers=bearer(ALICE)) as client,
        open_session(client, body) as first,
        open_session(client, body) as second,
    ):
        paths = [first.drafts, second.drafts] * 2 + [first.drafts]
        assert [client.post(path, json=draft).status_code for path in paths] == [204, 204, 204, 429, 429]
        assert 'outrider_drafts_dropped_total{budget="owner"} 2.0' in client.get("/metrics").text
        gate.open()


@pytest.mark.parametrize(("content", "statuses"), [(b"", [400, 400, 400, 429]), ([b"{}"], [400, 429])])
def test_an_empty_body_counts_as_one_and_one_of_unknown_length_as_the_longest(
    content: bytes | list[bytes], statuses: list[int]
) -> None:
    """A Content-Length of 0 is known."""
    with (
        held_server(session_per_s=0.0, session_burst=3.0, delay_s=0.0) as (server, gate),
        httpx.Client(base_url=server.url, headers=bearer(ALICE)) as client,
        open_session(client, {"prompt": PROMPT, "max_tokens": 4}) as session,
    ):
        answers = [client.post(session.drafts, content=content, headers=JSON) for _ in statuses]
        assert [answer.status_code for answer in answers] == statuses
        assert [answer.request.headers.get("content-length") for answer in answers] == (
            ["0" if content == b"" else None] * len(statuses)
        )
        gate.open()
        assert session.rest().tokens


@pytest.mark.parametrize(
    ("headers", "status"), [({}, 401), ({"Authorization": "Bearer wrong-key-wrong-key"}, 401), (None, 404)]
)
def test_the_checks_stand_before_the_budget(headers: dict[str, str] | None, status: int) -> None:
    """Nobody spends a session's budget without its owner's key."""
    draft = {"base": 0, "paths": [[1, 2]]}
    with (
        held_server(session_per_s=0.0, session_burst=1.0) as (server, gate),
        httpx.Client(base_url=server.url, headers=bearer(ALICE)) as alice,
        open_session(alice, {"prompt": PROMPT, "max_tokens": 4}) as session,
        httpx.Client(base_url=server.url) as stranger,
    ):
        path = session.drafts
        used = bearer(BOB) if headers is None else headers
        assert [stranger.post(path, json=draft, headers=used).status_code for _ in range(3)] == [status] * 3
        assert alice.post(path, json=draft).status_code == 204
        gate.open()


# -- the long request ------------------------------------------------------------------------------------------------


def test_each_message_has_the_time_of_one() -> None:
    """Also where every read ends within the next message; a message that trickles in has no more."""

    class GivenTime(asyncio.SelectorEventLoop):
        now_s = 0.0

        def time(self) -> float:
            return self.now_s

    async def num_read(pieces: list[bytes]) -> int:
        found = list[bytes]()

        async def receive() -> Message:
            loop.now_s += 6.0
            for _ in range(3):
                await asyncio.sleep(0)  # a deadline that has passed ends the read here
            return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

        def take(body: bytes) -> bool:
            found.append(body)
            return True

        await DraftLine().read(receive, take, finish_s=10.0, pause_s=0.0)
        return len(found)

    message = framed(bytes(40))
    loop, data, cut = GivenTime(), message * 4, len(message) // 2
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        steps = [0, *range(cut, len(data), len(message)), len(data)]
        assert runner.run(num_read([data[begin:end] for begin, end in pairwise(steps)])) == 4
        with refused("request_timeout"):
            runner.run(num_read([message + b"\x20", *(b"\x05" for _ in range(9))]))
