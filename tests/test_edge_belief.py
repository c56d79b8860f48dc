"""Compares the belief with a plain model, and tests the laws of the estimates and of the calibration."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.edge.drafting.belief import Belief, CommitOutcome
from outrider.edge.drafting.calibration import (
    MAX_WIDTH,
    Calibration,
    Guess,
    lookup_guess,
    model_guesses,
    shared_guess,
)
from outrider.edge.drafting.estimates import CallTimes, Estimates
from outrider.edge.drafting.tree import GuessNode, GuessTree
from outrider.models.errors import CloudError
from outrider.models.picks.sampling import Candidates

CHANCES = (0.6, 0.3, 0.1)


def ranked(tokens: Sequence[int]) -> list[Guess]:
    """Guesses whose cell is their rank."""
    return [Guess(token, rank, rank) for rank, token in enumerate(tokens)]


def believing(tokens: Sequence[int], *guesses: int) -> Belief:
    """A belief in this text, with a path of guesses after it."""
    belief = Belief(CHANCES.__getitem__)
    belief.on_commit(0, tokens)
    belief.tree.replant()
    belief.tree.add_path(ranked(guesses))
    return belief


def paths(tree: GuessTree) -> set[tuple[int, ...]]:
    """The tokens from the root to every guess."""

    def below(node: GuessNode, *path: int) -> Iterator[tuple[int, ...]]:
        for token, child in node.children.items():
            assert child.token == token and child.parent is node
            yield (*path, token)
            yield from below(child, *path, token)

    return set(below(tree.root))


@settings(deadline=None, max_examples=150)
@given(truth=st.lists(st.integers(0, 2), max_size=14), seed=st.integers(0, 1 << 32))
def test_belief_is_always_the_truth_so_far_and_a_tree_that_follows_it(truth: list[int], seed: int) -> None:
    """Commits in any chunking, repeated or overlapping, among any guesses, leave the same as a plain dictionary.

    What is below a hit stays, what contradicts the truth goes, and a guess that comes too late is dropped.
    """
    belief = Belief(CHANCES.__getitem__)
    guessed: dict[tuple[int, ...], list[int]] = {}  # what was guessed after a text
    late: list[tuple[GuessNode, tuple[int, ...]]] = []
    known, chance = 0, random.Random(seed)

    def expand(node: GuessNode, text: tuple[int, ...]) -> None:
        tokens = chance.sample(range(3), chance.randrange(4))
        added = belief.tree.expand(node, ranked(tokens))
        is_alive = text[:known] == tuple(truth[:known]) and len(text) >= known
        assert [child.token for child in added] == (tokens if is_alive else [])
        if is_alive:
            guessed[text] = tokens

    while known < len(truth):
        for node in belief.tree.take_best(chance.randrange(5), 0.0, 4):
            text = (*truth[:known], *node.path())
            if chance.random() < 0.6:
                expand(node, text)
            else:
                late.append((node, text))
        base = chance.randint(0, known)
        end = chance.randint(base, min(known + 3, len(truth)))
        fresh = truth[known : max(end, known)]
        right = 0
        while right < len(fresh) and fresh[right] in guessed.get(tuple(truth[: known + right]), ()):
            right += 1
        is_wrong = right < len(fresh) and bool(guessed.get(tuple(truth[: known + right])))

        outcome = belief.on_commit(base, truth[base:end])
        belief.tree.replant()

        assert (list(outcome.tokens), [node.token for node in outcome.hits]) == (fresh, fresh[:right])
        assert [([guess.token for guess in guesses], token) for guesses, token in outcome.tested] == [
            (guessed[tuple(truth[: known + index])], token) for index, token in enumerate(fresh[: right + is_wrong])
        ]
        known += len(fresh)
        while late and chance.random() < 0.6:
            expand(*late.pop())
        assert list(belief.known) == truth[:known] and len(belief.known) == known
        expected = {
            (*text[known:], token)
            for text, tokens in guessed.items()
            if len(text) >= known and text[:known] == tuple(truth[:known])
            for token in tokens
        }
        assert paths(belief.tree) == expected and belief.tree.num_nodes == len(expected)


def test_only_a_first_guess_that_was_wrong_is_contradicted() -> None:
    """Not where the path had ended, nor where the pick was the first guess; where nothing was guessed it is unknown."""
    belief = Belief(CHANCES.__getitem__)
    assert belief.on_commit(0, [5]).contradicts_at(0)
    belief.tree.replant()
    belief.tree.expand(belief.tree.root, ranked([1, 2]))
    for node in list(belief.tree.root.children.values()):
        belief.tree.expand(node, ranked([3, 4]))
    outcome = belief.on_commit(1, [1, 4, 6])
    assert [outcome.contradicts_at(index) for index in range(3)] == [False, True, False]


@pytest.mark.parametrize(("base", "tokens"), [(3, [9]), (1, [8]), (0, [1, 2])])
def test_a_verifier_that_breaks_its_word_is_refused(base: int, tokens: list[int]) -> None:
    """A gap, or tokens other than those committed before, raise CloudError and change neither text nor guesses."""
    belief = believing([1, 7], 9)
    with pytest.raises(CloudError):
        belief.on_commit(base, tokens)
    assert list(belief.known) == [1, 7] and paths(belief.tree) == {(9,)}


def scored(*gaps: float) -> list[Guess]:
    """A model's guesses 0, 1, 2, ... whose scores have these gaps."""
    return model_guesses(Candidates(list(range(len(gaps))), list(gaps)), MAX_WIDTH)


