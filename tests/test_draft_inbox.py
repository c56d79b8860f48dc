"""Drafts that have arrived are read in turns, bounded for each sequence; a flood holds up neither steps nor others."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine_harness import Clock

from outrider.cloud.vllm.draft_inbox import FIRST_BYTES, MAX_BYTES, MIN_BYTES, SHORT_BYTES, DraftInbox, DraftReader

_BYTE_S = 1e-6
_NUMBER = 8


def message(number: int, size: int, rank: int = 0) -> bytes:
    return b"%4d%4d" % (number, rank) + bytes(size - _NUMBER)


class Reading:
    """What was read, in order; each byte takes time."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.found: list[tuple[int, int]] = []
        self.num_bytes: Counter[int] = Counter()

    def __call__(self, raw: bytes) -> None:
        self.clock.now += _BYTE_S * len(raw)
        self.found.append((int(raw[:4]), int(raw[4:8])))
        self.num_bytes[int(raw[:4])] += len(raw)


def everyone(number: int) -> bool:
    return True


def test_a_flood_of_one_sequence_takes_nothing_from_others() -> None:
    """It has its part of a step; the others are read in the same round, and its own later ones in later steps."""
    reading = Reading()
    inbox = DraftInbox(reading)
    for rank in range(400):
        inbox.put(1, message(1, 5000, rank))
    for number in range(2, 50):
        inbox.put(number, message(number, 250))
    inbox.begin_step()
    inbox.read_until(lambda: False)
    assert {number for number, _ in reading.found} == set(range(1, 50))
    assert MIN_BYTES <= reading.num_bytes[1] < MIN_BYTES + 5000
    assert [number for number, _ in reading.found[:49]] == list(range(1, 50))
    inbox.begin_step()
    inbox.put(2, message(2, 250, 1))
    inbox.read_until(lambda: False)
    assert reading.num_bytes[1] < 2 * (MIN_BYTES + 5000) and reading.found[-1][0] == 1 and (2, 1) in reading.found
    ranks = [rank for number, rank in reading.found if number == 1]
    assert ranks == sorted(ranks)


def test_what_reading_leaves_in_a_step_comes_first_in_the_next() -> None:
    """Nobody is left out for ever, however little time steps have."""
    reading = Reading()
    inbox = DraftInbox(reading)
    for number in range(1, 9):
        inbox.put(number, message(number, 100))
    for _ in range(4):
        inbox.begin_step()
        count = len(reading.found)
        inbox.read_until(lambda: len(reading.found) >= count + 2)  # noqa: B023
        inbox.put(1, message(1, 100, 9))
    assert [number for number, _ in reading.found] == list(range(1, 9)) and len(inbox) == 1


@pytest.mark.parametrize("size", [100, 5000])
def test_a_flood_delays_no_step_by_more_than_a_bounded_part(size: int) -> None:
    """Before a step so many bytes are read, or one message; of those that need it."""
    reading = Reading()
    inbox = DraftInbox(reading)
    for rank in range(100):
        for number in (1, 2, 3):
            inbox.put(number, message(number, size, rank))
    inbox.read_first(lambda number: number != 2)
    assert 2 not in reading.num_bytes and sum(reading.num_bytes.values()) <= max(FIRST_BYTES, size)
    if size < FIRST_BYTES:
        assert abs(reading.num_bytes[1] - reading.num_bytes[3]) <= size
    else:
        inbox.read_first(everyone)
        assert len(reading.found) == 2 and reading.found[0][0] != reading.found[1][0]  # in turns


def test_unread_drafts_are_bounded() -> None:
    """A sequence keeps its newest ones; all together a part of the bound each."""
    reading = Reading()
    inbox = DraftInbox(reading)
    for rank in range(3000):
        inbox.put(1, message(1, 5000, rank))
    assert sum(inbox._num_bytes.values()) <= MAX_BYTES
    for number in range(2, 600):
        for rank in range(20):
            inbox.put(number, message(number, 5000, rank))
    assert sum(inbox._num_bytes.values()) <= MAX_BYTES * (1 + 7)  # harmonic: each had its part when it came
    assert sum(len(q) for q in (*inbox._turns.values(), *inbox._later.values())) == sum(
        size // 5000 for size in inbox._num_bytes.values()
    )
    inbox.begin_step()
    inbox.read_first(lambda number: number == 1)
    assert reading.found[0][0] == 1 and reading.found[0][1] > 1000
    one = DraftInbox(reading)
    one.put(7, message(7, 10 * MAX_BYTES))
    assert len(one) == 1


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(_NUMBER, 9000)), max_size=60), st.data())
@settings(max_examples=100, deadline=None)
def test_each_sequences_drafts_stay_in_order(arrivals: list[tuple[int, int]], data: st.DataObject) -> None:
    """However reading and arrivals alternate, none is read twice, and none is lost below the bounds."""
    reading = Reading()
    inbox = DraftInbox(reading)
    ranks: Counter[int] = Counter()
    for number, size in arrivals:
        ranks[number] += 1
        inbox.put(number, message(number, size, ranks[number]))
        match data.draw(st.integers(0, 3)):
            case 0:
                inbox.read_first(everyone)
            case 1:
                inbox.begin_step()
            case 2:
                stop = len(reading.found) + data.draw(st.integers(0, 3))
                inbox.read_until(lambda: len(reading.found) >= stop)  # noqa: B023
    while inbox:
        inbox.begin_step()
        inbox.read_until(lambda: False)
    for number, count in ranks.items():
        assert [rank for each, rank in reading.found if each == number] == list(range(1, count + 1))


