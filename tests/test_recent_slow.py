"""Tests what a slow Redis costs: a few requests wait for it, then it is left out, for longer each time."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import cast

import pytest
from tests.engine_harness import Clock
from tests.redis_store import find, place, store_at, warnings_of
from tests.waiting import wait_until

from outrider.cloud.recent.redis_store import MAX_PAUSE_S, LateAnswers, RedisStore
from outrider.models.breaker import Breaker


class SlowRedis(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Answers as an empty Redis does, but GETRANGE only when `answers` is set; counts what it is asked."""

    daemon_threads = True

    def __init__(self, place: Path) -> None:
        self.answers = threading.Event()
        self.num_asked = 0
        super().__init__(str(place), _Handler)


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        server = cast("SlowRedis", self.server)
        while line := self.rfile.readline():
            words = []
            for _ in range(int(line[1:])):
                words.append(self.rfile.read(int(self.rfile.readline()[1:]) + 2)[:-2])
            answer = b"+PONG\r\n" if words[0] == b"PING" else b"+OK\r\n"
            if words[0] == b"GETRANGE":
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
        assert [find(store, place()) for _ in range(50)] == [None] * 50
        assert server.num_asked == 3
        wait_until(lambda: len(warnings_of(caplog)) == 1)
        assert "too many answers are late" in warnings_of(caplog)[0]


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
        began = clock.now
        clock.now += 0.02
        found.append(answers.late(began))
    return found


def test_a_share_of_late_answers_is_enough() -> None:
    """Every second one, and one of five; one of twenty never is. Late ones need not come in a row."""
    for num_fast, limit in ((1, 10), (4, 10), (19, None)):
        clock = Clock()
        answers = LateAnswers(Breaker(clock=clock), clock)
        is_out = []
        for _ in range(200):
            is_out += late(answers, clock)
            for _ in range(num_fast):
                answers.in_time()
        assert any(is_out[: limit or 200]) == (limit is not None), num_fast


def test_a_burst_counts_once() -> None:
    """Calls that were all asked before the first of them was late."""
    clock = Clock()
    answers = LateAnswers(Breaker(clock=clock), clock)
    began = clock.now
    clock.now += 0.02
    assert [answers.late(began) for _ in range(50)] == [False] * 50
    assert late(answers, clock, 2) == [False, True]


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
