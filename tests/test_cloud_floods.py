"""Tests what many cheap requests of one client cost the others: they wait for each other, and pages are made once. The
budgets of draft messages, and the time that a long request's have.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import AsyncMock, Mock

import httpx
import pytest
from starlette.responses import JSONResponse
from starlette.types import Message
from tests.engine_harness import Clock, refused
from tests.local_endpoint import chunks_of
from tests.serving import (
    ALICE,
    BOB,
    JSON,
    PROMPT,
    FakeServer,
    OpenSession,
    StepGate,
    bearer,
    code_of,
    open_session,
    serve_fake,
    target_tokens,
)
from tests.waiting import EmulatedLoop

from outrider.cloud.api import openapi
from outrider.cloud.api.draft_line import DraftLine
from outrider.cloud.api.draft_posts import TREE_UNIT_BYTES, DraftBudget, DraftsEndpoint
from outrider.cloud.api.metrics import Metrics
from outrider.cloud.api.state import DraftLimits, ServerSettings
from outrider.cloud.seam import EngineStats, Totals
from outrider.models.errors import RequestError
from outrider.models.http import answers
from outrider.models.http.errors import Throttled
from outrider.models.http.limits import Pacer
from outrider.models.http.security import Gate, GatePaths, GateSettings, KeyRing
from outrider.models.http.shapes import CompletionShape, PackedLogprobs
from outrider.models.process.tally import RequestTally
from outrider.models.wire.draft_stream import framed

KEY = "a-key-of-this-test"
COMPLETION = {"model": "fake", "prompt": "def f", "ignore_eos": True}


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """For how long requests are to wait; they do not."""
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        found.append(round(seconds, 6))

    monkeypatch.setattr("outrider.models.http.security.asyncio.sleep", sleep)
    return found


def test_a_clients_requests_are_spaced_and_probes_are_never_refused(waits: list[float]) -> None:
    """A burst at once, then so many a second: of a key, of an address for all that come without an accepted one, who
    get fewer, and of an address where no key is needed.
    """

    def asked(num: int, path: str = "/v1/models", key: str = "", address: str = "10.0.0.1") -> list[float]:
        headers = [(b"host", b"localhost"), *([(b"authorization", f"Bearer {key}".encode())] if key else [])]
        scope = {"type": "http", "method": "GET", "path": path, "headers": headers, "client": (address, 1)}
        waits.clear()
        for _ in range(num):
            try:
                asyncio.run(paced(scope, None, None))  # type: ignore[arg-type]
            except RequestError as error:
                if error.code != "unauthorized":
                    raise
        return list(waits)

    app, probes = AsyncMock(), GatePaths(probes=frozenset({"/health"}))
    paced = Gate(app, GateSettings(KeyRing([KEY])), probes)
    paced._requests = Pacer(100.0, 3, clock=lambda: 0.0)
    paced._strangers = Pacer(10.0, 3, clock=lambda: 0.0)
    paced._probes = Pacer(10.0, 1, clock=lambda: 0.0)
    assert asked(5) == [0.1, 0.2] and asked(2, key="a-key-that-nobody-has") == [0.3, 0.4]
    assert asked(3, key=KEY) == asked(3, address="10.0.0.2") == []
    asked(15)
    with pytest.raises(Throttled, match="retry later"):
        asked(2)
    assert asked(1, key=KEY) == [0.01] and asked(6, "/health") == [0.1, 0.2, 0.3, 0.4, 0.5]
    paced = Gate(app, GateSettings(), probes)
    paced._requests = Pacer(10.0, 1, clock=lambda: 0.0)
    assert asked(2) == [0.1]


def test_refused_drafts_wait_and_accepted_ones_do_not(waits: list[float]) -> None:
    """Their route is not paced: a device posts many times a second, within budgets of its own."""
    accepted = {"type": "http.response.start", "status": 204, "headers": []}, b""
    deliver, send = AsyncMock(), AsyncMock()
    receive = AsyncMock(return_value={"type": "http.request", "body": b"", "more_body": False})
    paced = DraftsEndpoint(
        ServerSettings(),
        GatePaths(),
        RequestTally(),
        find=lambda *_: None,
        deliver=deliver,
        deliver_long=deliver,
        num_dropped=Counter(),
    )
    paced._refused = Pacer(10.0, 3, clock=lambda: 0.0)
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"9")]
    scope = {"type": "http", "method": "POST", "path": "/v1/sessions/a/drafts", "headers": headers}
    refused = RequestError("unauthorized", "no key", status=401)
    ahead = RequestError("draft_ahead", "base is past what is committed")
    for outcome, num, address, expected in (
        (refused, 5, "10.0.0.1", [0.1, 0.2]),
        (refused, 3, "10.0.0.2", []),
        (refused, 40, "10.0.0.1", None),
        (ahead, 40, "10.0.0.1", []),
        (accepted, 40, "10.0.0.1", []),
    ):
        deliver.side_effect = [outcome] * num
        waits.clear()
        send.reset_mock()
        for _ in range(num):
            asyncio.run(paced({**scope, "client": (address, 1)}, receive, send))
        assert send.call_args_list[0].args[0]["status"] == (204 if outcome is accepted else outcome.status)  # type: ignore[union-attr]
        found = [each for each in waits if each]
        assert found == expected if expected is not None else max(found) == 2.0


def test_a_client_is_forgotten_once_it_could_send_a_burst_again() -> None:
    """And there are never more clients than so many."""
    now = 0.0
    pacer = Pacer(10.0, 2, clock=lambda: now)
    for number in range(1000):
        pacer.wait_s(b"%d" % number, 1.0)
        now += 0.01
    assert len(pacer) <= 11


def test_the_openapi_document_is_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may ask for it."""
    rendered = Mock(side_effect=JSONResponse)
    monkeypatch.setattr(openapi, "JSONResponse", rendered)
    with serve_fake() as server, httpx.Client(base_url=server.url) as client:
        first, *others = [client.get("/openapi.json") for _ in range(3)]
        assert first.json()["paths"] and all(each.content == first.content for each in others)
        assert first.headers["content-type"] == "application/json" and rendered.call_count == 1


