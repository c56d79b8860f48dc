"""Tests that what waits is bounded and comes in turns: bodies, jobs, items of /v1/verify; no slot is lost."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel
from starlette.requests import Request
from tests.engine_harness import refused
from tests.hostile_bodies import SESSIONS, VERIFY
from tests.local_endpoint import serve_local
from tests.serving import (
    JSON,
    FakeServer,
    StepGate,
    bearer,
    code_of,
    read_events,
    run_session,
    serve_fake,
    target_tokens,
)

from outrider.cloud.api import verify as verify_module
from outrider.cloud.api.state import ServerSettings
from outrider.models.errors import RequestError
from outrider.models.http import bodies as requests_module
from outrider.models.http.bodies import LARGE_BODY_BYTES, MAX_BODIES, MAX_OWN_BODIES, Bodies
from outrider.models.http.encoding import Workers
from outrider.models.http.limits import Slots
from outrider.models.http.security import KeyRing
from outrider.models.wire.protocol import SessionOpen, SessionRequest

ALICE, BOB = "alice-has-this-key", "bob-has-another-key"
ITEM = {"prefix": [5, 17, 99, 3]}


class Job:
    """A function for a thread: says that it runs, and waits until the test lets it end."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.has_begun.set()
        assert self.may_end.wait(30)
        return "done"


async def begun(*jobs: Job) -> None:
    for job in jobs:
        assert await asyncio.to_thread(job.has_begun.wait, 30)


async def test_an_owner_has_one_worker_at_a_time() -> None:
    """One owner's second job waits, another owner's runs; a third owner waits for a thread."""
    workers = Workers(max_threads=2)
    jobs = [Job() for _ in range(4)]
    tasks = [asyncio.create_task(workers.run(owner, job)) for owner, job in zip(b"aabc", jobs, strict=True)]  # type: ignore[arg-type]
    await begun(jobs[0], jobs[2])
    assert not jobs[1].has_begun.is_set() and not jobs[3].has_begun.is_set()
    jobs[0].may_end.set()
    assert await tasks[0] == "done"
    await begun(jobs[3])  # it has waited longer for a thread than the first owner's second job
    assert not jobs[1].has_begun.is_set()
    for job in jobs:
        job.may_end.set()
    assert await asyncio.gather(*tasks) == ["done"] * 4 and not workers.turns.own.num_taken


async def test_texts_do_not_wait_for_the_loops_threads() -> None:
    """All of which may look up names at a server that does not answer."""
    loop, workers, look_up = asyncio.get_running_loop(), Workers(), Job()
    loop.set_default_executor(ThreadPoolExecutor(1))
    waiting = loop.run_in_executor(None, look_up)
    assert look_up.has_begun.wait(30)
    assert await asyncio.wait_for(workers.run(b"a", len, "text"), 30) == 4
    look_up.may_end.set()
    assert await waiting == "done"


def test_both_servers_end_their_threads() -> None:
    """With themselves."""
    with serve_fake() as cloud, serve_local(cloud.url) as local:
        for server in (cloud, local):
            body = {"model": "fake", "prompt": "def f", "max_tokens": 2}
            assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
        begun = [thread for thread in threading.enumerate() if thread.name.startswith("outrider-texts")]
    for thread in begun:
        thread.join(30)
    assert len(begun) >= 2 and not any(thread.is_alive() for thread in begun)


async def test_a_cancelled_callers_thread_keeps_its_place() -> None:
    """Clients that leave cannot pile up threads; a caller that has not begun gives its place back at once."""
    workers = Workers(max_threads=1)
    jobs = [Job() for _ in range(3)]
    first, second, third = (asyncio.create_task(workers.run(b"abc"[k : k + 1], jobs[k])) for k in range(3))
    await begun(jobs[0])
    for task in (first, second):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not jobs[2].has_begun.is_set()
    jobs[0].may_end.set()
    await begun(jobs[2])
    jobs[2].may_end.set()
    assert await third == "done" and not jobs[1].has_begun.is_set() and not workers.turns.own.num_taken


async def test_large_bodies_leave_the_loop_time_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of large bodies that arrive together one is parsed at a time, with a break in its middle; small ones do not wait;
    owners alternate.
    """
    order, breaks_s = list[str](), list[float]()

    def read_json(body: bytes) -> str:
        order.append(chr(body[0]))
        if len(body) > LARGE_BODY_BYTES:
            time.sleep(0.02)
            breaks_s.append(-time.monotonic())
        return chr(body[0])

    def note(message: type[BaseModel], raw: str) -> None:
        order.append(f"validated {raw}")
        if raw != "5":
            breaks_s[-1] += time.monotonic()

    monkeypatch.setattr(requests_module, "load", read_json)
    monkeypatch.setattr(requests_module, "validated", note)
    bodies, large = Bodies(1 << 20), 2 * LARGE_BODY_BYTES
    arrived = [(b"a", b"1" * large), (b"a", b"2" * large), (b"a", b"3" * large), (b"b", b"4" * large), (b"a", b"5")]
    await asyncio.gather(*(bodies.parse(owner, SessionRequest, body) for owner, body in arrived))
    while bodies.turns.own.num_taken:
        await asyncio.sleep(0)
    later = ["4", "validated 4", "2", "validated 2", "3", "validated 3"]
    assert order == ["1", "5", "validated 5", "validated 1", *later]
    assert len(breaks_s) == 4 and min(breaks_s) > 0.018  # of 0.02: clocks differ in their last digits


async def test_a_body_that_is_cancelled_in_its_break_gives_its_turn_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client has left; the next one's turn comes."""
    bodies = Bodies(1 << 20)
    tasks = [asyncio.create_task(bodies.parse(b"a", SessionRequest, b" " * 2 * LARGE_BODY_BYTES)) for _ in "12"]
    monkeypatch.setattr(requests_module, "load", lambda body: tasks[0].cancel())
    monkeypatch.setattr(requests_module, "validated", lambda message, raw: "done")
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    assert await tasks[1] == "done"  # type: ignore[comparison-overlap]


