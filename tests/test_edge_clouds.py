"""Tests several clouds: which one is chosen, how one that fails is left out and comes back, and where keys go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.agents import SURE, Clock, proxy_to
from tests.commands import KEY, OTHER_KEY, Outrider
from tests.local_endpoint import DRAFTS, MESSAGES, PROMPT, LocalEndpoint, expected, serve_local
from tests.serving import FakeServer, StepGate, serve_fake
from tests.test_edge_serve import FACTS

from outrider.cloud.api.state import ServerSettings
from outrider.edge.link.fleet import Fleet, text_ms
from outrider.edge.serve.upstream import Upstream
from outrider.models.breaker import Breaker
from outrider.models.client.client import VerifierClient
from outrider.models.client.errors import EndpointLost, KeyRefused, TargetMismatch
from outrider.models.errors import CloudError, RequestError
from outrider.models.http.security import KeyRing
from outrider.models.wire.protocol import ReadyAnswer

A, B, C = "http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3"


def test_a_breaker_leaves_out_what_failed_and_allows_one_trial_a_pause() -> None:
    """The pause doubles with each failed trial; further failures of the same outage count once."""
    clock = Clock()
    breaker = Breaker(1.0, max_pause_s=3.0, clock=clock)
    for now, outcomes, pause_s in (
        (0.0, [breaker.failed, breaker.failed], 1.0),
        (1.0, [breaker.failed], 2.0),
        (3.0, [breaker.failed], 3.0),  # the longest
        (6.0, [breaker.passed, breaker.failed], 3.0),  # a trial that only looked has not shown that it works
        (9.0, [breaker.succeeded, breaker.failed], 1.0),
    ):
        clock.now = now
        assert breaker.allows() and breaker.allows() != breaker.is_open  # half-open: one trial
        for outcome in outcomes:
            outcome()
        assert breaker.is_open and not breaker.allows() and breaker.pause_s == pause_s
    clock.now = 10.0
    assert breaker.allows()
    breaker.passed()
    assert not breaker.is_open and breaker.allows()


@pytest.mark.parametrize(
    ("rtt_ms", "state", "dearer_rtt_ms", "dearer"),
    [
        (5.0, {"step_ms": 30}, 150.0, {}),
        (5.0, {}, 5.0, {"queue_depth": 9}),
        (5.0, {}, 5.0, {"free_block_share": 0.01}),
        (9.0, {"step_ms": 10}, 5.0, {"step_ms": 40}),
        (5.0, {"queue_depth": 2, "running": 8}, 5.0, {"queue_depth": 2, "running": 1}),
    ],
    ids=["round trip", "queue", "memory", "step", "queue per running text"],
)
def test_latency_queue_and_memory_make_a_cloud_dearer(
    rtt_ms: float, state: dict[str, Any], dearer_rtt_ms: float, dearer: dict[str, Any]
) -> None:
    first, second = (ReadyAnswer(status="ready", model="m", **fields) for fields in (state, dearer))
    assert text_ms(rtt_ms, first) < text_ms(dearer_rtt_ms, second) / 1.2


class Cloud:
    """Readiness behind httpx's transport interface. state: what it answers; None: nothing does. trips: on the clock.
    asks_status: of all else, which needs a key.
    """

    asks_status = 401

    def __init__(self, clock: Clock, trip_s: float = 0.01, **state: Any) -> None:
        self.clock, self.trip_s, self.num_looks = clock, trip_s, 0
        self.state: dict[str, Any] | None = {"status": "ready", "model": "m", "target": "t", "step_ms": 20.0, **state}

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.num_looks, self.clock.now = self.num_looks + 1, self.clock.now + self.trip_s
        if self.state is None:
            raise httpx.ConnectError("refused")
        is_open = request.url.path == "/health/ready"
        return httpx.Response(200 if is_open else self.asks_status, json=self.state if is_open else FACTS.model_dump())


class Pauses:
    """A `sleep` that the test ends, pause by pause."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._waiting = clock, asyncio.Queue[asyncio.Future[None]]()
        self.lengths: list[float] = []

    async def __call__(self, pause_s: float) -> None:
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lengths.append(pause_s)
        self._waiting.put_nowait(over)
        await over
        self._clock.now += pause_s + 1e-6

    async def next(self) -> asyncio.Future[None]:
        """The next pause, once it has begun; set its result to end it."""
        return await self._waiting.get()


