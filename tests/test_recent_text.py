"""Tests drafting from an earlier text after the same prompt: few passes where it repeats, and never another text."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine_harness import SAMPLED, VOCAB, Collector, Harness, calibrated, plain

from outrider.cloud.engine import EngineConfig, Policy
from outrider.cloud.pending.lookup import MAX_TOKENS, RecentTextSource, kind_after
from outrider.cloud.pending.node_chances import NodeChances
from outrider.cloud.pending.trie import EARLIER_KINDS, PREDICTED_KINDS, REPEATED
from outrider.cloud.seam import DraftHints
from outrider.cloud.vllm.book import Book
from outrider.cloud.vllm.terms import Terms, terms_of
from outrider.models.picks.sampling import SamplingParams
from outrider.models.wire.tree_draft import CHANCES, TreeDraft

GREEDY = SamplingParams()
PROMPT = (1, 2, 3)


# -- where a text is in an earlier one ---------------------------------------------------------------------------------


def test_the_longer_an_earlier_text_agrees_the_likelier_it_goes_on() -> None:
    """Each node has the kind of the agreement before it."""
    tokens, kinds = RecentTextSource(range(40), [0, 1, 2], is_repeat=False).propose(20)
    assert tokens == list(range(3, 23))
    assert kinds == [kind_after(run) for run in range(3, 23)]
    assert kinds == sorted(kinds) and set(kinds) == set(EARLIER_KINDS)


def test_a_text_that_left_an_earlier_one_rejoins_it() -> None:
    """At the longest match of its last tokens, of these at the nearest to its place."""
    committed = [1, 2, 30]
    earlier = RecentTextSource([1, 2, 3, 4, 50, 51, 9, 8, 7, 60, 61, 4, 50, 70], committed, is_repeat=True)
    assert earlier.propose(4) == ([], [])
    committed += [4, 50]  # at 5 and at 13; the present place is 5
    assert earlier.propose(2) == ([51, 9], [kind_after(2), kind_after(3)])
    committed += [7, 60]
    assert earlier.propose(2)[0] == [61, 4]


def test_only_so_much_of_an_earlier_text_is_followed() -> None:
    """However long it is; behind its end nothing is proposed, and nothing is searched."""
    earlier = RecentTextSource([3] * (MAX_TOKENS + 5), [3] * MAX_TOKENS, is_repeat=True)
    assert earlier.propose(4) == ([], [])


@given(
    st.lists(st.integers(0, 3), max_size=30),
    st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=8),
    st.booleans(),
)
def test_what_is_proposed_stands_in_the_earlier_text(
    tokens: list[int], commits: list[list[int]], is_repeat: bool
) -> None:
    """After the tokens that were committed last, wherever it was left and rejoined."""
    committed: list[int] = []
    earlier = RecentTextSource(tokens, committed, is_repeat=is_repeat)
    for commit in commits:
        committed += commit
        path, kinds = earlier.propose(5)
        assert len(path) == len(kinds) <= 5
        run = 2 if committed != tokens[: len(committed)] else len(committed)
        found = [*committed[max(0, len(committed) - run) :], *path]
        assert not path or any(tokens[i : i + len(found)] == found for i in range(len(tokens)))


# -- the engine --------------------------------------------------------------------------------------------------------


def passes(collector: Collector) -> int:
    """Target passes of a finished text."""
    return collector.ended.usage.target_passes


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("is_repeat", [True, False])
def test_a_repeated_text_takes_few_passes(params: SamplingParams, is_repeat: bool) -> None:
    """Its tokens count as looked up."""
    text, harness = plain(PROMPT, params, 60), Harness()
    found = harness.finished(PROMPT, 60, params=params, recent=tuple(text), is_repeat=is_repeat)
    assert found.tokens == text and passes(found) <= 6
    looked_up = found.ended.usage.looked_up_tokens
    assert looked_up == harness.engine.stats().totals.lookup_accepted == 60 - passes(found)
    assert passes(harness.finished(PROMPT, 60, params=params)) == 60


def test_a_regenerated_text_rejoins_its_earlier_one() -> None:
    """Some tokens are others, some are missing: the rest is still drafted."""
    text = plain(PROMPT, GREEDY, 60)
    found = Harness().finished(PROMPT, 60, params=GREEDY, recent=(*text[:10], 63, *text[11:30], *text[33:]))
    assert found.tokens == text and passes(found) < 25


WRONG: dict[str, Callable[[list[int]], list[int]]] = {
    "another text": lambda text: [(token + 1) % VOCAB for token in text],
    "a loop": lambda text: [text[0]] * 60,
    "right once in three": lambda text: [token if i % 3 else 0 for i, token in enumerate(text)],
}


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("is_repeat", [True, False])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_earlier_text_costs_next_to_nothing(name: str, is_repeat: bool, policy: Policy) -> None:
    """Its rate is learned, as that of prompt lookup. A drafted token takes a fortieth of a step."""
    text, took = plain(PROMPT, GREEDY, 60), list[float]()
    for earlier in ((), tuple(WRONG[name](text))):
        harness = calibrated(config=EngineConfig(policy=policy))
        before = harness.clock.now
        found = harness.finished(PROMPT, 60, params=GREEDY, recent=earlier, is_repeat=is_repeat)
        assert found.tokens == text
        took.append(harness.clock.now - before)
    assert took[1] < 1.03 * took[0]


def test_ids_that_the_model_has_not_are_ignored() -> None:
    """They may come from anywhere, and are no fault of the request."""
    text = plain(PROMPT, GREEDY, 20)
    for earlier in ((*text[:5], VOCAB), (-1, *text), (2**32 - 1,)):
        found = Harness().finished(PROMPT, 20, params=GREEDY, recent=earlier, is_repeat=True)
        assert found.tokens == text and passes(found) == 20


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_earlier_text_changes_the_output(data: st.DataObject) -> None:
    """Whatever it is, beside drafts of the device in either form, greedy and sampled, with and without lookup."""
    params = data.draw(st.sampled_from([GREEDY, SAMPLED]))
    text = plain(PROMPT, params, 24)
    piece = st.one_of(
        st.lists(st.integers(0, VOCAB - 1), max_size=6),
        st.tuples(st.integers(0, 23), st.integers(0, 12)).map(lambda at: text[at[0] : at[0] + at[1]]),
    )
    earlier = tuple(token for part in data.draw(st.lists(piece, max_size=5)) for token in part)
    harness = Harness(config=EngineConfig(looks_up=data.draw(st.booleans()), policy=data.draw(st.sampled_from(Policy))))
    number, collector = harness.submit(PROMPT, 24, params=params, recent=earlier, is_repeat=data.draw(st.booleans()))
    sent = 0
    while collector.end is None:
        base = len(collector.tokens)
        kind = data.draw(st.sampled_from(["nothing", "path", "tree"]))
        guess = data.draw(st.sampled_from([text[base : base + 4], [1, 2, 3, 4]]))
        if kind == "path" and guess:
            harness.engine.draft(number, base, [guess])
        elif kind == "tree" and guess:
            parents = [-1, *range(sent, sent + len(guess) - 1)]
            harness.engine.draft_tree(number, TreeDraft(base, sent, guess, parents, [len(CHANCES) - 1] * len(guess)))
            sent += len(guess)
        harness.step()
    assert collector.tokens == text
    harness.assert_all_returned()


def test_a_repetition_outweighs_a_device_that_guesses_wrong() -> None:
    """The device's nodes are the likeliest otherwise."""
    text, harness = plain(PROMPT, GREEDY, 40), Harness()
    sequence = harness.submit(PROMPT, 40, params=GREEDY, recent=tuple(text), is_repeat=True)
    collector = harness.draft_along(sequence, lambda base: [[(text[base] + 1) % VOCAB] * 4])
    assert collector.tokens == text and passes(collector) <= 6


