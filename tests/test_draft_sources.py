"""Tests the verifier's own sources of drafts, the choice among them, and whole texts with them and with trees."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine_harness import SAMPLED, VOCAB, Clock, Harness, plain
from tests.pending_drafts import commit, learn_and_wait, line_message, move_root, pending, right_part, run_pass, timed

from outrider.cloud.engine import EngineConfig, Policy
from outrider.cloud.engine.config import TreeForm
from outrider.cloud.pending.drafting import Drafting
from outrider.cloud.pending.estimators import StepSize
from outrider.cloud.pending.lookup import PromptLookup, RecentTextSource, kind_of
from outrider.cloud.pending.sources import DraftSource, Sources
from outrider.cloud.pending.trie import (
    EARLIER_KINDS,
    HEAD_KINDS,
    NUM_KINDS,
    PREDICTED_KINDS,
    PROMPT_KINDS,
    DraftTrie,
)
from outrider.models.errors import RequestError
from outrider.models.picks.sampling import SamplingParams
from outrider.models.runtimes.ngram import NgramLookup
from outrider.models.wire.tree_draft import ROOT, TreeDraft

PROMPT = [3, 1, 4, 1, 5]


# -- prompt lookup -----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 4), max_size=40), st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3)))
@settings(max_examples=200, deadline=None)
def test_no_repetition_is_overlooked(text: list[int], more: list[list[int]]) -> None:
    """Prompt lookup searches only where the last pair may have stood before: it finds what a search always finds."""
    lookup, plain = PromptLookup(text), NgramLookup(max_n=4, min_n=2)
    plain.extend(text)
    for tokens in [[], *more]:
        text += tokens
        plain.extend(tokens)
        matched, copied = plain.match(5)
        assert lookup.propose(5) == (copied, [kind_of(matched + i) for i in range(len(copied))])


def test_a_long_text_is_copied_and_marked_in_pieces() -> None:
    """Nothing is proposed until all of it is there. What repeats is found then, and nothing is missed afterwards."""
    text = [n * 7919 % 100_003 for n in range(30_000)]
    text[8190:8192] = text[10:12]  # where the first piece ends
    lookup = PromptLookup(text)
    for _ in range(4):
        assert lookup._lookup.length < len(text) and lookup.propose(4) == ([], [])
    text += text[100:104]
    assert lookup.propose(4)[0] == text[104:108]
    text += [100_004, 100_005]
    assert lookup.propose(4) == ([], [])


@pytest.mark.parametrize(("period", "most_passes", "least_speed"), [(12, 0.4, 2.0), (None, 1.0, 0.98)])
def test_lookups_pay_where_a_text_repeats_itself_and_cost_nothing_elsewhere(
    period: int | None, most_passes: float, least_speed: float
) -> None:
    """A text with a period, and one of 20 tokens in no order, where two tokens often recur: steps of 10 + 2 ms."""
    rng = random.Random(3)
    truth = [rng.randrange(20) for _ in range(period or 600)] * (600 // (period or 600))
    drafting = timed(32, Policy.AUTO, 0.008, 0.002)
    drafts = pending(drafting, max_new=len(truth))
    drafts.sources = Sources([PromptLookup(drafts.committed)])
    took_s, num_passes = 0.0, 0
    while len(drafts.committed) < len(truth):
        drafted, committed, looked_up = run_pass(drafting, drafts, truth)
        assert drafts.num_lookup_chosen == len(drafted) and looked_up == len(committed) - 1
        learn_and_wait(drafting, drafts, [], committed, 0.0)
        took_s, num_passes = took_s + 0.010 + 0.002 * len(drafted), num_passes + 1
    assert num_passes <= most_passes * len(truth)
    assert 0.010 * len(truth) / took_s >= least_speed


# -- the choice --------------------------------------------------------------------------------------------------------


class Scripted:
    """A source that is right in a share of places; it takes `cost_s` on the clock."""

    goes_first = False
    rivals_device = True

    def __init__(
        self, text: Sequence[int], truth: Sequence[int], share: float, kinds: range, clock: Clock, cost_s: float = 0.0
    ) -> None:
        self._text, self._truth, self._clock, self._rng = text, truth, clock, random.Random(kinds.start)
        self.share, self.kinds, self.cost_s, self.num_asked = share, kinds, cost_s, 0

    def propose(self, most: int) -> tuple[list[int], list[int]]:
        self.num_asked += 1
        self._clock.now += self.cost_s
        truth = self._truth[len(self._text) : len(self._text) + min(most, 4)]
        path = [token if self._rng.random() < self.share else token + 1 for token in truth]
        return path, [self.kinds[0]] * len(path)


def generate(
    make: Sequence[tuple[float, range, float]], num_tokens: int = 600, *, policy: Policy = Policy.AUTO
) -> tuple[float, int, list[Scripted]]:
    """Generates a text with these sources (share, kinds, cost_s). Steps take 10 ms and 0.2 ms per drafted token.

    Returns the seconds that it took, the passes, and the sources.
    """
    clock, drafting = Clock(), timed(16, policy, 0.0098, 0.0002)
    truth = [random.Random(7).randrange(1 << 20) * 2 + index for index in range(num_tokens)]
    drafts = pending(drafting, max_new=num_tokens)
    sources = [Scripted(drafts.committed, truth, share, kinds, clock, cost_s) for share, kinds, cost_s in make]
    drafts.sources = Sources(sources, clock)
    started, num_passes = clock.now, 0
    while len(drafts.committed) < num_tokens:
        drafted, _, _ = run_pass(drafting, drafts, truth)
        clock.now += 0.010 + 0.0002 * len(drafted)
        num_passes += 1
    return clock.now - started, num_passes, sources


POOR, GOOD = (0.2, PROMPT_KINDS, 0.0), (0.8, PREDICTED_KINDS, 0.0)


@pytest.mark.parametrize("policy", [Policy.AUTO, Policy.VERIFY])
def test_the_source_that_proves_better_drafts(policy: Policy) -> None:
    """Whatever their kinds promise: within 5 % of the better one alone, in either order."""
    alone, worst, *both = (generate(m, policy=policy)[1] for m in ([GOOD], [POOR], [POOR, GOOD], [GOOD, POOR]))
    assert max(both) <= 1.05 * alone and worst > 1.5 * alone


@pytest.mark.parametrize("with_trees", [False, True])
def test_a_source_that_turns_bad_is_left_for_the_other(with_trees: bool) -> None:
    """The chances of its guesses are those of late, and of this text."""
    clock, truth, drafting = Clock(), list(range(0, 4000, 2)), Drafting(16, Policy.VERIFY, with_trees=with_trees)
    drafts = pending(drafting, max_new=2000)
    one, two = (
        Scripted(drafts.committed, truth, share, kinds, clock)
        for share, kinds in ((1.0, PROMPT_KINDS), (0.0, PREDICTED_KINDS))
    )
    drafts.sources = Sources([one, two], clock)
    for _ in range(2):
        num_begun, num_passes = len(drafts.committed), 0
        while len(drafts.committed) < num_begun + 800:
            run_pass(drafting, drafts, truth, 3)  # room for one source
            num_passes += 1
        assert num_passes < 350, "the worse one drafts: 800 passes"
        one.share, two.share = 0.0, 1.0


def test_a_source_that_costs_more_than_it_gains_is_seldom_asked() -> None:
    """A useless one that takes half a step's time costs little; one that is worth its time is asked."""
    took_s, _, (useless,) = generate([(0.0, HEAD_KINDS, 0.005)])
    useful_s, num_passes, (useful,) = generate([(0.9, HEAD_KINDS, 0.005)])
    assert took_s < 1.05 * 600 * 0.010 and useless.num_asked < 60
    assert useful_s < 0.75 * 600 * 0.010 and useful.num_asked > 0.5 * num_passes


