"""Tests recent texts in Redis: shared, bounded; no request waits for one that fails, and few for one that is slow."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import cast

import psutil
import pytest
from redis import Redis
from tests.agents import free_port
from tests.certificates import make_own, needs_openssl
from tests.engine_harness import Clock
from tests.redis_server import redis_server
from tests.redis_store import find, place, put, store_at, text, warnings_of
from tests.waiting import wait_until

from outrider.cloud.recent import redis_store
from outrider.cloud.recent.redis_store import MAX_PAUSE_S, SLOTS, LateAnswers, RedisStore
from outrider.cloud.recent.store import encode
from outrider.models.breaker import Breaker


def test_replicas_share_texts_through_redis(tmp_path: Path) -> None:
    """Within an owner; what Redis holds has an expiry, no prompt, and nothing of the owner's key."""
    with (
        redis_server(tmp_path / "redis"),
        store_at(f"unix://{tmp_path}/redis", max_s=7.0) as one,
        store_at(f"unix://{tmp_path}/redis") as two,
    ):
        put(one, place(), text(5, 6, 7))
        assert find(two, place()) == text(5, 6, 7) and find(two, place(b"bob")) is None
        with closing(Redis(unix_socket_path=str(tmp_path / "redis"))) as plain:
            (key,) = plain.keys()
            assert re.fullmatch(rb"outrider:recent:1:[0-9a-f]{32}:\d+", key) and 0 < plain.pttl(key) <= 7_000
            assert len(plain.get(key)) == len(encode(place(), text(5, 6, 7)))


def test_an_owner_has_a_fixed_number_of_slots(tmp_path: Path) -> None:
    """A flood of prompts takes no other owner's, and what shares a slot is a miss, no fault."""
    with redis_server(tmp_path / "redis"), store_at(f"unix://{tmp_path}/redis") as store:
        put(store, place(b"bob"), text(1, 2))
        for prompt in range(3 * SLOTS):
            store.put(place(prompt=(prompt,)), text(prompt))
        wait_until(lambda: store.stats().counts.stored == 1 + 3 * SLOTS)
        with closing(Redis(unix_socket_path=str(tmp_path / "redis"))) as plain:
            assert len(plain.keys()) <= 1 + SLOTS
        found = [find(store, place(prompt=(prompt,))) for prompt in range(3 * SLOTS)]
        assert all(each in (None, text(prompt)) for prompt, each in enumerate(found))
        assert 0 < sum(each is not None for each in found) <= SLOTS and find(store, place(b"bob")) == text(1, 2)
        assert store.stats().counts.rejected == store.stats().counts.failures == 0


def test_garbage_in_redis_is_a_miss(tmp_path: Path) -> None:
    """Bytes that fail the check, something huge, a key of another type: counted, and the store stays up."""
    with redis_server(tmp_path / "redis"), store_at(f"unix://{tmp_path}/redis") as store:
        put(store, place(), text(1, 2, 3))
        with closing(Redis(unix_socket_path=str(tmp_path / "redis"))) as plain:
            (key,) = plain.keys()
            good = plain.get(key)
            for wrong in (good[:-1] + bytes([good[-1] ^ 1]), b"garbage", b"\0" * (1 << 20)):
                plain.set(key, wrong)
                assert find(store, place()) is None
            plain.delete(key)
            plain.lpush(key, b"a list")
            assert find(store, place()) is None
        assert store.stats().up == 1 and store.stats().counts.rejected >= 2
        put(store, place(), text(4))
        assert find(store, place()) == text(4)


def test_a_redis_that_is_killed_is_left_out_until_it_is_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One warning, however many requests come; nothing is raised; what is put meanwhile is dropped. One that is dead at
    the start is waited for, too.
    """
    caplog.set_level(logging.INFO, "outrider.cloud")
    with store_at(f"unix://{tmp_path}/redis", is_up=False) as store:
        wait_until(lambda: store.stats().counts.failures > 2)
        assert find(store, place()) is None and store.stats().up == 0 and len(warnings_of(caplog)) == 1
        with redis_server(tmp_path / "redis") as process:
            wait_until(lambda: store.stats().up == 1)
            put(store, place(), text(1))
            process.kill()
            process.wait()
            wait_until(lambda: find(store, place()) is None and store.stats().up == 0)
        for _ in range(20):
            assert find(store, place()) is None
            store.put(place(), text(2))
        failures = store.stats().counts.failures
        wait_until(lambda: store.stats().counts.failures > failures + 2)  # it has tried again
        with redis_server(tmp_path / "redis"):
            wait_until(lambda: store.stats().up == 1)
            put(store, place(), text(3))
            assert find(store, place()) == text(3) and store.stats().counts.dropped == 20
    assert [str(tmp_path / "redis") in warning for warning in warnings_of(caplog)] == [True]


def test_a_redis_that_dies_unasked_is_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a request, so that the gauge is right at a replica that has none."""
    monkeypatch.setattr(redis_store, "_IDLE_S", 0.02)
    with redis_server(tmp_path / "redis") as process, store_at(f"unix://{tmp_path}/redis") as store:
        process.kill()
        wait_until(lambda: store.stats().up == 0 and len(warnings_of(caplog)) == 1)


