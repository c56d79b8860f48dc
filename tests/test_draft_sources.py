"""Tests the verifier's own sources of drafts, the choice among them, and that none changes a text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.engine_harness import SAMPLED, VOCAB, Clock, Collector, plain
from tests.fake_runtime import FakeBatchRuntime
from tests.requests import flat_request

from outrider.cloud.engine import Engine, EngineConfig, Policy
from outrider.cloud.engine.config import TreeForm
from outrider.cloud.pending.drafting import Drafting
from outrider.cloud.pending.estimators import AcceptanceEstimator, StepSize
from outrider.cloud.pending.learning import MAX_NGRAMS, HeadGuesses, NgramPool
from outrider.cloud.pending.lookup import RecentTextSource
from outrider.cloud.pending.pending_drafts import PendingDrafts
from outrider.cloud.pending.selected_drafts import NOTHING, SelectedDrafts
from outrider.cloud.pending.sources import DraftSource, Sources, Verified
from outrider.cloud.pending.trie import (
    EARLIER_KINDS,
    HEAD_KINDS,
    NUM_KINDS,
    POOL_KINDS,
    PREDICTED_KINDS,
    PROMPT_KINDS,
    DraftTrie,
)
from outrider.models.bundle.draft_heads import DraftHeads
from outrider.models.errors import ConfigError
from outrider.models.picks.sampling import SamplingParams
from outrider.models.runtimes.base import SequenceSlice

GREEDY = SamplingParams()
PROMPT = (1, 2, 3)


# -- the pool of n-grams -----------------------------------------------------------------------------------------------


def test_the_pool_chains_the_picks_of_all_rows_rejected_ones_included() -> None:
    """Row 0 is after the last token, row i + 1 after drafted token i."""
    text = [7, 8]
    pool = NgramPool(text)
    pool.learn(Verified(text, [1], SelectedDrafts.line([2, 3]), [], [1, 4, 5]))
    text += [1, 2]
    assert pool.propose(9) == ([4], [POOL_KINDS[0]])  # (8, 2) -> 4 is no match of two, 2 -> 4 is one of one
    text += [3]
    assert pool.propose(9) == ([5], [POOL_KINDS[1]])
    text += [7, 8]
    assert pool.propose(9) == ([1], [POOL_KINDS[1]])


def test_picks_after_a_rejected_guess_are_the_next_guess() -> None:
    """A Jacobi iteration: the same places, one step further; only directly after that pass."""
    text = [7, 8]
    pool = NgramPool(text)
    pool.learn(Verified(text, [1], SelectedDrafts.line([2, 3]), [], [1, 4, 5]))
    text += [1]
    assert pool.propose(9) == ([4, 5], [POOL_KINDS[2]] * 2)
    assert pool.propose(1) == ([4], [POOL_KINDS[2]])
    text += [60]
    assert pool.propose(9) == ([], [])


def test_a_row_that_is_not_finite_leaves_no_ngram() -> None:
    """None is no token."""
    text = [7, 8]
    pool = NgramPool(text)
    pool.learn(Verified(text, [1], SelectedDrafts.line([2, 3]), [], [1, None, 5]))
    text += [1]
    assert pool.propose(9) == ([], [])


def test_the_pool_of_a_sequence_is_bounded() -> None:
    """However long its text becomes: the newest stay."""
    text = [0]
    pool = NgramPool(text)
    for token in range(1, MAX_NGRAMS // 2 + 50):
        pool.learn(Verified(text, [token], NOTHING, [], [token]))
        text.append(token)
    assert len(pool._after) == MAX_NGRAMS
    assert (0,) not in pool._after and (0, 1) not in pool._after and (MAX_NGRAMS // 2,) in pool._after


# -- the choice --------------------------------------------------------------------------------------------------------


class Scripted:
    """A source that is right in a share of places; it takes `cost_s` on the clock."""

    goes_first = False
    rivals_device = True

    def __init__(
        self, text: Sequence[int], truth: Sequence[int], share: float, kinds: range, clock: Clock, cost_s: float = 0.0
    ) -> None:
        self._text, self._truth, self._clock = text, truth, clock
        self.share, self.kinds, self.cost_s = share, kinds, cost_s
        self._rng = random.Random(kinds.start)
        self.num_asked = 0

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
    clock, text = Clock(), list[int]()
    truth = [random.Random(7).randrange(1 << 20) * 2 + index for index in range(num_tokens)]
    drafting = Drafting(16, policy)
    for tokens in (1, 2, 4, 8, 16):
        drafting.curve.observe(StepSize(tokens), 0.0098 + 0.0002 * tokens)
    drafts = PendingDrafts(text, num_tokens, AcceptanceEstimator(16, drafting.learned(b"").acceptance))
    sources = [Scripted(text, truth, share, kinds, clock, cost_s) for share, kinds, cost_s in make]
    drafts.sources = Sources(sources, clock)
    started, num_passes = clock.now, 0
    while len(text) < num_tokens:
        chosen = drafting.choose([drafts], 99, StepSize(1, 0), 0.0)[drafts].tokens
        accepted = 0
        while accepted < len(chosen) and chosen[accepted] == truth[len(text) + accepted]:
            accepted += 1
        committed = truth[len(text) : len(text) + accepted + 1]
        text.extend(committed)
        drafts.advance(committed)
        clock.now += 0.010 + 0.0002 * len(chosen)
        num_passes += 1
    return clock.now - started, num_passes, sources


POOR, GOOD = (0.2, PROMPT_KINDS, 0.0), (0.8, POOL_KINDS, 0.0)


@pytest.mark.parametrize("policy", [Policy.AUTO, Policy.VERIFY])
def test_the_source_that_proves_better_drafts(policy: Policy) -> None:
    """Whatever their kinds promise: within 5 % of the better one alone, in either order."""
    _, alone, _ = generate([GOOD], policy=policy)
    for sources in ([POOR, GOOD], [GOOD, POOR]):
        _, num_passes, _ = generate(sources, policy=policy)
        assert num_passes <= 1.05 * alone
    assert generate([POOR], policy=policy)[1] > 1.5 * alone


@pytest.mark.parametrize("with_trees", [False, True])
def test_a_source_that_turns_bad_is_left_for_the_other(with_trees: bool) -> None:
    """The chances of its guesses are those of late, and of this text."""
    clock, text, truth = Clock(), list[int](), list(range(0, 4000, 2))
    one, two = (Scripted(text, truth, share, kinds, clock) for share, kinds in ((1.0, PROMPT_KINDS), (0.0, POOL_KINDS)))
    drafting = Drafting(16, Policy.VERIFY, with_trees=with_trees)
    drafts = PendingDrafts(text, 2000, AcceptanceEstimator(16, drafting.learned(b"").acceptance))
    drafts.sources = Sources([one, two], clock)
    for _ in range(2):
        num_begun, num_passes = len(text), 0
        while len(text) < num_begun + 800:
            chosen = drafting.choose([drafts], 3, StepSize(1, 0), 0.0)[drafts].tokens  # room for one source
            accepted = 0
            while accepted < len(chosen) and chosen[accepted] == truth[len(text) + accepted]:
                accepted += 1
            committed = truth[len(text) : len(text) + accepted + 1]
            text.extend(committed)
            drafts.advance(committed)
            num_passes += 1
        assert num_passes < 350, "the worse one drafts: 800 passes"
        one.share, two.share = 0.0, 1.0


def test_a_source_that_costs_more_than_it_gains_is_seldom_asked() -> None:
    """A useless one that takes half a step's time costs little; one that is worth its time is asked."""
    took_s, _, (useless,) = generate([(0.0, HEAD_KINDS, 0.005)])
    assert took_s < 1.05 * 600 * 0.010 and useless.num_asked < 60
    useful_s, num_passes, (useful,) = generate([(0.9, HEAD_KINDS, 0.005)])
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


