"""Tests whole texts with trees and lookups: the target's own, in fewer passes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine_harness import SAMPLED, VOCAB, Harness, plain, refused
from tests.pending_drafts import commit, line_message, pending, timed

from outrider.cloud.engine import EngineConfig, Policy
from outrider.cloud.engine.config import TreeForm
from outrider.cloud.pending.estimators import StepSize
from outrider.cloud.pending.lookup import PromptLookup, kind_of
from outrider.cloud.pending.sources import Sources
from outrider.models.errors import RequestError
from outrider.models.wire.tree_draft import ROOT, TreeDraft

PROMPT = [3, 1, 4, 1, 5]


# -- prompt lookup -----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2), max_size=30), st.integers(0, 8))
@settings(max_examples=100, deadline=None)
def test_a_lookup_finds_the_newest_longest_match(text: list[int], most: int) -> None:
    """As the plain search does; the array grows with the text."""
    lookup = PromptLookup(growing := text[: len(text) // 2])
    lookup.propose(most)
    growing.extend(text[len(text) // 2 :])
    tokens, kinds = lookup.propose(most)
    expected, matched = [], 0
    for size in (4, 3, 2):
        ends = [end for end in range(size, len(text)) if text[end - size : end] == text[len(text) - size :]]
        if ends:
            copy = list(text)
            while len(copy) < len(text) + most:
                copy.append(copy[ends[-1] + len(copy) - len(text)])
            expected, matched = copy[len(text) :], size
            break
    assert tokens == expected
    assert kinds == [kind_of(matched + i) for i in range(len(tokens))]


def test_a_long_prompt_is_copied_in_pieces() -> None:
    """Nothing is proposed until the whole text is there."""
    lookup = PromptLookup([*range(20_000), 5, 6, 7])
    answers = [lookup.propose(2)[0] for _ in range(3)]
    assert answers == [[], [], [8, 9]]


def test_lookups_are_counted_and_change_no_text() -> None:
    """In usage, commits and totals, apart from a device's drafts."""
    harness = Harness(config=EngineConfig(looks_up=True, policy=Policy.VERIFY))
    truth = plain(PROMPT, SAMPLED, 40)
    prompt = [*PROMPT, *truth, *PROMPT]  # the truth after PROMPT is in the prompt, but its context differs
    collector = harness.finished(prompt, 60)
    assert collector.tokens == plain(prompt, SAMPLED, 60)
    looked_up = sum(commit.looked_up for commit in collector.commits)
    assert collector.ended.usage.looked_up_tokens == looked_up
    totals = harness.engine.stats().totals
    assert totals.lookup_accepted == looked_up <= totals.lookup_proposed == totals.proposed