def fleet_of(clock: Clock, sleep: Any = asyncio.sleep, words: list[str] | None = None, **clouds: Cloud) -> Fleet:
    urls = {"a": A, "b": B, "c": C}
    clients = [VerifierClient(urls[name], transport=httpx.MockTransport(cloud)) for name, cloud in clouds.items()]
    return Fleet(clients, clock, sleep, on_change=(words if words is not None else []).append)


def order(fleet: Fleet) -> list[str]:
    return [client.url for client in fleet.ranked()]


async def test_the_preferred_cloud_gives_way_only_to_one_that_is_clearly_faster() -> None:
    """By what was measured; with alike figures the order of the configuration holds."""
    clock = Clock()
    a, b = Cloud(clock, 0.012), Cloud(clock, 0.010)
    async with aclosing(fleet_of(clock, a=a, b=b)) as fleet:
        assert order(fleet) == [A, B]  # nothing is known
        served = await fleet.look(9.0)
        assert [each.target for each in served] == ["t", "t"] and order(fleet) == [A, B]
        assert a.state is not None
        for load, ranks in (({"queue_depth": 8, "running": 2}, [B, A]), ({"queue_depth": 0}, [A, B])):
            clock.now += 60.0
            a.state |= load
            fleet.ranked()  # the figures are old: it looks again, and this text does not wait for that
            await fleet.look(9.0)
            assert order(fleet) == ranks
        assert [(each.state, each.queue_depth) for each in fleet.states()] == [("up", 0), ("up", 0)]


async def test_speed_never_chooses_another_model() -> None:
    """Where targets differ, the order of the configuration decides, however slow the first is."""
    # Slow in steps: looks go on side by side, and the clock is one for all.
    a, c = Cloud(clock := Clock(), step_ms=500.0), Cloud(clock, step_ms=50.0)
    async with aclosing(fleet_of(clock, a=a, b=Cloud(clock, step_ms=1.0, target="another"), c=c)) as fleet:
        await fleet.look(9.0)
        assert order(fleet) == [C, A, B]


async def test_a_cloud_that_failed_is_left_out_until_a_look_finds_it_back() -> None:
    """Trials are looks and never texts; then the preferred one is preferred again."""
    clock, words = Clock(), list[str]()
    pauses, a = Pauses(clock), Cloud(clock)
    async with aclosing(fleet_of(clock, pauses, words, a=a, b=Cloud(clock))) as fleet:
        await fleet.look(9.0)
        a.state = None
        for _ in range(2):  # another text, the same outage
            fleet.failed(A, EndpointLost(f"{A}: gone"))
        assert order(fleet) == [B, A] and fleet.is_down(A)
        (await pauses.next()).set_result(None)  # the first trial finds nothing
        second = await pauses.next()
        back, a.state = asyncio.Event(), {"status": "ready", "model": "m"}
        fleet._on_change = lambda said: (words.append(said), back.set())  # type: ignore[assignment, func-returns-value]
        second.set_result(None)
        await back.wait()
        assert order(fleet) == [A, B] and not fleet.is_down(A)
        assert len(words) == 2 and "left out" in words[0] and "is back" in words[1]
        assert pauses.lengths[1] > pauses.lengths[0] > 0.0
        fleet.failed(B, TargetMismatch("another target"))  # unfit for one text, and no outage
        assert not fleet.is_down(B)


