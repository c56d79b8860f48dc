"""Tests that the simulation, against which measurements are compared, gives the values that the design was based on."""

from __future__ import annotations

import pytest
from bench.simulate import never, patient

from outrider.models.bundle.speed_up import Setting


@pytest.mark.parametrize(("rtt_ms", "expected"), [(0.0, 1.58), (50.0, 1.31), (200.0, 1.05)])
def test_the_simulation_gives_the_values_of_the_design(rtt_ms: float, expected: float) -> None:
    """Acceptance 0.65, draft 1.5 ms, step 40 ms + 1.2 ms per drafted token, never waiting."""
    setting = Setting(alpha=0.65, draft_ms=1.5, step_ms=40.0, extra_ms=1.2, rtt_ms=rtt_ms)
    assert round(never(setting).speed_up, 2) == expected


def test_waiting_pays_at_a_short_round_trip() -> None:
    """The design's value at 10 ms, and the patience that gives it."""
    reach = patient(Setting(alpha=0.65, draft_ms=1.5, step_ms=40.0, extra_ms=1.2, rtt_ms=10.0))
    assert round(reach.speed_up, 2) == 1.71 and reach.choice == (20, 4)


def test_a_draft_that_is_never_accepted_costs_nothing_without_waiting() -> None:
    """The best depth is then 0, and every pass commits one token."""
    reach = never(Setting(alpha=0.0, draft_ms=1.5, step_ms=40.0, extra_ms=1.2, rtt_ms=10.0))
    assert reach.speed_up == pytest.approx(1.0) and reach.passes_per_token < 1.001  # one pass is running at the end