@pytest.mark.parametrize(("max_age_s", "num"), [(1e9, 20), (0.0, 62)])
async def test_metrics_are_made_once_a_while_for_all_who_ask(max_age_s: float, num: int) -> None:
    """So many at once, whatever versions of the two formats they ask for."""
    stats = Mock(return_value=EngineStats(Totals(), 0, 0, 0, 0, 1, 1, 0.0, None, None))
    metrics = Metrics(stats, lambda: 0, max_age_s=max_age_s)
    open_metrics = [f"application/openmetrics-text; version=1.0.{n}" for n in range(29)]
    wanted = ["text/plain; version=0.0.4", *open_metrics, "*/*"] * 2
    found = [await metrics.exposition(accept) for accept in wanted]
    assert stats.call_count == num and found[0][1] != found[1][1] and b"outrider_sessions_open" in found[-2][0]


def test_a_whole_answer_with_logprobs_is_written_in_turns() -> None:
    """Bit for bit what the stream's chunks add up to; no piece of it is large, and most of it is held compressed."""
    body = COMPLETION | {"max_tokens": 200, "n": 8, "logprobs": 20, "seed": 3, "temperature": 1.0}
    streamed = [defaultdict[str, list[Any]](list) for _ in range(8)]
    with serve_fake() as server, httpx.Client(base_url=server.url, timeout=60) as client:
        whole = client.post("/v1/completions", json=body)
        assert whole.headers.get("transfer-encoding") == "chunked"
        for chunk in chunks_of(client.post("/v1/completions", json=body | {"stream": True})):
            for choice in chunk["choices"]:
                for name, values in choice["logprobs"].items():
                    streamed[choice["index"]][name] += values
    found = [choice["logprobs"] for choice in whole.json()["choices"]]
    assert found == streamed and all(len(each["tokens"]) == 200 for each in found)


def test_an_owners_answers_hold_so_many_logprobs_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is too large alone fails for good, one beside others for now; what was counted is given back."""
    monkeypatch.setattr(answers, "MAX_LOGPROB_BYTES", 10_000)
    with serve_fake() as server, httpx.Client(base_url=server.url, timeout=60) as client:
        held = server.core.held_answers

        def asked(num_tokens: int) -> tuple[int, str | None]:
            answer = client.post("/v1/completions", json=COMPLETION | {"logprobs": 5, "max_tokens": num_tokens})
            if answer.status_code == 200:  # the client has the last byte before the server goes on
                server.wait_until(lambda: held.total == 0)
            return answer.status_code, answer.json().get("error", {}).get("code")

        assert asked(40) == (200, None)
        with monkeypatch.context() as patched:
            patched.setattr(CompletionShape, "whole", lambda *_: 1 / 0)
            assert asked(40) == (500, "internal_error") and held.total == 0
        assert asked(400) == (400, "answer_too_large") and held.total == 0
        held.add(b"127.0.0.1", 9_000)
        assert asked(40) == (503, "too_many_bytes") and held.total == 9_000
        held.add(b"127.0.0.1", -9_000)
        assert asked(40) == (200, None)


def test_packed_logprobs_are_a_fraction_of_their_json() -> None:
    """Of 300 tokens with the 20 likeliest of each."""
    tops = [{f"token {rank}": -rank - index / 7 for rank in range(20)} for index in range(300)]
    found: dict[str, Any] = {"tokens": ["x"] * 300, "top_logprobs": tops, "refusal": None}
    packed = PackedLogprobs({name: [] if values else None for name, values in found.items()})
    parts = [{name: values and values[at : at + 1] for name, values in found.items()} for at in range(300)]
    assert 20_000 < sum(map(packed.add, parts)) < len(json.dumps(found)) / 2
    pieces = list(packed.pieces())
    assert json.loads(b"".join(pieces)) == found and max(map(len, pieces)) < 1 << 17
    empty: dict[str, Any] = {"content": [], "refusal": None}
    assert json.loads(b"".join(PackedLogprobs(empty).pieces())) == empty


# -- budgets of drafts -------------------------------------------------------------------------------------------------

BODY = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True}
DRAFT = {"base": 0, "paths": [[1, 2]]}


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
    loop, data, cut = EmulatedLoop(), message * 4, len(message) // 2
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        steps = [0, *range(cut, len(data), len(message)), len(data)]
        assert runner.run(num_read([data[begin:end] for begin, end in pairwise(steps)])) == 4
        with refused("request_timeout"):
            runner.run(num_read([message + b"\x20", *(b"\x05" for _ in range(9))]))
