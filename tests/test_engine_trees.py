"""Tests trees in the engine: the text is the target's own whatever branches are drafted, and moved keys are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.engine_harness import SAMPLED, VOCAB, Collector, Harness, calibrated, plain
from tests.fake_runtime import FakeBatchRuntime
from tests.random_trees import RandomTrees
from tests.requests import flat_request

from outrider.cloud.engine import Engine, EngineConfig
from outrider.cloud.engine.config import TreeForm
from outrider.cloud.engine.runner import Share
from outrider.cloud.engine.sequence_state import SequenceState
from outrider.cloud.pending.estimators import AcceptanceEstimator
from outrider.cloud.pending.pending_drafts import PendingDrafts
from outrider.cloud.pending.selected_drafts import SelectedDrafts
from outrider.models.errors import ConfigError
from outrider.models.picks.sampling import SamplingParams
from outrider.models.runtimes import open_batch_runtime
from outrider.models.runtimes.base import BatchRuntime, ModelLimits, RuntimeOptions, SequenceSlice, TreeRuntime

PROMPTS = [[(7 * i + j * j) % VOCAB for j in range(3 + 5 * i)] for i in range(5)]
COUNT = 30


@pytest.fixture(autouse=True)
def random_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines made in this file choose random trees."""
    monkeypatch.setattr("outrider.cloud.engine.engine_state.Drafting", RandomTrees)


def trees_of(engine: Engine) -> RandomTrees:
    assert isinstance(engine._drafting, RandomTrees)
    return engine._drafting


def submit(
    harness: Harness, prompt: Sequence[int], params: SamplingParams = SAMPLED, *, count: int = COUNT
) -> tuple[Collector, list[int]]:
    """A sequence with trees of drafts, and its plain text."""
    truth = plain(prompt, params, count)
    sequence_id, collector = harness.submit(prompt, count, params=params)
    trees_of(harness.engine).truths[harness.engine._sequences[sequence_id].drafts] = truth
    return collector, truth


@pytest.mark.parametrize("kind", ["half", "alternatives", "wrong"])
@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED, SamplingParams(temperature=0.8, seed=3)])
def test_texts_with_trees_equal_the_plain_loop(kind: str, params: SamplingParams) -> None:
    """Several sequences at once, bit for bit; right branches are accepted, also those that are not the first."""
    moved: list[int] = []
    harness = Harness()
    trees_of(harness.engine).kind = kind
    move = harness.runtime.move
    harness.runtime.move = lambda sources, targets: (moved.append(len(sources)), move(sources, targets))[1]  # type: ignore[method-assign, func-returns-value]
    pairs = [submit(harness, prompt, params) for prompt in PROMPTS]
    harness.run()
    stats = harness.engine.stats()
    assert all(collector.tokens == truth for collector, truth in pairs)
    assert stats.totals.tree_steps > 0 and stats.trees == 1
    assert (stats.totals.accepted == 0) == (not moved) == (kind == "wrong")
    if kind == "alternatives":
        assert max(commit.accepted for commit in pairs[0][0].commits) >= 2


def test_trees_stand_chunks_and_preemption() -> None:
    """Long prompts in chunks beside trees, and too few blocks for all sequences: the texts stay the same."""
    harness = Harness(config=EngineConfig(step_tokens=20), num_blocks=24)
    trees_of(harness.engine).kind = "alternatives"
    pairs = [submit(harness, prompt) for prompt in [*PROMPTS, list(range(50)), *PROMPTS]]
    harness.run()
    assert all(collector.tokens == truth for collector, truth in pairs)
    totals = harness.engine.stats().totals
    assert totals.preempted > 0 and totals.tree_steps > 0 and totals.accepted > 0
    assert max(map(sum, harness.batches)) <= 20


