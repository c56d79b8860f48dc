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
        self.clock, self.found, self.num_bytes = Clock(), list[tuple[int, int]](), Counter[int]()

    def __call__(self, raw: bytes) -> None:
        self.clock.now += _BYTE_S * len(raw)
        self.found.append((int(raw[:4]), int(raw[4:8])))
        self.num_bytes[int(raw[:4])] += len(raw)

    @property
    def numbers(self) -> list[int]:
        """The sequences whose drafts were read."""
        return [number for number, _ in self.found]


def opened(*arrived: tuple[int, int, int]) -> tuple[Reading, DraftInbox]:
    """An inbox with messages: number, size, rank."""
    reading = Reading()
    inbox = DraftInbox(reading)
    for number, size, rank in arrived:
        inbox.put(number, message(number, size, rank))
    return reading, inbox


def everyone(number: int) -> bool:
    return True


def test_a_flood_of_one_sequence_takes_nothing_from_others() -> None:
    """It has its part of a step; the others are read in the same round, and its own later ones in later steps."""
    reading, inbox = opened(*((1, 5000, rank) for rank in range(400)), *((number, 250, 0) for number in range(2, 50)))
    inbox.begin_step()
    inbox.read_until(lambda: False)
    assert reading.numbers[:49] == list(range(1, 50)) == sorted(set(reading.numbers))
    assert MIN_BYTES <= reading.num_bytes[1] < MIN_BYTES + 5000
    inbox.begin_step()
    inbox.put(2, message(2, 250, 1))
    inbox.read_until(lambda: False)
    assert reading.num_bytes[1] < 2 * (MIN_BYTES + 5000) and reading.found[-1][0] == 1 and (2, 1) in reading.found
    ranks = [rank for number, rank in reading.found if number == 1]
    assert ranks == sorted(ranks)


def test_what_reading_leaves_in_a_step_comes_first_in_the_next() -> None:
    """Nobody is left out for ever, however little time steps have."""
    reading, inbox = opened(*((number, 100, 0) for number in range(1, 9)))
    for _ in range(4):
        inbox.begin_step()
        count = len(reading.found)
        inbox.read_until(lambda: len(reading.found) >= count + 2)  # noqa: B023
        inbox.put(1, message(1, 100, 9))
    assert reading.numbers == list(range(1, 9)) and len(inbox) == 1


@pytest.mark.parametrize("size", [100, 5000])
def test_a_flood_delays_no_step_by_more_than_a_bounded_part(size: int) -> None:
    """Before a step so many bytes are read, or one message; of those that need it."""
    reading, inbox = opened(*((number, size, rank) for rank in range(100) for number in (1, 2, 3)))
    inbox.read_first(lambda number: number != 2)
    assert 2 not in reading.num_bytes and sum(reading.num_bytes.values()) <= max(FIRST_BYTES, size)
    if size < FIRST_BYTES:
        assert abs(reading.num_bytes[1] - reading.num_bytes[3]) <= size
    else:
        inbox.read_first(everyone)
        assert len(reading.numbers) == 2 == len(set(reading.numbers))  # in turns


def test_unread_drafts_are_bounded() -> None:
    """A sequence keeps its newest ones; all together a part of the bound each."""
    reading, inbox = opened(*((1, 5000, rank) for rank in range(3000)))
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
    assert len(opened((7, 10 * MAX_BYTES, 0))[1]) == 1


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(_NUMBER, 9000)), max_size=60), st.data())
@settings(max_examples=100, deadline=None)
def test_each_sequences_drafts_stay_in_order(arrivals: list[tuple[int, int]], data: st.DataObject) -> None:
    """However reading and arrivals alternate, none is read twice, and none is lost below the bounds."""
    (reading, inbox), ranks = opened(), Counter[int]()
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
        if wait_s and self._next_s > self._clock.now:
            until = min(self._clock.now + wait_s, self._next_s)
            self.waited_s, self._clock.now = self.waited_s + until - self._clock.now, until
        while most > 0:
            if self._next_s > self._clock.now:
                return False
            _, number = self._arrivals.popleft()
            inbox.put(number, message(number, 250))
            most -= SHORT_BYTES
        return True

    @property
    def _next_s(self) -> float:
        return self._arrivals[0][0] if self._arrivals else float("inf")


def reader_of(arrivals: Sequence[tuple[float, int]]) -> tuple[DraftReader, Reading, Socket]:
    reading = Reading()
    socket = Socket(reading.clock, arrivals)
    return DraftReader(socket.receive, reading, reading.clock), reading, socket


def test_drafts_are_read_while_the_model_runs() -> None:
    """As they come, for a good part of the expected time; what comes after it is read before the next step or in it."""
    reader, reading, _ = reader_of([(0.001, 1), (0.010, 2), (0.0195, 3)])
    start = reading.clock.now = 0.0
    reader.read_during(start, 0.020)
    assert reading.numbers == [1, 2] and 0.010 <= reading.clock.now <= 0.0125
    reading.clock.now = 0.0200
    reader.ended(start, reading.clock.now, 0.0)
    reader.read_before(everyone)
    assert reading.numbers == [1, 2, 3]


def test_nothing_is_waited_for_beyond_the_models_end() -> None:
    """Where steps end sooner than expected, waiting is given up, and tried again by and by."""
    reader, reading, socket = reader_of([])
    took_s = list[float]()
    for step_s in (*[0.002] * 20, *[0.020] * 61):  # at first it is ten times faster than expected
        start, waited = reading.clock.now, socket.waited_s
        reader.read_during(start, 0.020)
        took_s.append(reading.clock.now - start)
        reading.clock.now = max(reading.clock.now, start + step_s)
        reader.ended(start, reading.clock.now, 0.0)
        if len(took_s) == 20:
            assert min(took_s[10:]) < 0.002 and socket.waited_s < 0.040 + 20 * 0.002
    assert max(took_s[20:]) < 0.0125 and socket.waited_s - waited > 0.010


@pytest.mark.parametrize("every_s", [1e-5, 1.0])
@pytest.mark.parametrize(("model_s", "prepared_s"), [(0.008, 0.002), (0.010, 0.004), (0.010, 0.006)])
def test_reading_leaves_the_host_its_time(model_s: float, prepared_s: float, every_s: float) -> None:
    """On a GPU the picks are prepared after the reading, while the model still runs: no step becomes longer, whatever
    arrives, though it is the steps' own times that are expected.
    """
    reader, reading, _ = reader_of([(n * every_s, 1 + n % 400) for n in range(200_000)])
    step_s, found_s = 2 * model_s, list[float]()
    for _ in range(60):
        start = reading.clock.now
        reader.read_during(start, step_s)
        reading.clock.now = max(start + model_s, reading.clock.now + prepared_s)
        reader.ended(start, reading.clock.now, prepared_s)
        found_s.append(step_s := reading.clock.now - start)
    assert max(found_s[-30:]) < 1.01 * model_s


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
