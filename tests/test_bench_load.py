"""The arithmetic of the measurements under load, beside peers, of capacity, and of leaks."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import psutil
import pytest
from bench.attacks.exchange import values_of
from bench.beside import Written
from bench.capacity import Costs, Found, saturated_rate
from bench.load import CLOUD_ONLY, VERIFY, Cell, Figures, crossover, misses, quantile
from bench.load_devices import Session
from bench.peer_engines import Batch, Done, Run
from bench.peer_servers import StreamedText, done_of, read_stream
from bench.peers import Comparison, compare
from bench.processes import remote, turn_of

from outrider.models.errors import RuntimeUnavailable


def test_figures_are_taken_while_all_sessions_run() -> None:
    """What comes before the last first commit and after the first end does not count, except for the passes."""
    first = Session([(0.0, (1,)), (1.0, (2, 3)), (2.0, (4,)), (3.0, (5, 6))])
    second = Session([(1.0, (1,)), (2.0, (2, 3, 4)), (6.0, (5, 6))])
    found = Figures.of([first, second])
    assert found.tokens_per_s == (1 + 2 + 3) / 2.0  # from second 1 to second 3
    assert found.passes == 5 / 10
    assert found.gaps_ms == (1000.0, 1000.0, 1000.0)
    with pytest.raises(ValueError, match="raise --max-tokens"):
        Figures.of([Session([(0.0, (1,))]), Session([(0.0, (1,))])])


@pytest.mark.parametrize(("share", "expected"), [(0.5, 50), (0.95, 95), (0.99, 99), (1.0, 100), (0.001, 1)])
def test_a_quantile_is_a_measured_value(share: float, expected: float) -> None:
    """The smallest that this share of the values does not exceed."""
    assert quantile([float(value) for value in range(100, 0, -1)], share) == expected


@pytest.mark.parametrize(
    ("speed_ups", "expected"),
    [({1: 1.8, 4: 1.2}, None), ({1: 0.9}, 1.0), ({4: 1.5, 16: 0.5}, 8.0), ({1: 2.0, 4: 1.0, 16: 0.8}, 4.0)],
)
def test_the_crossover_lies_between_two_measured_numbers(speed_ups: dict[int, float], expected: float | None) -> None:
    """By the logarithm of the number of sessions."""
    assert crossover(speed_ups) == (None if expected is None else pytest.approx(expected))


def test_limits_hold_at_16_sessions() -> None:
    """Passes always, tokens/s where the target is bound by memory, texts everywhere."""

    def cell(rate: float, passes: float, num_different: int = 0) -> Cell:
        return Cell([Figures(rate, passes, (1.0, 2.0, 3.0))], num_different)

    cells = {16: {CLOUD_ONLY: cell(100.0, 1.0), VERIFY: cell(140.0, 0.51)}}
    assert [line.split(":")[0] for line in misses(cells, is_memory_bound=False)] == ["16 sessions"]
    assert len(misses(cells, is_memory_bound=True)) == 2
    assert misses({16: {CLOUD_ONLY: cell(100.0, 1.0), VERIFY: cell(150.0, 0.5)}}, is_memory_bound=True) == []
    assert "texts differ" in misses({4: {VERIFY: cell(1.0, 1.0, 1)}}, is_memory_bound=False)[0]


def test_capacity_counts_rounds_after_the_first() -> None:
    """The first pass reads the prompt and drafts nothing."""
    text = Written(
        tokens=tuple(range(9)),
        arrival_s=(1.0, *[2.0] * 4, *[3.0] * 4),
        num_passes=3,
        num_drafted=8,
        num_accepted=6,
        draft_s=0.4,
    )
    costs = Costs.of([text, text])
    assert (costs.draft_s, costs.verify_s, costs.gamma) == pytest.approx((0.05, 0.8, 4.0))
    assert costs.gain == pytest.approx(1.25)
    found = Found({"beside": [10.0, 10.0], "devices": [11.0, 11.4]}, [costs])
    assert found.over_beside("devices") == pytest.approx(1.12)
    assert len(found.misses) == 1  # under 0.9 of 1.25
    clients = [Session([(0.0, (1,)), (2.0, (2, 3))]), Session([(1.0, (1,)), (2.0, (2,)), (4.0, (3,))])]
    assert saturated_rate(clients) == 3 / 1.0


def test_decoding_begins_when_every_text_has_begun() -> None:
    """The rates of an engine, and those of a streamed batch."""
    done = Done(((1, 2, 3, 4), (1, 2, 3, 4)), 8, took_s=4.0, before_s=2.0, num_before=4)
    assert (done.rate, done.decode_rate) == (2.0, 2.0)
    streamed = done_of([StreamedText("ab", 4, (1.0, 3.0)), StreamedText("abcd", 4, (2.0, 3.0, 4.0, 5.0))])
    assert streamed.texts == ("ab", "abcd") and streamed.rate == 8 / 5
    assert streamed.decode_rate == (2 + 3) / 3


def test_a_remote_object_answers_while_it_has_its_turn() -> None:
    """Calls go to a process of its own and back; outside of its turn it is stopped, and then it can be ended."""
    with remote(partial(nullcontext, [3, 1])) as process:
        with turn_of(process.pid):
            process.call("append", 2)
            assert process.call("index", 2) == 2
        stopped = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert stopped is not None and stopped.si_status == signal.SIGSTOP
    assert not psutil.pid_exists(process.pid)


def test_a_stream_is_read_with_its_usage() -> None:
    """Text, tokens and arrivals; an error in the stream is raised."""
    lines = [
        b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n',
        b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n',
        b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n',
        b"data: [DONE]\n",
    ]
    assert read_stream([(float(at), line) for at, line in enumerate(lines)]) == StreamedText("a", 3, (0.0,))
    with pytest.raises(RuntimeUnavailable, match="no room"):
        read_stream([(0.0, b'data: {"error": {"message": "no room"}}\n')])


def _run(seconds: Sequence[float], num_tokens: int = 2) -> Run:
    """Takes the given seconds for its batches."""
    left = iter(seconds)

    def run(batch: Batch) -> Done:
        took_s = next(left)
        texts = tuple((7,) * num_tokens for _ in batch.prompts)
        return Done(texts, num_tokens * len(texts), took_s, took_s / 2, 2)

    return run


def test_peers_take_turns_and_the_first_turn_does_not_count() -> None:
    """The bound is on the median of the runs' ratios."""
    batch = Batch(((1,), (2,)), 2)
    found = compare("x", _run([9.0, 1.0, 1.0, 2.0]), _run([9.0, 1.0, 0.5, 1.0]), batch, 3)
    assert (found.ours, found.peer) == ((4.0, 4.0, 2.0), (4.0, 8.0, 4.0))
    assert found.ratio == found.decode_ratio == 0.5
    assert len(found.misses) == 2 and found.num_same == 2
    assert replace(found, ours=found.peer, ours_decode=found.peer_decode).misses == []
    with pytest.raises(RuntimeUnavailable, match="expected 4"):
        compare("x", _run([1.0], num_tokens=1), _run([1.0]), batch, 1)
    assert isinstance(found, Comparison)


def test_values_of_one_server_and_of_replicas() -> None:
    """A metric's values come with and without labels; other metrics that begin alike do not count."""
    one = "# TYPE held gauge\nheld 3\nheld_bytes 70\n"
    two = 'held{outcome="kept",replica="a"} 3\nheld{outcome="kept",replica="b"} 4.5\nheld{outcome="lost"} 9\n'
    assert values_of(one, "held") == [3.0]
    assert values_of(two, "held", 'outcome="kept"') == [3.0, 4.5]