def test_a_source_that_was_slow_once_is_asked_again() -> None:
    """A question that fell into a busy moment, 200 steps long; a source that is not asked shows no other time."""
    clock, text, truth = Clock(), list[int](), list(range(0, 4000, 2))
    source = Scripted(text, truth, 1.0, PROMPT_KINDS, clock, cost_s=2.0)
    sources = Sources([source], clock)
    for _ in range(600):
        sources.guesses(4, [0.5] * NUM_KINDS, 0.010)
        source.cost_s = 0.0
        text.extend(truth[len(text) : len(text) + 2])
    assert source.num_asked > 50


@pytest.mark.parametrize(("share", "gives_way"), [(1.0, True), (0.0, False)])
def test_drafts_of_the_device_give_way_to_a_better_source(share: float, gives_way: bool) -> None:
    """And only to one that has proved better; the device's stay pending, and are still measured."""
    clock, truth, drafting = Clock(), list(range(0, 2000, 2)), Drafting(16, Policy.VERIFY)
    drafts, accepted = pending(drafting, max_new=900), list[int]()
    drafts.sources = Sources([Scripted(drafts.committed, truth, share, EARLIER_KINDS, clock)], clock)
    for _ in range(120):
        base = len(drafts.committed)
        device = [truth[base] if base % 3 else 1, 1, 1]  # two of three first tokens are right
        drafting.merge(drafts, base, [device], 0.0)
        drafted = drafting.choose([drafts], 99, StepSize(1, 0), 0.0)[drafts].tokens
        assert drafts.trie.likeliest_of_device(3) == device
        committed = right_part(drafted, truth, base)
        accepted.append(len(committed) - 1)
        pending_path = drafts.trie.likeliest_of_device(16)
        commit(drafts, *committed)
        drafts.acceptance.observe(pending_path, committed)
    assert (sum(accepted[-20:]) > 60) == gives_way
    assert 0.2 < drafts.acceptance.rates(1)[0] < 0.9


