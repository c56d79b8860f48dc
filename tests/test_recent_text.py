"""Tests drafting from an earlier text after the same prompt: few passes where it repeats, and never another text."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine_harness import SAMPLED, VOCAB, Collector, Harness, plain
from tests.requests import flat_request

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
    earlier_tokens = [1, 2, 3, 4, 50, 51, 9, 8, 7, 60, 61, 4, 50, 70]
    committed = [1, 2, 30]
    earlier = RecentTextSource(earlier_tokens, committed, is_repeat=True)
    assert earlier.propose(4) == ([], [])
    committed += [4, 50]  # at 5 and at 13; the present place is 5
    assert earlier.propose(2) == ([51, 9], [kind_after(2), kind_after(3)])
    committed += [7, 60]
    assert earlier.propose(2)[0] == [61, 4]


def test_only_so_much_of_an_earlier_text_is_followed() -> None:
    """However long it is; behind its end nothing is proposed, and nothing is searched."""
    committed: list[int] = [3] * MAX_TOKENS
    assert RecentTextSource([3] * (MAX_TOKENS + 5), committed, is_repeat=True).propose(4) == ([], [])


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
        if path:
            run = 2 if committed != tokens[: len(committed)] else len(committed)
            behind = committed[len(committed) - run :] if run else []
            found = [*behind, *path]
            assert any(tokens[i : i + len(found)] == found for i in range(len(tokens)))


# -- the engine --------------------------------------------------------------------------------------------------------


def run(
    harness: Harness, earlier: tuple[int, ...], *, is_repeat: bool, params: SamplingParams = GREEDY, count: int = 60
) -> Collector:
    """One text of the engine."""
    collector = Collector()
    harness.engine.submit(flat_request(PROMPT, params, count, recent=earlier, is_repeat=is_repeat), collector)
    harness.run()
    return collector


def passes(collector: Collector) -> int:
    """Target passes of a finished text."""
    return collector.ended.usage.target_passes


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("is_repeat", [True, False])
def test_a_repeated_text_takes_few_passes(params: SamplingParams, is_repeat: bool) -> None:
    """Its tokens count as looked up."""
    text = plain(PROMPT, params, 60)
    harness = Harness()
    found = run(harness, tuple(text), is_repeat=is_repeat, params=params)
    assert found.tokens == text and passes(found) <= 6
    assert found.ended.usage.looked_up_tokens == 60 - passes(found)
    assert harness.engine.stats().totals.lookup_accepted == 60 - passes(found)
    assert passes(run(harness, (), is_repeat=False, params=params)) == 60


def test_a_regenerated_text_rejoins_its_earlier_one() -> None:
    """Some tokens are others, some are missing: the rest is still drafted."""
    text = plain(PROMPT, GREEDY, 60)
    edited = [*text[:10], 63, *text[11:30], *text[33:]]
    found = run(Harness(), tuple(edited), is_repeat=False)
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
    text = plain(PROMPT, GREEDY, 60)
    took = {}
    for earlier in ((), tuple(WRONG[name](text))):
        harness = Harness(config=EngineConfig(policy=policy))
        harness.engine.calibrate()
        before = harness.clock.now
        assert run(harness, earlier, is_repeat=is_repeat).tokens == text
        took[bool(earlier)] = harness.clock.now - before
    assert took[True] < 1.03 * took[False]


def test_ids_that_the_model_has_not_are_ignored() -> None:
    """They may come from anywhere, and are no fault of the request."""
    text = plain(PROMPT, GREEDY, 20)
    for earlier in ((*text[:5], VOCAB), (-1, *text), (2**32 - 1,)):
        found = run(Harness(), earlier, is_repeat=True, count=20)
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
    collector = Collector()
    number = harness.engine.submit(
        flat_request(PROMPT, params, 24, recent=earlier, is_repeat=data.draw(st.booleans())), collector
    )
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
    text = plain(PROMPT, GREEDY, 40)
    harness, collector = Harness(), Collector()
    number = harness.engine.submit(flat_request(PROMPT, GREEDY, 40, recent=tuple(text), is_repeat=True), collector)
    while collector.end is None:
        base = len(collector.tokens)
        harness.engine.draft(number, base, [[(text[base] + 1) % VOCAB] * 4])
        harness.step()
    assert collector.tokens == text and passes(collector) <= 6


def test_a_prediction_has_chances_of_its_own() -> None:
    """What earlier texts of a client were worth says nothing about what it predicts, through the whole engine."""
    truth = plain(PROMPT, GREEDY, 60)
    wrong = [(token + 1) % VOCAB for token in truth]
    rates: list[list[float]] = []
    for is_predicted in (True, False):
        harness = Harness(config=EngineConfig(policy=Policy.VERIFY))
        for _ in range(3):
            request = flat_request(PROMPT, GREEDY, 60, recent=tuple(wrong), is_predicted=is_predicted)
            drafts = harness.engine._sequences[harness.engine.submit(request, Collector())].drafts
            (source,) = drafts.sources
            assert source.kinds == (PREDICTED_KINDS if is_predicted else EARLIER_KINDS)
            harness.run()
        rates.append(NodeChances(harness.engine._drafting.learned(b"").chances).rates())
    assert rates[0][PREDICTED_KINDS[0]] < rates[1][PREDICTED_KINDS[0]]
    assert rates[1][EARLIER_KINDS[0]] < rates[0][EARLIER_KINDS[0]]
    request = flat_request(PROMPT, GREEDY, 60, recent=tuple(truth), is_predicted=True)
    right = Collector()
    harness.engine.submit(request, right)
    harness.run()
    assert right.tokens == truth and passes(right) <= 6


def test_vllms_book_drafts_from_an_earlier_text() -> None:
    """By the same modules: its terms carry the text to the engine process."""
    predicted = Terms(2, GREEDY, 20, DraftHints(recent=(5, 6, 7), is_predicted=True))
    terms = Terms(1, GREEDY, 20, DraftHints(recent=(5, 6, 7), is_repeat=True))
    assert terms_of(terms.extra_args()) == terms
    book = Book(max_draft=16, policy=Policy.AUTO, looks_up=True, clock=lambda: 0.0)
    served = book.open(terms, PROMPT)
    (earlier,) = [source for source in served.drafts.sources if isinstance(source, RecentTextSource)]
    assert earlier.propose(2) == ([5, 6], [REPEATED, REPEATED])
    (prediction,) = [
        source for source in book.open(predicted, PROMPT).drafts.sources if isinstance(source, RecentTextSource)
    ]
    assert terms_of(predicted.extra_args()) == predicted and prediction.kinds == PREDICTED_KINDS
