"""The simulation that measurements are judged by, pinned to the values that the design was decided on."""

from __future__ import annotations

import pytest
from bench.simulate import never, patient

from outrider.models.prediction import Setting


@pytest.mark.parametrize(("rtt_ms", "expected"), [(0.0, 1.58), (50.0, 1.31), (200.0, 1.05)])
def test_the_simulation_gives_the_designs_table(rtt_ms: float, expected: float) -> None:
    """Acceptance 0.65, draft 1.5 ms, step 40 ms + 1.2 ms a drafted token, never waiting."""
    setting = Setting(alpha=0.65, draft_ms=1.5, step_ms=40.0, extra_ms=1.2, rtt_ms=rtt_ms)
    assert round(never(setting).speed_up, 2) == expected


def test_waiting_pays_at_a_short_round_trip() -> None:
    """The design's value at 10 ms, and the patience that reaches it."""
    reach = patient(Setting(alpha=0.65, draft_ms=1.5, step_ms=40.0, extra_ms=1.2, rtt_ms=10.0))
    assert round(reach.speed_up, 2) == 1.71 and reach.choice == (20, 4)


def test_a_draft_that_is_never_right_costs_nothing_when_nobody_waits() -> None:
    """Verifying nothing is the best depth then, and every pass commits one token."""
    reach = never(Setting(alpha=0.0, draft_ms=1.5, step_ms=40.0, extra_ms=1.2, rtt_ms=10.0))
    assert reach.speed_up == pytest.approx(1.0) and reach.passes_per_token < 1.001  # one pass is under way at the end