# -- how long --------------------------------------------------------------------------------------------------------


class Socket:
    """Messages that come at their times; waiting for one takes the clock there."""

    def __init__(self, clock: Clock, arrivals: Sequence[tuple[float, int]]) -> None:
        self._clock, self._arrivals = clock, deque(arrivals)
        self.waited_s = 0.0

    def receive(self, inbox: DraftInbox, most: int, wait_s: float) -> bool:
        if wait_s and (not self._arrivals or self._arrivals[0][0] > self._clock.now):
            until = min(self._clock.now + wait_s, self._arrivals[0][0] if self._arrivals else float("inf"))
            self.waited_s += until - self._clock.now
            self._clock.now = until
        while most > 0:
            if not self._arrivals or self._arrivals[0][0] > self._clock.now:
                return False
            inbox.put(self._arrivals[0][1], message(self._arrivals.popleft()[1], 250))
            most -= SHORT_BYTES
        return True


def reader_of(arrivals: Sequence[tuple[float, int]]) -> tuple[DraftReader, Reading, Socket]:
    reading = Reading()
    socket = Socket(reading.clock, arrivals)
    return DraftReader(socket.receive, reading, reading.clock), reading, socket


def test_drafts_are_read_while_the_model_runs() -> None:
    """As they come, for a good part of the expected time; what comes after it is read before the next step or in it."""
    reader, reading, _ = reader_of([(0.001, 1), (0.010, 2), (0.0195, 3)])
    start = reading.clock.now = 0.0
    reader.read_during(start, 0.020)
    assert [number for number, _ in reading.found] == [1, 2] and 0.010 <= reading.clock.now <= 0.0125
    reading.clock.now = 0.0200
    reader.ended(start, reading.clock.now)
    reader.read_before(everyone)
    assert [number for number, _ in reading.found] == [1, 2, 3]


def test_nothing_is_waited_for_beyond_the_models_end() -> None:
    """Where steps end sooner than expected, waiting is given up, and tried again by and by."""
    reader, reading, socket = reader_of([])
    spare: list[float] = []
    for _ in range(20):
        start = reading.clock.now
        reader.read_during(start, 0.020)
        end = max(reading.clock.now, start + 0.002)  # it is ten times faster than expected
        spare.append(end - reading.clock.now)
        reader.ended(start, end)
        reading.clock.now = end
    assert max(spare[10:]) > 0.0 and socket.waited_s < 0.040 + 20 * 0.002
    for _ in range(60):
        start = reading.clock.now
        reader.read_during(start, 0.020)
        assert reading.clock.now < start + 0.0125
        reading.clock.now = start + 0.020
        reader.ended(start, reading.clock.now)
    waited = socket.waited_s
    start = reading.clock.now
    reader.read_during(start, 0.020)
    assert socket.waited_s - waited > 0.010


def test_a_model_that_has_run_already_is_not_held_up() -> None:
    """As with an executor that runs it in the call: what is there is read for half a millisecond."""
    reader, reading, socket = reader_of([(0.0, 1 + n % 50) for n in range(5000)])
    start = reading.clock.now = 0.020
    reader.read_during(start - 0.020, 0.020)
    assert socket.waited_s == 0.0 and 0 < reading.clock.now - start < 0.001 and reading.found


def test_a_flood_ends_with_the_model() -> None:
    """Reading stops shortly before the expected end, whatever still arrives."""
    reader, reading, _ = reader_of([(n * 1e-5, 1 + n % 400) for n in range(10_000)])
    reading.clock.now = 0.0
    reader.read_during(0.0, 0.020)
    assert 0.0175 < reading.clock.now < 0.0185
    reader.read_before(everyone)
    assert reading.clock.now < 0.0185 + _BYTE_S * FIRST_BYTES
