"""Steady sessions: frames of one size at a fixed pace, and who is refused where they are asked for."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.agents import asking, drafter, is_at_rest, truth
from tests.agents import generate as generate_from
from tests.cascades import cascade
from tests.faulty_proxy import AgainstLongRequests
from tests.fronts import replicas, serve_front
from tests.local_endpoint import note_requests, serve_local
from tests.raw_client import Raw, post
from tests.serving import StepGate, code_of, serve_fake, target_tokens
from tests.test_cloud_streams import Streaming, settle
from tests.test_long_request import (
    PROMPT,
    ROUTE,
    SESSION,
    At,
    chunk,
    generate,
    long_head,
    num_taken,
    posts,
    serve_paced,
    tree,
)
from tests.waiting import TIMEOUT_S, wait_until

from outrider.cloud.api.state import ServerSettings
from outrider.edge.cli.command_options import ServeOptions
from outrider.edge.cli.run_options import RunOptions
from outrider.edge.results import Mode
from outrider.models.client.checks import EventParser, SessionCheck
from outrider.models.client.client import ClientOptions, VerifierClient
from outrider.models.client.errors import EndpointUnfit, ProtocolBroken
from outrider.models.errors import ConfigError, RequestError
from outrider.models.wire.draft_stream import MessageReader, framed
from outrider.models.wire.protocol import SessionOpen, SessionRequest
from outrider.models.wire.steady import (
    FRAME_BYTES,
    LEAST_BODY_BYTES,
    OPENING_BYTES,
    SteadyPace,
    down_frame,
    pace_of,
    padded,
)
from outrider.models.wire.verify import VerifyItem, VerifyRequest

STEADY = ClientOptions(is_steady=True)

# -- the bytes ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 400), max_size=12), st.integers(16, 300), st.lists(st.integers(0, 3), max_size=12))
def test_events_survive_frames(sizes: list[int], size: int, waits: list[int]) -> None:
    """Whatever fills them, frames have one size, and the events come out whole and in order."""
    frames, pending = list[bytes](), bytearray()
    for base, (count, wait) in enumerate(itertools.zip_longest(sizes, waits[: len(sizes)], fillvalue=0)):
        pending += b'data: {"base":%d,"tokens":[%s]}\n\n' % (base, b"7," * (count - 1) + b"7")
        frames += [down_frame(pending, size) for _ in range(wait)]
    while pending:
        frames.append(down_frame(pending, size))
    assert {len(frame) for frame in frames} <= {size}
    assert [event.base for event in events_of(frames)] == list(range(len(sizes)))


def events_of(chunks: Iterable[bytes]) -> Iterator[Any]:
    return itertools.chain.from_iterable(map(EventParser("here").feed, chunks))


@given(
    st.lists(st.tuples(st.binary(min_size=1, max_size=300), st.integers(0, 40)), max_size=12),
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
)
def test_messages_survive_the_filler_between_them(parts: list[tuple[bytes, int]], sizes: list[int]) -> None:
    """However their bytes are cut."""
    data = b"".join(framed(body) + bytes(count) for body, count in parts)
    reader, found, at, turn = MessageReader(is_steady=True), list[bytes](), 0, 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        found += reader.feed(data[at : at + size])
        at, turn = at + size, turn + 1
    assert found == [body for body, _ in parts] and not reader.is_within
    with pytest.raises(RequestError):
        reader.feed(b"\x80\x00")  # a length of 0 in two bytes: dearer to read than filler


@given(st.integers(2, 9000))
def test_a_padded_body_says_the_same_and_shows_its_order_of_size(size: int) -> None:
    """Powers of two from 4,096 on."""
    body = padded(json.dumps("x" * (size - 2)).encode())
    assert len(json.loads(body)) == size - 2
    assert len(body) == next(power for power in (4096, 8192, 16384) if power >= size)


# -- the server --------------------------------------------------------------------------------------------------------


def frames_of(raw: Raw, **fields: Any) -> Iterator[bytes]:
    """The stream of a steady session as its chunks."""
    body = SESSION | {"steady": True} | fields
    assert raw.answer(post("/v1/sessions", json.dumps(body).encode()))[0] == 200
    while size := int(raw._stream.readline(), 16):
        yield raw._stream.read(size)
        assert raw._stream.readline() == b"\r\n"


def tokens_of(events: Iterable[Any]) -> list[int]:
    """Those of all commits."""
    return [token for event in events if event.type == "commit" for token in event.tokens]


@pytest.mark.parametrize("fields", [{}, {"logprobs": 4}, {"stop": ["no such text"]}])
def test_frames_have_one_size_whether_anything_happens_or_not(fields: dict[str, Any]) -> None:
    """While the engine stands they go on; the text and its end are in them."""
    gate, size = StepGate(), pace_of(fields.get("logprobs")).down
    with serve_fake(gate=gate) as server, Raw(server) as raw:
        frames = frames_of(raw, **fields)
        first, *others = itertools.islice(frames, 4)
        assert all(each.startswith(b": ") for each in others)
        gate.open()
        others += frames
        assert len(first) == OPENING_BYTES and {len(each) for each in others} == {size}
        opened, *commits, end = events_of([first, *others])
        assert (opened.type, opened.steady) == ("open", pace_of(fields.get("logprobs")))
        assert tokens_of(commits) == target_tokens(PROMPT, 24) and (end.type, end.reason) == ("end", "length")


def test_the_front_of_replicas_passes_frames_on() -> None:
    """In their sizes; two that came together may go together."""
    with replicas(1) as group, serve_front(group) as front, Raw(At(front.url)) as raw:  # type: ignore[arg-type]
        frames = list(frames_of(raw))
        assert (sum(map(len, frames)) - OPENING_BYTES) % FRAME_BYTES == 0
        assert tokens_of(events_of(frames)) == target_tokens(PROMPT, 24)


def test_frames_of_a_client_with_many_texts_are_slower() -> None:
    """In proportion, beyond those that have the full pace."""
    paces = [pace_of(None, count) for count in (1, 16, 32, 10_000)]
    assert [pace.every_ms for pace in paces] == [15.0, 15.0, 30.0, 960.0]
    assert [round(pace.up / pace.every_ms, 1) for pace in paces] == [12.8] * 4


@pytest.mark.parametrize("pace", [{"every_ms": float("nan")}, {"every_ms": 9.0}, {"up": 1000}, {"down": 8000}])
def test_a_server_cannot_fill_a_devices_line(pace: dict[str, float]) -> None:
    """By the pace that it announces; the fastest of ours is taken."""
    with pytest.raises(ValueError):
        SteadyPace.model_validate(pace)
    assert SteadyPace.model_validate(pace_of(20, 1, 0.1).model_dump()).up == 4 * FRAME_BYTES


def test_messages_are_taken_from_frames_and_a_filler_alone_is_none() -> None:
    """Cut by frames, with zeros between."""
    with serve_fake(gate=StepGate()) as server, Raw(server) as raw, Raw(server) as up:
        events = events_of(frames_of(raw))
        opened, cut = next(events), [bytes(5) + tree()[:7], tree()[7:] + bytes(9), bytes(99)]
        assert opened.type == "open"
        up.send(long_head(opened.session) + b"".join(map(chunk, cut)))
        taken = next(events)
        assert taken.type == "taken" and taken.taken[0] == 1
        single = httpx.post(f"{server.url}/v1/sessions/{opened.session}/drafts", json={"base": 0, "paths": [[1]]})
        assert code_of(single) == (400, "steady_required")
        server.gate.open()
        assert sum(getattr(event, "accepted", 0) for event in events) > 0 and up.answer()[0] == 204


async def test_a_text_that_is_faster_than_its_frames_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where more waits than the server holds."""
    monkeypatch.setattr("outrider.models.http.sse.MOST_WAITING", 900)

    stream = Streaming(steady=pace_of(None))
    await settle()
    await stream.commit(*range(100))
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(stream.task, TIMEOUT_S)
    assert stream.num_closed == 1


