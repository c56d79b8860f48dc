"""Tests what a draft's calls take: their times, from which a draft is chosen, and a processor's energy."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tests.fake_runtime import FakeSequenceRuntime
from tests.ranks import read_ranks
from tests.serving import FakeServer
from tests.test_edge_ladder import PARAMS
from tests.waiting import run

from outrider.edge.cli.summary import result_as_json, summary_lines
from outrider.edge.devices import energy
from outrider.edge.devices.energy import EnergyMeter, EnergySpan, energy_meter, powercap_meter, windows_meter
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
from outrider.edge.link.endpoints import Endpoints
from outrider.edge.modes.assemble import make_agent
from outrider.edge.modes.recorder import Recorder
from outrider.edge.results import GenerationRequest, GenerationResult, Mode
from outrider.export.report.simulation.trees import simulate
from outrider.export.report.simulation.world import Form, Plan, Times
from outrider.models.client.client import VerifierClient
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
    other = zone(laptop, "intel-rapl:2", "package-1", 1)
    span = EnergySpan(meter_of(laptop))
    other.write_text("3000001\n")
    assert span.joules == pytest.approx(3.0)


def test_a_counter_that_begins_again_goes_on(laptop: Path) -> None:
    counter = zone(laptop, "intel-rapl:0", "package-0", RANGE_UJ - 1_000_000)
    span = EnergySpan(meter_of(laptop))
    counter.write_text("500000\n")
    assert span.joules == pytest.approx(1.5)


@pytest.mark.parametrize("broken", [None, "much\n", "", "\xb5"])
def test_a_counter_that_is_gone_or_breaks_says_nothing(broken: str | None, laptop: Path) -> None:
    """It ends no text: a reading that is no number fails as one that cannot be read."""
    span, counter = EnergySpan(meter_of(laptop)), laptop / "intel-rapl:0" / "energy_uj"
    counter.unlink() if broken is None else counter.write_text(broken, encoding="utf-8")
    assert span.joules is None


def test_why_there_is_no_meter(laptop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No zone; a file that only root may read, with what opens it; a file that is no number."""
    assert "has no package domain" in str(powercap_meter(laptop / "intel-rapl:1"))
    zone(laptop, "intel-rapl:0", "package-0").write_text("much\n")
    assert "cannot be read" in str(powercap_meter(laptop))
    zone(laptop, "intel-rapl:0", "package-0").with_name("max_energy_range_uj").write_text("0\n")
    assert "says no range" in str(powercap_meter(laptop))

    def refuse(file: Path) -> int:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(energy, "_number", refuse)
    why = str(powercap_meter(laptop))
    assert f"only root may read {laptop / 'intel-rapl:0' / 'energy_uj'}" in why
    assert f"sudo chmod a+r {laptop}/intel-rapl:*/energy_uj" in why and "CVE-2020-8694" in why
    assert EnergySpan(why).joules is None


def test_this_system_has_a_meter_or_says_why_not() -> None:
    assert energy_meter()


class Pdh:
    """Windows' library of performance counters, as far as it is called."""

    def __init__(self, opened: int = 0, added: int = 0, status: int = 0) -> None:
        self.results, self.status, self.value = (opened, added), status, 0

    def PdhOpenQueryW(self, source: None, data: Any, query: Any) -> int:
        return self.results[0]

    def PdhAddEnglishCounterW(self, query: Any, path: str, data: Any, counter: Any) -> int:
        assert path == r"\Energy Meter(RAPL_Package0_PKG)\Energy"
        return self.results[1]

    def PdhCollectQueryData(self, query: Any) -> int:
        return 0

    def PdhGetRawCounterValue(self, counter: Any, kind: None, raw: Any) -> int:
        raw._obj.status, raw._obj.first = self.status, self.value
        return 0


def test_windows_counts_picowatt_hours() -> None:
    """Not run on Windows: the layout is that of PDH_RAW_COUNTER, and a counter without a value is none."""
    assert energy._RawCounter.first.offset == 16 and ctypes.sizeof(energy._RawCounter) == 40
    pdh = Pdh()
    meter = windows_meter(pdh)
    assert isinstance(meter, EnergyMeter)
    span = EnergySpan(meter)
    pdh.value = 1_000_000_000
    assert span.joules == pytest.approx(3.6)
    for wrong in (Pdh(opened=1), Pdh(added=1), Pdh(status=0xC0000BC6)):
        assert "Windows has no counter" in str(windows_meter(wrong))


@pytest.fixture
def moving(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This system's meter moves by half a joule with each reading."""
    readings = iter(range(10_000))
    monkeypatch.setattr(energy, "energy_meter", lambda: EnergyMeter(lambda: (next(readings),), 0.5, (1 << 63,)))
    yield


async def written(url: str, mode: Mode) -> GenerationResult:
    async with VerifierClient(url) as client:
        drafter = ModelDrafter(FakeSequenceRuntime(vocab_size=256)) if mode is not Mode.CLOUD_ONLY else None
        agent = make_agent(mode, Endpoints([client]), drafter)
        return await agent.generate(GenerationRequest((1, 2, 3), PARAMS, 12, ignore_eos=True))


def test_energy_is_read_before_the_clock_of_a_text_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meter is made and read outside of what the text's times count."""
    order: list[str] = []

    def noted(name: str, value: Any) -> Any:
        order.append(name)
        return value

    monkeypatch.setattr(energy, "energy_meter", lambda: noted("meter", "none"))
    Recorder(Mode.STREAM, clock=lambda: noted("clock", 0.0))
    assert order == ["meter", "clock"]


@pytest.mark.usefixtures("moving")
@pytest.mark.parametrize("mode", list(Mode))
def test_every_mode_counts_what_a_text_takes(server: FakeServer, mode: Mode) -> None:
    """From its request to its end; -v and --json show it, and neither invents it."""
    result = run(written(server.url, mode))
    assert result.joules == 0.5 and result.tokens_per_joule == 24.0
    shown = "\n".join(summary_lines(result, is_verbose=True))
    assert "energy: 24.00 tokens per joule; this device's processor took 0.5 J meanwhile" in shown
    assert "joule" not in "\n".join(summary_lines(result))
    assert result_as_json(result, "")["tokens_per_joule"] == 24.0
    unknown = replace(result, joules=None)
    assert "joule" not in "\n".join(summary_lines(unknown, is_verbose=True))
    document = result_as_json(unknown, "")
    assert document["joules"] is None and document["tokens_per_joule"] is None


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
