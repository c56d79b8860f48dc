"""Compares the belief with a plain model, and tests the laws of the estimates."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.edge.drafting.belief import Belief
from outrider.edge.drafting.estimates import Estimates, ForgettingRatio
from outrider.models.errors import CloudError

TOKENS = st.lists(st.integers(0, 2), max_size=6)


@settings(deadline=None, max_examples=60)
@given(truth=st.lists(st.integers(0, 2), max_size=20), data=st.data())
def test_belief_is_always_the_truth_so_far_and_a_consistent_guess(truth: list[int], data: st.DataObject) -> None:
    """Commits in any chunking, repeated or overlapping, among any drafts, leave the same as a plain list."""
    belief, drafted = Belief(), list[int]()
    known = 0
    while known < len(truth):
        guess = data.draw(TOKENS)
        belief.extend(guess)
        drafted += guess
        base = data.draw(st.integers(0, known))
        end = data.draw(st.integers(base, len(truth)))
        fresh = truth[known : max(end, known)]
        right = 0
        while right < min(len(fresh), len(drafted)) and fresh[right] == drafted[right]:
            right += 1
        is_wrong = right < min(len(fresh), len(drafted))

        outcome = belief.on_commit(base, truth[base:end])

        drafted = [] if is_wrong else drafted[right:]
        known += len(fresh)
        assert (outcome.tokens, outcome.num_matched, outcome.diverged) == (tuple(fresh), right, is_wrong)
        assert outcome.num_tested == right + is_wrong
        assert outcome.overtaken == (not is_wrong and len(fresh) > right)
        assert list(belief.known) == truth[:known]
        assert list(belief.drafted) == drafted
        start = data.draw(st.integers(0, known + len(drafted)))
        assert belief.tokens_from(start) == (truth[:known] + drafted)[start:]
        known = max(known, end)


def test_a_repeated_commit_changes_nothing() -> None:
    """A duplicate has no new tokens, tests nothing and drops nothing."""
    belief = Belief()
    belief.on_commit(0, [5, 6])
    belief.extend([7])
    outcome = belief.on_commit(0, [5, 6])
    assert (outcome.tokens, outcome.num_tested, list(belief.drafted)) == ((), 0, [7])


@pytest.mark.parametrize(("base", "tokens"), [(3, [9]), (1, [8]), (0, [1, 2])])
def test_a_verifier_that_breaks_its_word_is_refused(base: int, tokens: list[int]) -> None:
    """A gap, or tokens other than those committed before, raise CloudError and do not change the known text."""
    belief = Belief()
    belief.on_commit(0, [1, 7])
    with pytest.raises(CloudError):
        belief.on_commit(base, tokens)
    assert list(belief.known) == [1, 7]


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 10)), min_size=1), st.floats(0, 1), st.floats(0.1, 1))
def test_a_forgetting_ratio_stays_between_its_extremes(
    seen: list[tuple[float, float]], prior: float, keep: float
) -> None:
    """A ratio of sums lies between the smallest and the largest of its ratios."""
    ratio = ForgettingRatio(prior, 1.0, keep)
    for top, bottom in seen:
        ratio.add(top, bottom)
    ratios = [prior, *(top / bottom for top, bottom in seen)]
    assert min(ratios) - 1e-6 <= ratio.value <= max(ratios) * (1 + 1e-6) + 1e-6


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), max_size=10), st.lists(st.booleans(), max_size=30))
def test_survival_falls_with_depth(confidences: list[float], results: list[bool]) -> None:
    """The survival of more tokens is never above that of fewer, and always a probability."""
    estimates = Estimates()
    for is_right in results:
        belief = Belief()
        belief.extend([1])
        estimates.on_commit(belief.on_commit(0, [1 if is_right else 2]), [0.5], 40.0)
    survivals = [estimates.survival(confidences[:n]) for n in range(len(confidences) + 1)]
    assert all(0.0 <= b <= a <= 1.0 for a, b in pairwise(survivals))


def test_confidence_is_calibrated_by_what_came_of_it() -> None:
    """When confident tokens are accepted and others rejected, their survivals part, whatever the drafter's numbers."""
    estimates = Estimates()
    for _ in range(60):
        for confidence, truth in ((0.9, 1), (0.3, 2)):
            belief = Belief()
            belief.extend([1])
            estimates.on_commit(belief.on_commit(0, [truth]), [confidence], 40.0)
    assert estimates.survival([0.9]) > 0.85
    assert estimates.survival([0.3]) < 0.15
    assert 0.4 < estimates.acceptance < 0.6
