"""Tests when a text is tried again, and when not: errors that end a stream, pauses between tries, single messages."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import nullcontext, suppress
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from tests.agents import Clock, generate, scripted_client
from tests.local_endpoint import local_core
from tests.test_edge_resume import (
    ONE,
    PROMPT,
    Answer,
    Script,
    ended,
    opened,
    refusing,
    session,
    stream,
    unreachable,
)
from tests.test_edge_serve import FACTS
from tests.waiting import EmulatedLoop

from outrider.edge.link.endpoints import Endpoints
from outrider.edge.link.fleet import Fleet
from outrider.edge.modes.stream import StreamAgent
from outrider.edge.results import GenerationRequest
from outrider.edge.serve import upstream as upstream_module
from outrider.edge.serve.state import OfflineSettings
from outrider.edge.serve.upstream import FACTS_S, Upstream
from outrider.models.client import long_request
from outrider.models.client.client import VerifierClient
from outrider.models.client.errors import EndpointLost
from outrider.models.client.long_request import LongRequest
from outrider.models.client.messages import ByteCounts
from outrider.models.errors import CloudError, RequestError
from outrider.models.wire.protocol import Commit, ErrorBody, Taken

URL = "http://127.0.0.1:1"


def failing(code: str, kind: str = "server_error", num_tokens: int = 0) -> Answer:
    """A session that an error ends, after some tokens."""
    end = ended("error").model_copy(update={"error": ErrorBody(code=code, message="no", type=kind)})
    return session(opened(), *[Commit(base=0, tokens=[7] * num_tokens)] * bool(num_tokens), end)


@pytest.mark.parametrize(
    ("code", "kind", "status", "is_its_own"),
    [
        ("grammar_too_complex", "invalid_request_error", 400, False),
        ("unsupported_parameter", "invalid_request_error", 400, False),
        ("unauthorized", "authentication_error", 401, True),
        ("upstream_refused", "server_error", 502, True),
    ],
)
async def test_a_refusal_that_ends_a_stream_is_one(code: str, kind: str, status: int, is_its_own: bool) -> None:
    """It is not tried again there, and the caller gets it; another endpoint may serve where it is that one alone."""
    first, other = Script(failing(code, kind, 1)), Script(session(opened(), Commit(base=0, tokens=[5]), ended()))
    request = GenerationRequest(PROMPT, max_tokens=2)
    with pytest.raises(RequestError, match="no") as refused:
        await stream(first, request)
    assert (refused.value.code, refused.value.status, len(first.requests)) == (code, status, 1)
    clients = [scripted_client(Script(failing(code, kind, 1))), scripted_client(other, "http://other")]
    with nullcontext() if is_its_own else pytest.raises(RequestError):
        assert (await generate(clients, request)).tokens == (7, 5)
    assert len(other.requests) == is_its_own


async def test_a_text_on_which_a_model_fails_is_tried_once_more_at_each_endpoint() -> None:
    """Another replica may serve it, or the same one later; each token counts as progress. No more: it may fail always,
    and costs each time what a text costs.
    """
    fault, rest = failing("model_fault"), session(opened(), Commit(base=0, tokens=[5]), ended())
    request = GenerationRequest(PROMPT, max_tokens=3)
    faults = [failing("model_fault", num_tokens=1)] * 2
    assert (await stream(Script(*faults, rest), request)).tokens == (7, 7, 5)
    assert (await generate([scripted_client(Script(fault)), scripted_client(Script(rest), "http://b")], ONE)).tokens
    one, two = (Script(*[fault] * 9) for _ in range(2))
    with pytest.raises(CloudError, match="model_fault: no"):
        await generate([scripted_client(one), scripted_client(two, "http://two")], ONE)
    assert len(one.requests) == len(two.requests) == 2


@pytest.mark.parametrize(("drawn", "factor"), [(0.0, 0.5), (0.5, 1.0), (1.0, 1.5)])
async def test_pauses_vary_and_double_until_some_tokens_have_come(drawn: float, factor: float) -> None:
    """A server that ends each text after a token is asked less and less often; eight tokens begin anew."""

    def cut(num_tokens: int) -> Answer:
        return session(opened(stop_ids=()), Commit(base=0, tokens=[7] * num_tokens))

    clock, jitter, request = Clock(), lambda: drawn, GenerationRequest(PROMPT, max_tokens=29)
    rest = session(opened(stop_ids=()), Commit(base=0, tokens=[7] * 10), ended())
    script = Script(cut(1), unreachable, cut(1), cut(7), cut(9), cut(1), rest)
    result = await generate([scripted_client(script)], request, sleep=clock.sleep, clock=clock, jitter=jitter)
    assert len(result.tokens) == 29 and len(script.requests) == 7
    assert clock.pauses == pytest.approx([factor * pause_s for pause_s in (0.05, 0.1, 0.2, 0.4, 0.05, 0.1)])
    assert Endpoints([scripted_client(rest)])._jitter is random.random


async def test_what_a_server_asks_for_is_waited_for_and_up_to_a_quarter_more() -> None:
    """Never less."""
    for drawn, expected in ((0.0, 8.0), (1.0, 10.0)):
        clock, jitter = Clock(), lambda: drawn  # noqa: B023
        script = Script(lambda _: httpx.Response(503, headers={"retry-after": "8"}), refusing(0))
        result = await generate([scripted_client(script)], ONE, sleep=clock.sleep, clock=clock, jitter=jitter)
        assert result.tokens == (5,) and clock.pauses == [expected]


async def test_a_cloud_that_has_served_other_texts_is_no_wrong_address() -> None:
    """A name that is gone, or a portal's answer, while this device changes networks: it is tried again."""
    served, clock = Script(refusing(0), lambda _: httpx.Response(404), refusing(0)), Clock()
    async with scripted_client(served) as client:
        fleet = Fleet([client])
        for _ in range(2):
            endpoints = Endpoints([client.for_one_text()], None, clock.sleep, clock, fleet=fleet)
            assert (await StreamAgent(endpoints).generate(ONE)).tokens == (5,)
        assert len(clock.pauses) == 1
        with pytest.raises(CloudError, match="no verifier at"):
            await stream(Script(lambda _: httpx.Response(404)), ONE)