def test_drafts_of_the_device_give_way_to_a_better_source() -> None:
    """And only to one that has proved better; the device's stay pending, and are still measured."""
    clock, text, truth = Clock(), list[int](), list(range(0, 2000, 2))
    for share, expected in ((1.0, True), (0.0, False)):
        text.clear()
        drafting = Drafting(16, Policy.VERIFY)
        drafts = PendingDrafts(text, 900, AcceptanceEstimator(16, drafting.learned(b"").acceptance))
        drafts.sources = Sources([Scripted(text, truth, share, EARLIER_KINDS, clock)], clock)
        accepted: list[int] = []
        for _ in range(120):
            base = len(text)
            device = [truth[base] if base % 3 else 1, 1, 1]  # two of three first tokens are right
            drafting.merge(drafts, base, [device], 0.0)
            chosen = drafting.choose([drafts], 99, StepSize(1, 0), 0.0)[drafts].tokens
            assert drafts.trie.likeliest_of_device(3) == device
            num = 0
            while num < len(chosen) and chosen[num] == truth[base + num]:
                num += 1
            accepted.append(num)
            committed = truth[base : base + num + 1]
            pending = drafts.trie.likeliest_of_device(16)
            text.extend(committed)
            drafts.advance(committed)
            drafts.acceptance.observe(pending, committed)
        assert (sum(accepted[-20:]) > 60) == expected
        assert 0.2 < drafts.acceptance.rates(1)[0] < 0.9


def test_a_preferred_path_is_the_likeliest_and_the_devices_is_known() -> None:
    """Also where both go through one node."""
    trie = DraftTrie()
    trie.merge([1, 2, 3], prefer=True)
    trie.merge([1, 5, 6], [PROMPT_KINDS[0]] * 3)
    assert trie.likeliest(9) == [1, 2, 3]
    trie.prefer([1, 5, 6, 7])
    assert trie.likeliest(9) == [1, 5, 6]
    assert trie.likeliest_of_device(9) == [1, 2, 3] and trie.likeliest_of_device(2) == [1, 2]
    trie.advance(1)
    assert trie.likeliest(9) == [5, 6] and trie.likeliest_of_device(9) == [2, 3]


