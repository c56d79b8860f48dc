"""Checks that the fake runtime detects an engine's cache errors, and is otherwise a well-behaved model."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.fake_runtime import FakeBatchRuntime, FakeSequenceRuntime

from outrider.models.errors import ConfigError
from outrider.models.runtimes.base import BatchRuntime, BranchingRuntime, SequenceRuntime, SequenceSlice

VOCAB = 64


def truth(tokens: list[int], seed: int = 0) -> NDArray[np.float32]:
    """Logits after every token, from the linear twin."""
    twin = FakeSequenceRuntime(vocab_size=VOCAB, seed=seed)
    return np.stack([twin.extend([token]) for token in tokens])


@given(seed=st.integers(0, 10_000))
def test_any_batching_gives_the_linear_logits(seed: int) -> None:
    """Random sequences, chunks, rollbacks and block tables: every row equals the twin's, bit for bit."""
    rng = random.Random(seed)
    runtime = FakeBatchRuntime(vocab_size=VOCAB, block_size=4, num_blocks=40)
    free = list(range(40))
    rng.shuffle(free)
    texts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))] for _ in range(3)]
    tables = [[free.pop() for _ in range(11)] for _ in texts]
    past = [0, 0, 0]
    for _ in range(6):
        batch, expected = [], []
        for b, text in enumerate(texts):
            past[b] = rng.randint(0, past[b])
            new = text[past[b] : past[b] + rng.randint(1, 8)]
            if new:
                rows = rng.randint(0, len(new))
                batch.append(SequenceSlice(new, past[b], tables[b], rows))
                expected.append(truth(text[: past[b] + len(new)])[past[b] + len(new) - rows :])
                past[b] += len(new)
        if batch:
            assert np.array_equal(runtime.forward(batch), np.concatenate(expected))


def test_a_tree_gives_each_branch_its_linear_logits() -> None:
    """Siblings share a position and do not see each other, beside a causal neighbour."""
    runtime = FakeBatchRuntime(vocab_size=VOCAB, block_size=4)
    runtime.forward([SequenceSlice([1, 2, 3], 0, [5, 2], 0)])
    mask = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], np.uint8)
    tree = SequenceSlice([10, 11, 12, 13], 3, [5, 2], 4, [3, 4, 4, 5], mask)
    logits = runtime.forward([SequenceSlice([7, 8], 0, [0], 2), tree])
    assert np.array_equal(logits[:2], truth([7, 8]))
    assert np.array_equal(logits[[2, 3]], truth([1, 2, 3, 10, 11])[3:])
    assert np.array_equal(logits[[2, 4, 5]], truth([1, 2, 3, 10, 12, 13])[3:])


def next_logits(runtime: FakeBatchRuntime, past: int, blocks: list[int]) -> NDArray[np.float32]:
    return runtime.forward([SequenceSlice([9], past, blocks, 1)]).copy()


def test_wrong_addresses_give_other_text() -> None:
    """A swapped block, a stale block and a missed rollback each change the logits."""
    text = list(range(20, 28))
    right = truth([*text, 9])[-1:]

    def filled() -> FakeBatchRuntime:
        runtime = FakeBatchRuntime(vocab_size=VOCAB, block_size=4)
        runtime.forward([SequenceSlice(text, 0, [3, 1], 0), SequenceSlice(text[::-1], 0, [6, 8], 0)])
        return runtime

    assert np.array_equal(next_logits(filled(), 8, [3, 1, 2]), right)
    assert not np.array_equal(next_logits(filled(), 8, [1, 3, 2]), right)
    assert not np.array_equal(next_logits(filled(), 8, [3, 8, 2]), right)
    assert not np.array_equal(next_logits(filled(), 7, [3, 1, 2]), right)


def test_impossible_addresses_are_assertion_errors() -> None:
    """Too few blocks, slots never written, and slots that two sequences touch in one step."""
    runtime = FakeBatchRuntime(vocab_size=VOCAB, block_size=4, num_blocks=16)
    with pytest.raises(AssertionError, match="1 blocks for 5 tokens"):
        runtime.forward([SequenceSlice([1] * 5, 0, [0], 1)])
    with pytest.raises(AssertionError, match="never written"):
        runtime.forward([SequenceSlice([1], 4, [9, 10], 1)])
    with pytest.raises(AssertionError, match="written twice"):
        runtime.forward([SequenceSlice([1], 0, [2], 1), SequenceSlice([1], 0, [2], 1)])
    runtime.forward([SequenceSlice([1, 2, 3, 4], 0, [2], 1)])
    with pytest.raises(AssertionError, match="overwritten in the same step"):
        runtime.forward([SequenceSlice([5], 4, [2, 3], 1), SequenceSlice([4], 3, [2], 1)])
    with pytest.raises(AssertionError, match="outside the vocabulary"):
        runtime.forward([SequenceSlice([VOCAB], 0, [0], 1)])


