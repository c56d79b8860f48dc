"""Tests what a draft's calls take: their times, from which a draft is chosen, and a processor's energy."""

from __future__ import annotations

import ctypes
import json
from dataclasses import replace
from itertools import count, product
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
from tests.agents import VOCAB, asking, generate
from tests.fake_runtime import FakeSequenceRuntime
from tests.ranks import read_ranks
from tests.serving import FakeServer

from outrider.edge.cli.summary import result_as_json, summary_lines
from outrider.edge.devices.energy import (
    EnergyMeter,
    EnergySpan,
    _RawCounter,
    energy_meter,
    powercap_meter,
    windows_meter,
)
from outrider.edge.devices.profiles import (
    CALL_SIZES,
    Link,
    Load,
    Profile,
    ProfileKey,
    Profiles,
    forecast,
    processor_load,
)
from outrider.edge.drafting.drafter import ModelDrafter, NgramDrafter
from outrider.edge.drafting.node_times import time_nodes
from outrider.edge.modes.recorder import Recorder
from outrider.edge.results import Mode
from outrider.export.report.simulation.trees import simulate
from outrider.export.report.simulation.world import Form, Plan, Times
from outrider.models.errors import BundleError

RANGE_UJ = 262_143_328_850


def zone(root: Path, place: str, name: str, energy_uj: int = 0) -> Path:
    """A power zone as the kernel shows it."""
    folder = root / place
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in (("name", name), ("energy_uj", energy_uj), ("max_energy_range_uj", RANGE_UJ)):
        (folder / file).write_text(f"{text}\n")
    return folder / "energy_uj"


@pytest.fixture
def laptop(tmp_path: Path) -> Path:
    """A package with its parts, the same package again by another way, the platform."""
    for place, name in (
        ("intel-rapl", ""),
        ("intel-rapl:0", "package-0"),
        ("intel-rapl:0:0", "core"),
        ("intel-rapl:0:1", "uncore"),
        ("intel-rapl:1", "psys"),
        ("intel-rapl-mmio:0", "package-0"),
    ):
        zone(tmp_path, place, name, 7_000_000)
    return tmp_path


def meter_of(root: Path) -> EnergyMeter:
    meter = powercap_meter(root)
    assert isinstance(meter, EnergyMeter), meter
    return meter


def test_packages_are_summed_and_nothing_counts_twice(laptop: Path) -> None:
    """No part of a package, no second way to it, no platform; a second package counts."""
    span = EnergySpan(meter_of(laptop))
    for place in ("intel-rapl:0:0", "intel-rapl:0:1", "intel-rapl:1", "intel-rapl-mmio:0"):
        zone(laptop, place, "core", 9_000_000)
    assert span.joules is None, "a counter that has not moved says nothing"
    zone(laptop, "intel-rapl:0", "package-0", 9_500_000)
    assert span.joules == pytest.approx(2.5)
    for place, name, before, after, joules in (
        ("intel-rapl:2", "package-1", 1, 3_000_001, 3.0),
        ("intel-rapl:0", "package-0", RANGE_UJ - 1_000_000, 500_000, 1.5),  # a counter that begins again goes on
    ):
        counter = zone(laptop, place, name, before)
        span = EnergySpan(meter_of(laptop))
        counter.write_text(f"{after}\n")
        assert span.joules == pytest.approx(joules)


@pytest.mark.parametrize("broken", [None, "much\n", "", "\xb5"])
def test_a_counter_that_is_gone_or_breaks_says_nothing(broken: str | None, laptop: Path) -> None:
    """It ends no text: a reading that is no number fails as one that cannot be read."""
    span, counter = EnergySpan(meter_of(laptop)), laptop / "intel-rapl:0" / "energy_uj"
    counter.unlink() if broken is None else counter.write_text(broken, encoding="utf-8")
    assert span.joules is None