def test_a_prediction_has_kinds_of_its_own() -> None:
    """So that its worth is measured apart from an earlier text's."""
    predicted = RecentTextSource([5, 6], [], is_repeat=False, kinds=PREDICTED_KINDS)
    assert predicted.propose(9) == ([5, 6], [PREDICTED_KINDS[0]] * 2)
    assert predicted.kinds == PREDICTED_KINDS and not predicted.goes_first


# -- whole texts -------------------------------------------------------------------------------------------------------


class Revealing(FakeBatchRuntime):
    """Shows hidden states: of each row, the logits. Heads over it guess that a token repeats."""

    hidden_size = VOCAB

    def forward(self, batch: Sequence[SequenceSlice]) -> NDArray[np.float32]:
        self._rows = super().forward(batch)
        return self._rows

    def hidden_rows(self) -> NDArray[np.float32]:
        return self._rows


def heads_of(table: NDArray[np.float32], count: int = 3) -> DraftHeads:
    """Heads whose hidden state is the logits of the next token: head k looks `k + 1` rows further in `table`."""
    size = len(table)
    return DraftHeads(
        np.zeros((count, size, size), np.float32),
        np.zeros((count, size), np.float32),
        table,
        np.zeros(size, np.float32),
    )


HEADS = heads_of(np.eye(VOCAB, dtype=np.float32))
SOURCES: dict[str, EngineConfig] = {
    "lookup": EngineConfig(looks_up=True),
    "lookahead": EngineConfig(looks_ahead=True),
    "heads": EngineConfig(heads=HEADS),
    "all": EngineConfig(looks_up=True, looks_ahead=True, heads=HEADS),
}


def run(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Collector]:
    """Texts of 60 tokens, together."""
    found = [Collector() for _ in prompts]
    for prompt, collector in zip(prompts, found, strict=True):
        engine.submit(flat_request(tuple(prompt), params, 60), collector)
    while engine.has_work:
        engine.step()
    return found


@pytest.mark.parametrize("form", [TreeForm.LINE, TreeForm.TREE])
@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_no_source_changes_a_text(name: str, params: SamplingParams, form: TreeForm) -> None:
    """Token by token the target's own; guesses were verified, so equal texts prove something."""
    config = replace(SOURCES[name], policy=Policy.VERIFY, form=form)
    runtime = Revealing(vocab_size=VOCAB, block_size=4)
    engine = Engine(runtime, config, clock=Clock())
    pairs = [token for last in range(VOCAB) for token in (2, last)]  # so whatever is picked after 2 is looked up
    prompts = [[*pairs, 2], [4, 5, 4, 5, 4]]
    requests = run(engine, prompts, params)
    assert [found.tokens for found in requests] == [plain(prompt, params, 60) for prompt in prompts]
    proposed = sum(commit.proposed for found in requests for commit in found.commits)
    assert proposed > 0 and engine.stats().free_blocks == engine.stats().num_blocks


def test_heads_need_a_runtime_that_shows_hidden_states() -> None:
    """And one whose sizes are theirs."""
    with pytest.raises(ConfigError, match="does not keep; leave out --source heads"):
        Engine(FakeBatchRuntime(vocab_size=VOCAB), EngineConfig(heads=HEADS))
    with pytest.raises(ConfigError, match="train heads for this target"):
        Engine(Revealing(vocab_size=VOCAB), EngineConfig(heads=heads_of(np.eye(8, dtype=np.float32))))


def test_every_source_of_the_engine_is_one_of_the_seam() -> None:
    """They have kinds of their own, so that each one's chances are measured apart."""
    sources: list[DraftSource] = [
        NgramPool([]),
        HeadGuesses(HEADS, GREEDY, []),
        RecentTextSource([], [], is_repeat=False),
        RecentTextSource([], [], is_repeat=False, kinds=PREDICTED_KINDS),
    ]
    kinds = [kind for source in sources for kind in source.kinds]
    assert len(set(kinds)) == len(kinds)


def test_lookahead_saves_passes_where_a_text_repeats_itself() -> None:
    """A language of few tokens: what the target picked after a token is likely picked again."""
    runtime = Periodic(vocab_size=VOCAB)
    passes = {}
    for looks_ahead in (False, True):
        engine = Engine(runtime, EngineConfig(looks_ahead=looks_ahead, policy=Policy.VERIFY), clock=Clock())
        (collector,) = run(engine, [PROMPT], GREEDY)
        assert collector.tokens == [(4 + index) % 12 for index in range(60)]
        passes[looks_ahead] = collector.ended.usage.target_passes
    assert passes[False] == 60 and passes[True] < 30


class Periodic(FakeBatchRuntime):
    """Counts to twelve, over and over."""

    def forward(self, batch: Sequence[SequenceSlice]) -> NDArray[np.float32]:
        rows = super().forward(batch)
        last = [token for item in batch for token in item.tokens[len(item.tokens) - item.num_rows :]]
        rows[:] = 0.0
        rows[np.arange(len(rows)), (np.array(last, np.int64) + 1) % 12] = 5.0
        return rows