def test_a_prediction_has_chances_of_its_own() -> None:
    """What earlier texts of a client were worth says nothing about what it predicts, through the whole engine."""
    truth, rates = plain(PROMPT, GREEDY, 60), list[list[float]]()
    wrong = tuple((token + 1) % VOCAB for token in truth)
    for is_predicted in (True, False):
        harness = Harness(config=EngineConfig(policy=Policy.VERIFY))
        for _ in range(3):
            number, _ = harness.submit(PROMPT, 60, params=GREEDY, recent=wrong, is_predicted=is_predicted)
            (source,) = harness.engine._sequences[number].drafts.sources
            assert source.kinds == (PREDICTED_KINDS if is_predicted else EARLIER_KINDS)
            harness.run()
        rates.append(NodeChances(harness.engine._drafting.learned(b"").chances).rates())
    predicted, earlier = (tuple(each[kinds[0]] for each in rates) for kinds in (PREDICTED_KINDS, EARLIER_KINDS))
    assert predicted[0] < predicted[1] and earlier[1] < earlier[0]
    right = harness.finished(PROMPT, 60, params=GREEDY, recent=tuple(truth), is_predicted=True)
    assert right.tokens == truth and passes(right) <= 6


def test_vllms_book_drafts_from_an_earlier_text() -> None:
    """By the same modules: its terms carry the text to the engine process."""
    book, found = Book(max_draft=16, policy=Policy.AUTO, looks_up=True, clock=lambda: 0.0), list[RecentTextSource]()
    for number, is_predicted in enumerate((False, True), start=1):
        hints = DraftHints(recent=(5, 6, 7), is_repeat=not is_predicted, is_predicted=is_predicted)
        terms = Terms(number, GREEDY, 20, hints)
        assert terms_of(terms.extra_args()) == terms
        found += [source for source in book.open(terms, PROMPT).drafts.sources if isinstance(source, RecentTextSource)]
    earlier, prediction = found
    assert earlier.propose(2) == ([5, 6], [REPEATED, REPEATED]) and prediction.kinds == PREDICTED_KINDS