@pytest.mark.parametrize(("period", "most_passes", "least_speed"), [(12, 0.4, 2.0), (None, 1.0, 0.98)])
def test_lookups_pay_where_a_text_repeats_itself_and_cost_nothing_elsewhere(
    period: int | None, most_passes: float, least_speed: float
) -> None:
    """A text with a period, and one of 20 tokens in no order, where two tokens often recur: steps of 10 + 2 ms."""
    rng = random.Random(3)
    truth = [rng.randrange(20) for _ in range(period or 600)] * (600 // (period or 600))
    drafting = timed(32, Policy.AUTO, 0.008, 0.002)
    drafts, text = pending(drafting, max_new=len(truth)), list[int]()
    drafts.sources = Sources([PromptLookup(text)])
    took_s, num_passes, num_looked_up = 0.0, 0, 0
    while len(text) < len(truth):
        chosen = drafting.choose([drafts], 99, StepSize(1, 0), 0.0)[drafts].tokens
        assert drafts.num_lookup_chosen == len(chosen)
        base, accepted = len(text), 0
        while accepted < len(chosen) and chosen[accepted] == truth[base + accepted]:
            accepted += 1
        committed = truth[base : base + accepted + 1]
        text.extend(committed)
        num_looked_up += (found := commit(drafts, *committed))
        assert found == accepted
        drafting.committed(drafts, [], committed, 0.0, crowding=1.0)
        took_s, num_passes = took_s + 0.010 + 0.002 * len(chosen), num_passes + 1
    assert num_passes + num_looked_up == len(truth)
    assert num_passes <= most_passes * len(truth)
    assert 0.010 * len(truth) / took_s >= least_speed


# -- whole texts -------------------------------------------------------------------------------------------------------


@given(st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_no_tree_changes_the_text(seed: int) -> None:
    """Right and wrong nodes, lost, repeated and late messages, lookups: same tokens, no leak."""
    rng = random.Random(seed)
    config = EngineConfig(policy=rng.choice(list(Policy)), step_tokens=rng.choice([3, 16]), max_draft=6, looks_up=True)
    harness = Harness(config=config, num_blocks=rng.choice([22, 128]))
    prompts = [PROMPT, [1, 2, 1, 2]]
    truths = [plain(prompt, SAMPLED, 16) for prompt in prompts]
    sequences = [harness.submit(prompt, 16) for prompt in prompts]
    numbers, late = [0, 0], list[tuple[int, TreeDraft]]()
    for _ in range(1_000):
        for which, ((sequence_id, collector), truth) in enumerate(zip(sequences, truths, strict=True)):
            if collector.end is not None or rng.random() < 0.5:
                continue
            base = rng.randint(0, len(collector.tokens))
            first, size = numbers[which], rng.randint(1, 6)
            numbers[which] += size
            parents = [rng.choice([ROOT, *range(max(0, first - 4), first + i)]) for i in range(size)]
            tokens = [truth[min(15, base + i)] if rng.random() < 0.5 else rng.randrange(VOCAB) for i in range(size)]
            message = TreeDraft(base, first, tokens, parents, [rng.randrange(16) for _ in range(size)])
            late.append((sequence_id, message))
            for each in rng.choices(late[-4:], k=rng.randrange(3)):
                try:
                    harness.engine.draft_tree(*each)
                except RequestError as error:
                    assert error.code in ("stale_draft", "unknown_session")
        delay = harness.engine.step()
        if delay is None:
            break
        harness.clock.now += delay
    assert [c.tokens for _, c in sequences] == truths
    harness.assert_all_returned()


@pytest.mark.parametrize(("form", "sizes"), [(TreeForm.LINE, [1, 1]), (TreeForm.TREE, [1, 12])])
def test_a_tree_saves_passes_where_the_target_picks_an_alternative(form: TreeForm, sizes: list[int]) -> None:
    """The likeliest guess is wrong at its first place, its alternative right, and what follows that is pending.

    A line misses once and goes on below the alternative; a tree has verified it.
    """
    harness = Harness(config=EngineConfig(policy=Policy.VERIFY, form=form))
    truth = plain(PROMPT, SAMPLED, 24)
    sequence_id, collector = harness.submit(PROMPT, 24, patience_ms=0)
    harness.engine.step()
    tokens = [(truth[1] + 1) % VOCAB, *truth[1:12]]
    message = TreeDraft(1, 0, tokens, [ROOT, ROOT, *range(1, 11)], [13, 9, *[13] * 10])
    harness.engine.draft_tree(sequence_id, message)
    harness.run()
    assert collector.tokens == truth
    assert [len(c.tokens) for c in collector.commits[:2]] == sizes
    assert max(len(c.tokens) for c in collector.commits) > 4 and len(collector.commits) < 18


def test_bad_trees_are_refused_by_code() -> None:
    """As paths are; a tree below a node that the commits contradict is stale, one below an unknown node is not."""
    harness = Harness()
    truth = plain(PROMPT, SAMPLED, 12)
    wrong = (truth[0] + 1) % VOCAB
    sequence_id, collector = harness.submit(PROMPT, 12)
    harness.engine.draft_tree(sequence_id, TreeDraft(0, 0, [wrong, truth[0]], [ROOT, ROOT], [9, 9]))
    harness.run_steps(4)
    num = len(collector.tokens)
    for target, message, code in (
        (999, line_message(0, 0, [1]), "unknown_session"),
        (sequence_id, line_message(99, 0, [1]), "draft_ahead"),
        (sequence_id, line_message(num, 0, [VOCAB]), "token_out_of_range"),
        (sequence_id, line_message(0, 9, [wrong, 1, 2]), "stale_draft"),
        (sequence_id, line_message(0, 9, truth[:num]), "stale_draft"),
        (sequence_id, TreeDraft(0, 5, [1, 2], [0, 5], [9, 9]), "stale_draft"),
        (sequence_id, TreeDraft(0, 5, [truth[1]], [1], [9]), "stale_draft"),
    ):
        with refused(code):
            harness.engine.draft_tree(target, message)
    harness.engine.draft_tree(sequence_id, TreeDraft(0, 50, [1], [40], [9]))
    harness.engine.draft_tree(sequence_id, TreeDraft(0, 60, truth[1 : num + 1], [1, *range(60, 59 + num)], [9] * num))
    harness.run()
    assert collector.tokens == truth