def test_a_tree_is_cut_to_the_blocks_that_there_are() -> None:
    """A guess takes nobody's blocks, but those that fit are verified."""
    harness = Harness()
    trees_of(harness.engine).kind = "alternatives"
    harness.engine._cache.room = lambda sequence: len(sequence.tokens) + 4  # type: ignore[method-assign]
    collector, truth = submit(harness, PROMPTS[1])
    harness.run()
    assert collector.tokens == truth and harness.engine.stats().totals.accepted > 0
    assert max(commit.proposed for commit in collector.commits) == 4


def test_moved_keys_can_be_shared() -> None:
    """A second sequence that continues the text of the first finds its moved keys and values in shared blocks."""
    harness = Harness(block_size=4)
    trees_of(harness.engine).kind = "alternatives"
    first, truth = submit(harness, PROMPTS[2])
    harness.run()
    assert first.tokens == truth and any(commit.accepted for commit in first.commits)
    second, expected = submit(harness, PROMPTS[2] + truth, count=8)
    harness.run()
    assert second.tokens == expected
    assert second.ended.usage.cached_prompt_tokens > len(PROMPTS[2]) + 20


class Faulty(FakeBatchRuntime):
    """A row after the token `bad` is not finite. is_spread: nor are all rows of its sequence's step, as where its keys
    are not finite on torch.
    """

    bad, is_spread = -1, False

    def forward(self, batch: Sequence[SequenceSlice]) -> NDArray[np.float32]:
        rows, first = super().forward(batch), 0
        for item in batch:
            after = np.array(item.tokens)[len(item.tokens) - item.num_rows :] == self.bad
            rows[first : first + item.num_rows][after | (self.is_spread and self.bad in item.tokens)] = np.nan
            first += item.num_rows
        return rows


def run_faulty(
    runtime: Faulty, tree: Callable[[list[int]], SelectedDrafts], count: int = 6
) -> tuple[Collector, list[int]]:
    """One sequence that verifies `tree` of what it will commit in its second step."""
    harness, truth = Harness(runtime=runtime), plain(PROMPTS[1], SAMPLED, count)
    _, collector = harness.submit(PROMPTS[1], count)
    harness.step()
    (sequence,) = harness.engine._sequences.values()
    step_with(harness, {sequence.drafts: tree(truth[1:])})
    harness.run()
    return collector, truth


def step_with(harness: Harness, chosen: dict[PendingDrafts, SelectedDrafts]) -> None:
    """One step with these drafts; all later ones are without any."""
    trees_of(harness.engine).choose = lambda decoding, *rest: chosen  # type: ignore[method-assign]
    harness.step()
    trees_of(harness.engine).choose = lambda decoding, *rest: {}  # type: ignore[method-assign]


def test_a_fault_matters_only_on_the_branch_that_is_taken() -> None:
    """Not finite after a token that is not picked: nothing. After one that is: the text ends there with model_fault."""
    runtime = Faulty(vocab_size=VOCAB)
    runtime.bad = next(token for token in range(VOCAB) if token not in plain(PROMPTS[1], SAMPLED, 6))
    collector, truth = run_faulty(runtime, lambda rest: SelectedDrafts([runtime.bad, *rest[:2]], [-1, -1, 1]))
    assert collector.tokens == truth and collector.commits[1].accepted == 2
    again = Faulty(vocab_size=VOCAB)
    again.bad = truth[2]
    collector, _ = run_faulty(again, lambda rest: SelectedDrafts([(rest[0] + 1) % VOCAB, *rest[:2]], [-1, -1, 1]))
    assert (collector.tokens, collector.code) == (truth[:3], "model_fault")