async def test_a_redis_that_hangs_delays_nobody_for_long(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request waits for the bound and not for the socket, the event loop goes on meanwhile, and soon none waits."""
    monkeypatch.setattr(redis_store, "_SOCKET_S", 3.0)
    with redis_server(tmp_path / "redis") as process, store_at(f"unix://{tmp_path}/redis", wait_s=0.3) as store:
        put(store, place(), text(1))
        process.send_signal(signal.SIGSTOP)
        began, num_turns = time.monotonic(), 0
        asking = asyncio.ensure_future(store.find(place()))
        while not asking.done():
            await asyncio.sleep(0.01)
            num_turns += 1
        # The socket's own limit is 3 s.
        assert asking.result() is None and time.monotonic() - began < 2.5 and num_turns > 1
        wait_until(lambda: store.stats().up == 0)
        began = time.monotonic()
        assert [await store.find(place()) for _ in range(10)] == [None] * 10
        assert time.monotonic() - began < 2.5  # one that waited would take 0.3 s
        wait_until(lambda: len(warnings_of(caplog)) == 1)
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: store.stats().up == 1)
        assert await store.find(place()) == text(1)


def test_what_waits_for_redis_is_bounded_for_each_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls and bytes: another owner's are taken while one has its fill; late answers to one burst count once."""
    written = len(encode(place(), text(1)))
    monkeypatch.setattr(redis_store, "_SOCKET_S", 3000.0)
    monkeypatch.setattr(redis_store, "_MAX_FINDS_EACH", 8)
    monkeypatch.setattr(redis_store, "_MAX_WAITING_BYTES_EACH", 2 * written)
    with redis_server(tmp_path / "redis") as process, store_at(f"unix://{tmp_path}/redis", wait_s=600.0) as store:
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        asked = [store._ask(place(owner)) for owner in (*[b"alice"] * 10, b"bob")]
        assert [each is None for each in asked] == [False] * 8 + [True] * 2 + [False]
        for _ in range(5):
            store.put(place(prompt=(9,)), text(1))  # not what is asked for: Redis may store it before it answers
        dropped = store.stats().counts.dropped
        assert 2 <= dropped <= 3  # one may be on its way
        store.put(place(b"bob", (9,)), text(1))
        assert store.stats().counts.dropped == dropped
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), store._loop).result()  # all calls have begun
        later_s = store._loop.time() + 1000.0  # the wait is over; without it, a busy machine could be late by itself
        monkeypatch.setattr(store._loop, "time", lambda: later_s)
        store._loop.call_soon_threadsafe(lambda: None)
        wait_until(lambda: store._num_late == 9)
        process.send_signal(signal.SIGCONT)
        assert all(each is None or each.result(30.0) is None for each in asked)
        assert store.stats().up == 1 and store.stats().counts.failures == 9
        wait_until(lambda: store.stats().counts.stored >= 3 and not store._finds)


def test_a_port_that_never_answers_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """It accepts connections, and is no Redis."""
    with (
        socket.create_server(("127.0.0.1", 0)) as mute,
        store_at(f"redis://127.0.0.1:{mute.getsockname()[1]}/0", is_up=False) as store,
    ):
        assert find(store, place()) is None
        wait_until(lambda: store.stats().counts.failures > 0 and len(warnings_of(caplog)) == 1)
        assert store.stats().up == 0


