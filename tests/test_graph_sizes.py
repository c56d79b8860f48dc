"""The step sizes that vLLM captures, and what the chooser of drafts makes of them; no vLLM is needed for it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.cloud.pending.drafting import Drafting
from outrider.cloud.pending.estimators import StepSize, StepTimeCurve
from outrider.cloud.pending.policy import Policy
from outrider.cloud.seam import DraftHints
from outrider.cloud.vllm.graph_sizes import MOST_TOKENS, graph_arguments, sizes_to_capture
from outrider.models.wire.tree_draft import ROOT, TreeDraft


@pytest.mark.parametrize(("max_draft", "max_running", "step_tokens"), [(16, 32, 2048), (1, 1, 2), (64, 256, 2048)])
def test_sizes_cover_the_steps_that_may_come(max_draft: int, max_running: int, step_tokens: int) -> None:
    """One token, a sequence's whole draft, and all sequences', as far as graphs pay; padding stays small."""
    sizes = sizes_to_capture(max_draft, max_running, step_tokens)
    most = min(step_tokens, MOST_TOKENS, max_running * (1 + max_draft))
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most and min(most, 1 + max_draft) in sizes
    assert all(b - a <= max(8, a / 4) for a, b in pairwise(sizes)) and len(sizes) < 50
    assert graph_arguments(max_draft, max_running, step_tokens)["compilation_config"] == {
        "cudagraph_mode": "FULL",
        "cudagraph_capture_sizes": sizes,
    }


def curve_of(captured: list[int]) -> StepTimeCurve:
    """Steps of 10 ms and 0.1 ms for each token that they run as."""
    curve = StepTimeCurve(captured)
    for tokens in (1, 3, 6, 12, 20, 40, 100):
        run_as = next((size for size in captured if size >= tokens), tokens)
        for _ in range(3):
            curve.observe(StepSize(tokens, 0), 0.010 + 0.0001 * run_as)
    return curve


def test_a_step_costs_what_the_next_captured_size_costs() -> None:
    """Tokens up to it are free, beyond the largest each costs; without graphs too."""
    times = curve_of([4, 8, 16, 32]).seconds(100)
    assert times[0] == times[3] < times[4] == times[7] < times[8] == times[15] < times[31] == times[16]
    assert np.all(np.diff(times[31:]) > 0)
    added = curve_of([4, 8, 16, 32]).steps_added(8, StepSize(6, 0), 0.0)
    assert added[0] == added[1] == 0.0 < added[2]
    assert np.all(np.diff(curve_of([]).seconds(40)) > 0)


def chosen(captured: list[int], num_sequences: int, chance_of: int) -> int:
    """Drafted tokens that a step of so many sequences verifies, whose drafts have this level's chance."""
    drafting = Drafting(16, Policy.AUTO, captured=captured)
    for tokens in (1, 2, 4, 8, 16, 32, 64):
        run_as = next((size for size in captured if size >= tokens), tokens)
        for _ in range(4):
            drafting.stepped(StepSize(tokens, 0), 0.010 * run_as, False)  # as long as all its tokens
    everyone = [drafting.pending(b"%d" % n, [], 100, DraftHints()) for n in range(num_sequences)]
    tree = TreeDraft(0, 0, list(range(5, 13)), [ROOT, *range(7)], [chance_of] * 8)
    for drafts in everyone:
        drafting.merge_tree(drafts, tree, 0.0)
    return sum(len(each.tokens) for each in drafting.choose(everyone, 500, StepSize(num_sequences, 0), 0.0).values())


def test_a_step_is_filled_to_its_captured_size() -> None:
    """Where a token costs as much as a step, none is drafted; where the padding is there anyway, it is used."""
    assert chosen([], 5, 7) == 0
    assert chosen([8, 16, 32, 64], 5, 7) == 3 and chosen([8, 16, 32, 64], 8, 7) == 0
    assert chosen([16, 32, 64], 5, 7) == 11


@given(st.lists(st.integers(1, 600), max_size=8, unique=True), st.data())
@settings(max_examples=100, deadline=None)
def test_times_do_not_fall_with_size(captured: list[int], data: st.DataObject) -> None:
    """Whatever was captured, and run; and without graphs each size stands for those next to it."""
    curve = StepTimeCurve(captured)
    sizes = data.draw(st.lists(st.integers(1, 2500), min_size=1, max_size=20))
    for tokens in sizes:
        curve.observe(StepSize(tokens, 10 * tokens), data.draw(st.floats(0.001, 0.1)))
    times = curve.seconds(2600)
    assert np.all(np.diff(times) >= -1e-12) and np.all(times > 0)
    for size in captured:
        smaller = max((each for each in captured if each < size), default=0)
        assert len(set(times[smaller:size].tolist())) == 1
    untried = curve.untried(max(sizes), 2600)
    assert untried is None or untried > max(sizes)
