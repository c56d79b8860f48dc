"""Predicted speed-ups: the simulation's numbers without its noise, and the limits that any such number has."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.played_drafts import Simulation

from outrider.models.bundle.speed_up import (
    Setting,
    alpha_for,
    best_depth,
    best_depths,
    predict,
    stop_and_wait,
    stream,
    tokens_per_pass,
    waiting_for,
)
from outrider.models.errors import ConfigError

DESIGN = Setting(alpha=0.65, draft_ms=1.5, step_ms=40.0, extra_ms=1.2, rtt_ms=0.0)

# DESIGN.md section 2.2, computed by tools/simulate.py: RTT ms, stop-and-wait, never waits, best patience.
TABLE = (
    (0.0, 1.99, 1.58, 2.01),
    (10.0, 1.66, 1.58, 1.71),
    (25.0, 1.35, 1.58, 1.58),
    (50.0, 1.02, 1.31, 1.31),
    (100.0, 0.70, 1.18, 1.18),
    (200.0, 0.43, 1.05, 1.05),
)


@pytest.mark.parametrize(("rtt_ms", "block", "never", "patient"), TABLE)
def test_the_designs_table_comes_out(rtt_ms: float, block: float, never: float, patient: float) -> None:
    """Stop-and-wait to the last digit; streamed to the 1 % by which 3000 simulated tokens differ from the mean."""
    setting = replace(DESIGN, rtt_ms=rtt_ms)
    assert round(stop_and_wait(setting).speed_up, 2) == block
    assert waiting_for(setting, best_depths(setting), 0).speed_up == pytest.approx(never, rel=0.01)
    assert stream(setting).speed_up == pytest.approx(patient, rel=0.01)


@pytest.mark.parametrize(
    ("alpha", "draft_ms", "step_ms", "extra_ms", "rtt_ms", "wanted"),
    [
        (0.3, 0.97, 40.0, 0.13, 33.3, 0),
        (0.6, 6.1, 10.0, 0.13, 7.3, 0),
        (0.6, 0.97, 10.0, 0.13, 7.3, 3),
        (0.6, 15.2, 40.0, 3.1, 33.3, 3),
        (0.9, 6.1, 40.0, 0.13, 121.7, 0),
        (0.9, 0.97, 10.0, 3.1, 33.3, 0),
        (0.9, 6.1, 40.0, 3.1, 0.0, 4),
    ],
)
def test_it_is_the_mean_of_what_the_simulation_plays(
    alpha: float, draft_ms: float, step_ms: float, extra_ms: float, rtt_ms: float, wanted: int
) -> None:
    """Speed and passes, also where the device is slow or the target waits; 8,000 tokens are within 3 %."""
    setting = Setting(alpha, draft_ms, step_ms, extra_ms, rtt_ms)
    # As patient as the exact form, and a little, or a draft that is just in time would come too late by rounding.
    patience_ms = rtt_ms + wanted * draft_ms + 0.01 if wanted else 0.0
    took_ms, passes = Simulation(setting, patience_ms, max(1, wanted)).run(8_000)
    found = waiting_for(setting, best_depths(setting), wanted)
    assert found.speed_up == pytest.approx(step_ms / took_ms, rel=0.03)
    assert found.passes_per_token == pytest.approx(passes, rel=0.03)


@settings(max_examples=60, deadline=None)
@given(
    alpha=st.floats(0.0, 0.9),
    draft_ms=st.floats(0.1, 60.0),
    step_ms=st.floats(1.0, 80.0),
    extra_ms=st.floats(0.0, 3.0),
    rtt_ms=st.floats(0.0, 300.0),
)
def test_streamed_drafts_are_never_slower_and_bounded(
    alpha: float, draft_ms: float, step_ms: float, extra_ms: float, rtt_ms: float
) -> None:
    """At least plain streaming; at most what drafts that are there at once and cost nothing would give."""
    reach = stream(Setting(alpha, draft_ms, step_ms, extra_ms, rtt_ms))
    assert 1.0 - 1e-9 <= reach.speed_up <= 1.0 / (1.0 - alpha) + 1e-9
    assert 0.0 < reach.passes_per_token <= 1.0 + 1e-9


@settings(max_examples=40, deadline=None)
@given(
    alphas=st.tuples(st.floats(0.0, 0.9), st.floats(0.0, 0.9)),
    rtts=st.tuples(st.floats(0.0, 300.0), st.floats(0.0, 300.0)),
    draft_ms=st.floats(0.1, 60.0),
    extra_ms=st.floats(0.0, 1.0),
)
def test_more_acceptance_and_a_shorter_way_never_hurt(
    alphas: tuple[float, float], rtts: tuple[float, float], draft_ms: float, extra_ms: float
) -> None:
    """To 1 %: the rule looks one step ahead, so drafts that come in pairs may be verified a step too early."""
    worse = Setting(min(alphas), draft_ms, 20.0, extra_ms, max(rtts))
    for better in (replace(worse, alpha=max(alphas)), replace(worse, rtt_ms=min(rtts))):
        assert stream(better).speed_up >= 0.99 * stream(worse).speed_up
        assert stop_and_wait(better).speed_up >= stop_and_wait(worse).speed_up - 1e-12


def test_a_draft_that_is_never_right_gives_nothing_and_costs_nothing() -> None:
    """Streamed, the target verifies none of it; stop-and-wait pays for every round."""
    hopeless = replace(DESIGN, alpha=0.0, rtt_ms=10.0)
    assert stream(hopeless).speed_up == pytest.approx(1.0) and best_depth(hopeless, 8) == 0
    assert stop_and_wait(hopeless).speed_up == pytest.approx(40.0 / (1.5 + 10.0 + 40.0 + 1.2))


def test_a_perfect_draft_is_bounded_by_how_far_it_runs_ahead() -> None:
    """Every guess right and free of charge: the window and the round trip are what is left."""
    perfect = Setting(alpha=1.0, draft_ms=0.0, step_ms=10.0, extra_ms=0.0, rtt_ms=0.0)
    assert stream(perfect).speed_up == pytest.approx(33.0)  # 32 drafted tokens and the target's own
    assert stream(replace(perfect, rtt_ms=100.0)).speed_up < 33.0


def test_a_device_slower_than_the_target_gives_nothing_from_afar() -> None:
    """It never gets ahead; nearby the target can wait for it, if a step is dear enough."""
    slow = Setting(alpha=0.8, draft_ms=60.0, step_ms=40.0, extra_ms=0.5, rtt_ms=50.0)
    assert stream(slow).speed_up == pytest.approx(1.0)
    assert stream(replace(slow, draft_ms=15.0, rtt_ms=0.0)).speed_up > 1.3


def test_the_ends_of_the_curve_are_where_it_crosses() -> None:
    """Both to 0.1 ms, 0 when it is never worth it, None beyond the last round trip."""
    found = predict(0.65, draft_ms=1.5, step_ms=40.0, extra_ms=1.2)
    for end_ms, of, worth in ((found.breaks_even_ms, stop_and_wait, 1.0), (found.fades_ms, stream, 1.05)):
        assert end_ms is not None
        assert of(replace(DESIGN, rtt_ms=end_ms)).speed_up < worth < of(replace(DESIGN, rtt_ms=end_ms - 0.2)).speed_up
    assert [point.rtt_ms for point in found.curve] == sorted(point.rtt_ms for point in found.curve)
    hopeless = predict(0.0, draft_ms=1.5, step_ms=40.0, extra_ms=1.2)
    assert (hopeless.fades_ms, hopeless.breaks_even_ms) == (0.0, 0.0)
    near = predict(0.9, draft_ms=1.5, step_ms=40.0, extra_ms=0.0, round_trips_ms=(0.0, 10.0))
    assert (near.fades_ms, near.breaks_even_ms) == (None, None)


@given(alpha=st.floats(0.0, 1.0), depth=st.integers(1, 16))
def test_the_rate_that_explains_the_length_of_rounds_is_found_back(alpha: float, depth: int) -> None:
    """`alpha_for` inverts `tokens_per_pass`."""
    assert tokens_per_pass(alpha_for(tokens_per_pass(alpha, depth), depth), depth) == pytest.approx(
        tokens_per_pass(alpha, depth), abs=1e-3
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alpha": 1.5}, "acceptance rate is 1.5"),
        ({"alpha": float("nan")}, "acceptance rate is nan"),
        ({"draft_ms": -1.0}, "draft time is -1.0 ms"),
        ({"step_ms": 0.0}, "step takes 0.0 ms"),
        ({"rtt_ms": float("inf")}, "round trip time is inf"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, float], message: str) -> None:
    """By name, with what was expected."""
    with pytest.raises(ConfigError, match=message):
        replace(DESIGN, **change)