def test_a_server_that_serves_steady_sessions_only_refuses_the_others() -> None:
    """By name."""
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": "a", "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": True}),
        ("/v1/sessions", SESSION),
        ("/v1/verify", {"items": [{"prefix": PROMPT, "draft": [1]}]}),
    ]
    with serve_fake(ServerSettings(needs_steady=True)) as server:
        for path, body in bodies:
            assert code_of(httpx.post(server.url + path, json=body)) == (400, "steady_required"), (path, body)
        wait_until(server.is_empty)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 4}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}),
    ],
)
def test_openais_answers_have_no_pace_and_say_so(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the verifier, and at a local endpoint, which asks the verifier for steady sessions all the same."""
    wire = note_requests(monkeypatch)
    with serve_fake() as server, serve_local(server.url, is_steady=True) as local:
        for url in (server.url, local.url):
            for is_stream in (False, True):
                answer = httpx.post(url + path, json=body | {"steady": True, "stream": is_stream})
                error = answer.json()["error"]
                assert (code_of(answer), error["param"]) == ((400, "unsupported_parameter"), "steady")
                assert error["message"].startswith("steady is not supported, except as false; leave it out: ")
                assert "`outrider run`, `chat` or `serve` with --steady" in error["message"]
            for value in (False, None):
                assert httpx.post(url + path, json=body | {"steady": value}).status_code == 200
    assert [json.loads(each)["steady"] for each in wire.to("POST /v1/sessions")] == [True, True]


# -- the device --------------------------------------------------------------------------------------------------------


def test_a_steady_text_is_the_same_in_full_frames() -> None:
    """Drafts are accepted; every byte of a body belongs to a whole frame or a padded request."""
    with serve_paced(num_taken) as server:
        results, _ = generate(server.url, 2, STEADY)
        wait_until(lambda: is_at_rest(server) and posts(server) == {204: 2})
        assert {route for route, _, status in server.core.metrics.requests} >= {ROUTE, "/v1/sessions"}
    for seed, result in enumerate(results):
        assert result.tokens == truth(asking(seed, max_tokens=40)) and result.num_accepted > 0
        assert 0 <= result.num_failed_posts <= 1 < result.num_posts  # the last may have no commit to wait for
        assert (result.wire.body_up - LEAST_BODY_BYTES) % FRAME_BYTES == 0 < result.wire.body_up
        assert (result.wire.body_down - OPENING_BYTES) % FRAME_BYTES == 0


def test_a_device_becomes_steady_where_the_server_is() -> None:
    """It is refused once, and asks at once as the server wants it."""
    with serve_paced(num_taken, ServerSettings(needs_steady=True)) as server:
        results, _ = generate(server.url, 2)
        wait_until(lambda: is_at_rest(server))
        requests = server.core.metrics.requests.items()
        assert {status: num for (route, _, status), num in requests if route == "/v1/sessions"} == {400: 1, 200: 2}
    for seed, result in enumerate(results):
        assert result.tokens == truth(asking(seed, max_tokens=40)) and result.num_accepted > 0


async def test_a_server_that_does_not_know_it_is_refused_by_name() -> None:
    """An older one calls the field unknown; one that ignores it is no verifier."""
    unknown = {"error": {"code": "invalid_parameter", "message": "steady: unknown field", "param": "steady"}}

    refusing = httpx.MockTransport(lambda request: httpx.Response(400, json=unknown))
    asked = SessionRequest(prompt=PROMPT, max_tokens=9)
    with pytest.raises(EndpointUnfit, match="http://old knows no steady sessions: upgrade it"):
        async with VerifierClient("http://old", STEADY, refusing) as client, client.open_session(asked):
            pass


def test_a_cascade_refuses_by_name_and_sends_nothing_on() -> None:
    """Its own link to the target's verifier has no pace. Where the device knows that verifier, it takes the text."""
    words = r"steady is not supported by a cascade, .*; use that verifier, or leave out --steady"
    with cascade() as running, serve_local(running.mid.url, is_steady=True) as local:
        with pytest.raises(RequestError, match=words) as refused:
            generate(running.mid.url, 1, STEADY)
        assert (refused.value.code, refused.value.origin) == ("unsupported_parameter", running.mid.url)
        assert re.match(words, local.post({"prompt": "a", "max_tokens": 4}, status=400)["error"]["message"])
        assert not any(route == "/v1/sessions" for route, _, _ in running.big.core.metrics.requests)
        both = [running.mid.url, running.big.url]
        assert asyncio.run(generate_from(both, asking(), drafter(), options=STEADY)).tokens == truth(asking())
        assert not running.engine.counts.provisional


@pytest.mark.parametrize("how", ["buffers", "refuses", "cuts"])
def test_a_way_that_passes_no_long_request_costs_drafts_and_shows_nothing(how: str) -> None:
    """No draft goes elsewhere; the text is the same."""
    with serve_paced(num_taken) as server:
        address = httpx.URL(server.url)
        with AgainstLongRequests(how, address.host, address.port or 0) as proxy:
            (result,), _ = generate(proxy.url, 1, STEADY)
        assert result.tokens == truth(asking(0, max_tokens=40)) and result.num_failed_posts > 0
        assert result.num_failed_posts == result.num_posts or how == "cuts"
        assert (result.wire.body_up - LEAST_BODY_BYTES) % FRAME_BYTES == 0


@pytest.mark.parametrize("is_asked", [False, True])
def test_an_open_event_that_is_not_what_was_asked_for_is_broken(is_asked: bool) -> None:
    """Neither a text in the clear, nor frames for who does not read them as such."""
    check = SessionCheck("here", SessionRequest(prompt=PROMPT, max_tokens=9, steady=is_asked))
    with pytest.raises(ProtocolBroken, match="steady"):
        check(SessionOpen(session="a", model="b", steady=None if is_asked else pace_of(None)))


async def test_what_has_no_pace_is_not_sent() -> None:
    """/v1/verify; conversations and their ids are padded, through the front of replicas, too."""
    with replicas(1) as group, serve_front(group) as front:
        async with VerifierClient(front.url, STEADY) as client:
            with pytest.raises(RequestError, match="/v1/verify is not"):
                await client.verify(VerifyRequest(items=[VerifyItem(prefix=PROMPT, draft=[1])]))
            up, down = client.wire.body_up, client.wire.body_down
            assert (await client.render(b'{"messages": [{"role": "user", "content": "a"}]}')).tokens
            assert (client.wire.body_up - up, client.wire.body_down - down) == (4096, 4096)


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        (RunOptions, {"prompt": "a", "mode": Mode.STOP_AND_WAIT}, "stop-and-wait"),
        (ServeOptions, {"host": "0.0.0.0"}, "no fixed pace"),
        (RunOptions, {"prompt": "a", "target": "reference"}, "--target asks no other verifier"),
    ],
)
def test_options_that_contradict_steady_are_refused(command: Any, options: dict[str, Any], message: str) -> None:
    """Before anything is sent."""
    with pytest.raises(ConfigError, match=message):
        command(steady=True, **options)