def test_a_preferred_path_is_the_likeliest_and_the_devices_is_known() -> None:
    """Also where both go through one node."""
    trie = DraftTrie()
    trie.merge([1, 2, 3], prefer=True)
    trie.merge([1, 7], prefer=False)  # an older message that arrives late
    trie.merge([1, 5, 6], [PROMPT_KINDS[0]] * 3)
    assert trie.likeliest(9) == [1, 2, 3]
    trie.prefer([1, 5, 6, 7])
    assert (trie.likeliest(9), trie.likeliest_of_device(9)) == ([1, 5, 6], [1, 2, 3])
    assert trie.likeliest_of_device(2) == [1, 2]
    move_root(trie, 1)
    assert (trie.likeliest(9), trie.likeliest_of_device(9)) == ([5, 6], [2, 3])


def test_every_source_of_the_engine_has_kinds_of_its_own() -> None:
    """So that each one's chances are measured apart, a prediction's from an earlier text's."""
    predicted = RecentTextSource([5, 6], [], is_repeat=False, kinds=PREDICTED_KINDS)
    assert predicted.propose(9) == ([5, 6], [PREDICTED_KINDS[0]] * 2) and not predicted.goes_first
    sources: list[DraftSource] = [PromptLookup([]), RecentTextSource([], [], is_repeat=False), predicted]
    kinds = [kind for source in sources for kind in source.kinds]
    assert len(set(kinds)) == len(kinds)


# -- whole texts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [TreeForm.LINE, TreeForm.TREE])
@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_no_source_changes_a_text(params: SamplingParams, form: TreeForm) -> None:
    """Token by token the target's own; guesses were verified, so equal texts prove something. They are counted in
    usage, commits and totals, apart from a device's drafts.
    """
    harness = Harness(config=EngineConfig(looks_up=True, policy=Policy.VERIFY, form=form))
    pairs = [token for last in range(VOCAB) for token in (2, last)]  # so whatever is picked after 2 is looked up
    prompts = [[*pairs, 2], [4, 5, 4, 5, 4]]
    texts = [harness.submit(prompt, 60, params=params)[1] for prompt in prompts]
    harness.run()
    assert [text.tokens for text in texts] == [plain(prompt, params, 60) for prompt in prompts]
    looked_up, totals = [sum(each.looked_up for each in text.commits) for text in texts], harness.engine.stats().totals
    assert [text.ended.usage.looked_up_tokens for text in texts] == looked_up
    assert totals.lookup_accepted == sum(looked_up) <= totals.lookup_proposed == totals.proposed > 0


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
                    assert error.code == "unknown_session"
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
    counts = [len(commit.tokens) for commit in collector.commits]
    assert collector.tokens == truth and counts[:2] == sizes and max(counts) > 4 and len(counts) < 18


def test_drafts_of_no_use_are_dropped() -> None:
    """What the commits contradict or have, also below a node of an earlier message: the text is the same, and nothing
    of it is pending. A tree that goes on behind the commits is, though its first nodes are committed.
    """
    harness = Harness(config=EngineConfig(looks_up=False))
    truth = plain(PROMPT, SAMPLED, 12)
    wrong = (truth[0] + 1) % VOCAB
    sequence_id, collector = harness.submit(PROMPT, 12, patience_ms=0)
    harness.run_steps(3)
    num, trie = len(collector.tokens), harness.engine._sequences[sequence_id].drafts.trie
    assert num == 3
    harness.engine.draft_tree(sequence_id, TreeDraft(0, 0, [wrong, truth[0]], [ROOT, ROOT], [9, 9]))
    for tokens in ([wrong, 1, 2, 3, 4, 5], truth[:num]):
        harness.engine.draft(sequence_id, 0, [tokens])
        harness.engine.draft_tree(sequence_id, line_message(0, 9, tokens))
    for below in (TreeDraft(0, 5, [1, 2], [0, 5], [9, 9]), TreeDraft(0, 5, [truth[1]], [1], [9])):
        harness.engine.draft_tree(sequence_id, below)
    harness.engine.draft_tree(sequence_id, TreeDraft(0, 50, [1], [40], [9]))  # below one that never comes
    harness.step()
    assert not trie and trie.num_nodes == 0 == harness.engine.stats().totals.draft_nodes
    behind = truth[1 : num + 4]
    parents = [1, *range(60, 59 + len(behind))]
    harness.engine.draft_tree(sequence_id, TreeDraft(0, 60, behind, parents, [9] * len(behind)))
    harness.run()
    assert collector.tokens == truth and harness.engine.stats().totals.draft_nodes > 0