def test_bodies_that_wait_are_bounded() -> None:
    """Of one owner and in all; what is counted is let go."""
    bodies = Bodies(1000)
    with ExitStack() as held:
        for number in range(MAX_BODIES):
            owner = b"%d" % (number // MAX_OWN_BODIES)
            held.enter_context(bodies.hold(owner, b" " * 1000))
            if (number + 1) % MAX_OWN_BODIES == 0:
                with refused("too_many_bytes", 503), bodies.hold(owner, b"1"):
                    pass
        with refused("too_many_bytes", 503), bodies.hold(b"another", b"1"):
            pass
    with bodies.hold(b"another", b"1"):
        assert bodies.held.total == 1


def test_calls_that_wait_hold_few_bytes() -> None:
    """Calls to verify that wait for slots are within the bound on bytes; the others are served, and freed."""
    settings, most = ServerSettings(max_sessions=1, max_body_bytes=1000), MAX_OWN_BODIES * 1000 // 900
    body = json.dumps({"items": [ITEM]}).ljust(900).encode()
    with serve_fake(settings, gate=StepGate()) as server, ThreadPoolExecutor(64) as pool:
        call = partial(httpx.post, server.url + VERIFY, content=body, headers=JSON, timeout=60, verify=False)
        waiting = [pool.submit(call) for _ in range(most)]
        server.wait_until(lambda: server.core.bodies.held.total == most * 900)
        assert call().status_code == 503
        server.gate.open()
        assert {each.result().status_code for each in waiting} == {200}
        server.wait_until(lambda: is_idle(server))
        assert server.core.bodies.held.total == 0


def test_a_stream_does_not_keep_its_body() -> None:
    """A megabyte of blanks around a short prompt is gone once it is parsed."""
    body = json.dumps({"prompt": [1], "max_tokens": 4}).ljust(1 << 20).encode()
    with (
        serve_fake(gate=StepGate()) as server,
        httpx.Client(base_url=server.url) as client,
        client.stream("POST", SESSIONS, content=body, headers=JSON) as response,
    ):
        assert isinstance(next(read_events(response)), SessionOpen)
        kept = [each for each in gc.get_objects() if isinstance(each, Request) and hasattr(each, "_body")]
        assert [each for each in kept if len(each._body) == len(body)] == []
        server.gate.open()


# -- slots and /v1/verify ----------------------------------------------------------------------------------------------


def is_idle(server: FakeServer) -> bool:
    """Whether nothing runs or waits, and every slot is free. Held prefixes keep blocks."""
    stats = server.core.engine.stats()
    return stats.running == stats.queued == server.core.slots.num_taken == server.core.slots.num_waiting == 0


def test_items_beyond_the_owners_share_wait_and_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 calls of 64 items with 3 slots: at most 3 sequences at once, every result in its place. A call beyond the bound
    on those that wait is refused with 429.
    """
    monkeypatch.setattr(verify_module, "MAX_WAITING_CALLS", 4)
    prefixes = [[[n + 1, k + 1] for k in range(64)] for n in range(4)]
    with serve_fake(ServerSettings(max_sessions=3), gate=StepGate()) as server:
        taken, submit = list[int](), server.core.engine.submit

        def counted(*args: Any) -> int:
            taken.append(server.core.slots.num_taken)
            return submit(*args)

        server.core.engine.submit = counted  # type: ignore[assignment,method-assign]
        with ThreadPoolExecutor(4) as pool:
            bodies = [{"items": [{"prefix": each} for each in some]} for some in prefixes]
            calls = [pool.submit(httpx.post, server.url + VERIFY, json=body, timeout=60) for body in bodies]
            server.wait_until(lambda: server.core.slots.num_waiting == 4)
            assert server.core.slots.num_taken == 3
            for path, body in ((SESSIONS, {"prompt": [1], "max_tokens": 1}), (VERIFY, {"items": [ITEM]})):
                assert code_of(httpx.post(server.url + path, json=body)) == (429, "too_many_sessions")
            server.gate.open()
            found = [[each["tokens"] for each in call.result().json()["results"]] for call in calls]
        assert found == [[target_tokens(each, 1) for each in some] for some in prefixes] and max(taken) == 3
        server.wait_until(lambda: is_idle(server))


def test_waiting_items_do_not_delay_another_key() -> None:
    """Another owner's session runs while a call's items wait."""
    settings = ServerSettings(keys=KeyRing([ALICE, BOB]), max_sessions=2)
    with serve_fake(settings, gate=StepGate()) as server, ThreadPoolExecutor(1) as pool:
        call = pool.submit(
            httpx.post, server.url + VERIFY, json={"items": [ITEM] * 256}, headers=bearer(ALICE), timeout=60
        )
        server.wait_until(lambda: server.core.slots.num_waiting == 1)
        assert server.core.engine.stats().running + server.core.engine.stats().queued <= 2
        server.gate.open()
        with httpx.Client(base_url=server.url, headers=bearer(BOB)) as client:
            assert run_session(client, {"prompt": [1], "max_tokens": 3, "ignore_eos": True}).tokens
        assert len(call.result().json()["results"]) == 256
        server.wait_until(lambda: is_idle(server))


@pytest.mark.parametrize("is_first", [True, False])
def test_a_client_that_leaves_while_items_wait_frees_everything(is_first: bool) -> None:
    """Whether its call still waits for its first slot, or for a later one."""
    with (
        serve_fake(ServerSettings(max_sessions=2), gate=StepGate()) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        slots, before = server.core.slots, [server.url + VERIFY] * is_first
        with ThreadPoolExecutor(1) as pool:
            calls = [pool.submit(httpx.post, url, json={"items": [ITEM] * 3}, timeout=60) for url in before]
            server.wait_until(lambda: slots.num_waiting == len(calls))
            with pytest.raises(httpx.ReadTimeout):
                client.post(VERIFY, json={"items": [ITEM] * 5}, timeout=0.2)
            client.close()
            server.wait_until(lambda: slots.num_waiting == len(calls))
            server.gate.open()
            assert [len(call.result().json()["results"]) for call in calls] == [3] * is_first
        server.wait_until(lambda: is_idle(server))


def test_a_bad_item_gives_its_slot_to_the_next() -> None:
    """Good and bad items in turn, with one slot."""
    with serve_fake(ServerSettings(max_sessions=1)) as server:
        answer = httpx.post(server.url + VERIFY, json={"items": [{"prefix": [300]}, ITEM, 0, ITEM, {"prefix": []}]})
        assert ["error" in result for result in answer.json()["results"]] == [True, False, True, False, True]
        server.wait_until(lambda: is_idle(server))


# What a test does next: wait for a slot, take one at once, free one, cancel a waiting call, let the loop run.
slot_actions = st.lists(
    st.tuples(st.sampled_from(["wait", "take", "release", "cancel", "run"]), st.integers(0, 1), st.integers(0, 9)),
    max_size=60,
)


@given(slot_actions, st.integers(1, 3))
@example([(each, 0, 0) for each in (*["wait"] * 4, "cancel", "run", "wait", "release", "release")], 2)
def test_no_slot_is_lost(actions: list[tuple[str, int, int]], max_each: int) -> None:
    """Whatever is cancelled when: no more slots than allowed are taken, a free slot leaves nobody waiting, turns come
    in order, and in the end all are free. Who finds a free slot needs no turn, and may go on before one whose turn has
    come wakes up, as in the example.
    """

    async def run() -> None:
        slots, held, number = Slots(max_each), [0, 0], 0
        waiting: list[list[asyncio.Task[None]]] = [[], []]
        served: list[list[int]] = [[], []]

        async def wait(index: int, own: int) -> None:
            owner = bytes([index])
            needs_turn = owner in slots._waiting or slots.taken(owner) >= max_each
            await slots.wait(owner)
            held[index] += 1
            if needs_turn:
                served[index].append(own)

        async def settle() -> None:
            for _ in range(3):
                await asyncio.sleep(0)
            for index in range(2):
                waiting[index] = [each for each in waiting[index] if not each.done()]
                assert held[index] <= max_each and (not waiting[index] or held[index] == max_each)
            assert slots.num_taken == sum(held) and slots.num_waiting == sum(map(len, waiting))

        for action, index, which in actions:
            owner = bytes([index])
            if action == "wait":
                waiting[index].append(asyncio.create_task(wait(index, number)))
                number += 1
            elif action == "take":
                with suppress(RequestError):
                    slots.take(owner)
                    held[index] += 1
            elif action == "release" and held[index]:
                slots.release(owner)
                held[index] -= 1
            elif action == "cancel" and waiting[index]:
                waiting[index][which % len(waiting[index])].cancel()
            elif action == "run":
                await settle()
        await settle()
        assert all(each == sorted(each) for each in served)
        for index in range(2):
            while held[index]:
                slots.release(bytes([index]))
                held[index] -= 1
                await settle()
        assert slots.num_taken == slots.num_waiting == 0 and not slots._waiting and not slots._taken

    asyncio.run(run())