@pytest.mark.parametrize("parents", [[-1, 0], [-1, -1]], ids=["line", "tree"])
def test_a_guess_with_keys_that_are_not_finite_ends_no_text(parents: list[int]) -> None:
    """Its sequence runs again without drafts; the one beside it keeps what it got."""
    runtime = Faulty(vocab_size=VOCAB)
    runtime.is_spread = True
    truths = [plain(prompt, SAMPLED, 6) for prompt in PROMPTS[1:3]]
    runtime.bad = next(token for token in range(VOCAB) if all(token not in text for text in [*truths, *PROMPTS[1:3]]))
    harness = Harness(runtime=runtime)
    collectors = [harness.submit(prompt, 6)[1] for prompt in PROMPTS[1:3]]
    harness.step()
    spoiled, other = (sequence.drafts for sequence in harness.engine._sequences.values())
    guess = SelectedDrafts([runtime.bad, truths[0][1]], parents)
    step_with(harness, {spoiled: guess, other: SelectedDrafts.line(truths[1][1:3])})
    harness.run()
    assert [collector.tokens for collector in collectors] == truths
    assert [collector.commits[1].accepted for collector in collectors] == [0, 2]


def test_texts_stay_the_same_where_every_move_fails(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever a move leaves in the slots, also for a sequence that goes on from shared blocks; faults are counted. The
    picks are known: they are committed, and run again for their keys.
    """
    harness = Harness(block_size=4)
    trees_of(harness.engine).kind = "alternatives"
    move, num_failed = harness.runtime.move, 0

    def scramble(sources: Sequence[int], targets: Sequence[int]) -> None:
        nonlocal num_failed
        num_failed += 1
        move([sources[0]] * len(targets), targets)
        raise RuntimeError("no copy today")

    harness.runtime.move = scramble  # type: ignore[method-assign]
    pairs = [submit(harness, prompt) for prompt in PROMPTS]
    harness.run()
    assert all(collector.tokens == truth for collector, truth in pairs)
    second, expected = submit(harness, PROMPTS[2] + pairs[2][1], count=8)
    harness.run()
    assert second.tokens == expected
    assert second.ended.usage.cached_prompt_tokens > len(PROMPTS[2])
    totals = harness.engine.stats().totals
    assert totals.accepted >= totals.faults == num_failed > 5 and harness.engine.health.fault is None
    assert "no copy today" in caplog.text


def test_what_a_move_takes_is_part_of_what_a_tree_costs() -> None:
    """A move of 60 ms after a step of 40: trees take 2.5 times as long as lines, and it is the model's time."""
    harness = calibrated(step_s=lambda num_tokens: 0.040)
    before = harness.engine.stats().totals
    move = harness.runtime.move

    def slow_move(sources: Sequence[int], targets: Sequence[int]) -> None:
        move(sources, targets)
        harness.clock.now += 0.060

    harness.runtime.move = slow_move  # type: ignore[method-assign]
    trees = trees_of(harness.engine)
    trees.kind = "alternatives"
    collector, truth = submit(harness, PROMPTS[1])
    harness.run()
    totals = harness.engine.stats().totals
    assert collector.tokens == truth and totals.tree_steps > 5 and trees.trees.ratio > 2.0
    assert totals.model_s - before.model_s == pytest.approx(0.040 * totals.steps + 0.060 * totals.tree_steps)


def test_a_step_that_fails_with_a_tree_runs_without_it() -> None:
    """The batch runs again by halves without drafts; the texts are the same."""
    has_failed: list[int] = []

    def fail_once(batch: Sequence[SequenceSlice]) -> None:
        if not has_failed and any(item.mask is not None for item in batch):
            has_failed.append(len(batch))
            raise RuntimeError("no masks this time")

    harness = Harness(on_step=fail_once)
    pairs = [submit(harness, prompt) for prompt in PROMPTS]
    harness.run()
    assert has_failed and all(collector.tokens == truth for collector, truth in pairs)


@pytest.mark.parametrize(
    ("chosen", "computed", "num_attended"),
    [
        (SelectedDrafts([20, 21, 22, 23], [-1, 0, -1, 2]), 8, 6 * 8 + 1 + 2 + 3 + 4 + 3 + 4),
        (SelectedDrafts.line([20, 21, 22]), 9, 4 * 9 + 10),
    ],
    ids=["tree", "line"],
)
def test_a_share_attends_what_its_tree_does(chosen: SelectedDrafts, computed: int, num_attended: int) -> None:
    """The time of a step goes by it. A line is run as ever, without a mask and positions."""
    drafts, tokens = PendingDrafts([], 100, AcceptanceEstimator(8)), list(range(10))
    request = flat_request(tuple(tokens), SAMPLED, 20)
    sequence = SequenceState(1, request, Collector(), tokens, drafts, [3, 1, 2], computed=computed)
    share = Share(sequence, [*tokens[computed:], *chosen.tokens], chosen, is_complete=True)
    item = share.as_slice()
    assert share.num_attended == num_attended and (item.mask is None) == (item.positions is None) == chosen.is_line


def test_the_form_follows_runtime_and_option() -> None:
    """`auto` takes trees where the runtime is right with them, `line` never; `tree` needs such a runtime."""
    for form, trees in ((TreeForm.AUTO, 1), (TreeForm.LINE, 0), (TreeForm.TREE, 1)):
        assert Engine(FakeBatchRuntime(), EngineConfig(form=form)).stats().trees == trees
    lines_only: Any = SimpleNamespace(limits=ModelLimits(VOCAB, 512), block_size=16, num_blocks=8)
    assert Engine(lines_only).stats().trees == 0
    with pytest.raises(ConfigError, match="cannot verify trees here: the runtime has no trees; use --tree line"):
        Engine(lines_only, EngineConfig(form=TreeForm.TREE))


@pytest.fixture(scope="module", params=["torch-qwen2", "torch-mistral", "openvino-qwen2"])
def runtime(
    request: pytest.FixtureRequest, tiny_model: Callable[[str], Path], tiny_ir: Callable[..., Path]
) -> Iterator[BatchRuntime]:
    """A runtime that takes trees; Mistral has a window of 16."""
    kind, family = request.param.split("-")
    path = tiny_ir(family) if kind == "openvino" else tiny_model(family)
    options = RuntimeOptions(num_threads=1, kv_cache_bytes=1 << 20, is_batch_invariant=False)
    opened = open_batch_runtime(kind, path, options)
    yield opened
    opened.close()


def texts(runtime: BatchRuntime, truths: Sequence[list[int]] | None, kind: str = "") -> list[list[int]]:
    """Three texts of 24 tokens, greedy and sampled; with trees of `truths` if given, on a small cache."""
    engine = Engine(runtime, EngineConfig(step_tokens=24))
    requests = [
        flat_request(
            tuple((5 * i + j * j) % 96 for j in range(30)), SamplingParams(temperature=0.8 * (i > 0), seed=i), 24
        )
        for i in range(3)
    ]
    collectors = [Collector() for _ in requests]
    ids = [engine.submit(request, collector) for request, collector in zip(requests, collectors, strict=True)]
    trees = trees_of(engine)
    trees.kind, trees.vocab_size = kind, runtime.limits.vocab_size
    for sequence_id, truth in zip(ids, truths or [], strict=False):
        trees.truths[engine._sequences[sequence_id].drafts] = truth
    while engine.has_work:
        engine.step()
    assert bool(engine.stats().totals.tree_steps) == bool(truths)
    if kind == "alternatives":
        assert engine.stats().totals.accepted > 20
    return [collector.tokens for collector in collectors]


def test_real_models_keep_their_texts_with_trees(runtime: BatchRuntime) -> None:
    """On random models of the runtimes that users run, also beyond a sliding window."""
    assert isinstance(runtime, TreeRuntime) and runtime.why_no_trees is None
    truths = texts(runtime, None)
    assert all(len(set(truth)) > 3 for truth in truths)
    for kind in ("half", "alternatives", "wrong"):
        assert texts(runtime, truths, kind) == truths