def test_why_there_is_no_meter(laptop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No zone; a file that only root may read, with what opens it; a file that is no number."""
    assert "has no package domain" in str(powercap_meter(laptop / "intel-rapl:1"))
    for file, text, words in (("energy_uj", "much", "cannot be read"), ("max_energy_range_uj", "0", "says no range")):
        zone(laptop, "intel-rapl:0", "package-0").with_name(file).write_text(f"{text}\n")
        assert words in str(powercap_meter(laptop))

    refused = PermissionError(13, "Permission denied", str(laptop / "intel-rapl:0" / "energy_uj"))
    monkeypatch.setattr("outrider.edge.devices.energy._number", Mock(side_effect=refused))
    why = str(powercap_meter(laptop))
    assert f"only root may read {laptop / 'intel-rapl:0' / 'energy_uj'}" in why
    assert f"sudo chmod a+r {laptop}/intel-rapl:*/energy_uj" in why and "CVE-2020-8694" in why
    assert EnergySpan(why).joules is None
    assert energy_meter()  # this system has one, or says why not


def pdh_with(opened: int = 0, added: int = 0, status: int = 0) -> Mock:
    """Windows' library of performance counters, as far as it is called; its counter is `value`."""

    def read(counter: Any, kind: None, raw: Any) -> int:
        raw._obj.status, raw._obj.first = status, made.value
        return 0

    made = Mock(value=0)
    made.PdhOpenQueryW.return_value, made.PdhAddEnglishCounterW.return_value = opened, added
    made.PdhCollectQueryData.return_value, made.PdhGetRawCounterValue.side_effect = 0, read
    return made


def test_windows_counts_picowatt_hours() -> None:
    """Not run on Windows: the layout is that of PDH_RAW_COUNTER, and a counter without a value is none."""
    assert _RawCounter.first.offset == 16 and ctypes.sizeof(_RawCounter) == 40
    pdh = pdh_with()
    span = EnergySpan(windows_meter(pdh))
    assert pdh.PdhAddEnglishCounterW.call_args.args[1] == r"\Energy Meter(RAPL_Package0_PKG)\Energy"
    pdh.value = 1_000_000_000
    assert span.joules == pytest.approx(3.6)
    for wrong in (pdh_with(opened=1), pdh_with(added=1), pdh_with(status=0xC0000BC6)):
        assert "Windows has no counter" in str(windows_meter(wrong))


@pytest.fixture
def moving(monkeypatch: pytest.MonkeyPatch) -> None:
    """This system's meter moves by half a joule with each reading."""
    readings = count()
    monkeypatch.setattr(
        "outrider.edge.devices.energy.energy_meter", lambda: EnergyMeter(lambda: (next(readings),), 0.5, (1 << 63,))
    )


def test_energy_is_read_before_the_clock_of_a_text_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meter is made and read outside of what the text's times count."""
    calls = Mock(**{"meter.return_value": "none", "clock.return_value": 0.0})
    monkeypatch.setattr("outrider.edge.devices.energy.energy_meter", calls.meter)
    Recorder(Mode.STREAM, clock=calls.clock)
    assert calls.mock_calls == [call.meter(), call.clock()]


@pytest.mark.usefixtures("moving")
@pytest.mark.parametrize("mode", list(Mode))
async def test_every_mode_counts_what_a_text_takes(server: FakeServer, mode: Mode) -> None:
    """From its request to its end; -v and --json show it, and neither invents it."""
    drafter = ModelDrafter(FakeSequenceRuntime(vocab_size=VOCAB)) if mode is not Mode.CLOUD_ONLY else None
    result = await generate([server.url], asking(max_tokens=12), drafter, mode=mode)
    known = "energy: 24.00 tokens per joule; this device's processor took 0.5 J meanwhile, other programs included"
    for each, joules, rate, energies in (
        (result, 0.5, 24.0, [known]),
        (replace(result, joules=None), None, None, []),
    ):
        assert (each.joules, each.tokens_per_joule) == (joules, rate)
        document = result_as_json(each, "")
        assert (document["joules"], document["tokens_per_joule"]) == (joules, rate)
        assert [line for line in summary_lines(each, is_verbose=True) if "joule" in line] == energies
        assert "joule" not in "\n".join(summary_lines(each))


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
    for round_trip_ms, step_ms in product((0.0, 10.0, 25.0, 50.0, 100.0), (40.0, 100.0)):
        npu, quick, slow = (rate(each, Link(round_trip_ms, step_ms), 0.77) for each in (NPU, cpu, one))
        assert (slow < npu < quick) if step_ms == 40.0 else (npu > max(slow, quick))
    assert forecast(NPU, 0.77, CALM, Link(25.0, 100.0)).nodes == 16
    assert forecast(cpu, 0.77, CALM, Link(0.0, 40.0)).nodes == 1


@pytest.mark.parametrize(
    ("draft", "step_ms", "rtt_ms"),
    list(
        product(
            (
                (18.2 + 16 * 0.29, 0.0, 16),  # an NPU's graphs as published: a pass, and each node that it has room for
                (18.2 + 8 * 0.29, 0.0, 8),
                (18.2 + 4 * 0.29, 0.0, 4),
                (18.2 + 0.29, 0.0, 1),
                (8.0, 0.0, 1),
                (7.2, 0.8, 8),
            ),
            (40.0, 100.0),
            (0.0, 100.0),
        )
    ),
)
def test_the_score_is_near_the_simulation(draft: tuple[float, float, int], step_ms: float, rtt_ms: float) -> None:
    """Over the ranks of the reference pair: within an eighth. draft: ms of a call and of a node, nodes of a call."""
    call_ms, node_ms, most = draft
    ranks = read_ranks("reference_ranks_0.8")
    profile = Profile(calls_ms={size: call_ms + node_ms * size for size in CALL_SIZES if size <= most})
    times = Times(step_ms, 0.03 * step_ms, profile.token_ms, most, node_ms / profile.token_ms)
    simulated = 1e3 * simulate(ranks, times, rtt_ms, Plan(form=Form.LINE)).speed_up / step_ms
    scored = forecast(profile, ranks.hits(1), link=Link(rtt_ms, step_ms)).tokens_per_s
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
    assert {size: calls.count(size) for size in calls} == dict.fromkeys(sizes[1:], 12)
    assert list(time_nodes(NgramDrafter(), "no meter").calls_ms) == [1]  # lookup is timed too


def test_a_draft_of_few_positions_is_timed_in_full_or_not_at_all() -> None:
    """A call that guesses nothing takes no time, and would win every placement."""
    texts: list[int] = []
    runtime = FakeSequenceRuntime(
        vocab_size=64,
        max_positions=30,
        max_branches=16,
        on_branches=lambda each: texts.append(runtime.length + len(each[0])),
    )
    assert list(time_nodes(ModelDrafter(runtime), "no meter").calls_ms) == [1, 4, 8, 16] and max(texts) == 29
    for most in (1, 16):
        short = FakeSequenceRuntime(vocab_size=64, max_positions=24, max_branches=most)
        with pytest.raises(BundleError, match=r"guesses nothing after a text of 24 tokens.*30 tokens or more"):
            time_nodes(ModelDrafter(short), "no meter")


def test_nodes_per_joule_are_those_of_the_calls_of_most_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter moves by a joule for each call."""
    monkeypatch.setattr("outrider.edge.drafting.node_times.ENERGY_S", 0.0001)
    calls: list[int] = []
    runtime = FakeSequenceRuntime(vocab_size=64, max_branches=8, on_branches=lambda each: calls.append(len(each)))
    meter = EnergyMeter(lambda: (len(calls),), 1.0, (1 << 63,))
    assert time_nodes(ModelDrafter(runtime), meter).nodes_per_joule == 8.0