async def test_an_outage_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --offline-ok: while verifiers are asked again, texts are the draft's; from their answer on the target's."""
    answers, clock, answer = asyncio.Event(), Clock(), Mock(side_effect=httpx.ConnectTimeout("no answer"))
    asked = list[httpx.Request]()

    async def cloud(request: httpx.Request) -> Any:
        asked.append(request)
        await answers.wait()
        return answer()

    core = local_core(URL, fingerprint=FACTS.tokenizer, offline=OfflineSettings("a-draft"))
    client = VerifierClient(URL, transport=httpx.MockTransport(cloud))
    core.upstream = upstream = Upstream([client], FACTS.tokenizer, clock=clock)
    answers.set()
    assert await core.facts_or_draft() is core.draft_facts
    answers.clear()
    monkeypatch.setattr(upstream_module, "MOMENT_S", 0.0)
    num_before, clock.now = len(asked), clock.now + FACTS_S - 1.0
    assert [await core.facts_or_draft() for _ in range(3)] == [core.draft_facts] * 3
    answer.side_effect = lambda: httpx.Response(200, content=FACTS.model_dump_json())
    answers.set()
    assert await upstream.facts() == await core.facts_or_draft() == FACTS and len(asked) == num_before + 1
    answers.clear()
    upstream.lost(clock.now - 1.0)  # a text that began before this answer
    assert await core.facts_or_draft() == FACTS
    upstream.lost(clock.now + 1.0)
    clock.now += FACTS_S
    waiting = asyncio.create_task(core.facts_or_draft())
    while len(asked) < num_before + 2:
        await asyncio.sleep(0)
    assert not waiting.done()
    answers.set()
    assert await waiting == FACTS
    await core.aclose()


@pytest.mark.parametrize(
    ("rtt_s", "step_s", "stall_s", "taken_s", "waited_s"),
    [
        (0.0, 0.0, 0.0, None, 0.25),
        (0.1, 0.04, 0.0, None, 0.25),
        (0.2, 0.0, 0.0, None, 0.4),
        (0.0, 0.3, 0.0, None, 0.3),
        (0.2, 0.3, 0.0, None, 0.7),
        (0.2, 0.3, 0.0, 0.69, 0.69),
        (0.2, 0.3, 0.64, None, 0.74),
        (0.2, 0.3, 0.66, None, 0.81),
        (0.2, 0.3, 0.66, 0.8, 0.8),
    ],
)
def test_an_acknowledgement_is_waited_for_as_long_as_the_protocol_says(
    rtt_s: float, step_s: float, stall_s: float, taken_s: float | None, waited_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two round trips and a step, at least 250 ms, until single messages are sent. A device that stood still, and looks
    over 50 ms late, waits 50 ms more. stall_s: how long it does. taken_s: when the message is acknowledged.
    """

    async def scenario() -> tuple[bool, float]:
        async def start(pieces: AsyncIterator[bytes]) -> None:
            async for _ in pieces:
                loop.call_later(0.1, stall)

        def stall() -> None:
            loop.now_s += stall_s
            if taken_s is not None:
                loop.call_at(taken_s, line.follow, Taken(taken=(1, 0.0)))

        line = LongRequest("http://x", start, ByteCounts(), rtt_s=rtt_s, step_s=9.0, on_unusable=lambda _: None)
        line.follow(Commit(base=0, tokens=[1], step_ms=1e3 * step_s))
        with suppress(EndpointLost):
            await line.post(b"a tree")
        return line.is_open, loop.now_s

    loop = EmulatedLoop()
    monkeypatch.setattr(long_request, "_now_s", loop.time)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        is_open, took_s = runner.run(scenario())
    assert is_open == (taken_s is not None) and took_s == pytest.approx(waited_s)
