"""Tests the budgets of draft messages, and the time that a long request's have."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import httpx
import pytest
from starlette.types import Message
from tests.engine_harness import Clock, refused
from tests.serving import (
    JSON,
    FakeServer,
    OpenSession,
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
BODY = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}
DRAFT = {"base": 0, "paths": [[1, 2]]}
ALICE, BOB = "alice-has-a-long-key", "bob-has-another-long-key"


# -- the buckets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "steps"),
    [
        # After the burst, messages are taken as the bucket fills; other sessions have their own.
        (
            {"session_per_s": 10.0, "session_burst": 3.0},
            [
                (0.0, [("a", b"")] * 5, [None, None, None, "session", "session"]),
                (0.0, [("b", b"")], [None]),
                (0.15, [("a", b"")] * 2, [None, "session"]),
                (1e6, [("a", b"")] * 4, [None, None, None, "session"]),
            ],
        ),
        # 5 KB take 20 messages' worth, and a tree's bytes more: a node has three and takes as long as a path's token
        # in JSON. The bucket fills up from below 0.
        (
            {"session_per_s": 10.0, "session_burst": 10.0},
            [
                (0.0, [("a", b"", 5_000)] * 2, [None, "session"]),
                (1.0, [("a", b"", 1)], ["session"]),
                (0.2, [("a", b"", 100)] * 2, [None, None]),
                (0.0, [("b", b"", 4 * TREE_UNIT_BYTES, TREE_UNIT_BYTES)] * 4, [None, None, None, "session"]),
            ],
        ),
        # Sessions of one owner share a budget. A message that the owner's bucket refuses takes nothing from theirs.
        (
            {"session_per_s": 0.0, "session_burst": 2.0, "owner_per_s": 1.0, "owner_burst": 3.0},
            [
                (0.0, [(name, b"x") for name in "abcd"], [None, None, None, "owner"]),
                (0.0, [("e", b"y")], [None]),
                (2.0, [("d", b"x")] * 3, [None, None, "session"]),
            ],
        ),
    ],
    ids=["a session", "long messages", "an owner"],
)
def test_a_burst_is_taken_and_then_the_rate(
    limits: dict[str, float], steps: list[tuple[float, list[Any], list[str | None]]]
) -> None:
    """Of a session, of an owner, and by the length of messages. Each step: a pause, messages, what refuses them."""
    clock = Clock()
    budget = DraftBudget(DraftLimits(**limits), clock)
    for pause_s, messages, expected in steps:
        clock.now += pause_s
        assert [budget.spend(*message) for message in messages] == expected


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
def flooded_session(**limits: float) -> Iterator[tuple[FakeServer, httpx.Client, OpenSession]]:
    """A server with two keys whose engine stands until the gate is opened, a client of ALICE, and a session of hers."""
    settings = ServerSettings(keys=KeyRing([ALICE, BOB]), draft_limits=DraftLimits(**limits))
    with (
        serve_fake(settings, gate=StepGate()) as server,
        httpx.Client(base_url=server.url, headers=bearer(ALICE)) as client,
        open_session(client, BODY) as session,
    ):
        yield server, client, session
        server.gate.open()
        assert session.rest().tokens == target_tokens(PROMPT, 8)


def test_a_flood_is_dropped_late_and_unread_and_the_text_stays() -> None:
    """429 after the delay, counted, whatever the body is; other owners' drafts are taken; the text is the same."""
    draft = {"base": 0, "paths": [target_tokens(PROMPT, 4)]}
    with (
        flooded_session(session_per_s=0.0, session_burst=2.0, delay_s=0.05) as (server, alice, flooded),
        httpx.Client(base_url=server.url, headers=bearer(BOB)) as bob,
        open_session(bob, BODY) as calm,
    ):
        assert [alice.post(flooded.drafts, json=draft).status_code for _ in range(2)] == [204, 204]
        late = alice.post(flooded.drafts, content=b"not even JSON", headers=JSON)
        assert code_of(late) == (429, "rate_limited") and late.headers["retry-after"] == "1"
        assert late.elapsed.total_seconds() >= 0.05
        assert bob.post(calm.drafts, json=draft).status_code == 204
        metrics = alice.get("/metrics").text
        assert 'outrider_drafts_dropped_total{budget="session"} 1.0' in metrics
        route = 'method="POST",route="/v1/sessions/{session_id}/drafts",status="429"'
        assert f"outrider_http_requests_total{{{route}}} 1.0" in metrics


def test_an_owners_sessions_add_up() -> None:
    """A second session gives its owner no second budget."""
    limits = {"session_burst": 3.0, "owner_per_s": 0.0, "owner_burst": 3.0, "delay_s": 0.0}
    with flooded_session(**limits) as (_, client, first), open_session(client, BODY) as second:
        paths = [first.drafts, second.drafts] * 2 + [first.drafts]
        assert [client.post(path, json=DRAFT).status_code for path in paths] == [204, 204, 204, 429, 429]
        assert 'outrider_drafts_dropped_total{budget="owner"} 2.0' in client.get("/metrics").text


@pytest.mark.parametrize(
    ("content", "length", "statuses"), [(b"", "0", [400, 400, 400, 429]), ([b"{}"], None, [400, 429])]
)
def test_an_empty_body_counts_as_one_and_one_of_unknown_length_as_the_longest(
    content: bytes | list[bytes], length: str | None, statuses: list[int]
) -> None:
    """A Content-Length of 0 is known."""
    with flooded_session(session_per_s=0.0, session_burst=3.0, delay_s=0.0) as (_, client, session):
        answers = [client.post(session.drafts, content=content, headers=JSON) for _ in statuses]
    found = [(answer.status_code, answer.request.headers.get("content-length")) for answer in answers]
    assert found == [(status, length) for status in statuses]


@pytest.mark.parametrize(
    ("headers", "status"), [({}, 401), ({"Authorization": "Bearer wrong-key-wrong-key"}, 401), (bearer(BOB), 404)]
)
def test_the_checks_stand_before_the_budget(headers: dict[str, str], status: int) -> None:
    """Nobody spends a session's budget without its owner's key."""
    with (
        flooded_session(session_per_s=0.0, session_burst=1.0) as (server, alice, session),
        httpx.Client(base_url=server.url, headers=headers) as stranger,
    ):
        assert [stranger.post(session.drafts, json=DRAFT).status_code for _ in range(3)] == [status] * 3
        assert alice.post(session.drafts, json=DRAFT).status_code == 204


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