ANY_GUESSES = st.one_of(
    st.lists(st.floats(0.0, 9.0), min_size=1, max_size=MAX_WIDTH).map(lambda gaps: scored(*gaps)),
    st.integers(1, 6).map(lambda suffix: [lookup_guess(0, suffix)]),
    st.lists(st.floats(0.0, 9.0), min_size=1, max_size=MAX_WIDTH).map(
        lambda gaps: [shared_guess(guess) for guess in scored(*gaps)]
    ),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(ANY_GUESSES, st.integers(0, 9), st.integers(1, 60)), max_size=8))
def test_a_calibrated_chance_is_a_probability_that_is_never_certain(seen: list[tuple[list[Guess], int, int]]) -> None:
    """Whatever was observed, for every rank, gap and source."""
    calibration = Calibration()
    for guesses, token, times in seen:
        for _ in range(times):
            calibration.observe(guesses, token)
    every = [guess for gap in (0.1, 0.3, 0.7, 1.5, 3.0, 9.0) for guess in scored(*[gap] * MAX_WIDTH)]
    every += [*map(shared_guess, every), *(lookup_guess(0, suffix) for suffix in range(1, 7))]
    assert len({guess.cell for guess in every}) == 2 * 6 * MAX_WIDTH + 3
    assert all(0.0 < calibration.chance(guess.cell) < 1.0 for guess in every)


def test_chances_are_learned_by_gap_and_by_rank() -> None:
    """Where sure picks are right, and unsure ones are not but the third is, their chances part from the priors."""
    calibration = Calibration()
    sure, unsure = scored(5.0, 5.0, 6.0), scored(0.1, 0.1, 0.2)
    assert calibration.chance(sure[0].cell) > 0.9 and 0.3 < calibration.chance(unsure[0].cell) < 0.5
    for _ in range(120):
        calibration.observe(sure, sure[0].token)
        calibration.observe(unsure, unsure[2].token)
    chances = [[calibration.chance(guess.cell) for guess in guesses] for guesses in (sure, unsure)]
    assert chances[0][0] > 0.97 and chances[0][2] < 0.05
    assert max(chances[1][:2]) < 0.1 and chances[1][2] > 0.85


def committed(estimates: Estimates, guesses: Sequence[Guess], token: int) -> CommitOutcome:
    """A commit of this token after these guesses."""
    belief = Belief(estimates.calibration.chance)
    belief.tree.take_best(1, 0.0, 1)
    belief.tree.expand(belief.tree.root, guesses)
    outcome = belief.on_commit(0, [token])
    estimates.on_commit(outcome, 40.0)
    return outcome


@pytest.mark.parametrize("gaps", [(9.0,), (9.0, 9.0, 9.0, 9.0), (0.1, 0.1, 0.2, 0.2)], ids=["path", "sure", "unsure"])
def test_an_always_wrong_draft_shows_within_ten_tokens(gaps: tuple[float, ...]) -> None:
    """Also in gaps that it has not shown yet: no pick of it is likely any more."""
    estimates, guesses = Estimates(), scored(*gaps)
    for _ in range(10):
        committed(estimates, guesses, 99)
    chances = [estimates.calibration.chance(scored(gap)[0].cell) for gap in (0.1, 0.3, 0.7, 1.5, 3.0, 9.0)]
    assert estimates.acceptance < 0.15 and max(chances) < 0.3


def test_acceptance_is_that_of_the_first_guess_and_hits_count_all() -> None:
    """A token that was the second guess was not accepted from the path, but it was guessed."""
    estimates = Estimates()
    for _ in range(80):
        outcome = committed(estimates, scored(0.1, 0.1), 1)
        assert [node.rank for node in outcome.hits] == [1] and len(outcome.tested) == 1
    assert estimates.acceptance < 0.1 and estimates.calibration.chance(scored(0.1, 0.1)[1].cell) > 0.85


ONLY_ONE, SLEPT = (40, 4.0, 1), (1, 20_000.0, 1)
SLOW_ONCE = (1, 4.0, 1), (1, 200.0, 8)


@pytest.mark.parametrize(
    ("calls", "size", "least_ms", "most_ms"),
    [
        ([ONLY_ONE], 1, 3.96, 4.04),
        ([ONLY_ONE], 5, 7.92, 8.08),  # each further node costs a quarter of a call
        ([ONLY_ONE, (40, 6.0, 5)], 3, 4.95, 5.05),
        ([ONLY_ONE, (40, 6.0, 5)], 5, 5.94, 6.06),
        ([ONLY_ONE, (40, 6.0, 5)], 9, 7.92, 8.08),  # on the line through the last two
        # Its first call of a size, or a busy machine, would else decide how many nodes are run for good.
        ([*SLOW_ONCE], 8, 100.0, 999.0),
        ([*SLOW_ONCE, (400, 4.0, 1)], 8, 10.89, 11.11),
        ([*SLOW_ONCE, (400, 4.0, 1), (400, 11.0, 8)], 1, 3.96, 4.04),  # the smallest is kept
        # Calls of 4 ms and one of 20 s: 1,000 ms as a mean. A draft that became slower is believed within 20 calls.
        ([ONLY_ONE, SLEPT], 1, 0.0, 12.0),
        ([ONLY_ONE, SLEPT, (20, 400.0, 1)], 1, 200.0, 999.0),
    ],
)
def test_the_time_of_a_call_is_predicted_from_those_that_were_measured(
    calls: list[tuple[int, float, int]], size: int, least_ms: float, most_ms: float
) -> None:
    """On the line between two sizes; one that took long once is tried again, and one in which the device slept hardly
    counts. calls: their number, ms and size.
    """
    times = CallTimes()
    for count, ms, nodes in calls:
        for _ in range(count):
            times.add(ms, nodes)
    assert least_ms < times.ms(size) < most_ms
