"""Holds the simulation of many devices to what is known in closed form."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import Any

import pytest
from bench.gpu_on_paper import DENSE_8B, H100, H200, MIXTURE, Replica
from bench.load import Figures
from bench.load_devices import Device
from bench.scale import OnPaper
from bench.scale_check import drafting_on, line_through, messages
from bench.virtual_replica import BESIDE, DEVICES, HOST, NONE, RANKS, Field, Host, Machine, RankedDraft, simulate
from bench.virtual_time import RIGHT, Core, Drafting, Link, Peer, Text, Verifier

from outrider.cloud.engine import Policy
from outrider.export.report.simulation.ranks import MISSED, Picked, Ranks
from outrider.models.bundle.speed_up import tokens_per_pass

STEP_S = 0.04
ALONE = Machine(lambda sequences, tokens: STEP_S + 3e-4 * (tokens - 1), lambda sequences: 0.004)
SURE = Ranks((tuple(Picked(0, (9.0,) * 7) for _ in range(8)),))
"""Of a draft whose first guess is always right."""
NEARBY = Field(draft_ms=1.0, rtt_ms=0.0, jitter_ms=0.0)


@pytest.mark.parametrize("count", [1, 4])
def test_without_drafts_a_token_takes_a_step(count: int) -> None:
    """Whatever the round trip is, and as many sessions as there are."""
    found = simulate(ALONE, NONE, count, Field(rtt_ms=200.0, jitter_ms=0.0))
    assert found.rate == pytest.approx(count / (STEP_S + 3e-4 * (count - 1)))
    assert found.client_rate == pytest.approx(found.rate / count) and found.passes == 1.0


@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("rtt_ms", [0.0, 60.0])
def test_drafts_that_are_never_right_gain_nothing(count: int, rtt_ms: float) -> None:
    """And cost next to nothing: the engine stops verifying them, and devices stop sending them."""
    wrong = replace(NEARBY, lost=1.0, rtt_ms=rtt_ms)
    ratio = simulate(ALONE, DEVICES, count, wrong).rate / simulate(ALONE, NONE, count, wrong).rate
    assert 0.97 < ratio <= 1.0 + 1e-9


def test_a_round_trip_costs_drafts_their_use() -> None:
    """Near by they gain; far away little is left."""
    near, far = (
        simulate(ALONE, DEVICES, 1, replace(NEARBY, rtt_ms=rtt_ms)).rate * STEP_S for rtt_ms in (0.0, 20 * 1e3 * STEP_S)
    )
    assert near > 1.5 and 0.97 < far < 1.1


def turns(gamma: int, draft_s: float, num_texts: int) -> Figures:
    """Texts that take turns, one a step, with drafts of one right guess for each that is right or not by itself."""
    verifier = Verifier(lambda sequences, tokens: STEP_S, 1, beside_s=lambda count: gamma * draft_s)
    length = 1 + 40 * (gamma + 1)
    return Figures.of(verifier.run(sure_peers(verifier, num_texts, length, gamma, Drafting.BESIDE)))


def sure_peers(verifier: Verifier, count: int, length: int, gamma: int, *how: Any) -> list[Peer]:
    """Texts of so many tokens, all drafts for which are right. how: they draft, as `Peer` takes it."""
    return [
        Peer(verifier.timeline, Text([RIGHT] * length), Device(RankedDraft(SURE, 1, number), gamma, 1), *how)
        for number in range(count)
    ]


def test_drafts_from_devices_serve_as_many_more_as_the_paper_says() -> None:
    """1 + gamma t_d / t_v, at saturation (arXiv 2606.25091), where every guess is right."""
    gamma, draft_s = 4, 0.005
    beside, devices = turns(gamma, draft_s, 1), turns(gamma, 0.0, 1)
    assert devices.tokens_per_s / beside.tokens_per_s == pytest.approx(1.0 + gamma * draft_s / STEP_S)
    assert devices.tokens_per_s == pytest.approx((gamma + 1) / STEP_S)


def test_commits_leave_when_the_server_has_done_its_part() -> None:
    """After the step and what the server does around it."""
    verifier = Verifier(lambda sequences, tokens: STEP_S, 1, host_s=lambda passes, step_s: 0.01)
    began = verifier.timeline.now
    (session,) = verifier.run([Peer(verifier.timeline, Text([RIGHT] * 3))])
    expected = [began + number * (STEP_S + 0.01) for number in (1, 2, 3)]
    assert [at for at, _ in session.commits] == pytest.approx(expected)


@pytest.mark.parametrize(("message_s", "passes"), [(0.0, [1, 3]), (0.001, [4, 4])])
def test_drafts_that_queue_reach_the_same_step(message_s: float, passes: list[int]) -> None:
    """Four answers, a millisecond apart: the first one begins a step, unless the event loop has the interpreter."""
    verifier = Verifier(lambda sequences, tokens: STEP_S, 4, policy=Policy.VERIFY, message_s=message_s)
    verifier.run(sure_peers(verifier, 4, 41, 4, Drafting.ANSWERS, Core(0.001)))
    totals = [each.passes for each in verifier.progress]
    steps = [after - before for before, after in pairwise(totals) if after > before]
    assert sorted(steps[3:5]) == passes


@pytest.mark.parametrize(("answer", "handle"), [(0.3, 0.5), (0.1, 0.3), (0.3, 0.1), (0.3, 0.0)])
def test_what_messages_take_comes_out_of_their_lags(answer: float, handle: float) -> None:
    """As far as the slower of two queues shows it: played, and then calibrated."""
    message, count, devices, loop = 0.7, 16, Core(answer), Core(handle)
    lags = [loop.done_at(devices.done_at(message) + message) for _ in range(count)]
    expected = (message, handle) if handle > answer else (message + handle / 2.0, 0.0)
    assert messages(2 * message + answer + handle, fmean(lags), count, answer) == pytest.approx(expected)


def test_acceptance_is_that_of_the_ranks() -> None:
    """Of first guesses, less the share that is lost; a guess is the same whenever it is asked for."""
    lost = 0.25
    draft = RankedDraft(RANKS, 4, first=1, lost=lost)
    hits = fmean(draft.guess(position, [])[0].token == RIGHT for position in range(4000))
    assert hits == pytest.approx((1 - lost) * RANKS.hits(1), abs=0.03)
    assert Field(lost).acceptance == (1 - lost) * RANKS.hits(1)
    assert draft.guess(3, [RIGHT, RIGHT]) == draft.guess(5, [])
    assert all(guess.token != RIGHT for guess in draft.guess(3, [RIGHT, 3]))


def test_messages_take_their_time_in_their_order() -> None:
    """Half a round trip at least, and none overtakes another."""
    link = Link(0.02, 0.005)
    sent = [0.001 * index for index in range(50)]
    arrived = [link.arrival(now) for now in sent]
    assert arrived == sorted(arrived) and all(b >= a + 0.02 for a, b in zip(sent, arrived, strict=True))


def test_a_step_on_paper_is_bound_by_what_it_moves() -> None:
    """Weights at one sequence, and every expert where many tokens are routed."""
    assert MIXTURE.read(1) == pytest.approx(MIXTURE.active)  # a byte a weight
    assert MIXTURE.read(10_000) == pytest.approx(MIXTURE.weights)
    replica = Replica(DENSE_8B, H100, 1, context=1024)
    assert replica.step_s(1, 1) == pytest.approx(7.6e-3, rel=0.05)  # measured: docs/benchmarks.md
    assert replica.step_s(32, 32) == pytest.approx(10.0e-3, rel=0.1)
    assert replica.places(True) < replica.places(False)
    endless = replace(H100, bandwidth=1e24, flops={1: 1e24, 2: 1e24})
    assert Replica(DENSE_8B, endless, 1, 1024).step_s(64, 512) == pytest.approx(DENSE_8B.fixed_s)


def test_clients_are_bound_by_memory_or_by_time() -> None:
    """And more devices need more replicas."""
    paper = OnPaper(Replica(DENSE_8B, H100, 1, 2048), Field())
    assert paper.clients(NONE, 15.0) == paper.places(NONE)
    fast = paper.clients(NONE, 100.0)
    assert 0 < fast < paper.places(NONE) and paper.outcome(NONE, fast).client_rate >= 100.0
    assert paper.clients(NONE, 1000.0) == 0 and paper.load(NONE, 100, 1000.0) is None
    few, many = paper.load(NONE, 100, 15.0), paper.load(NONE, 10_000, 15.0)
    assert few is not None and many is not None and many[1] < few[1]
    assert (few[0], many[0]) == (1, -(-10_000 // paper.places(NONE)))


def test_a_draft_beside_is_as_deep_as_pays() -> None:
    """By the closed form of independent guesses."""
    dear = Machine(lambda sequences, tokens: STEP_S, lambda sequences: STEP_S)
    cheap = Machine(lambda sequences, tokens: STEP_S, lambda sequences: STEP_S / 100)
    assert dear.gamma(1, 0.7) == 0 and cheap.gamma(1, 0.7) > 1
    assert simulate(dear, BESIDE, 2, NEARBY) == simulate(dear, NONE, 2, NEARBY)
    rate = tokens_per_pass(RANKS.hits(1), ALONE.gamma(1, RANKS.hits(1)))
    assert 1.0 < simulate(ALONE, BESIDE, 1, NEARBY).passes ** -1 < 1.2 * rate
    assert line_through((1.0, 3.0), (2.0, 6.0)) == (0.0, 2.0) and line_through((1.0, 2.0), (5.0, 4.0)) == (5.0, 0.0)


def test_the_server_works_while_the_gpu_does() -> None:
    """The engine's part comes between two steps; the event loop's only as far as it does not fit into the step."""
    host, passes = Host(plain=1e-3, engine=2e-3, loop=4e-3), 10
    assert host.after(NONE, passes, 0.0) == pytest.approx(0.010)
    assert host.after(BESIDE, passes, 0.0) == host.after(DEVICES, passes, 0.040) == pytest.approx(0.030)
    assert [host.after(DEVICES, passes, step_s) for step_s in (0.015, 0.0)] == pytest.approx([0.055, 0.070])


def test_a_server_that_takes_time_serves_fewer() -> None:
    """A step of a GPU, and then the server's part, for each token."""
    machine = replace(ALONE, host=HOST)
    found = simulate(machine, NONE, 100, NEARBY)
    assert found.client_rate == pytest.approx(1.0 / (STEP_S + 3e-4 * 99 + 100 * HOST.plain))
    paper = OnPaper(Replica(MIXTURE, H200, 8, 2048), Field())
    assert paper.clients(NONE, 15.0) < paper.alone.clients(NONE, 15.0)


def test_the_search_ends_near_the_rate() -> None:
    """Within half a percent of what is asked for, or at the last client."""
    paper = OnPaper(Replica(DENSE_8B, H100, 1, 2048), Field())
    for rate in (40.0, 80.0):
        count = paper.clients(NONE, rate)
        found, more = (paper.outcome(NONE, each).client_rate for each in (count, count + 1))
        assert found >= rate and (found < 1.005 * rate or more < rate)


def test_a_device_rests_where_drafting_does_not_pay() -> None:
    """As the agent does: far fewer calls of a draft that is never right."""
    ranks = Ranks(RANKS.texts[:2])
    never = Ranks(tuple(tuple(each._replace(rank=MISSED) for each in text) for text in ranks.texts))
    plain = 1.0 / STEP_S
    assert drafting_on(ranks, (1e3 * STEP_S, 1.0, 1.0), 10.0, 1) > 1.5 * plain
    assert 0.95 * plain < drafting_on(never, (1e3 * STEP_S, 1.0, 1.0), 10.0, 1) <= plain * (1 + 1e-9)
