"""Tests profiles: how calls are timed, what is kept of them, and which draft is expected to be the fastest."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
from bench.placed import DRAFTS, rates
from bench.rank_files import read_ranks
from bench.simulate_trees import DATA
from tests.fake_runtime import FakeSequenceRuntime

from outrider.edge.devices.energy import EnergyMeter
from outrider.edge.devices.profiles import Link, Load, Profile, ProfileKey, Profiles, forecast, processor_load
from outrider.edge.drafting.drafter import ModelDrafter, NgramDrafter
from outrider.edge.drafting.node_times import time_nodes
from outrider.models.errors import BundleError

CALM, ANY = Load(), Link()
NPU = Profile(calls_ms={size: 18.2 + 0.29 * size for size in (1, 4, 8, 16)})
"""As published; not run on hardware."""


def rate(profile: Profile, link: Link = ANY, acceptance: float | None = None, load: Load = CALM) -> float:
    return forecast(profile, acceptance, load, link).tokens_per_s


def test_the_score_counts_utilisation_queue_link_and_acceptance() -> None:
    profile, slower = Profile(calls_ms={1: 2.0, 8: 8.0}), Profile(calls_ms={1: 4.0, 8: 16.0})
    assert rate(profile, load=Load(0.5)) == rate(slower) == rate(profile, load=Load(0.0, 1.0)) < rate(profile)
    assert rate(profile, acceptance=0.8) > rate(profile, acceptance=0.5)
    assert rate(Profile(calls_ms={1: 1.0}), acceptance=0.3) < rate(Profile(calls_ms={1: 3.0}), acceptance=0.9)
    near, far = rate(profile, Link(0.0, 40.0)), rate(profile, Link(400.0, 40.0))
    assert near > far > 25.0, "a draft that does not pay is not used"
    assert rate(Profile(calls_ms={1: 500.0}), Link(10.0, 40.0)) == pytest.approx(25.0)
    assert processor_load(lambda seconds: 40.0, lambda: (6.0, 0.0, 0.0), 2) == Load(0.4, 2.0)


def test_many_nodes_in_a_call_win_where_no_first_guess_is_waited_for() -> None:
    """16 nodes in 23 ms: faster than 8 ms a node at a step of 100 ms, slower at 40; faster than one node anywhere."""
    cpu, one = Profile(calls_ms={1: 8.0}), Profile(calls_ms={1: 18.5})
    for round_trip_ms in (0.0, 10.0, 25.0, 50.0, 100.0):
        short, long = Link(round_trip_ms, 40.0), Link(round_trip_ms, 100.0)
        assert rate(NPU, short, 0.77) < rate(cpu, short, 0.77) and rate(NPU, long, 0.77) > rate(cpu, long, 0.77)
        assert rate(NPU, short, 0.77) > rate(one, short, 0.77) and rate(NPU, long, 0.77) > rate(one, long, 0.77)
    assert forecast(NPU, 0.77, CALM, Link(25.0, 100.0)).nodes == 16
    assert forecast(cpu, 0.77, CALM, Link(0.0, 40.0)).nodes == 1


@pytest.mark.parametrize(("name", "step_ms", "rtt_ms"), list(product(DRAFTS, (40.0, 100.0), (0.0, 100.0))))
def test_the_score_is_near_the_simulation(name: str, step_ms: float, rtt_ms: float) -> None:
    """Over the ranks of the reference pair: within an eighth."""
    scored, simulated = rates(read_ranks(DATA / "ranks_0.8.json"), DRAFTS[name], step_ms, rtt_ms)
    assert scored == pytest.approx(simulated, rel=0.125)


def test_a_profile_of_before_is_measured_anew(tmp_path: Path) -> None:
    """It lacks the times by nodes. One that is kept comes back whole."""
    store, key = Profiles(tmp_path), ProfileKey("digest", "openvino", "1", "CPU", "Some CPU", "0.1")
    store.keep(key, NPU)
    assert store.find(key) == NPU
    (file,) = tmp_path.glob("*.json")
    file.write_text(json.dumps({"bundle": "digest", "token_ms": 1.0, "eight_ms": 2.0, "open_s": 0.1}))
    assert store.find(key) is None


@pytest.mark.parametrize(("most", "sizes"), [(1, [1]), (4, [1, 4]), (8, [1, 4, 8]), (16, [1, 4, 8, 16])])
def test_calls_are_timed_by_their_nodes(most: int, sizes: list[int]) -> None:
    """As many as the runtime takes in a call, each with so many nodes of the same text."""
    calls: list[int] = []
    runtime = FakeSequenceRuntime(vocab_size=64, max_branches=most, on_branches=lambda each: calls.append(len(each)))
    found = time_nodes(ModelDrafter(runtime), "no meter")
    assert list(found.calls_ms) == sizes and min(found.calls_ms.values()) > 0.0
    assert found.worst_ms >= found.calls_ms[1] and found.nodes_per_joule is None
    assert set(calls) == set(sizes[1:]) and len(calls) == 12 * len(sizes[1:])


def test_a_draft_of_few_positions_is_timed_in_full_or_not_at_all() -> None:
    """A call that guesses nothing takes no time, and would win every placement."""
    texts: list[int] = []
    runtime = FakeSequenceRuntime(
        vocab_size=64,
        max_positions=30,
        max_branches=16,
        on_branches=lambda each: texts.append(runtime.length + len(each[0])),
    )
    assert list(time_nodes(ModelDrafter(runtime), "no meter").calls_ms) == [1, 4, 8, 16]
    assert max(texts) == 29
    for most in (1, 16):
        short = FakeSequenceRuntime(vocab_size=64, max_positions=24, max_branches=most)
        with pytest.raises(BundleError, match=r"guesses nothing after a text of 24 tokens.*30 tokens or more"):
            time_nodes(ModelDrafter(short), "no meter")


def test_lookup_is_timed_too() -> None:
    assert list(time_nodes(NgramDrafter(), "no meter").calls_ms) == [1]


def test_nodes_per_joule_are_those_of_the_calls_of_most_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter moves by a joule for each call."""
    monkeypatch.setattr("outrider.edge.drafting.node_times.ENERGY_S", 0.0001)
    calls: list[int] = []
    runtime = FakeSequenceRuntime(vocab_size=64, max_branches=8, on_branches=lambda each: calls.append(len(each)))
    meter = EnergyMeter(lambda: (len(calls),), 1.0, (1 << 63,))
    assert time_nodes(ModelDrafter(runtime), meter).nodes_per_joule == 8.0
