"""Predicts the speed-up of drafts that branch, for report cards: in bounded time, equal figures for equal inputs.

Plays the measured tokens through `trees.simulate` once, under the default budget of bytes. Knows no report.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from outrider.export.report.simulation.plan import Form, Plan, Times
from outrider.export.report.simulation.ranks import Ranks
from outrider.export.report.simulation.trees import BYTES_PER_TOKEN, simulate
from outrider.models.manifest import AtRoundTrip

MOST_TOKENS: Final = 480
"""Played per figure: with nine round trips some 2 s in all."""


def predict_trees(ranks: Ranks, times: Times, curve: Sequence[AtRoundTrip]) -> tuple[AtRoundTrip, ...]:
    """The curve with `line` and `tree` added to each point.

    A line is at least as fast as the path, and a tree as a line, because each may do what the other does.
    """
    num_tokens = min(MOST_TOKENS, len(ranks.picked))

    def played(form: Form, rtt_ms: float) -> float:
        # Beyond a step nothing comes back in time to be worth a wait.
        patience_ms = None if rtt_ms < times.step_ms else 0.0
        plan = Plan(form=form, bytes_per_token=BYTES_PER_TOKEN, patience_ms=patience_ms)
        return round(simulate(ranks, times, rtt_ms, plan, num_tokens=num_tokens, seeds=(0,)).speed_up, 3)

    found = []
    for point in curve:
        line = max(point.stream, played(Form.LINE, point.rtt_ms))
        tree = max(line, played(Form.TREE, point.rtt_ms))
        found.append(point.model_copy(update={"line": line, "tree": tree}))
    return tuple(found)