@needs_openssl
def test_tls_checks_the_certificate(tmp_path: Path) -> None:
    """`rediss://`: with the authority's certificate texts are kept, without it the store stays down."""
    (certificate, key), port = make_own(tmp_path, "localhost"), free_port()
    tls = ["--tls-port", str(port), "--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
    url = f"rediss://127.0.0.1:{port}/0"
    with redis_server(tmp_path / "redis", *tls, "--tls-auth-clients", "no"):
        with store_at(f"{url}?ssl_ca_certs={certificate}") as store:
            put(store, place(), text(1))
            assert find(store, place()) == text(1)
        with store_at(url, is_up=False) as stranger:
            wait_until(lambda: stranger.stats().counts.failures > 0)
            assert stranger.stats().up == 0


class SlowRedis(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Answers as an empty Redis does, but GETRANGE only when `answers` is set; counts what it is asked."""

    daemon_threads = True

    def __init__(self, place: Path) -> None:
        self.answers, self.num_asked = threading.Event(), 0
        super().__init__(str(place), _Handler)


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        server = cast("SlowRedis", self.server)
        while line := self.rfile.readline():
            word, *_ = [self.rfile.read(int(self.rfile.readline()[1:]) + 2)[:-2] for _ in range(int(line[1:]))]
            answer = b"+PONG\r\n" if word == b"PING" else b"+OK\r\n"
            if word == b"GETRANGE":
                server.num_asked += 1
                server.answers.wait(30.0)
                answer = b"$0\r\n\r\n"
            self.wfile.write(answer)


@contextmanager
def slow_redis(place: Path) -> Iterator[SlowRedis]:
    with SlowRedis(place) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.answers.set()
            server.shutdown()
            thread.join()


def ask(store: RedisStore, server: SlowRedis) -> None:
    """A request that Redis gets, and answers after the request has given up."""
    num_asked, failures = server.num_asked, store.stats().counts.failures
    server.answers.clear()
    assert find(store, place()) is None
    wait_until(lambda: server.num_asked == num_asked + 1 and store._num_late == 1)
    server.answers.set()
    wait_until(lambda: store._num_late == 0 and not store._finds)
    assert store.stats().counts.failures > failures


def test_nobody_waits_while_an_answer_is_late(tmp_path: Path) -> None:
    """A Redis that hangs costs who asks before the first answer is late, and nobody after it."""
    with slow_redis(tmp_path / "redis") as server, store_at(f"unix://{tmp_path}/redis", wait_s=0.05) as store:
        assert find(store, place()) is None
        wait_until(lambda: store._num_late == 1)
        for _ in range(20):
            assert find(store, place(b"bob")) is None
        assert server.num_asked == 1
        server.answers.set()
        wait_until(lambda: store._num_late == 0)
        if store.stats().up:  # it is asked again
            find(store, place())
            wait_until(lambda: server.num_asked == 2)


def test_a_slow_redis_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After three late answers, although its pings are fast: one warning, no further calls, gauge 0."""
    with (
        slow_redis(tmp_path / "redis") as server,
        closing(RedisStore(f"unix://{tmp_path}/redis", wait_s=5.0, retry_s=3600.0)) as store,
    ):
        wait_until(lambda: store.stats().up == 1)
        store._wait_s = 0.05  # now: the first ping of a busy machine may take longer, and there is no second one
        for num_left in (2, 1, 0):
            assert store.stats().up == 1, num_left
            ask(store, server)
        assert store.stats().up == 0
        assert [find(store, place()) for _ in range(50)] == [None] * 50 and server.num_asked == 3
        wait_until(lambda: ["too many answers are late" in warning for warning in warnings_of(caplog)] == [True])


def test_a_slow_redis_is_asked_again_by_one_request(tmp_path: Path) -> None:
    """After each pause one late answer is enough; what is fast again stays."""
    with slow_redis(tmp_path / "redis") as server, store_at(f"unix://{tmp_path}/redis", wait_s=0.05) as store:
        for _ in range(3):
            ask(store, server)
        for _ in range(2):
            wait_until(lambda: store.stats().up == 1)
            ask(store, server)
            assert store._breaker.pause_s >= 0 and not store._num_late
        assert server.num_asked == 5
        wait_until(lambda: store.stats().up == 1)
        store._wait_s = 5.0  # no slow test machine counts as a slow Redis
        for _ in range(30):
            find(store, place())
        assert store.stats().up == 1 and server.num_asked == 35


# -- the rule ----------------------------------------------------------------------------------------------------------


def late(answers: LateAnswers, clock: Clock, count: int = 1) -> list[bool]:
    """Late answers, one after the other."""
    found = []
    for _ in range(count):
        began, clock.now = clock.now, clock.now + 0.02
        found.append(answers.late(began))
    return found


@pytest.mark.parametrize(("num_fast", "limit"), [(1, 10), (4, 10), (19, None)])
def test_a_share_of_late_answers_is_enough(num_fast: int, limit: int | None) -> None:
    """Every second one, and one of five; one of twenty never is. Late ones need not come in a row."""
    clock, is_out = Clock(), list[bool]()
    answers = LateAnswers(Breaker(clock=clock), clock)
    for _ in range(200):
        is_out += late(answers, clock)
        for _ in range(num_fast):
            answers.in_time()
    assert any(is_out[: limit or 200]) == (limit is not None)


def test_each_pause_is_longer_until_it_recovers() -> None:
    """Doubled to a minute at most; twenty answers in time start it anew."""
    clock = Clock()
    breaker = Breaker(1.0, MAX_PAUSE_S, clock)
    answers = LateAnswers(breaker, clock)
    assert breaker.pause_s == 0.0 and late(answers, clock, 3) == [False, False, True]
    pauses = []
    for _ in range(8):
        pauses.append(breaker.pause_s)
        clock.now += breaker.pause_s
        assert breaker.pause_s == 0.0
        breaker.passed()  # it answers a ping
        assert late(answers, clock) == [True]
    assert pauses == pytest.approx([1, 2, 4, 8, 16, 32, MAX_PAUSE_S, MAX_PAUSE_S])
    clock.now += MAX_PAUSE_S
    breaker.passed()
    for _ in range(20):
        answers.in_time()
    assert late(answers, clock, 3) == [False, False, True] and breaker.pause_s == pytest.approx(1.0)