async def test_a_cloud_that_refuses_the_key_is_left_out_until_it_takes_it() -> None:
    """Its readiness, which needs no key, does not bring it back, and no text is spent on that."""
    clock, words = Clock(), list[str]()
    pauses, guarded = Pauses(clock), Cloud(clock)
    async with aclosing(fleet_of(clock, pauses, words, a=guarded, b=Cloud(clock))) as fleet:
        fleet.failed(A, KeyRefused(RequestError("unauthorized", "Set a key.", status=401)))
        assert order(fleet) == [B, A] and words == [f"Set a key. {A} is left out until it answers."]
        (await pauses.next()).set_result(None)
        second = await pauses.next()
        assert fleet.is_down(A) and guarded.num_looks == 2
        back, guarded.asks_status = asyncio.Event(), 200
        fleet._on_change = lambda said: back.set()
        second.set_result(None)
        await back.wait()
        assert order(fleet) == [A, B]


async def test_a_cloud_that_refuses_the_key_does_not_come_back_by_its_readiness() -> None:
    """Neither where a client asks the local endpoint for it, nor for a text that is written without a cloud."""
    clock = Clock()
    clouds = [(A, Cloud(clock)), (B, down := Cloud(clock))]
    upstream = Upstream([VerifierClient(url, transport=httpx.MockTransport(cloud)) for url, cloud in clouds], "t")
    fleet, down.state = upstream.fleet, None
    fleet.failed(A, KeyRefused(RequestError("unauthorized", "Set a key.", status=401)))
    with pytest.raises(CloudError, match="refuses this device's key"):
        await upstream.ready()
    assert fleet.is_down(A) and not await fleet.finds_one(9.0)
    await upstream.aclose()


async def test_a_gateway_that_hides_its_readiness_is_a_cloud_that_answers() -> None:
    """Whether it works, texts will show; an offline text tries it."""
    gateway = VerifierClient(A, transport=httpx.MockTransport(lambda request: httpx.Response(404)))
    hidden = Fleet([gateway])
    assert await hidden.look(9.0) == [] and await hidden.finds_one(9.0)
    cloud = Cloud(clock := Clock())
    fleet = fleet_of(clock, a=cloud)
    assert await fleet.finds_one(9.0)
    cloud.state = None
    assert not await fleet.finds_one(9.0)
    for each in (hidden, fleet):
        await each.aclose()


async def test_a_look_may_take_longer_than_who_asks_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a network with seconds of round trip: silence ends it, and what it found counts for the next who asks."""
    loop, answers, late_s = asyncio.get_running_loop(), asyncio.Semaphore(0), 0.0
    real = loop.time
    monkeypatch.setattr(loop, "time", lambda: real() + late_s)

    async def answer(request: httpx.Request) -> httpx.Response:
        await answers.acquire()
        return httpx.Response(200, json={"status": "ready", "model": "m"})

    async with aclosing(Fleet([VerifierClient(A, transport=httpx.MockTransport(answer))])) as fleet:
        for num_answers, fails in ((2, False), (1, True)):
            assert not await fleet.finds_one(0.0)
            late_s += 12.0  # then the answers come
            await asyncio.sleep(0)
            look = fleet._members[A].look
            assert look is not None and not look.done()
            for _ in range(num_answers):
                answers.release()
            await look
            if fails:
                fleet.failed(A, EndpointLost(f"{A}: gone"))  # meanwhile
            assert await fleet.finds_one(0.0) is not fails
        assert not await fleet.finds_one(0.0)


def test_the_command_refuses_to_send_a_key_in_the_clear(
    outrider: Outrider,
) -> None:
    """Before anything is sent."""
    command = ["run", "x", "--draft", "nowhere", "--cloud", "http://cloud.example.com", "--api-key", KEY]
    shown = outrider(*command, code=2).err
    assert "without encryption" in shown and KEY not in shown
    assert "without encryption" not in outrider(*command, "--allow-http", code=2).err


@pytest.fixture
def by_preference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of this machine do not choose: the first cloud that is up is taken."""
    monkeypatch.setattr("outrider.edge.link.fleet.CLEARLY", 1e9)