def test_a_poisoned_token_spoils_its_own_slice_only() -> None:
    """`fail_on_token` makes the logits of the slice that ends in it NaN; the neighbours' do not change."""
    runtime = FakeBatchRuntime(vocab_size=VOCAB, fail_on_token=13)
    logits = runtime.forward(
        [SequenceSlice([13, 5], 0, [0], 2), SequenceSlice([5, 13], 0, [1], 2), SequenceSlice([6], 0, [2], 1)]
    )
    assert np.array_equal(logits[:2], truth([13, 5]))
    assert np.isnan(logits[2:4]).all()
    assert np.array_equal(logits[4:], truth([6]))


def test_a_step_is_shown_before_it_is_computed() -> None:
    """`on_step` sees the batch, in the calling thread, and may hold it."""
    seen: list[tuple[int, int]] = []
    runtime = FakeBatchRuntime(vocab_size=VOCAB, on_step=lambda batch: seen.append((len(batch), runtime.num_steps)))
    runtime.forward([SequenceSlice([1], 0, [0], 1)])
    assert runtime.num_steps == 1 and seen == [(1, 0)]


@pytest.mark.parametrize("agreement", [0.0, 0.3, 0.8, 1.0])
def test_a_draft_agrees_as_often_as_asked(agreement: float) -> None:
    """Over 1,000 contexts of the target's own greedy text; within four standard deviations, plus 1 / VOCAB by luck."""
    target = FakeSequenceRuntime(vocab_size=VOCAB)
    draft = FakeSequenceRuntime(vocab_size=VOCAB, agreement=agreement)
    token, num_same = 3, 0
    for _ in range(1000):
        wanted = int(target.extend([token]).argmax())
        num_same += int(draft.extend([token]).argmax()) == wanted
        token = wanted
    expected = agreement + (1 - agreement) / VOCAB
    assert abs(num_same / 1000 - expected) <= 4 * (expected * (1 - expected) / 1000) ** 0.5


def test_a_sequence_rolls_back_and_seeds_differ() -> None:
    """After truncation the logits are those of the shorter text; another seed is another language."""
    runtime = FakeSequenceRuntime(vocab_size=VOCAB)
    runtime.extend([1, 2, 3, 4])
    runtime.truncate(2)
    assert runtime.length == 2
    assert np.array_equal(runtime.extend([9, 8]), truth([1, 2, 9, 8])[-1])
    assert not np.array_equal(truth([1, 2]), truth([1, 2], seed=1))
    assert isinstance(runtime, SequenceRuntime) and isinstance(FakeBatchRuntime(), BatchRuntime)
    with pytest.raises(ConfigError, match=r"agreement is 1\.5"):
        FakeSequenceRuntime(agreement=1.5)


def test_branches_have_their_linear_logits_and_leave_the_sequence() -> None:
    """Each row is that of a fresh sequence, in any share of agreement; the sequence goes on where it was."""
    seen: list[int] = []
    runtime = FakeSequenceRuntime(vocab_size=VOCAB, agreement=0.5, on_branches=lambda call: seen.append(len(call)))
    twin = FakeSequenceRuntime(vocab_size=VOCAB, agreement=0.5)
    assert isinstance(runtime, BranchingRuntime)
    runtime.extend([1, 2])
    branches = [[3], [3, 4], [5, 6, 7], [5, 6, 8]]
    rows = runtime.extend_branches(branches)
    assert seen == [4] and runtime.length == 2 and rows.shape == (4, VOCAB)
    for row, branch in zip(rows, branches, strict=True):
        twin.truncate(0)
        assert np.array_equal(row, twin.extend([1, 2, *branch]))
    assert np.array_equal(runtime.extend([5, 6, 8]), rows[3])
    for wrong in ([], [[1]] * 9):
        with pytest.raises(AssertionError):
            runtime.extend_branches(wrong)
    with pytest.raises(ConfigError, match="7 tokens do not fit the 6 positions"):
        FakeSequenceRuntime(max_positions=6).extend_branches([[1], [1] * 7])


def test_logits_are_peaked_but_not_certain() -> None:
    """The likeliest token has most of the mass in most contexts and rarely all of it, so sampling matters."""
    rows = truth(list(np.random.default_rng(0).integers(0, VOCAB, 500)))
    weights = np.exp(rows - rows.max(axis=1, keepdims=True))
    top = (weights / weights.sum(axis=1, keepdims=True)).max(axis=1)
    assert 0.4 < np.median(top) < 0.95