@contextmanager
def replicas(gate: StepGate) -> Iterator[tuple[FakeServer, FakeServer]]:
    """Two servers of one target; the first steps as the gate allows, and says often that it lives."""
    with (
        serve_fake(ServerSettings(keep_alive_s=0.1), config=SURE, gate=gate) as first,
        serve_fake(config=SURE) as second,
    ):
        yield first, second


def concurrent(local: LocalEndpoint, first: FakeServer, gate: StepGate, break_it: Callable[[], object]) -> None:
    """Four texts begin at `first`, which breaks in their middle: all are the target's, byte for byte."""
    prompts = [f"{index} + {PROMPT}" for index in range(4)]
    with ThreadPoolExecutor(4) as pool:
        texts = [pool.submit(local.text, prompt=prompt) for prompt in prompts]
        first.wait_until(lambda: len(first.core.sessions) == 4)
        gate.allow(8)
        # With the first token of each the device knows how often this server says that it lives.
        first.wait_until(lambda: local.core.metrics.ttft_s.count == 4 and first.runtime.num_steps > 6)
        break_it()
        assert [text.result(60.0) for text in texts] == [expected(prompt) for prompt in prompts]


@pytest.mark.usefixtures("by_preference")
def test_concurrent_texts_go_on_at_the_next_cloud_and_later_ones_begin_there(caplog: pytest.LogCaptureFixture) -> None:
    """The first cloud ends in mid-text of four. Once it is back, the next text begins there again."""
    gate = StepGate()
    with replicas(gate) as (first, second), ExitStack() as link:
        proxy = link.enter_context(proxy_to(first.url))
        with serve_local([proxy.url, second.url], DRAFTS) as local:
            fleet = local.core.upstream.fleet
            link.callback(gate.open)
            concurrent(local, first, gate, link.close)
            assert fleet.is_down(proxy.url) and second.runtime.num_steps > 0
            steps = first.runtime.num_steps
            assert local.text(8) == expected(PROMPT, 8) and first.runtime.num_steps == steps
            with proxy_to(first.url, listen_port=proxy.port):
                local.wait_until(lambda: not fleet.is_down(proxy.url))
                assert local.text(8) == expected(PROMPT, 8) and first.runtime.num_steps > steps
                clouds = httpx.get(f"{local.url}/health/ready").json()["clouds"]
                assert [each["state"] for each in clouds] == ["up", "up"] and "127.0.0.1" not in str(clouds)
    assert "is left out" in caplog.text and "is back" in caplog.text


@pytest.mark.usefixtures("by_preference")
def test_texts_and_chats_go_where_the_devices_key_is_taken(tmp_path: Path) -> None:
    """Although the preferred cloud is ready; once it knows the key it is preferred again."""
    (file := tmp_path / "keys").write_text(KEY)
    with (
        serve_fake(ServerSettings(keys := KeyRing.load(file))) as first,
        serve_fake() as second,
        serve_local([first.url, second.url], DRAFTS, api_key=OTHER_KEY) as local,
    ):
        for _ in range(2):
            assert local.text(8) == expected(PROMPT, 8)
        chat = local.post({"messages": MESSAGES, "max_tokens": 1}, "/v1/chat/completions")
        fleet = local.core.upstream.fleet
        assert chat["choices"] and fleet.is_down(first.url) and not first.runtime.num_steps
        file.write_text(f"{KEY}\n{OTHER_KEY}")
        keys.reload()
        local.wait_until(lambda: not fleet.is_down(first.url))
        assert local.text(8) == expected(PROMPT, 8) and first.runtime.num_steps


@pytest.mark.usefixtures("by_preference")
def test_a_silent_cloud_is_left_within_seconds_by_all_its_texts() -> None:
    """Its link swallows everything; the texts go on elsewhere, unchanged."""
    gate = StepGate()
    with (
        replicas(gate) as (first, second),
        proxy_to(first.url) as proxy,
        serve_local([proxy.url, second.url], DRAFTS) as local,
    ):
        concurrent(local, first, gate, proxy.hold)
        assert local.core.upstream.fleet.is_down(proxy.url)
        gate.open()
